"""`rloom runs [DIR]`"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloom.cli.parsing import RUNS_FOLDERS, CommandParser, default_run_folders, epilog
from rloom.console import run_safely
from rloom.language import translate
from rloom.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rloom.doctor.run.report import Report
    from rloom.runs.run_folder import RunSummary

WIDTH_OF_A_FILE = 200  # one line a run
DIAGNOSIS_S = 2.0  # of all runs together
STYLES = {"running": "green", "failed": "red", "unreadable": "red", "killed": "red", "interrupted": "yellow"}


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom runs",
        description="List the runs below a folder, the last written first.",
        **epilog("rloom runs checkpoints/my_project"),
    )
    parser.add_argument("folder", nargs="*", type=Path, metavar="DIR", help=f"default: {' and '.join(RUNS_FOLDERS)}")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a run")
    given = parser.parse_args(arguments)

    return run_safely(lambda: show(given.folder or default_run_folders(), as_json=given.json))


def show(folders: Sequence[Path], *, as_json: bool) -> int:
    from rloom.errors import DataError
    from rloom.runs.run_folder import summaries

    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; name the folder of the runs: rloom runs DIR")
    found = summaries(folders)
    reports = reports_of(found)
    if as_json:
        objects = [as_object(each, reports.get(each.path)) for each in found]
        print(printable(json.dumps(objects, indent=2, ensure_ascii=False)))
        return 0
    if not found:
        names = " and ".join(map(str, folders))
        print(printable(translate(f"There is no run in {names} or below; `rloom runs DIR` looks in another folder.")))
        return 0
    console = new_console(WIDTH_OF_A_FILE)
    console.print(table(found, reports, now=time.time()))
    if unread := len(found) - len(reports):
        runs = "1 run" if unread == 1 else f"{unread} runs"
        console.print(printable(translate(f"Not diagnosed, to save time: {runs} (`rloom doctor RUN`)")), style="dim")
    for each in found:
        if each.fault is not None:
            console.print(
                printable(translate(f"{each.name}: {each.fault}")), style="yellow", soft_wrap=True, markup=False
            )
    return 0


def reports_of(found: Sequence["RunSummary"]) -> "dict[Path, Report | None]":
    """The findings of the runs, the last written first, as many as are read within `DIAGNOSIS_S`. None: unreadable."""
    from rloom.doctor.run.report import Report
    from rloom.runs.run_folder import RunFolder

    reports: dict[Path, Report | None] = {}
    end = time.monotonic() + DIAGNOSIS_S
    for summary in found:
        if time.monotonic() > end:
            break
        try:
            reports[summary.path] = Report.of(RunFolder(summary.path))
        except Exception:  # any fault of the run's files; the state of the run says it
            reports[summary.path] = None
    return reports


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.text import Text

    shown = new_table(*names)
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    new_console(WIDTH_OF_A_FILE).print(shown)


def new_console(width_of_a_file: int) -> "Console":
    """`width_of_a_file`: columns of what is no terminal, such as a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width_of_a_file
    return console


def new_table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(translate(name), justify="right" if name in ("step", "reward") else "left", overflow="fold")
    return table


def as_object(summary: "RunSummary", report: "Report | None") -> dict[str, Any]:
    worst = None if report is None else report.worst
    findings = None if report is None else {"count": len(report.findings), "worst": worst and worst.kind}
    return {**asdict(summary), "path": str(summary.path), "findings": findings}


def finding_text(report: "Report | None") -> tuple[str, str]:
    """Text and style: `2 (ERROR)`, in the colour of the worst; empty where the run was not diagnosed."""
    worst = None if report is None else report.worst
    if report is None or worst is None:
        return "" if report is None else "0", "dim"
    from rloom.doctor.run.report import SEVERITIES

    word, style = SEVERITIES[worst.severity]
    return f"{len(report.findings)} ({translate(word)})", style


def table(found: Sequence["RunSummary"], reports: "Mapping[Path, Report | None]", *, now: float) -> "Table":
    from rich.text import Text

    shown = new_table("run", "state", "findings", "step", "reward", "validation", "algorithm", "model", "written")
    for each in found:
        status, steps, reward = progress(each)
        shown.add_row(
            Text(printable(each.name)),
            Text(printable(status), style=STYLES.get(each.state.status, "")),
            Text(*finding_text(reports.get(each.path))),
            Text(steps),
            Text(reward),
            Text(printable("\n".join(accuracy_lines(each)))),
            Text(printable(each.algorithm or "")),
            Text(printable("/".join(Path(each.model).parts[-2:])) if each.model else ""),
            Text("" if each.state.updated is None else age(now - each.state.updated)),
        )
    return shown


def progress(summary: "RunSummary") -> tuple[str, str, str]:
    """State, step and reward of a run, as text."""
    state = summary.state
    return (
        translate(state.status) + (f": {translate(state.error)}" if state.error else ""),
        str(state.step) if state.total_steps is None else f"{state.step}/{state.total_steps}",
        "" if summary.reward is None else f"{summary.reward:.3f}",
    )


def accuracy_lines(summary: "RunSummary") -> list[str]:
    """`gsm8k acc 31.2 → 58.7 % (best 60.1 % at 40)`, `hh score -0.42 → 0.1`"""
    from rloom.runs.measures import LABELS, shown

    lines = []
    for source, found in summary.accuracy.items():
        first, last, best = (shown(value, found.measure) for value in (found.first, found.last, found.best))
        text = f"{source.rpartition('/')[2]} {LABELS[found.measure]} "
        text += f"{first.removesuffix(' %')} → {last}" if found.last_step != found.first_step else first
        if found.best > max(found.first, found.last):
            text += translate(f" (best {best} at {found.best_step})")
        lines.append(text)
    return lines


def age(seconds: float) -> str:
    for unit, length in (("d ago", 86400), ("h ago", 3600), ("min ago", 60)):
        if seconds >= length:
            return translate(f"{seconds / length:.0f} {unit}")
    return translate(f"{max(seconds, 0):.0f} s ago")
