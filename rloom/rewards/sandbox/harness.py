"""The process of a program: it executes generated code and, for tests, makes the calls that they ask for.

It knows nothing of the tests but the arguments of their calls. Comparison and report are in the process of the tests
(`tests.py`), which never executed generated code.
"""

import atexit
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from rloom.rewards.sandbox.exchange import Peer

_MESSAGE_LENGTH = 200
FILE = "<solution>"
_LONGEST_REQUEST = 1 << 40  # arguments are the row's


def execute(job: Mapping[str, Any], descriptor: int) -> NoReturn:
    """Execute a program that reads stdin, and end the process. The reason of an early end is written as text."""
    code = 0
    try:
        _load(job)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        code = 1
        os.write(descriptor, describe(error).encode(errors="replace"))
    _finish()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the program
            continue
    os._exit(code & 0xFF)


def _finish() -> None:
    """What Python does at its end: wait for threads, in which many programs run their main function, and call what was
    registered."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException:  # Python prints it and ends all the same
        traceback.print_exc()


def serve(job: Mapping[str, Any], descriptor: int) -> NoReturn:
    """Execute a program that defines functions, then call them for the tests until they close the connection."""
    _Program(job, descriptor).serve()


class _Program(Peer):
    def __init__(self, job: Mapping[str, Any], descriptor: int) -> None:
        super().__init__(descriptor, _LONGEST_REQUEST)
        self._fault: BaseException | None = None
        try:
            self._module = _load(job)
        except BaseException as error:  # raised when the tests ask for a name
            self._fault = error

    def do(self, operation: str, values: Sequence[Any]) -> Any:
        if self._fault is not None:
            raise self._fault
        return self._names(*values) if operation == "names" else super().do(operation, values)

    def lost(self, reason: str) -> NoReturn:
        os._exit(0)

    def described(self, error: BaseException) -> str:
        return describe(error)

    def _names(self, names: Sequence[str], methods: bool) -> dict[str, Any]:
        """The names that the program defines; with `methods`, also as methods of a class `Solution`."""
        found = {name: vars(self._module)[name] for name in names if name in vars(self._module)}
        missing = [name for name in names if name not in found]
        if methods and missing and "Solution" in vars(self._module):
            solution = vars(self._module)["Solution"]()
            found |= {name: getattr(solution, name) for name in missing if name in dir(solution)}
        return found


def _load(job: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(job["module_name"])
    sys.modules[module.__name__] = module  # dataclasses and pickle look up the module of a class there
    exec(job["prelude"], module.__dict__)
    exec(_compiled(job["sources"]), module.__dict__)
    return module


def _compiled(sources: Sequence[str]) -> Any:
    fault: Exception | None = None
    for source in sources:
        try:
            return compile(source, FILE, "exec")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            fault = fault or error
    raise fault or SyntaxError("no code")


def describe(error: BaseException) -> str:
    """One line: type, message, and the line of the program."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    try:
        message = " ".join(str(error).split())[:_MESSAGE_LENGTH]
    except Exception:  # an exception of the program whose __str__ raises
        message = ""
    place = f" (line {lines[-1]} of the program)" if lines else ""
    return type(error).__name__ + (f": {message}" if message else "") + place
