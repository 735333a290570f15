"""`rloom compare RUN RUN ...`"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rloom.cli.parsing import CommandParser, epilog
from rloom.cli.runs import new_console, new_table
from rloom.console import run_safely
from rloom.language import translate
from rloom.runs.measures import short_number
from rloom.terminal import printable

if TYPE_CHECKING:
    from rich.table import Table

    from rloom.runs.compare import AccuracyComparison, Comparison, MetricComparison, Point
    from rloom.runs.run_folder import RunFolder

WIDTH_OF_A_FILE = 160
MAX_VALUE = 60  # characters of a value of the configuration
CURVE_WIDTH = 12
UNITS = {"accuracy": "acc %", "score": "score"}  # of a validation, by what it measures
FIXED_WIDTH, STEP_WIDTH = 42, 12  # of the names and curves, and of one step, in the table of metrics


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom compare",
        description="Compare runs: configuration, validation, metrics at equal steps. Differences are to the "
        "first run.",
        **epilog("rloom compare checkpoints/math/ppo checkpoints/math/grpo"),
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory; two or more")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if not 2 <= len(given.runs) <= len(ascii_uppercase):
        parser.error(f"it takes 2 to {len(ascii_uppercase)} runs")

    return run_safely(lambda: show(given.runs, as_json=given.json))


def show(paths: Sequence[Path], *, as_json: bool) -> int:
    from rloom.config.given_keys import leaf_keys
    from rloom.runs.compare import compare
    from rloom.runs.run_folder import RunFolder

    runs = [RunFolder(path) for path in paths]
    found = compare(runs, {path: key.default for path, key in leaf_keys().items()})
    if as_json:
        whole = {"runs": [str(run.path) for run in runs], **asdict(found)}
        print(printable(json.dumps(whole, indent=2, ensure_ascii=False)))
        return 0
    render(found, runs)
    return 0


def render(found: "Comparison", runs: Sequence["RunFolder"]) -> None:
    console = new_console(WIDTH_OF_A_FILE)
    names = ascii_uppercase[: len(runs)]
    for name, run in zip(names, runs, strict=True):
        state = run.state
        steps = f"step {state.step}" if state.total_steps is None else f"step {state.step} of {state.total_steps}"
        shown = f"{name}  {run.path}  {translate(state.status)}, {translate(steps)}"
        console.print(printable(shown), soft_wrap=True, markup=False)
        for fault in run.faults:
            console.print(printable(translate(f"   {fault}")), style="yellow", soft_wrap=True, markup=False)
    console.print(translate("\nConfiguration"), style="bold")
    if found.config:
        console.print(config_table(found, names))
    else:
        console.print(translate("no key differs"))
    if found.accuracy:
        console.print(translate("\nValidation"), style="bold")
        console.print(accuracy_table(found.accuracy, names))
    console.print(translate("\nMetrics at equal steps"), style="bold")
    for table in metric_tables(found.metrics, names, console.width):
        console.print(table)


def config_table(found: "Comparison", names: str) -> "Table":
    from rich.text import Text

    table = new_table("key", *names)
    for each in found.config:
        cells = [
            Text(printable(short(value)) + (translate(" (default)") if is_default else "") if present else "-")
            for value, present, is_default in zip(each.values, each.present, each.is_default, strict=True)
        ]
        table.add_row(Text(printable(each.key)), *cells)
    return table


def short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 4]} ..."


def accuracy_table(found: Sequence["AccuracyComparison"], names: str) -> "Table":
    from rich.text import Text

    table = new_table("source", "", "", *names)
    for each in found:
        for title, points, own_steps in accuracy_rows(each):
            cells = accuracy_cells(points, each.measure, own_steps=own_steps)
            table.add_row(Text(printable(each.source)), UNITS[each.measure], translate(title), *cells)
    return table


def accuracy_rows(found: "AccuracyComparison") -> Iterator[tuple[str, Sequence["Point | None"], bool]]:
    """Title, points, and whether the points are at different steps."""
    if found.common_steps:
        yield f"step {found.common_steps[0]}", found.first_common, False
        if len(found.common_steps) > 1:
            yield f"step {found.common_steps[-1]}, the last of all", found.last_common, False
    yield "best", found.best, True
    yield "last", found.last, True


def accuracy_cells(points: Sequence["Point | None"], measure: str, *, own_steps: bool) -> list[str]:
    """Accuracies in percent, scores as they are."""
    is_accuracy, cells = measure == "accuracy", []
    for index, point in enumerate(points):
        text = "" if point is None else f"{100 * point.value:.1f}" if is_accuracy else short_number(point.value)
        first = points[0]
        if index and point is not None and first is not None:
            difference = point.value - first.value
            text += f" ({100 * difference:+.1f})" if is_accuracy else f" ({signed(difference)})"
        cells.append(f"{text} {translate(f'at {point.step}')}" if own_steps and point is not None else text)
    return cells


def metric_tables(metrics: Sequence["MetricComparison"], names: str, width: int) -> Iterator["Table"]:
    """One table for the metrics that the runs have at the same steps; a column a step, as many as fit."""
    from rloom.runs.compare import spread

    for steps, together in groupby(metrics, key=lambda metric: tuple(metric.steps)):
        shown = spread(len(steps), (width - FIXED_WIDTH) // STEP_WIDTH)
        table = new_table("", "", "", *(f"step {steps[index]}" for index in shown))
        for metric in together:
            rows = [metric.rows[index] for index in shown]
            for number_of_run, (name, curve) in enumerate(zip(names, curves(metric), strict=True)):
                values = [row[number_of_run] for row in rows]
                table.add_row("" if number_of_run else translate(metric.label), name, curve, *map(short_number, values))
            for number_of_run, name in enumerate(names[1:], start=1):
                differences = [row[number_of_run] - row[0] for row in rows]
                table.add_row("", f"{name}-{names[0]}", "", *map(signed, differences), style="dim")
        yield table


def curves(metric: "MetricComparison") -> list[str]:
    """Of the whole runs, on one scale."""
    from rloom.runs.compare import sparkline

    everything = [value for series in metric.series for value in series.values()]
    low, high = min(everything), max(everything)
    return [sparkline([series[step] for step in sorted(series)], low, high, CURVE_WIDTH) for series in metric.series]


def signed(value: float) -> str:
    text = short_number(value)
    return text if text.startswith("-") else f"+{text}"
