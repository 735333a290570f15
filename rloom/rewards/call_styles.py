"""Call a reward function in one of four styles, and turn what it returns or raises into Scores."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rloom.rewards.messages import Style
from rloom.rewards.results import to_score
from rloom.rewards.user_function import ARGUMENTS, GROUP_ARGUMENTS, QUERY_ARGUMENTS, VARIADIC, one_line
from rloom.types import Sample, SampleGroup, Score

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
        values = (sample.data_source, sample.response, sample.ground_truth, sample.extra_info)
        try:
            return to_score(self._result(dict(zip(ARGUMENTS, values, strict=True)) | self._kwargs), self._name)
        except BaseException as error:  # the user's code: a sys.exit() in it also fails only one sample
            return Score.failed(one_line(error, self._file))

    def _each(self, group: SampleGroup) -> list[Score]:
        return [self.for_answer(sample) for sample in group]

    def _with_lists(self, group: SampleGroup) -> list[Score]:
        rows = [(sample.data_source, sample.response, sample.ground_truth, sample.extra_info) for sample in group]
        columns = [list(column) for column in zip(*rows, strict=True)]
        arguments = dict(zip(GROUP_ARGUMENTS, columns, strict=True)) | self._kwargs
        return self._scores(group, arguments, lambda _, result: to_score(result, self._name))

    def _with_queries(self, group: SampleGroup) -> list[Score]:
        return [self._for_query(sample) for sample in group]

    def _for_query(self, sample: Sample) -> Score:
        """As OpenRLHF does: lists of one answer in, a dict with `rewards`, `scores` and `extra_logs` out."""
        label = "" if sample.ground_truth is None else sample.ground_truth
        values = ([sample.prompt + sample.response], [sample.prompt], [label])
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
                return Score.failed(f"{self._name} returned None: it does not apply to this row")
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
        {**sample.extra_info, "data_source": sample.data_source, "ground_truth": sample.ground_truth, **sample.columns}
        for sample in group
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_COLUMNS)
    prompts = [_prompt(sample) for sample in group]
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": prompts,
        "completions": [
            sample.response if isinstance(prompt, str) else [{"role": "assistant", "content": sample.response}]
            for sample, prompt in zip(group, prompts, strict=True)
        ],
        "completion_ids": [list(sample.response_tokens) for sample in group],
    }


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
