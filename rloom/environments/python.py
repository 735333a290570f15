"""A tool that runs Python programs in the sandbox of the code rewards."""

import ast
from contextlib import suppress

from rloom.rewards.rules.code import sandbox_for
from rloom.rewards.sandbox.client import Isolation
from rloom.rewards.sandbox.settings import Limits, SandboxJob

NOTHING = "(the program printed nothing; use print)"


class PythonTool:
    """Each call is a program of its own: names of earlier calls are not defined. The rule of the data source scores the
    last answer."""

    def __init__(
        self,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        isolation: Isolation = "auto",
        instruction: str = "",
    ) -> None:
        """`timeout_s`: of one program, under multi_turn.tool_timeout_s. `memory_mb` and `isolation` are as in
        reward_model.sandbox. `instruction`: is added to the prompt."""
        self._instruction = instruction
        self._limits = Limits(
            timeout_s=timeout_s,
            cpu_s=max(1, int(timeout_s)),
            memory_mb=memory_mb,
            file_mb=16,
            processes=8,
            output_kb=64,
        )
        self._isolation: Isolation = isolation

    def reset(self, **row: object) -> str:
        return f"\n\n{self._instruction}" if self._instruction else ""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. It must print its results.
        """
        sandbox = sandbox_for(self._limits, self._isolation)
        try:
            outcome = sandbox.run(SandboxJob((*printing_last_value(code), code), module_name="__main__"))
        except BaseException:  # the time limit of the call, too: a reply that comes later belongs to no later call
            sandbox.close()
            raise
        printed, error = outcome.run.stdout.strip(), outcome.error
        if error is not None:
            return f"{printed}\nError: {error}".strip()
        return printed or NOTHING


def printing_last_value(code: str) -> tuple[str, ...]:
    """The program that also prints its last expression, as a notebook does; empty if the program has none."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(code)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr) and not is_print(last.value):
            last.value = ast.Call(ast.Name("print", ast.Load()), [last.value], [])
            return (ast.unparse(ast.fix_missing_locations(tree)),)
    return ()


def is_print(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
