"""Ground truths of code problems: asserts (HumanEval, MBPP), or inputs and outputs (verl's form)."""

import ast
import builtins
import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

FORMS = "entry_point and test (HumanEval), test_list (MBPP), or inputs and outputs"
REFERENCES = ("canonical_solution", "code")  # of the rows of HumanEval and MBPP as they are published
CASE = "__case__"
PACKAGE, ALIAS = "numpy", "np"  # the only package that programs and tests can import, and its usual name


@dataclass(frozen=True)
class Asserts:
    """Tests in Python. `tests` reports each one through `__case__` (see `sandbox/tests.py`)."""

    tests: str
    count: int
    names: tuple[str, ...]  # that the program defines and the tests use
    prompt: str = ""  # the beginning of the function, which an answer may continue
    given: str = ""  # definitions of the prompt, which the tests may use
    time_limit_s: float | None = None
    reference: str | None = None


@dataclass(frozen=True)
class Calls:
    """A function is called with arguments, and its values are compared with the outputs."""

    function: str
    calls: tuple[tuple[Any, ...], ...]
    outputs: tuple[Any, ...]
    time_limit_s: float | None = None
    reference: str | None = None

    @property
    def count(self) -> int:
        return len(self.outputs)


@dataclass(frozen=True)
class Streams:
    """A program reads an input from stdin, and what it prints is compared with the output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_limit_s: float | None = None
    reference: str | None = None

    @property
    def count(self) -> int:
        return len(self.outputs)


Problem = Asserts | Calls | Streams


def problem_of(data_source: str, ground_truth: Any) -> Problem:
    """ValueError if `ground_truth` has none of the known forms."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        if not isinstance(truth, Mapping):
            raise ValueError("it is not an object")
        for key, form in (("entry_point", _humaneval), ("test_list", _mbpp), ("inputs", _inputs_and_outputs)):
            if key in truth:
                reference = next((truth[name] for name in REFERENCES if isinstance(truth.get(name), str)), None)
                return replace(form(truth), time_limit_s=_time_limit(truth), reference=reference)
        raise ValueError(f"it has the keys {', '.join(map(str, truth)) or '(none)'}")
    except (ValueError, SyntaxError, RecursionError) as error:
        raise ValueError(
            f"the ground truth of a row of {data_source} cannot be used: {error}; it is a JSON object with {FORMS}"
        ) from error


def _humaneval(truth: Mapping[str, Any]) -> Asserts:
    name, prompt = _text(truth, "entry_point"), _text(truth, "prompt") if "prompt" in truth else ""
    if not name.isidentifier():
        raise ValueError(f"entry_point={name!r} is not a name")
    module = ast.parse(_text(truth, "test"))
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise ValueError("its test defines no function check")
    has_tests = [any(isinstance(node, ast.Assert) for node in ast.walk(statement)) for statement in check.body]
    if not any(has_tests):
        raise ValueError("the function check of its test has no assert")
    body: list[ast.stmt] = []
    for index, statement in enumerate(check.body):
        body.append(_case(sum(has_tests[:index]), [statement]) if has_tests[index] else statement)
    check.body = body
    given = _definitions(prompt, name)
    module.body += ast.parse(f"check({name})").body
    used = [other for other in _program_names(module, ast.parse(given)) if other != name]
    # with its prompt a row is complete; without it, helper functions of the prompt are in the program
    names = (name,) if prompt else (name, *used)
    return Asserts(ast.unparse(ast.fix_missing_locations(module)), sum(has_tests), names, prompt, given)


def _definitions(prompt: str, name: str) -> str:
    """The imports and helper functions of `prompt`. The tests get them from the row, not from the program."""
    for source in (prompt, f"{prompt}\n    pass", before_function(prompt, name)):
        with contextlib.suppress(SyntaxError, ValueError):
            ast.parse(source)
            return source
    return ""


def before_function(prompt: str, name: str) -> str:
    return re.split(rf"^(?:async )?def {re.escape(name)}\b", prompt, maxsplit=1, flags=re.M)[0]


def _mbpp(truth: Mapping[str, Any]) -> Asserts:
    setup = _text(truth, "test_setup_code") if truth.get("test_setup_code") else ""
    sources = _list(truth, "test_list")
    parsed = [ast.parse(str(source)).body for source in sources]
    module = ast.parse(setup)
    module.body += [_case(index, statements) for index, statements in enumerate(parsed)]
    names = _program_names(module) or _builtin_called_by_all(parsed)
    return Asserts(ast.unparse(ast.fix_missing_locations(module)), len(parsed), tuple(names))


def _program_names(module: ast.Module, given: ast.Module | None = None) -> list[str]:
    """Names that the tests use, and that neither the row nor Python defines. Modules of the standard library that are
    used without an import are imported into the tests."""
    names = _undefined_names(module, given)
    imports = [name for name in names if _is_module(module, name)]
    module.body[:0] = [ast.Import([ast.alias(PACKAGE if name == ALIAS else name, name)]) for name in imports]
    return [name for name in names if name not in imports]


def _undefined_names(module: ast.Module, given: ast.Module | None) -> list[str]:
    used: dict[str, None] = {}
    defined = {CASE}
    statements = [*module.body, *(given.body if given is not None else ())]
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used[node.id] = None
        elif isinstance(node, ast.Name):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return [name for name in used if name not in defined and name not in vars(builtins)]


def _builtin_called_by_all(tests: Sequence[Sequence[ast.stmt]]) -> list[str]:
    """Where a function has the name of a builtin (`assert sum(10, 15) == 6`): the first call without another call in it
    that every test has. Other builtins stay those of Python."""
    calls = [[call for statement in test for call in _innermost_calls(statement)] for test in tests]
    return next(([name] for name in calls[0] if all(name in others for others in calls)), [])


def _innermost_calls(statement: ast.AST) -> list[str]:
    """From left to right."""
    calls = [
        (node.lineno, node.col_offset, node.func.id)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and not any(isinstance(below, ast.Call) for argument in node.args for below in ast.walk(argument))
    ]
    return [name for _, _, name in sorted(calls)]


def _is_module(module: ast.Module, name: str) -> bool:
    """Whether `name` is a module that the tests use only as in `sys.getsizeof(x)`."""
    if name not in sys.stdlib_module_names and name not in (PACKAGE, ALIAS):
        return False
    alone = [node for node in ast.walk(module) if isinstance(node, ast.Name) and node.id == name]
    attributes = [node.value for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    return all(any(node is value for value in attributes) for node in alone)


def _case(index: int, statements: list[ast.stmt]) -> ast.If:
    """`if __case__.wanted(0): with __case__(0): statements`."""
    wanted = ast.parse(f"if {CASE}.wanted({index}):\n with {CASE}({index}):\n  pass").body[0]
    assert isinstance(wanted, ast.If) and isinstance(wanted.body[0], ast.With)
    wanted.body[0].body = statements
    return wanted


def _inputs_and_outputs(truth: Mapping[str, Any]) -> Calls | Streams:
    inputs, outputs = _list(truth, "inputs"), _list(truth, "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if truth.get("fn_name") is None:
        return Streams(tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
    return Calls(_text(truth, "fn_name"), tuple(map(_arguments, inputs)), tuple(map(_value, outputs)))


def _lines(value: Any) -> str:
    """An input or output may be a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(value: Any) -> tuple[Any, ...]:
    """A list, or text with a line of JSON for each argument."""
    if isinstance(value, str):
        return tuple(json.loads(line) for line in value.strip().split("\n"))
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _time_limit(truth: Mapping[str, Any]) -> float | None:
    limit_s = truth.get("time_limit_s")
    if limit_s is None:
        return None
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
        raise ValueError(f"its time_limit_s is {limit_s!r}, not a number of seconds above 0")
    return float(limit_s)


def _text(truth: Mapping[str, Any], key: str) -> str:
    if not isinstance(truth.get(key), str):
        raise ValueError(f"its {key} is {type(truth.get(key)).__name__}, not text")
    return str(truth[key])


def _list(truth: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = truth.get(key)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"its {key} is not a list with at least one element")
    return value
