"""What the answers of some steps tell about prompts and rewards: equal prompts, noise, pay for length, sign errors."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rloom.errors import DataError
from rloom.rewards.routing import rule_for
from rloom.runs.compare import spread
from rloom.runs.records import finite

MOST_STEPS = 12  # that are read
MOST_ANSWERS = 512  # of a step
FEWEST_PAIRS = 30  # of answers that are compared
ALL_RIGHT = 0.98  # of the right answers
LONGEST_TEXT = 4000  # characters: a rule reads the end of an answer
SHOWN = 160  # characters of a text
TIME_LIMIT = re.compile(r"test (\d+): (?:CPU )?time limit of ([\d.]+) s")  # in the detail of a program


@dataclass(frozen=True)
class SampledAnswer:
    step: int
    group: int
    row: int  # of the data set
    prompt: str
    text: str
    score: float
    right: float | None  # 1, 0 or between, apart from the score; None: not known
    length: int
    truth: str | None
    prediction: str | None
    finished: bool
    calls: int | None = None  # of tools; None: an answer of one turn
    detail: str = ""


@dataclass(frozen=True)
class Samples:
    answers: Sequence[SampledAnswer] = ()
    by_rule: bool = False  # `right` is by the built-in rule of the data source

    @classmethod
    def of(cls, run: Path, most_steps: int = MOST_STEPS) -> "Samples":
        """Of the first and the last step of a run directory, and of some between. Empty: it has no dumps."""
        from rloom.runs.dumps.reader import Dumps  # pyarrow: half of the time that `rloom view` would need to start

        try:
            dumps = Dumps(run)
            steps = dumps.steps("train")
            chosen = [steps[index] for index in spread(len(steps), most_steps)]
            return cls.of_rows((step, row) for step in chosen for row in dumps.rows("train", step)[:MOST_ANSWERS])
        except (DataError, OSError):  # a dump that is damaged, or removed since
            return cls()

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> "Samples":
        """`rows`: (step, row of a dump)."""
        kept = [(step, row) for step, row in rows if finite(row["score"]) is not None]
        sources = {str(row["data_source"]) for _, row in kept}
        fast = bool(sources) and all(is_fast(source) for source in sources)
        own = any(row["accuracy"] is not None and row["accuracy"] != row["score"] for _, row in kept)
        # Not in the main thread: there a rule sets a timer whose signal ends the process, which here may be a trainer.
        with ThreadPoolExecutor(1) as thread:
            answers = list(thread.map(lambda one: answer_of(*one, by_rule=fast and not own, own=own), kept))
        return cls(answers, by_rule=fast and not own)

    @cached_property
    def groups(self) -> list[list[SampledAnswer]]:
        """The answers to one prompt of one step."""
        found: dict[tuple[int, int], list[SampledAnswer]] = defaultdict(list)
        for answer in self.answers:
            found[answer.step, answer.group].append(answer)
        return list(found.values())

    @cached_property
    def right_by_step(self) -> dict[int, float]:
        found: dict[int, list[float]] = defaultdict(list)
        for answer in self.answers:
            if answer.right is not None:
                found[answer.step].append(answer.right)
        return {step: fmean(values) for step, values in found.items()}

    @cached_property
    def same_texts(self) -> float | None:
        """Share of the groups whose answers all have the same text."""
        groups = [group for group in self.groups if len(group) > 1]
        if not groups:
            return None
        return fmean(len({answer.text for answer in group}) == 1 for group in groups)

    @cached_property
    def prompts(self) -> tuple[int, int, int]:
        """Rows of the data, different prompts among them, and prompts whose rows have different ground truths. An
        environment may give each row another problem behind the same prompt: its rows are counted as different."""
        if any(answer.calls is not None for answer in self.answers):
            rows = len({answer.row for answer in self.answers})
            return rows, rows, 0
        truths: dict[str, set[str | None]] = defaultdict(set)
        for answer in self.answers:
            truths[answer.prompt].add(answer.truth)
        return len({a.row for a in self.answers}), len(truths), sum(len(found) > 1 for found in truths.values())

    @cached_property
    def noise(self) -> tuple[float, int] | None:
        """Share of the score's variance among answers of the same text to the same prompt, and how many such answers
        there are. None: too few, or all scores are equal; or an environment knows more than the prompt says."""
        if any(answer.calls is not None for answer in self.answers):
            return None
        same: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for answer in self.answers:
            same[answer.prompt, answer.text, answer.truth].append(answer.score)
        repeated = [scores for scores in same.values() if len(scores) > 1]
        count, total = sum(map(len, repeated)), squares([answer.score for answer in self.answers])
        if count < FEWEST_PAIRS or total <= 0:
            return None
        inside = sum(squares(scores) for scores in repeated) / sum(len(scores) - 1 for scores in repeated)
        return inside / (total / len(self.answers)), count

    @cached_property
    def length_share(self) -> tuple[float, float] | None:
        return self.share_explained(lambda answer: len(answer.text))

    @cached_property
    def calls_share(self) -> tuple[float, float] | None:
        return self.share_explained(lambda answer: answer.calls or 0)

    def share_explained(self, measure: Callable[[SampledAnswer], int]) -> tuple[float, float] | None:
        """Share of the score's variance inside groups that a measure, such as the length, explains among equally right
        answers, and the correlation of both. None: too few answers differ."""
        centred, total = [], 0.0
        for group in self.groups:
            total += squares([answer.score for answer in group])
            for right in {answer.right for answer in group}:
                equal = [answer for answer in group if answer.right == right]
                score, length = fmean(a.score for a in equal), fmean(measure(a) for a in equal)
                centred += [(a.score - score, measure(a) - length) for a in equal if len(equal) > 1]
        varied = [(score, length) for score, length in centred if length]
        along, lengths = sum(s * n for s, n in centred), sum(n * n for _, n in centred)
        scores = sum(s * s for s, _ in centred)
        if len(varied) < FEWEST_PAIRS or total <= 0 or lengths <= 0 or scores <= 0:
            return None
        return along * along / lengths / total, along / math.sqrt(lengths * scores)

    @cached_property
    def score_correctness_correlation(self) -> float | None:
        """Correlation of score and correctness inside groups. None: it is not known, or too few differ."""
        pairs = []
        for group in self.groups:
            known = [(a.score, a.right) for a in group if a.right is not None]
            if len({right for _, right in known}) > 1:
                score, right = fmean(s for s, _ in known), fmean(r for _, r in known)
                pairs += [(s - score, r - right) for s, r in known]
        scores, rights = sum(s * s for s, _ in pairs), sum(r * r for _, r in pairs)
        if len(pairs) < FEWEST_PAIRS or scores <= 0 or rights <= 0:
            return None
        return sum(s * r for s, r in pairs) / math.sqrt(scores * rights)

    @cached_property
    def right_with_lowest_score(self) -> tuple[float, SampledAnswer] | None:
        """Share of the right answers that have the lowest score of all, and one of them.

        None: too few are right, or all right ones have it.
        """
        right = [answer for answer in self.answers if answer.right == 1]
        lowest = min((answer.score for answer in self.answers), default=0.0)
        missed = [answer for answer in right if answer.score == lowest]
        if len(right) < FEWEST_PAIRS or not missed or len(missed) > ALL_RIGHT * len(right):
            return None
        return len(missed) / len(right), missed[0]

    @cached_property
    def offset(self) -> tuple[float, float] | None:
        """The most common difference between answer and ground truth, if it is not 0, and its share of all answers."""
        differences = [found for a in self.answers if (found := difference(a)) is not None]
        if len(differences) < FEWEST_PAIRS:
            return None
        value, count = Counter(differences).most_common(1)[0]
        return (value, count / len(differences)) if value else None

    @cached_property
    def time_limits(self) -> list[tuple[float, int, int]]:
        """Of programs that ran into one: seconds, row of the data set, number of the test. The longest first."""
        found = ((TIME_LIMIT.search(answer.detail), answer.row) for answer in self.answers)
        limits = {(float(match[2]), row, int(match[1])) for match, row in found if match is not None}
        return sorted(limits, key=lambda one: (-one[0], *one[1:]))

    def example(self) -> str | None:
        """One of the first answers, as text."""
        first = next((a for a in self.answers if a.text.strip()), None)
        if first is None:
            return None
        return f"an answer of step {first.step}: {brief(first.text)}; expected: {brief(str(first.truth))}"


def answer_of(step: int, row: Mapping[str, Any], *, by_rule: bool, own: bool) -> SampledAnswer:
    text, truth = str(row["output"] or ""), row["ground_truth"]
    right = right_by_rule(str(row["data_source"]), text, truth) if by_rule else row["accuracy"] if own else None
    return SampledAnswer(
        step, row["group"], row["index"], str(row["prompt"]), text, float(row["score"]), finite(right),
        int(row["length"] or 0), None if truth is None else str(truth), row.get("prediction"), bool(row["finished"]),
        row.get("calls"), row.get("detail") or "",
    )  # fmt: skip


def is_fast(data_source: str) -> bool:
    """Whether its rule needs no library and runs no code of an answer."""
    rule = rule_for(data_source)
    return rule is not None and rule.is_fast


def right_by_rule(data_source: str, text: str, truth: Any) -> float | None:
    rule = rule_for(data_source)
    assert rule is not None  # is_fast
    try:
        return finite(rule.compute_score(data_source, text[-LONGEST_TEXT:], truth).get("acc"))
    except Exception:  # a ground truth that the rule cannot read
        return None


def difference(answer: SampledAnswer) -> float | None:
    try:
        return float(answer.prediction or "") - float(answer.truth or "")
    except ValueError:
        return None


def squares(values: Sequence[float]) -> float:
    """Sum of the squared distances from the mean."""
    mean = fmean(values) if values else 0.0
    return sum((value - mean) ** 2 for value in values)


def brief(text: str) -> str:
    line = " ⏎ ".join(part for part in text.strip().splitlines() if part.strip())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
