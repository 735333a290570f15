"""The report of `rloom data check` as text."""

from collections import defaultdict
from collections.abc import Sequence

from rloom.data.check import Finding, Report, counted

SHOWN_OF_A_COLUMN = 5
SHORTEST_BUCKET = 16  # tokens
BAR_WIDTH = 40


def render_report(report: Report) -> str:
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


def verdict(report: Report) -> str:
    warned = f", warnings: {len(report.warnings)}" if report.warnings else ""
    return f"ok: {counted(report.rows)}{warned}" if report.ok else f"not ok: errors: {len(report.errors)}{warned}"


def _render_findings(title: str, findings: Sequence[Finding]) -> list[str]:
    columns: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        columns[finding.column].append(finding)
    lines = [f"{title}: {len(findings)}"] if findings else []
    for column, found in columns.items():
        lines.append(f"  {column}: {len(found)}")
        lines += [f"    {_place(finding)}{finding.reason}" for finding in found[:SHOWN_OF_A_COLUMN]]
        if len(found) > SHOWN_OF_A_COLUMN:
            lines.append(f"    and {len(found) - SHOWN_OF_A_COLUMN} more")
    return lines


def _place(finding: Finding) -> str:
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
