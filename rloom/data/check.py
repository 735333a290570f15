"""`rloom data check`: find the faults of a data file before a run."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.data import chat
from rloom.data.files import Row, locate, read_rows
from rloom.data.prompts import data_source_of, extra_info_of, ground_truth_of, messages_of
from rloom.errors import DataError
from rloom.rewards.routing import registered, rule_for, runs_code
from rloom.rewards.rules.code_problems import problem_of
from rloom.types import Message

NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")
SHOWN_OF_A_KIND = 20
SHORTEST_BUCKET = 16  # tokens
BAR_WIDTH = 40


@dataclass(frozen=True)
class Fault:
    row: int  # from 0
    reason: str


@dataclass(frozen=True)
class Report:
    path: Path
    rows: int
    columns: tuple[str, ...]  # of any row, in order of appearance
    sources: Mapping[str, int]  # data source -> rows
    schema_faults: tuple[Fault, ...]
    truth_faults: tuple[Fault, ...]  # ground truths that are missing, or that the rule cannot parse
    sources_without_rule: tuple[str, ...]
    duplicates: tuple[tuple[int, int], ...]  # (row, the first row with the same prompt)
    prompt_lengths: tuple[int, ...] | None  # tokens of each prompt without fault; None without a tokenizer

    @property
    def ok(self) -> bool:
        """Whether a run can use the file. Repeated prompts are no fault."""
        return not (self.schema_faults or self.truth_faults or self.sources_without_rule)


@dataclass(frozen=True)
class _Read:
    """The readable values of one row."""

    row: int
    messages: tuple[Message, ...] | None
    source: str | None
    ground_truth: Any
    truth_place: str | None  # key of the ground truth in this row; None: reward_model is not an object


def check_file(
    path: str | Path,
    *,
    tokenizer: chat.Tokenizer | None = None,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    own_reward: bool = False,
) -> Report:
    """`own_reward`: the user's reward function scores the rows, so they need neither a rule nor a ground truth."""
    rows = read_rows(path)
    faults: list[Fault] = []
    read = [_read(number, values, prompt_key, reward_fn_key, faults) for number, values in enumerate(rows)]
    lengths = None if tokenizer is None else _lengths(read, tokenizer, faults)
    # a reward_model that is not an object is reported once, as a schema fault
    ruled = [] if own_reward else [row for row in read if row.truth_place is not None]
    ruled_sources = dict.fromkeys(row.source for row in ruled if row.source is not None)
    return Report(
        path=locate(path),
        rows=len(rows),
        columns=tuple(dict.fromkeys(name for values in rows for name in values)),
        sources=Counter(row.source for row in read if row.source is not None),
        schema_faults=tuple(sorted(faults, key=lambda fault: fault.row)),
        truth_faults=tuple(_truth_faults(ruled)),
        sources_without_rule=tuple(source for source in ruled_sources if rule_for(source) is None),
        duplicates=tuple(_duplicates(read)),
        prompt_lengths=lengths,
    )


def _read(number: int, values: Row, prompt_key: str, reward_fn_key: str, faults: list[Fault]) -> _Read:
    def attempt(reader: Callable[..., Any], *arguments: str) -> Any:
        try:
            return reader(values, *arguments)
        except DataError as error:
            faults.append(Fault(number, str(error)))
            return None

    attempt(extra_info_of)
    return _Read(
        row=number,
        messages=attempt(messages_of, prompt_key),
        source=attempt(data_source_of, reward_fn_key),
        ground_truth=attempt(ground_truth_of),
        truth_place=_truth_place(values.get("reward_model")),
    )


def _truth_place(reward_model: Any) -> str | None:
    if reward_model is None:
        return "ground_truth"
    return "reward_model.ground_truth" if isinstance(reward_model, Mapping) else None


def _truth_faults(rows: Sequence[_Read]) -> list[Fault]:
    faults = []
    for row in rows:
        truth = row.ground_truth
        if truth is None or (isinstance(truth, str | list | dict) and not truth) or not str(truth).strip():
            faults.append(Fault(row.row, f"no ground truth; set {row.truth_place}"))
        elif row.source == "openai/gsm8k" and not NUMBER.fullmatch(str(truth).strip()):
            faults.append(Fault(row.row, f"the ground truth {truth!r} is not a number, as openai/gsm8k needs"))
        elif row.source is not None and runs_code(row.source):
            faults += _code_faults(row.row, row.source, truth)
    return faults


def _code_faults(row: int, source: str, truth: Any) -> list[Fault]:
    try:
        problem_of(source, truth)
    except ValueError as error:
        return [Fault(row, str(error))]
    return []


def _duplicates(rows: Sequence[_Read]) -> list[tuple[int, int]]:
    first: dict[tuple[tuple[str, str], ...], int] = {}
    repeated = []
    for row in rows:
        if row.messages is None:
            continue
        key = tuple((message["role"], message["content"]) for message in row.messages)
        if key in first:
            repeated.append((row.row, first[key]))
        else:
            first[key] = row.row
    return repeated


def _lengths(rows: Sequence[_Read], tokenizer: chat.Tokenizer, faults: list[Fault]) -> tuple[int, ...]:
    texts = []
    for row in rows:
        if row.messages is None:
            continue
        try:
            texts.append(chat.render_chat(row.messages, tokenizer))
        except DataError as error:
            faults.append(Fault(row.row, str(error)))
    return tuple(len(tokens) for tokens in chat.tokenize(texts, tokenizer))


def length_histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(upper bound in tokens, prompts between the previous bound and it); each bound is twice the previous."""
    bounds = [SHORTEST_BUCKET]
    while bounds[-1] < max(lengths):
        bounds.append(bounds[-1] * 2)
    lower_bounds = [0, *bounds[:-1]]
    return [
        (upper, sum(lower < length <= upper for length in lengths))
        for lower, upper in zip(lower_bounds, bounds, strict=True)
    ]


def render_report(report: Report) -> str:
    """The report for a terminal."""
    lines = [f"{report.path}: {counted(report.rows)} (numbered from 0)", f"columns: {', '.join(report.columns)}"]
    lines += ["data sources:", *(f"  {source}: {counted(count)}" for source, count in report.sources.items())]
    if report.prompt_lengths:
        lines += _render_lengths(report.prompt_lengths)
    lines += _render_kind("faults", [f"row {fault.row}: {fault.reason}" for fault in report.schema_faults])
    lines += _render_kind("ground truths", [f"row {fault.row}: {fault.reason}" for fault in report.truth_faults])
    lines += _render_kind(
        "data sources without a reward rule",
        [
            f"{source}: use a registered data source ({', '.join(registered())}), or your own reward function, "
            "custom_reward_function.path=FILE (then check with --own_reward)"
            for source in report.sources_without_rule
        ],
    )
    lines += _render_kind("repeated prompts", [f"row {row} repeats row {first}" for row, first in report.duplicates])
    lines.append("ok" if report.ok else "not ok")
    return "\n".join(lines)


def counted(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _render_kind(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    lines = [f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries[:SHOWN_OF_A_KIND])]
    if len(entries) > SHOWN_OF_A_KIND:
        lines.append(f"  and {len(entries) - SHOWN_OF_A_KIND} more")
    return lines


def _render_lengths(lengths: Sequence[int]) -> list[str]:
    histogram = length_histogram(lengths)
    width = len(str(histogram[-1][0]))
    most = max(count for _, count in histogram)
    mean = sum(lengths) / len(lengths)
    lines = [f"prompt length in tokens: {min(lengths)} to {max(lengths)}, mean {mean:.1f}"]
    for upper, count in histogram:
        bar = "█" * round(BAR_WIDTH * count / most)
        lines.append(f"  up to {upper:>{width}}  {bar} {count}".rstrip())
    return lines
