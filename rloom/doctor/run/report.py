"""`rloom doctor RUN ...`: reads run directories and prints what is wrong with them, as text or as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.doctor.run.checks import CHECKS, diagnose
from rloom.doctor.run.finding import Finding, Severity
from rloom.doctor.run.history import FEWEST_OF_A_TREND, FEWEST_STEPS, History
from rloom.errors import DataError
from rloom.language import translate
from rloom.runs.run_folder import RunFolder
from rloom.terminal import printable

Line = tuple[str, str]  # its text and its style, as rich names it

SEVERITIES = {
    Severity.ERROR: ("ERROR", "bold red"),
    Severity.WARNING: ("WARNING", "bold yellow"),
    Severity.NOTE: ("NOTE", "bold cyan"),
}


@dataclass(frozen=True)
class Report:
    run: Path  # as it was given
    steps: int  # of training
    state: str
    findings: Sequence[Finding]
    checked: Sequence[str]  # kinds
    unchecked: Sequence[str]  # kinds whose metrics the run does not have, though its answers could have the fault
    faults: Sequence[str] = ()  # of the run's files

    @classmethod
    def of(cls, folder: RunFolder, given: Path | None = None) -> "Report":
        history = History.of(folder)
        applies = {kind: check.applies(history.columns) for kind, check in CHECKS.items()}
        has_turns = any(name.startswith("episode/") for name in history.columns)
        return cls(
            given or folder.path,
            len(history.steps),
            folder.state.status.value,
            diagnose(history),
            [kind for kind, does in applies.items() if does],
            [kind for kind, does in applies.items() if not does and (has_turns or not CHECKS[kind].is_of_turns)],
            folder.faults,
        )

    @property
    def worst(self) -> Finding | None:
        """The first of the most severe findings."""
        order = list(SEVERITIES)
        return min(self.findings, key=lambda finding: order.index(finding.severity), default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "state": self.state,
            "steps": self.steps,
            "findings": [finding.as_json() for finding in self.findings],
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "faults": list(self.faults),
        }


def report_lines(report: Report) -> Iterator[Line]:
    steps, count = report.steps, len(report.findings)
    yield f"{report.run}", "bold"
    found = "1 finding" if count == 1 else f"{count} findings"
    yield f"{steps} steps, {translate(report.state)}; {len(report.checked)} kinds of faults checked, {found}", ""
    for fault in report.faults:
        yield fault, "yellow"
    for number, finding in enumerate(report.findings, start=1):
        yield "", ""
        yield from finding_lines(number, finding)
    if not report.findings:
        yield from nothing_wrong(report)
    if steps < FEWEST_OF_A_TREND:
        yield (
            f"Too few steps for all checks: {steps}; levels need {FEWEST_STEPS} steps, trends {FEWEST_OF_A_TREND}.",
            "dim",
        )


def nothing_wrong(report: Report) -> Iterator[Line]:
    if report.steps >= FEWEST_STEPS:
        yield "Nothing wrong found.", "bold green"
    yield f"Checked: {', '.join(report.checked)}", "dim"
    if report.unchecked:
        yield f"Not checked, because the run does not measure it: {', '.join(report.unchecked)}", "dim"


def finding_lines(number: int, finding: Finding) -> Iterator[Line]:
    word, style = SEVERITIES[finding.severity]
    first, last = finding.steps
    steps = f"step {first}" if first == last else f"steps {first}–{last}"
    title = f"{translate(word)} {translate(finding.title)}"
    yield f"{number}. {title}  [{finding.kind}, {translate(steps)}]", style
    yield "   Evidence", "bold"
    for text in finding.evidence:
        yield f"     {text}", ""
    if finding.causes:
        yield "   Likely causes", "bold"
        for place, text in enumerate(finding.causes, start=1):
            yield f"     {place}. {text}", ""
    if finding.advice:
        yield (
            "   What this run has learned cannot be used: begin again with" if finding.begin_again else "   Try",
            "bold",
        )
        for advice in finding.advice:
            text = advice if isinstance(advice, str) else f"{advice.assignment:<56} {translate(advice.why)}"
            yield f"     {text}", ""


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
        render(reports)
    if unreadable:
        raise DataError("; ".join(unreadable))
    return int(any(report.findings for report in reports))


def render(reports: Sequence[Report]) -> None:
    from rich.console import Console  # JSON and the viewer need none

    console = Console(soft_wrap=True, highlight=False)
    for number, report in enumerate(reports):
        if number:
            console.print()
        for text, style in report_lines(report):
            console.print(printable(translate(text)), style=style or None, markup=False)
