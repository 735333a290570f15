"""Findings as text for a terminal and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.doctor.run.checks import CHECKS, diagnose
from rloom.doctor.run.finding import Finding, Severity, Text
from rloom.doctor.run.history import FEWEST_STEPS, History
from rloom.doctor.run.series import FEWEST_OF_A_TREND
from rloom.runs.run_folder import RunFolder

Line = tuple[str, str]  # its text and its style, as rich names it

SEVERITIES = {
    Severity.ERROR: (Text("ERROR", "错误"), "bold red"),
    Severity.WARNING: (Text("WARNING", "警告"), "bold yellow"),
    Severity.NOTE: (Text("NOTE", "注意"), "bold cyan"),
}
EVIDENCE, CAUSES, CHANGES = Text("Evidence", "依据"), Text("Likely causes", "可能原因"), Text("Try", "可尝试")


@dataclass(frozen=True)
class Report:
    run: Path  # as it was given
    steps: int  # of training
    state: str
    findings: Sequence[Finding]
    checked: Sequence[str]  # kinds
    unchecked: Sequence[str]  # kinds whose metrics the run does not have
    faults: Sequence[str] = ()  # of the run's files

    @classmethod
    def of(cls, folder: RunFolder, given: Path | None = None) -> "Report":
        history = History.of(folder)
        applies = {kind: check.applies(history.columns) for kind, check in CHECKS.items()}
        return cls(
            given or folder.path,
            len(history.steps),
            folder.state.status.value,
            diagnose(history),
            [kind for kind, does in applies.items() if does],
            [kind for kind, does in applies.items() if not does],
            folder.faults,
        )

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


def report_lines(report: Report, chinese: bool) -> Iterator[Line]:
    steps, count = report.steps, len(report.findings)
    yield f"{report.run}", "bold"
    if chinese:
        yield f"{steps} 步，状态 {report.state}；检查了 {len(report.checked)} 类问题，发现 {count} 个", ""
    else:
        found = f"{count} finding{'s' if count != 1 else ''}"
        yield f"{steps} steps, {report.state}; {len(report.checked)} kinds of faults checked, {found}", ""
    for fault in report.faults:
        yield fault, "yellow"
    for number, finding in enumerate(report.findings, start=1):
        yield "", ""
        yield from finding_lines(number, finding, chinese)
    if not report.findings:
        yield from nothing_wrong(report, chinese)
    if steps < FEWEST_OF_A_TREND:
        yield few_steps(steps, chinese), "dim"


def nothing_wrong(report: Report, chinese: bool) -> Iterator[Line]:
    if report.steps >= FEWEST_STEPS:
        yield ("没有发现问题。" if chinese else "Nothing wrong found."), "bold green"
    yield f"{'已检查' if chinese else 'Checked'}: {', '.join(report.checked)}", "dim"
    if report.unchecked:
        words = "未检查（没有相应指标）" if chinese else "Not checked, because the run does not measure it"
        yield f"{words}: {', '.join(report.unchecked)}", "dim"


def few_steps(steps: int, chinese: bool) -> str:
    levels, trends = FEWEST_STEPS, FEWEST_OF_A_TREND
    if chinese:
        return f"步数太少：只有 {steps} 步；水平类检查需要 {levels} 步，趋势类检查需要 {trends} 步。"
    return f"Too few steps for all checks: {steps}; levels need {levels} steps, trends {trends}."


def finding_lines(number: int, finding: Finding, chinese: bool) -> Iterator[Line]:
    word, style = SEVERITIES[finding.severity]
    first, last = finding.steps
    where = f"{first}" if first == last else f"{first}–{last}"
    steps = f"第 {where} 步" if chinese else f"step{'s' if first != last else ''} {where}"
    yield f"{number}. {word.get(chinese)} {finding.title.get(chinese)}  [{finding.kind}, {steps}]", style
    yield f"   {EVIDENCE.get(chinese)}", "bold"
    for text in finding.evidence:
        yield f"     {text.get(chinese)}", ""
    if finding.causes:
        yield f"   {CAUSES.get(chinese)}", "bold"
        for place, text in enumerate(finding.causes, start=1):
            yield f"     {place}. {text.get(chinese)}", ""
    if finding.changes:
        yield f"   {CHANGES.get(chinese)}", "bold"
        for change in finding.changes:
            yield f"     {change.assignment:<56} {change.why.get(chinese)}", ""
