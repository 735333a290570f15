"""Load a user's reward function, call it in one of four styles, and turn what it returns or raises into Scores."""

import ast
import asyncio
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, SupportsFloat

from rloom.errors import RewardError
from rloom.import_path import add_folder_of
from rloom.rewards import helpers
from rloom.rewards.base import Style
from rloom.types import Sample, SampleGroup, Score
from rloom.written_names import Definition, bound_names, defines_unseen_names

MODULE_NAME = "rloom_custom_reward"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
GROUP_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")  # lists
QUERY_ARGUMENTS = ("queries", "prompts", "labels")  # lists
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
NAMES = {Style.ANSWER: ARGUMENTS, Style.GROUP: GROUP_ARGUMENTS, Style.QUERIES: QUERY_ARGUMENTS}
TRL_ONLY = ("trainer_state",)  # objects of TRL's trainer


def check_source(path: str, name: str, reward_kwargs: Mapping[str, Any], *, whole_groups: bool) -> None:
    """The faults that the text of a reward file shows. Its code runs later, in the processes that compute rewards."""
    file = _reward_file(path, name)
    try:
        module = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise _cannot_load(path, file, error) from error
    bound = list(bound_names(module.body))
    if name not in bound and name not in helpers.__all__ and not defines_unseen_names(module, bound):
        own = [node.name for node in module.body if isinstance(node, Definition) and not node.name.startswith("_")]
        raise _no_function(path, name, own)
    found = [node for node in module.body if isinstance(node, Definition) and node.name == name]
    if bound.count(name) == 1 and found and not found[0].decorator_list:
        returned = f" -> {ast.unparse(found[0].returns)}" if found[0].returns else ""
        shown = f"({ast.unparse(found[0].args)}){returned}"
        style = _style(_written_signature(found[0].args), whole_groups)
        _check_signature(_written_signature(found[0].args), f"{_subject(name)}{shown} in {path}", reward_kwargs, style)


def _written_signature(arguments: ast.arguments) -> Signature:
    """As `inspect.signature` finds it in the function that the text defines."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [
        Parameter(
            one.arg,
            Parameter.POSITIONAL_ONLY if place < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if place < required else None,
        )
        for place, one in enumerate(positional)
    ]
    found += [Parameter(one.arg, Parameter.VAR_POSITIONAL) for one in [arguments.vararg] if one]
    found += [
        Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    found += [Parameter(one.arg, Parameter.VAR_KEYWORD) for one in [arguments.kwarg] if one]
    return Signature(found)


def load_function(
    path: str, name: str, reward_kwargs: Mapping[str, Any], *, whole_groups: bool
) -> tuple[Callable[..., Any], Style]:
    """The function and how it is called. TRL's have a parameter `completions`, OpenRLHF's `queries`; `whole_groups`
    applies to the others."""
    file = _reward_file(path, name)
    module = _load_module(path, file)
    if name not in vars(module):
        raise _no_function(path, name, _functions(module))
    function: Any = vars(module)[name]
    if not callable(function):
        raise RewardError(
            f"custom_reward_function.name={name!r}: in {path} that is a {type(function).__name__}, not a function; "
            f"it defines {', '.join(_functions(module)) or 'no functions'}"
        )
    return function, checked_style(function, _subject(name), f" in {path}", reward_kwargs, whole_groups=whole_groups)


def _reward_file(path: str, name: str) -> Path:
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise RewardError(
            f"custom_reward_function.path={path!r}: there is no file {file}; use a Python file that defines {name}"
        )
    return file


def _cannot_load(path: str, file: Path, error: BaseException) -> RewardError:
    return RewardError(
        f"custom_reward_function.path={path!r} cannot be loaded: {one_line(error, str(file))}; "
        f"correct it until `python {path}` runs without an error"
    )


def _no_function(path: str, name: str, own: Sequence[str]) -> RewardError:
    defined = ", ".join(own) or "no functions"
    return RewardError(f"custom_reward_function.name={name!r}: {path} has no such function; it defines {defined}")


def _subject(name: str) -> str:
    return f"custom_reward_function.name={name!r}: {name}"


def checked_style(
    function: Callable[..., Any], subject: str, place: str, reward_kwargs: Mapping[str, Any], *, whole_groups: bool
) -> Style:
    """How the function is called. A RewardError that begins with `subject` if its signature does not allow that."""
    signature = _signature(function)
    style = _style(signature, whole_groups)
    _check_signature(signature, f"{subject}{signature}{place}", reward_kwargs, style)
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
        raise _cannot_load(path, file, error) from error
    return module


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == MODULE_NAME and not name.startswith("_")
    ]


def _signature(function: Callable[..., Any]) -> Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # built-in functions may have none
        return None


def _style(signature: Signature | None, whole_groups: bool) -> Style:
    if signature is not None and "completions" in signature.parameters:
        return Style.COLUMNS
    if signature is not None and "queries" in signature.parameters:
        return Style.QUERIES
    return Style.GROUP if whole_groups else Style.ANSWER


def _check_signature(signature: Signature | None, subject: str, reward_kwargs: Mapping[str, Any], style: Style) -> None:
    """`subject`: key, function and signature, for error messages."""
    if signature is None or not signature.parameters:
        return
    parameters = signature.parameters
    if style is Style.COLUMNS:
        required = [name for name in TRL_ONLY if name in parameters and parameters[name].default is Parameter.empty]
        if required:
            raise RewardError(
                f"{subject} needs {required[0]}, an object of TRL's trainer; give this parameter a default value"
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
            f"{subject} cannot be called with the keywords {', '.join(arguments)}{extra}: {error}"
        ) from error


NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class FunctionCaller:
    """A `runner` awaits the results of async functions."""

    def __init__(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], runner: asyncio.Runner | None = None
    ) -> None:
        self._function = function
        self._kwargs = dict(kwargs)
        self._runner = runner
        code = _code_of(function)
        self._file = "" if code is None else code.co_filename
        place = "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        self._name = (type(function).__name__ if code is None else code.co_name) + place

    def for_group(self, style: Style) -> Callable[[SampleGroup], list[Score]]:
        return {
            Style.ANSWER: self._each,
            Style.GROUP: self._with_lists,
            Style.QUERIES: self._with_queries,
            Style.COLUMNS: self._with_columns,
        }[style]

    def for_answer(self, sample: Sample) -> Score:
        values = (sample.data_source, sample.whole_response, sample.ground_truth, sample.info)
        try:
            return to_score(self._result(dict(zip(ARGUMENTS, values, strict=True)) | self._kwargs), self._name)
        except BaseException as error:  # the user's code: a sys.exit() in it also fails only one sample
            return Score.failed(one_line(error, self._file))

    def _each(self, group: SampleGroup) -> list[Score]:
        return [self.for_answer(sample) for sample in group]

    def _with_lists(self, group: SampleGroup) -> list[Score]:
        rows = [(sample.data_source, sample.whole_response, sample.ground_truth, sample.info) for sample in group]
        columns = [list(column) for column in zip(*rows, strict=True)]
        arguments = dict(zip(GROUP_ARGUMENTS, columns, strict=True)) | self._kwargs
        return self._scores(group, arguments, lambda _, result: to_score(result, self._name))

    def _with_queries(self, group: SampleGroup) -> list[Score]:
        return [self._for_query(sample) for sample in group]

    def _for_query(self, sample: Sample) -> Score:
        """As OpenRLHF does: lists of one answer in, a dict with `rewards`, `scores` and `extra_logs` out."""
        label = "" if sample.ground_truth is None else sample.ground_truth
        values = ([sample.prompt + sample.whole_response], [sample.prompt], [label])
        try:
            result = self._result(dict(zip(QUERY_ARGUMENTS, values, strict=True)) | self._kwargs)
            if not isinstance(result, Mapping):
                return to_score(_only(result), self._name)
            if result.get("rewards") is None:
                return Score.failed(f"{self._name} returned a dict without 'rewards'")
            logged = {name: _only(value) for name, value in (result.get("extra_logs") or {}).items()}
            if result.get("scores") is not None:
                logged["acc"] = _only(result["scores"])
            return to_score(_only(result["rewards"]), self._name, logged)
        except BaseException as error:  # as above
            return Score.failed(one_line(error, self._file))

    def _with_columns(self, group: SampleGroup) -> list[Score]:
        """As TRL's GRPOTrainer does, but for the answers to one prompt and not for a whole batch."""
        metrics: dict[str, float] = {}
        extras: list[list[str]] = [[] for _ in group]

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for texts, value in zip(extras, values, strict=True):
                texts.append(f"{column}: {value}")

        def convert(index: int, result: Any) -> Score:
            if result is None:
                return Score.failed(f"{self._name} returned None: it does not apply to this row", applies=False)
            return to_score(result, self._name, {"detail": "; ".join(extras[index]) or None, **metrics})

        columns = _columns(group)
        given = columns | {"log_metric": metrics.__setitem__, "log_extra": log_extra} | self._kwargs
        parameters = [one for one in inspect.signature(self._function).parameters.values() if one.kind not in VARIADIC]
        missing = [one.name for one in parameters if one.default is one.empty and one.name not in given]
        if missing:
            reason = f"{self._name} needs the column {missing[0]!r}; this row has {', '.join(columns)}"
            return [Score.failed(reason)] * len(group)
        if not _takes_all_keywords(self._function):
            given = {one.name: given[one.name] for one in parameters if one.name in given}
        return self._scores(group, given, convert)

    def _scores(
        self, group: SampleGroup, arguments: Mapping[str, Any], convert: Callable[[int, Any], Score]
    ) -> list[Score]:
        """Of a call that returns a list."""
        try:
            results = list(self._result(arguments))
            if len(results) != len(group):
                reason = f"{self._name} returned {len(results)} results for {len(group)} answers"
                return [Score.failed(reason)] * len(group)
            return [convert(index, result) for index, result in enumerate(results)]
        except BaseException as error:  # as above
            return [Score.failed(one_line(error, self._file))] * len(group)

    def _result(self, arguments: Mapping[str, Any]) -> Any:
        result = self._function(**arguments)
        return self._runner.run(_wait_for(result)) if self._runner and inspect.isawaitable(result) else result


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _code_of(function: Callable[..., Any]) -> Any:
    unwrapped = inspect.unwrap(function)
    return unwrapped.__code__ if inspect.isfunction(unwrapped) else None


def _takes_all_keywords(function: Callable[..., Any]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())


def _columns(group: SampleGroup) -> dict[str, Any]:
    rows = [
        {**sample.info, "data_source": sample.data_source, **_ground_truth(sample), **sample.columns}
        for sample in group
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_COLUMNS)
    prompts = [_prompt(sample) for sample in group]
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": prompts,
        "completions": [
            sample.whole_response if isinstance(prompt, str) else [dict(message) for message in sample.answer_messages]
            for sample, prompt in zip(group, prompts, strict=True)
        ],
        **({"environments": [EnvironmentState(sample) for sample in group]} if group[0].episode else {}),
        "completion_ids": [
            list(sample.response_tokens if sample.episode is None else sample.episode.tokens) for sample in group
        ],
    }


class EnvironmentState:
    """The environment of an episode, as TRL's argument `environments` has it: its attributes of plain data."""

    def __init__(self, sample: Sample) -> None:
        self.__dict__.update({} if sample.episode is None else sample.episode.state)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the environment has no {name!r} here: it ran in a process of its own, and reward functions read its "
            f"public attributes of plain data: {', '.join(self.__dict__) or 'none'}"
        )


def _ground_truth(sample: Sample) -> dict[str, Any]:
    """Empty without one: a function that needs the column fails for its absence, and not for a None in it."""
    return {} if sample.ground_truth is None else {"ground_truth": sample.ground_truth}


def _only(value: Any) -> Any:
    """The value of a list or tensor of one answer; a number as it is."""
    try:
        values = list(value)
    except TypeError:  # a number, or a tensor without a dimension
        return value
    if len(values) != 1:
        raise ValueError(f"it returned {len(values)} values for 1 answer")
    return values[0]


def _prompt(sample: Sample) -> str | list[dict[str, Any]]:
    """The text or the chat messages, whichever the data file has."""
    prompt = sample.columns.get("prompt", sample.messages or sample.prompt)
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


ACCEPTED = "a number, or a dict with 'score'"
RESERVED = ("score", "pred", "detail")


def to_score(result: Any, function: str, logged: Mapping[str, Any] = MappingProxyType({})) -> Score:
    """`function`: its name, for the reason of a failure. `logged`: further values, as in a dict with 'score'."""
    if not isinstance(result, Mapping):
        return _score(result, logged, f"{function} returned")
    if "score" not in result:
        keys = ", ".join(repr(key) for key in result) or "no keys"
        return Score.failed(f"{function} returned a dict with {keys}; it needs a 'score'")
    return _score(result["score"], {**logged, **result}, f"{function} returned 'score' =")


def _score(value: Any, further: Mapping[str, Any], subject: str) -> Score:
    parts = {str(key): value for key, value in further.items() if key not in RESERVED and _is_number(value)}
    if not _is_number(value):
        reason = f"{subject} {_short(value)} ({type(value).__name__}); a reward is {ACCEPTED}"
        return Score.failed(reason, applies=value is not None)
    return Score.of(
        float(value),
        {name: float(part) for name, part in parts.items()},
        subject=f"{subject} {_short(value)}",
        prediction=_text(further.get("pred")),
        detail=_text(further.get("detail")),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _is_number(value: Any) -> bool:
    """True for int, float, bool, Fraction, and scalars of NumPy and torch, without importing those."""
    if type(value) is float:  # a check against a protocol takes longer than a rule
        return True
    if not isinstance(value, SupportsFloat):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several numbers, or too large for a float
        return False
    return True


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
