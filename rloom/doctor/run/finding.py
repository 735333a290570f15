"""What a check reports: the fault, its evidence, its causes and the keys to change."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from rloom.language import to_chinese


class Severity(StrEnum):
    ERROR = "error"  # the run cannot learn, or has ended
    WARNING = "warning"  # it learns slowly, unstably, or something else than it should
    NOTE = "note"  # it costs time or memory


@dataclass(frozen=True)
class Change:
    key: str
    value: Any  # to try
    why: str
    towards: Literal["lower", "higher"] | None = None  # a number helps only on this side of what it is; None: any other

    def differs_from(self, current: Any) -> bool:
        """Whether it is a change at all. `current`: of the run; None: not known, or not set."""
        if self.towards is None or not isinstance(current, int | float):
            return bool(current != self.value)
        return bool(current > self.value if self.towards == "lower" else current < self.value)

    @property
    def assignment(self) -> str:
        """`algorithm.lam=1.0`, as on the command line."""
        return f"{self.key}={'null' if self.value is None else self.value}"


@dataclass(frozen=True)
class Finding:
    kind: str  # "reward_zero"; stable
    title: str
    severity: Severity
    steps: tuple[int, int]  # the first and the last step of the evidence
    evidence: tuple[str, ...]
    causes: tuple[str, ...]  # the most likely first
    changes: tuple[Change, ...]
    certain: bool  # enough steps and a clear margin: a running run warns of it

    def as_json(self) -> dict[str, Any]:
        def both(text: str) -> dict[str, str]:
            return {"en": text, "zh": to_chinese(text)}

        return {
            "kind": self.kind,
            "title": both(self.title),
            "severity": self.severity.value,
            "steps": list(self.steps),
            "evidence": [both(text) for text in self.evidence],
            "causes": [both(text) for text in self.causes],
            "changes": [{"key": c.key, "value": c.value, "why": both(c.why)} for c in self.changes],
            "certain": self.certain,
        }


@dataclass(frozen=True)
class Fault:
    """What every finding of one kind has in common."""

    kind: str
    severity: Severity
    title: str
    causes: tuple[str, ...]
    metrics: tuple[str, ...]  # the check can be made if any of them was measured; none: always

    def found(
        self,
        steps: tuple[int, int],
        evidence: Sequence[str],
        changes: Sequence[Change],
        *,
        certain: bool,
        causes: Sequence[str] | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        return Finding(
            self.kind,
            self.title,
            severity or self.severity,
            steps,
            tuple(evidence),
            self.causes if causes is None else tuple(causes),
            tuple(changes),
            certain,
        )
