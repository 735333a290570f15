"""`rloom doctor RUN ...`: reads run directories and prints what is wrong with them."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rloom.doctor.run.report import Report, report_lines
from rloom.errors import DataError
from rloom.language import translate
from rloom.runs.run_folder import RunFolder
from rloom.terminal import printable


def run(paths: Sequence[Path], *, as_json: bool) -> int:
    """0: nothing wrong, 1: findings. A run that cannot be read is an error after the reports of the others."""
    reports, unreadable = [], []
    for path in paths:
        try:
            reports.append(Report.of(RunFolder(path), path))
        except DataError as error:
            unreadable.append(f"{path}: {error}")
    if as_json and reports:
        found = [report.as_json() for report in reports]
        print(printable(json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False)))
    elif not as_json:
        render(reports, Console(soft_wrap=True, highlight=False))
    if unreadable:
        raise DataError("; ".join(unreadable))
    return int(any(report.findings for report in reports))


def render(reports: Sequence[Report], console: Console) -> None:
    for number, report in enumerate(reports):
        if number:
            console.print()
        for text, style in report_lines(report):
            console.print(printable(translate(text)), style=style or None, markup=False)
