"""What a check reports: the fault, its evidence, its causes and what to try."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from rloom.doctor.run.history import History
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


Advice = Change | str  # a key to change, or something else to do
Support = str | bool  # evidence for a cause; True: it is possible; False: the run's own numbers exclude it


@dataclass(frozen=True)
class Cause:
    text: str
    when: Callable[[History], Support] = lambda history: True
    advice: Callable[[History], Sequence[Advice]] = lambda history: ()

    def changes(self, history: "History", keys: Collection[str]) -> bool:
        """Whether its first advice is another value of one of these keys."""
        first = next(iter(self.advice(history)), None)
        return isinstance(first, Change) and first.key in keys


@dataclass(frozen=True)
class Finding:
    kind: str  # "reward_zero"; stable
    title: str
    severity: Severity
    steps: tuple[int, int]  # the first and the last step of the evidence
    evidence: tuple[str, ...]
    causes: tuple[str, ...]  # those with evidence first
    advice: tuple[Advice, ...]  # for the first cause first
    certain: bool  # enough steps and a clear margin: a running run warns of it
    begin_again: bool = False  # the policy or the optimizer state is damaged, or nothing was learned
    keys: tuple[str, ...] = ()  # with unusual values that explain it

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(advice for advice in self.advice if isinstance(advice, Change))

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
            "actions": [both(advice) for advice in self.advice if isinstance(advice, str)],
            "begin_again": self.begin_again,
            "certain": self.certain,
        }


@dataclass(frozen=True)
class Fault:
    """What every finding of one kind has in common."""

    kind: str
    severity: Severity
    title: str
    causes: tuple[Cause, ...]
    metrics: tuple[str, ...]  # the check can be made if any of them was measured; none: always

    def found(
        self,
        history: History,
        steps: tuple[int, int],
        evidence: Sequence[str],
        *,
        certain: bool,
        severity: Severity | None = None,
        begin_again: bool = False,
        more: Sequence[Advice] = (),
    ) -> Finding:
        """Causes: unusual values of keys that explain this kind, then those with evidence, then those that are
        possible. Beside an unusual value the possible ones are left out. `more`: advice for any cause."""
        unusual = [value for value in history.unusual if self.kind in value.explains]
        results = [(cause, cause.when(history)) for cause in self.causes]
        supported = [(cause, text) for cause, text in results if isinstance(text, str)]
        possible = [] if unusual else [cause for cause, text in results if text is True]
        keys = {value.key for value in unusual}
        ranked = [
            cause for cause in (*(cause for cause, _ in supported), *possible) if not cause.changes(history, keys)
        ]
        advice: list[Advice] = [Change(value.key, value.usual, f"it is {value.value}") for value in unusual]
        advice += [one for cause in ranked for one in cause.advice(history)]
        advice += more
        return Finding(
            self.kind,
            self.title,
            severity or self.severity,
            steps,
            (*evidence, *(text for _, text in supported if text not in evidence)),
            (*(value.sentence for value in unusual), *(cause.text for cause in ranked)),
            tuple(without_repeated(advice)),
            certain,
            begin_again,
            tuple(value.key for value in unusual),
        )


def without_repeated(advice: Iterable[Advice]) -> list[Advice]:
    """The first for each key."""
    found: dict[str, Advice] = {}
    for one in advice:
        found.setdefault(one if isinstance(one, str) else one.key, one)
    return list(found.values())
