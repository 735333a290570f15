"""Load a user's reward function, with errors that name the fault."""

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rloom.errors import RewardError

MODULE_NAME = "rloom_custom_reward"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
GROUP_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")  # lists


def load_function(
    path: str, name: str, reward_kwargs: Mapping[str, Any], arguments: Sequence[str] = ARGUMENTS
) -> Callable[..., Any]:
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise RewardError(
            f"custom_reward_function.path={path!r}: there is no file {file}; use a Python file that defines {name}"
        )
    module = _load_module(path, file)
    if name not in vars(module):
        raise RewardError(
            f"custom_reward_function.name={name!r}: {path} has no such function; it defines {_functions(module)}"
        )
    function: Any = vars(module)[name]
    if not callable(function):
        raise RewardError(
            f"custom_reward_function.name={name!r}: in {path} that is a {type(function).__name__}, not a function; "
            f"it defines {_functions(module)}"
        )
    _check_signature(function, path, name, reward_kwargs, arguments)
    return function  # type: ignore[no-any-return]


def one_line(error: BaseException, file: str) -> str:
    """Type, message and place of an error: the innermost line in the user's `file`, or else where it was raised."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {message[:300]}{place}" if message else f"{type(error).__name__}{place}"


def _load_module(path: str, file: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(MODULE_NAME, str(file))
    spec = importlib.util.spec_from_loader(MODULE_NAME, loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses and pickle read the module of a class from there
    sys.path.append(str(file.parent))  # so that it can import files of the same folder
    try:
        loader.exec_module(module)
    except BaseException as error:  # also a sys.exit() in the file
        raise RewardError(
            f"custom_reward_function.path={path!r} cannot be loaded: {one_line(error, str(file))}; "
            f"correct it until `python {path}` runs without an error"
        ) from error
    return module


def _functions(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == MODULE_NAME and not name.startswith("_")
    ]
    return ", ".join(own) or "no functions"


def _check_signature(
    function: Callable[..., Any], path: str, name: str, reward_kwargs: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-in functions may have none
        return
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        extra = f" and reward_kwargs {', '.join(reward_kwargs)}" if reward_kwargs else ""
        raise RewardError(
            f"custom_reward_function.name={name!r}: {name}{signature} in {path} cannot be called with the keywords "
            f"{', '.join(arguments)}{extra}: {error}"
        ) from error
