"""Load a user's reward function, with errors that name the fault."""

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from rloom.errors import RewardError
from rloom.import_path import add_folder_of
from rloom.rewards import helpers
from rloom.rewards.messages import Style

MODULE_NAME = "rloom_custom_reward"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
GROUP_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")  # lists
QUERY_ARGUMENTS = ("queries", "prompts", "labels")  # lists
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
NAMES = {Style.ANSWER: ARGUMENTS, Style.GROUP: GROUP_ARGUMENTS, Style.QUERIES: QUERY_ARGUMENTS}
TRL_ONLY = ("trainer_state", "environments")  # objects of TRL's trainer


def load_function(
    path: str, name: str, reward_kwargs: Mapping[str, Any], *, whole_groups: bool
) -> tuple[Callable[..., Any], Style]:
    """The function and how it is called. TRL's have a parameter `completions`, OpenRLHF's `queries`; `whole_groups`
    applies to the others."""
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
    subject = f"custom_reward_function.name={name!r}: {name}"
    return function, checked_style(function, subject, f" in {path}", reward_kwargs, whole_groups=whole_groups)


def checked_style(
    function: Callable[..., Any], subject: str, place: str, reward_kwargs: Mapping[str, Any], *, whole_groups: bool
) -> Style:
    """How the function is called. A RewardError that begins with `subject` if its signature does not allow that."""
    style = _style(function, whole_groups)
    _check_signature(function, subject, place, reward_kwargs, style)
    return style


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
    vars(module).update({name: getattr(helpers, name) for name in helpers.__all__})
    sys.modules[MODULE_NAME] = module  # dataclasses and pickle read the module of a class from there
    add_folder_of(str(file))
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


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # built-in functions may have none
        return {}


def _style(function: Callable[..., Any], whole_groups: bool) -> Style:
    if "completions" in _parameters(function):
        return Style.COLUMNS
    if "queries" in _parameters(function):
        return Style.QUERIES
    return Style.GROUP if whole_groups else Style.ANSWER


def _check_signature(
    function: Callable[..., Any], subject: str, place: str, reward_kwargs: Mapping[str, Any], style: Style
) -> None:
    parameters = _parameters(function)
    if not parameters:
        return
    signature = inspect.signature(function)
    if style is Style.COLUMNS:
        required = [name for name in TRL_ONLY if name in parameters and parameters[name].default is Parameter.empty]
        if required:
            raise RewardError(
                f"{subject}{signature}{place} needs {required[0]}, an object of TRL's trainer; "
                "give this parameter a default value"
            )
        # its parameters are columns of the rows
        arguments = [name for name, one in parameters.items() if one.kind not in VARIADIC and name not in reward_kwargs]
    else:
        arguments = list(NAMES[style])
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        extra = f" and reward_kwargs {', '.join(reward_kwargs)}" if reward_kwargs else ""
        raise RewardError(
            f"{subject}{signature}{place} cannot be called with the keywords {', '.join(arguments)}{extra}: {error}"
        ) from error
