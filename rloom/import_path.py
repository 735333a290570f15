"""The oldest Python, and where it looks for modules: never first in the current folder, whose files may be anyone's.

A `random.py` or `types.py` there would replace that of the standard library, and a downloaded checkpoint may have one.
`rloom` imports this module before any other: until then only sys and os are safe to import.
"""

import os
import sys

OLDEST_PYTHON = (3, 11)
if sys.version_info < OLDEST_PYTHON:  # this line is reached by Python 3.6 and newer, and other modules are not
    oldest, found = (".".join(map(str, version[:2])) for version in (OLDEST_PYTHON, sys.version_info))
    fault = f"rloom needs Python {oldest} or newer; {sys.executable} is Python {found}"
    if sys.argv[:1] != ["-m"]:
        raise ImportError(fault)
    sys.stderr.write(f"{fault}\n")  # `python3.9 -m rloom`: one line without a traceback
    sys.exit(2)

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # rloom is found there, installed or not
RAY_WORKER = os.path.join("ray", "_private", "workers", "default_worker.py")
# The child runs the rloom of this process, also where another is installed. Then the folder goes to the end of the
# path: its files replace no other module.
_START = (
    "import sys; folder = sys.argv.pop(1); sys.path.insert(0, folder); import rloom; sys.path.remove(folder); "
    "sys.path.append(folder); from importlib import import_module; import_module(sys.argv.pop(1)).main()"
)


def child_command(module: str, *arguments: str) -> list[str]:
    """The command of a child process that calls `main()` of a module of rloom. -P: not from the current folder."""
    return [sys.executable, "-P", "-c", _START, OWN_FOLDER, module, *arguments]


class DriverFolders(list[str]):
    """What Ray puts before the search path of its workers, each folder before the earlier ones. Ray extends the list by
    the current folder, which goes to its beginning here: a folder named rloom there is not imported."""

    def extend(self, folders):  # type: ignore[no-untyped-def]  # without a type: nothing is imported here
        self[:0] = folders


def add_folder_of(file: str) -> None:
    """Let a user's own file import the files beside it. The standard library and installed packages come first."""
    folder = os.path.dirname(os.path.abspath(file))
    if folder not in sys.path:
        sys.path.append(folder)


def set_back_current_folder(path: list[str], argv: list[str], command: list[str]) -> None:
    """Change `path`, the modules' search path, where Python or Ray has put the current folder first.

    `argv` and `command`: `sys.argv` and `sys.orig_argv`. A notebook or a user's own program is left as it is.
    """
    if argv[:1] == ["-m"] and _runs_rloom(command):  # Python sets argv[0] to "-m" while it looks for the module
        folder = path.pop(0)
        if folder == OWN_FOLDER:
            path.append(folder)  # a clone without an installation
    elif argv and argv[0].endswith(RAY_WORKER):
        # before Ray's own folders: those of the driver, which may hold a module that a pickled function names
        ray = argv[0].removesuffix(os.path.join("_private", "workers", "default_worker.py"))
        first = next((place for place, folder in enumerate(path) if folder.startswith(ray)), 0)
        path[:] = [*path[first:], *path[:first]]


def _runs_rloom(command: list[str]) -> bool:
    """Example: ["python", "-u", "-m", "rloom.trainer.main_ppo"]"""
    after = command[command.index("-m") + 1 :] if "-m" in command else []
    return bool(after) and after[0].partition(".")[0] == "rloom"


if not sys.flags.safe_path:
    set_back_current_folder(sys.path, sys.argv, sys.orig_argv)
