"""Execute generated code and its tests. This runs inside the sandbox, in the program's own process."""

import json
import os
import sys
import tempfile
import traceback
from types import ModuleType, TracebackType
from typing import Any, NoReturn

_MESSAGE_LENGTH = 200
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the memory limit has no room for more threads
_FILE = "<solution>"


class _Report:
    """Writes results to a pipe, one line of JSON each."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor, self._nonce = descriptor, nonce

    def __call__(self, **values: Any) -> None:
        line = json.dumps({"nonce": self._nonce, **values}) + "\n"
        view = memoryview(line.encode())
        while view:
            view = view[os.write(self._descriptor, view) :]


class _Cases:
    """`__case__` of the tests: `if __case__.wanted(0):` and `with __case__(0): assert ...`."""

    def __init__(self, report: _Report, first: int) -> None:
        self._report, self._first, self._index = report, first, first

    def wanted(self, index: int) -> bool:
        return index >= self._first

    def __call__(self, index: int) -> "_Cases":
        self._index = index
        return self

    def __enter__(self) -> None:
        self._report(begin=self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._report(case=self._index, error=None if error is None else describe(error))
        return True


def execute(job: dict[str, Any], descriptor: int) -> NoReturn:
    """Execute the program, then its tests or calls, and end the process."""
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    for name in [name for name in sys.modules if name.split(".")[0] == "rloom"]:
        del sys.modules[name]  # as if this file were not there
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = [_FILE]
    tempfile.tempdir = os.getcwd()  # the launcher has already looked up its own
    report = _Report(descriptor, job.pop("nonce"))
    code = 0
    try:
        _execute(job, report)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if job["module_name"] != "__main__":
            report(error=describe(error))
    except BaseException as error:
        code = 1
        report(error=describe(error))
    _flush()
    os._exit(code & 0xFF)


def _execute(job: dict[str, Any], report: _Report) -> None:
    module = ModuleType(job["module_name"])
    sys.modules[module.__name__] = module  # dataclasses and pickle look up the module of a class there
    exec(job["prelude"], module.__dict__)
    exec(_compiled(job["sources"]), module.__dict__)
    if job["tests"]:
        # a copy: the program's functions do not find __case__ among their global names
        names = {**module.__dict__, "__case__": _Cases(report, job["first_case"])}
        exec(compile(job["tests"], "<tests>", "exec"), names)
    if job["function"] is not None:
        _call(_function(module, job["function"]), job["calls"], job["first_case"], report)


def _call(function: Any, calls: list[list[Any]], first: int, report: _Report) -> None:
    for index, arguments in enumerate(calls[first:], start=first):
        report(begin=index)
        try:
            value = json.loads(json.dumps(function(*arguments)))
        except Exception as error:
            report(case=index, error=describe(error))
        else:
            report(case=index, error=None, value=value)


def _compiled(sources: list[str]) -> Any:
    fault: Exception | None = None
    for source in sources:
        try:
            return compile(source, _FILE, "exec")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            fault = fault or error
    raise fault or SyntaxError("no code")


def _function(module: ModuleType, name: str) -> Any:
    """The function, or the method of a class `Solution`."""
    if name in vars(module):
        return vars(module)[name]
    if "Solution" in vars(module):
        return getattr(vars(module)["Solution"](), name)
    raise NameError(f"the program defines no function {name!r}")


def describe(error: BaseException) -> str:
    """One line: type, message, and the line of the program."""
    if isinstance(error, AssertionError) and not str(error):
        return "assertion failed"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    message = " ".join(str(error).split())[:_MESSAGE_LENGTH]
    place = f" (line {lines[-1]} of the program)" if lines else ""
    return type(error).__name__ + (f": {message}" if message else "") + place


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the program
            continue
