"""The program in an answer: which code block, and how it completes a prompt.

Nothing is compiled here: sources that may be right are tried in order inside the sandbox.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence

from rloom.rewards.rules.code_problems import Asserts, Calls, Problem, before_function

_FENCE = re.compile(r"[ \t]*```[ \t]*([\w+#.-]*)")
_PYTHON = ("python", "python3", "py")
_THOUGHT_END = "</think>"
_CODE_LINE = re.compile(r"^(?:(?:def|class|import|from|async def)\b|@)", re.M)
_INDENT = "    "


def programs(answer: str, problem: Problem) -> tuple[str, ...]:
    """Sources in order of preference, of which the first that compiles is the program; none: there is no code."""
    answer = answer.rpartition(_THOUGHT_END)[2].replace("\r\n", "\n")
    names = problem.names if isinstance(problem, Asserts) else (problem.function,) if isinstance(problem, Calls) else ()
    code = chosen_block(answer, names)
    if isinstance(problem, Asserts) and problem.prompt:
        return _completions(problem.prompt, problem.names, answer if code is None else code, fenced=code is not None)
    if code is not None:
        return (code,)
    return _from_first_code_line(answer) if answer.strip() else ()


def chosen_block(answer: str, names: Sequence[str]) -> str | None:
    """The last Python block that defines one of `names`, else the last Python block. Blocks without a language count
    if no block is marked as Python. Blocks of other languages and empty ones do not count."""
    blocks = [(label.lower(), textwrap.dedent(text)) for label, text in _blocks(answer) if text.strip()]
    python = [text for label, text in blocks if label in _PYTHON] or [text for label, text in blocks if not label]
    return next((text for text in reversed(python) if defines(text, names)), python[-1] if python else None)


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Label and text of each block. A fence without a line break after it, at the end of the answer, begins none."""
    label: str | None = None
    text: list[str] = []
    for line in answer.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if label is None and fence is not None and line.endswith("\n"):
            label, text = fence.group(1), []
        elif label is not None and fence is not None:
            yield label, "".join(text)
            label = None
        else:
            text.append(line)
    if label is not None:
        yield label, "".join(text)


def defines(code: str, names: Sequence[str]) -> bool:
    return any(re.search(rf"^[ \t]*(?:async )?def {re.escape(name)}\b", code, re.M) for name in names)


def _completions(prompt: str, names: Sequence[str], code: str, *, fenced: bool) -> tuple[str, ...]:
    """A whole function, or the continuation of `prompt`, which ends inside the function."""
    if not code.strip():
        return ()
    if defines(code, names):
        # what comes before the function in the prompt: imports and helper functions, which an answer may leave out
        before = before_function(prompt, names[0])
        wholes = (code,) if fenced else _from_first_code_line(code)
        return tuple(f"{before}\n{whole}" for whole in wholes)
    if fenced:
        return (f"{prompt}\n{code}", f"{prompt}\n{textwrap.indent(code, _INDENT)}")
    return (f"{prompt}\n{_continuation(code)}",)


def _continuation(answer: str) -> str:
    """The body of a function: up to the first line that is not indented. A missing indentation of its first line is
    added, because some decoders remove leading spaces."""
    first, *others = answer.lstrip("\n").split("\n")
    lines = [first if first[:1].isspace() else _INDENT + first]
    for line in others:
        if line.strip() and not line[0].isspace():
            break
        lines.append(line)
    return "\n".join(lines)


def _from_first_code_line(answer: str) -> tuple[str, ...]:
    """The whole text, and the text from the first line that looks like code."""
    match = _CODE_LINE.search(answer)
    return (answer,) if match is None or match.start() == 0 else (answer, answer[match.start() :])
