"""`rloom data check`: all faults of data files, before a run stops at the first.

An error is what `rloom train` refuses. A warning is what it accepts, though it is probably a mistake.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloom.data import chat
from rloom.data.files import Row, has_byte_order_mark, locate, read_rows
from rloom.data.rows import Columns, ReadRow, read_row, truth_column
from rloom.errors import DataError
from rloom.rewards.routing import OTHER_REWARDS, registered, rule_for

ROLES = ("system", "developer", "user", "assistant", "tool")
TYPES = {str: "text", bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class DataFinding:
    column: str  # or "file"
    row: int | None  # from 0; None: the whole file
    reason: str


@dataclass
class DataReport:
    path: str
    rows: int = 0
    columns: tuple[str, ...] = ()  # columns of any row, in order of appearance
    sources: Mapping[str, int] = field(default_factory=dict)  # data source -> rows
    errors: list[DataFinding] = field(default_factory=list)
    warnings: list[DataFinding] = field(default_factory=list)
    prompt_lengths: tuple[int, ...] | None = None  # tokens of each prompt without fault; None without a tokenizer
    prompts: dict[str, int] = field(default_factory=dict)  # prompt -> its first row

    @property
    def ok(self) -> bool:
        return not self.errors


@dataclass(frozen=True)
class CheckSettings:
    columns: Columns = field(default_factory=Columns)
    tokenizer: chat.Tokenizer | None = None
    max_prompt_length: int | None = None  # tokens


def check_files(paths: Sequence[str | Path], settings: CheckSettings) -> list[DataReport]:
    """One report a file. A prompt that an earlier file has is a warning."""
    reports: list[DataReport] = []
    for path in paths:
        report = check_file(path, settings)
        for earlier in reports:
            report.warnings += [
                DataFinding(
                    settings.columns.prompt_key, row, f"is also row {earlier.prompts[prompt]} of {earlier.path}"
                )
                for prompt, row in report.prompts.items()
                if prompt in earlier.prompts
            ]
        reports.append(report)
    return reports


def check_file(path: str | Path, settings: CheckSettings) -> DataReport:
    report = DataReport(str(path))
    try:
        rows = read_rows(path)
    except DataError as error:
        report.errors.append(DataFinding("file", None, str(error)))
        return report
    read = [read_row(values, settings.columns) for values in rows]
    report.rows = len(rows)
    report.columns = tuple(dict.fromkeys(name for values in rows for name in values))
    report.sources = Counter(row.data_source for row in read if row.data_source is not None)
    report.errors += [
        DataFinding(fault.column, number, fault.reason) for number, row in enumerate(read) for fault in row.faults
    ]
    if settings.columns.rules:
        report.errors += _sources_without_rule(rows, read, settings.columns.reward_fn_key)
    if settings.tokenizer is not None:
        _check_lengths(report, read, settings)
    if locate(path).suffix != ".parquet" and has_byte_order_mark(locate(path)):
        report.warnings.append(
            DataFinding("file", None, "starts with a byte order mark, which other JSON readers refuse")
        )
    report.warnings += _repeated_prompts(report, read, settings.columns.prompt_key)
    report.warnings += _unusual_roles(read, settings.columns.prompt_key)
    report.warnings += _mixed_types(rows)
    report.warnings += _not_finite(rows)
    return report


def _sources_without_rule(rows: Sequence[Row], read: Sequence[ReadRow], column: str) -> Iterator[DataFinding]:
    """One for each data source, at its first row."""
    counts = Counter(row.data_source for row in read)
    named = set()
    for number, (values, row) in enumerate(zip(rows, read, strict=True)):
        source = row.data_source
        if source is None or source in named or rule_for(source) is not None:
            continue
        named.add(source)
        reward_model = values.get("reward_model")
        for_model = isinstance(reward_model, Mapping) and reward_model.get("style") == "model"
        hint = " The row is for a reward model (reward_model.style is model)." if for_model else ""
        yield DataFinding(
            column,
            number,
            f"no reward rule for {source!r} ({counted(counts[source])}).{hint} Use a registered data source "
            f"({', '.join(registered())}), or another reward: {OTHER_REWARDS}. Then check with --own_reward or "
            "--reward_model",
        )


def _check_lengths(report: DataReport, read: Sequence[ReadRow], settings: CheckSettings) -> None:
    """Lengths of the rendered prompts, and the errors that need a tokenizer."""
    column, limit = settings.columns.prompt_key, settings.max_prompt_length
    assert settings.tokenizer is not None
    texts: dict[int, str] = {}
    for number, row in enumerate(read):
        if row.messages is None:
            continue
        try:
            texts[number] = chat.render_chat(row.messages, settings.tokenizer)
        except DataError as error:
            report.errors.append(DataFinding(column, number, str(error)))
    lengths = [len(tokens) for tokens in chat.tokenize(list(texts.values()), settings.tokenizer)]
    for number, length in zip(texts, lengths, strict=True):
        if length == 0:
            report.errors.append(DataFinding(column, number, "the tokenizer makes no token of the prompt"))
        if limit is not None and length > limit:
            ways = "data.filter_overlong_prompts=True, or data.truncation to left, right or middle"
            reason = f"{length} tokens, over data.max_prompt_length={limit}; raise it, set {ways}"
            report.errors.append(DataFinding(column, number, reason))
    report.prompt_lengths = tuple(lengths)


def _repeated_prompts(report: DataReport, read: Sequence[ReadRow], column: str) -> Iterator[DataFinding]:
    """Also fills `report.prompts`."""
    for number, row in enumerate(read):
        if row.messages is None:
            continue
        prompt = repr([(message["role"], message["content"]) for message in row.messages])
        first = report.prompts.setdefault(prompt, number)
        if first != number:
            yield DataFinding(column, number, f"repeats row {first}")


def _unusual_roles(read: Sequence[ReadRow], column: str) -> Iterator[DataFinding]:
    for number, row in enumerate(read):
        for place, message in enumerate(row.messages or ()):
            if message["role"] not in ROLES:
                reason = f"message {place} has the role {message['role']!r}; chat templates have {', '.join(ROLES)}"
                yield DataFinding(column, number, reason)


def _mixed_types(rows: Sequence[Row]) -> Iterator[DataFinding]:
    """Only json files can have them. A reward function has to handle both."""
    first: dict[str, tuple[int, str]] = {}
    for number, row in enumerate(rows):
        reward_model = row.get("reward_model")
        nested = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
        values = {**row, truth_column(row): nested if nested is not None else row.get("ground_truth")}
        for column, value in values.items():
            kind = TYPES.get(type(value))
            if kind is None:
                continue
            earlier, expected = first.setdefault(column, (number, kind))
            if kind != expected:
                yield DataFinding(column, number, f"is {kind}; in row {earlier} it is {expected}")


def _not_finite(rows: Sequence[Row]) -> Iterator[DataFinding]:
    for number, row in enumerate(rows):
        for column, value in row.items():
            if any(isinstance(each, float) and not math.isfinite(each) for each in _leaves(value)):
                yield DataFinding(column, number, "has a number that is NaN or infinite, which JSON cannot express")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def counted(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


SHOWN_OF_A_COLUMN = 5
SHORTEST_BUCKET = 16  # tokens
BAR_WIDTH = 40


def render_report(report: DataReport) -> str:
    lines = [f"{report.path}: {counted(report.rows)} (numbered from 0)"]
    if report.columns:
        lines.append(f"columns: {', '.join(report.columns)}")
    if report.sources:
        lines += ["data sources:", *(f"  {source}: {counted(count)}" for source, count in report.sources.items())]
    if report.prompt_lengths:
        lines += _render_lengths(report.prompt_lengths)
    lines += _render_findings("errors", report.errors)
    lines += _render_findings("warnings", report.warnings)
    return "\n".join([*lines, verdict(report)])


def verdict(report: DataReport) -> str:
    warned = f", warnings: {len(report.warnings)}" if report.warnings else ""
    return f"ok: {counted(report.rows)}{warned}" if report.ok else f"not ok: errors: {len(report.errors)}{warned}"


def _render_findings(title: str, findings: Sequence[DataFinding]) -> list[str]:
    columns: dict[str, list[DataFinding]] = defaultdict(list)
    for finding in findings:
        columns[finding.column].append(finding)
    lines = [f"{title}: {len(findings)}"] if findings else []
    for column, found in columns.items():
        lines.append(f"  {column}: {len(found)}")
        lines += [f"    {_place(finding)}{finding.reason}" for finding in found[:SHOWN_OF_A_COLUMN]]
        if len(found) > SHOWN_OF_A_COLUMN:
            lines.append(f"    and {len(found) - SHOWN_OF_A_COLUMN} more")
    return lines


def _place(finding: DataFinding) -> str:
    return "" if finding.row is None else f"row {finding.row}: "


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


def _render_lengths(lengths: Sequence[int]) -> list[str]:
    histogram = length_histogram(lengths)
    width = len(str(histogram[-1][0]))
    most = max(count for _, count in histogram)
    mean = sum(lengths) / len(lengths)
    lines = [f"prompt length in tokens: {min(lengths)} to {max(lengths)}, mean {mean:.1f}"]
    for upper, count in histogram:
        bar = "█" * round(BAR_WIDTH * count / most) if most else ""
        lines.append(f"  up to {upper:>{width}}  {bar} {count}".rstrip())
    return lines


LONGEST_TEXT = 2000  # characters


def show_rows(
    path: str | Path, first: int, count: int, columns: Columns, tokenizer: chat.Tokenizer | None = None
) -> str:
    rows = read_rows(path)
    if not 0 <= first < len(rows):
        raise DataError(f"{path}: has no row {first}; its rows are 0 to {len(rows) - 1}")
    shown = range(first, min(first + count, len(rows)))
    heading = f"{path}: {counted(len(rows))} (numbered from 0)"
    return "\n\n".join([heading, *(_show(number, rows[number], columns, tokenizer) for number in shown)])


def _show(number: int, values: Row, columns: Columns, tokenizer: chat.Tokenizer | None) -> str:
    row = read_row(values, columns)
    lines = [f"--- row {number}", f"{columns.reward_fn_key}: {_text(row.data_source)}"]
    if row.messages is not None:
        lines += _show_prompt(row.messages, tokenizer)
    lines.append(f"{truth_column(values)}: {_text(row.ground_truth)}")
    lines += [f"{name}: {_text(value)}" for name, value in _other_values(values, columns).items()]
    return "\n".join([*lines, *(f"fault in {fault.column}: {fault.reason}" for fault in row.faults)])


def _other_values(values: Row, columns: Columns) -> dict[str, Any]:
    """What is neither prompt nor data source nor ground truth, one level deep."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    shown = (columns.prompt_key, columns.reward_fn_key, "ground_truth", "reward_model.ground_truth")
    return {name: value for name, value in flat.items() if name not in shown}


def _show_prompt(messages: Sequence[Any], tokenizer: chat.Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return [f"[{message['role']}] {_text(message['content'])}" for message in messages]
    text = chat.render_chat(messages, tokenizer)
    (tokens,) = chat.tokenize([text], tokenizer)
    return [f"prompt, {len(tokens)} tokens:", _text(text)]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}... (the first {LONGEST_TEXT} of {len(text)} characters)"
