"""`rloom runs [DIR]`"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloom.cli.parsing import RUNS_FOLDERS, CommandParser, default_run_folders, epilog
from rloom.console import run_safely
from rloom.language import translate
from rloom.terminal import printable

if TYPE_CHECKING:
    from rich.table import Table

    from rloom.runs.run_folder import RunSummary

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

    def run() -> int:
        return show(given.folder or default_run_folders(), as_json=given.json)

    return run_safely(run)


def show(folders: Sequence[Path], *, as_json: bool) -> int:
    from rloom.errors import DataError
    from rloom.runs.run_folder import summaries

    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; name the folder of the runs: rloom runs DIR")
    found = summaries(folders)
    if as_json:
        print(printable(json.dumps([as_object(each) for each in found], indent=2, ensure_ascii=False)))
        return 0
    if not found:
        names = " and ".join(map(str, folders))
        print(printable(translate(f"There is no run in {names} or below; `rloom runs DIR` looks in another folder.")))
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # of a file or a pipe: one line a run
    console.print(table(found, now=time.time()))
    for each in found:
        if each.fault is not None:
            console.print(
                printable(translate(f"{each.name}: {each.fault}")), style="yellow", soft_wrap=True, markup=False
            )
    return 0


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        shown.add_column(translate(name), justify="right" if name in ("step", "reward") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # of a file or a pipe: one line a run
    console.print(shown)


def as_object(summary: "RunSummary") -> dict[str, Any]:
    return {**asdict(summary), "path": str(summary.path)}


def table(found: Sequence["RunSummary"], *, now: float) -> "Table":
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("run", "state", "step", "reward", "validation accuracy", "algorithm", "model", "written"):
        shown.add_column(translate(name), justify="right" if name in ("step", "reward") else "left", overflow="fold")
    for each in found:
        state = each.state
        status = translate(state.status) + (f": {translate(state.error)}" if state.error else "")
        shown.add_row(
            Text(printable(each.name)),
            Text(printable(status), style=STYLES.get(state.status, "")),
            Text(str(state.step) if state.total_steps is None else f"{state.step}/{state.total_steps}"),
            Text("" if each.reward is None else f"{each.reward:.3f}"),
            Text(printable("\n".join(accuracy_lines(each)))),
            Text(printable(each.algorithm or "")),
            Text(printable("/".join(Path(each.model).parts[-2:])) if each.model else ""),
            Text("" if state.updated is None else age(now - state.updated)),
        )
    return shown


def accuracy_lines(summary: "RunSummary") -> list[str]:
    """`gsm8k 31.2 → 58.7 % (best 60.1 at 40)`"""
    lines = []
    for source, found in summary.accuracy.items():
        text = f"{source.rpartition('/')[2]} {100 * found.first:.1f}"
        if found.last_step != found.first_step:
            text += f" → {100 * found.last:.1f}"
        text += " %"
        if found.best > max(found.first, found.last):
            text += translate(f" (best {100 * found.best:.1f} at {found.best_step})")
        lines.append(text)
    return lines


def age(seconds: float) -> str:
    for unit, length in (("d ago", 86400), ("h ago", 3600), ("min ago", 60)):
        if seconds >= length:
            return translate(f"{seconds / length:.0f} {unit}")
    return translate(f"{max(seconds, 0):.0f} s ago")
