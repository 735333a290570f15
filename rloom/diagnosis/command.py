"""`rloom doctor RUN ...`: reads run directories and prints what is wrong with them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rloom.diagnosis.report import Report, report_lines
from rloom.language import is_chinese
from rloom.observe.run_folder import RunFolder
from rloom.terminal import printable


def run(paths: Sequence[Path], *, as_json: bool) -> int:
    """0: nothing wrong, 1: findings."""
    reports = [Report.of(RunFolder(path), path) for path in paths]
    if as_json:
        found = [report.as_json() for report in reports]
        print(printable(json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False)))
    else:
        render(reports, Console(soft_wrap=True, highlight=False), is_chinese(os.environ))
    return int(any(report.findings for report in reports))


def render(reports: Sequence[Report], console: Console, chinese: bool) -> None:
    for number, report in enumerate(reports):
        if number:
            console.print()
        for text, style in report_lines(report, chinese):
            console.print(printable(text), style=style or None, markup=False)
