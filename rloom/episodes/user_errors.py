"""Errors of a user's code, in the process in which it runs: a line with their place, and the traceback for the output.

Imports no torch. The driver shows what was noted once for each place, of all processes.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from rloom.episodes.base import ERRORS
from rloom.errors import RloomError

FRAMES, LONGEST_TRACEBACK = 20, 8000  # the innermost ones; characters
MOST_NOTED = 10  # of one process, with its replies
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # of rloom
LIBRARY_FOLDER = sysconfig.get_paths()["stdlib"] + os.sep  # installed packages are in it, too
_noted: dict[str, str] = {}  # place -> text; not sent yet
_sent: set[str] = set()


def one_line(error: BaseException) -> str:
    """Example: KeyError: 'nokey' (env.py:42 in Game.reset)."""
    place = place_of(error)
    text = str(error) if isinstance(error, RloomError) else type_and_text(error).partition("\n")[0][:500]
    return f"{text} ({place})" if place else text


def type_and_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # of the user's class
        text = ""
    return f"{type(error).__name__}: {text}"


def place_of(error: BaseException) -> str:
    """The innermost line in the user's files, else in an installed package. Empty: rloom raised it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    found = [place for one in chain(error) for place in places(one)]
    own = [place for place, is_library in found if not is_library] or [place for place, _ in found]
    return own[-1] if own else ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    one: BaseException | None = error
    for _ in range(FRAMES):
        if one is not None:
            yield one
            one = one.__cause__


def places(error: BaseException) -> Iterator[tuple[str, bool]]:
    """(file, line and function; whether it is in a package) of each frame, without those of rloom and Python."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = os.path.abspath(frame.f_code.co_filename)
        is_library = file.startswith(LIBRARY_FOLDER)
        is_python = is_library and "site-packages" not in file
        if not (is_python or file.startswith(OWN_FOLDER) or frame.f_code.co_filename.startswith("<frozen")):
            yield f"{os.path.basename(file)}:{line} in {frame.f_code.co_qualname}", is_library


def note_failure(error: BaseException) -> None:
    """An error that fails the episode. One that rloom raises says what is wrong in its line."""
    if not place_of(error):
        return
    with suppress(Exception):  # of the user's class
        first = error.__traceback__
        while first is not None and first.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
            first = first.tb_next  # rloom's calls of the user's code
        written = traceback.format_exception(type(error), error, first, limit=-FRAMES)
        note(error, "".join(written)[-LONGEST_TRACEBACK:])


def note_tool_error(error: BaseException, tool: str) -> None:
    """An error that the policy reads. One that is not raised in the user's files is the fault of its call."""
    if place_of(error):
        note(error, f"the tool {tool} raised {one_line(error)}; the policy reads the error as its result")


def note(error: BaseException, text: str) -> None:
    place = f"{type(error).__name__} {place_of(error)}"
    if place not in _sent and len(_noted) < MOST_NOTED:
        _noted[place] = text


def with_noted(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply with the errors since the last one."""
    if not _noted:
        return answer
    noted = dict(_noted)
    _sent.update(_noted)
    _noted.clear()
    return {**answer, ERRORS: noted}
