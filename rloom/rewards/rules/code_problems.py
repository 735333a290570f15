"""Ground truths of code problems: asserts (HumanEval, MBPP), or inputs and outputs (verl's form)."""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMS = "entry_point and test (HumanEval), test_list (MBPP), or inputs and outputs"


@dataclass(frozen=True)
class Asserts:
    """Tests in Python. `tests` reports each one through `__case__` (see `sandbox/harness.py`)."""

    tests: str
    count: int
    names: tuple[str, ...]  # functions that the tests call; the program defines one of them
    prompt: str = ""  # the beginning of the function, which an answer may continue


@dataclass(frozen=True)
class Calls:
    """A function is called with arguments, and its values are compared with the outputs."""

    function: str
    calls: tuple[tuple[Any, ...], ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Streams:
    """A program reads an input from stdin, and what it prints is compared with the output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Problem = Asserts | Calls | Streams


def problem_of(data_source: str, ground_truth: Any) -> Problem:
    """ValueError if `ground_truth` has none of the known forms."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        if not isinstance(truth, Mapping):
            raise ValueError("it is not an object")
        if "entry_point" in truth:
            return _humaneval(truth)
        if "test_list" in truth:
            return _mbpp(truth)
        if "inputs" in truth:
            return _inputs_and_outputs(truth)
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
    tests = f"{ast.unparse(ast.fix_missing_locations(module))}\ncheck({name})\n"
    return Asserts(tests, sum(has_tests), (name,), prompt)


def _mbpp(truth: Mapping[str, Any]) -> Asserts:
    setup = _text(truth, "test_setup_code") if truth.get("test_setup_code") else ""
    sources = _list(truth, "test_list")
    parsed = [ast.parse(str(source)).body for source in sources]
    module = ast.parse(setup)
    module.body += [_case(index, statements) for index, statements in enumerate(parsed)]
    called = [
        node.func.id
        for statements in parsed
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    names = tuple(dict.fromkeys(name for name in called if name not in vars(builtins)))
    return Asserts(ast.unparse(ast.fix_missing_locations(module)), len(parsed), names)


def _case(index: int, statements: list[ast.stmt]) -> ast.If:
    """`if __case__.wanted(0): with __case__(0): statements`."""
    wanted = ast.parse(f"if __case__.wanted({index}):\n with __case__({index}):\n  pass").body[0]
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


def _text(truth: Mapping[str, Any], key: str) -> str:
    if not isinstance(truth.get(key), str):
        raise ValueError(f"its {key} is {type(truth.get(key)).__name__}, not text")
    return str(truth[key])


def _list(truth: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = truth.get(key)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"its {key} is not a list with at least one element")
    return value
