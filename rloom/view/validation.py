"""The prompts of two validations: which were fixed in between, which were broken."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun
from rloom.view.paging import paged
from rloom.view.prompts import prompts_of
from rloom.view.query import Query

if TYPE_CHECKING:
    from rloom.runs.dumps.reader import Dumps, PromptSummary

# An accuracy above this counts as right, as in the metrics of a validation. `rloom.runs.accuracy` imports numpy.
RIGHT_ABOVE = 0.5
OUTCOMES = {(False, True): "fixed", (True, False): "broken", (True, True): "right", (False, False): "wrong"}
ALL = "all"


@dataclass(frozen=True)
class Change:
    """A prompt with accuracies in both validations."""

    outcome: str
    before: "PromptSummary"
    after: "PromptSummary"


@dataclass(frozen=True)
class Answers:
    """Of one validation."""

    first: Mapping[int, tuple[str, float | None]]  # group -> text and score
    every: Mapping[int, Sequence[str]]  # group -> texts; empty if there is no text to search for


def validation(run: OpenedRun, query: Query) -> Json:
    outcome = query.choice("outcome", (ALL, *OUTCOMES.values()))
    text = query.text("text").casefold()
    with run.dumps() as dumps:
        steps = dumps.steps("validation")
        if not steps:
            raise NotFound("the run has no dump of a validation yet")
        before, after = query.integer("before"), query.integer("after")
        before, after = steps[0] if before is None else before, steps[-1] if after is None else after
        earlier, later = prompts_of(dumps, "validation", before), prompts_of(dumps, "validation", after)
        answers = {step: answers_of(dumps, step, with_all=bool(text)) for step in {before, after}}
    found = changes(earlier, later)
    kept = [
        change
        for change in found
        if outcome in (ALL, change.outcome)
        and query.text("source") in ("", change.after.data_source)
        and (not text or contains(change, answers[before], answers[after], text))
    ]
    numbers, shown = paged(kept, query)
    return {
        "before": before,
        "after": after,
        "counts": counted(found),
        "by_source": {
            source: counted([change for change in found if change.after.data_source == source])
            for source in sorted({change.after.data_source for change in found})
        },
        "unscored": len({p.index for p in earlier} & {p.index for p in later}) - len(found),
        **numbers,
        "rows": [change_json(change, answers[before], answers[after]) for change in shown],
    }


def changes(earlier: "Sequence[PromptSummary]", later: "Sequence[PromptSummary]") -> list[Change]:
    """In the order of the data set. A prompt whose scores all failed in one of the validations is in none of them."""
    before = {prompt.index: prompt for prompt in earlier if prompt.accuracy is not None}
    after = {prompt.index: prompt for prompt in later if prompt.accuracy is not None}
    return [
        Change(OUTCOMES[is_right(before[index]), is_right(after[index])], before[index], after[index])
        for index in sorted(before.keys() & after.keys())
    ]


def is_right(prompt: "PromptSummary") -> bool:
    return prompt.accuracy is not None and prompt.accuracy > RIGHT_ABOVE


def counted(changes: Sequence[Change]) -> dict[str, int]:
    counts = Counter(change.outcome for change in changes)
    return {outcome: counts[outcome] for outcome in OUTCOMES.values()}


def answers_of(dumps: "Dumps", step: int, *, with_all: bool) -> Answers:
    every = dumps.texts("validation", step) if with_all else {}
    return Answers(dumps.first_answers("validation", step), every)


def contains(change: Change, before: Answers, after: Answers, text: str) -> bool:
    searched = [change.after.text, *before.every[change.before.group], *after.every[change.after.group]]
    return any(text in one.casefold() for one in searched)


def change_json(change: Change, before: Answers, after: Answers) -> Json:
    return {
        "index": change.after.index,
        "text": change.after.text,
        "ground_truth": change.after.ground_truth,
        "data_source": change.after.data_source,
        "outcome": change.outcome,
        "before": side_json(change.before, before),
        "after": side_json(change.after, after),
    }


def side_json(prompt: "PromptSummary", answers: Answers) -> Json:
    text, score = answers.first[prompt.group]
    return {"group": prompt.group, "mean": prompt.mean, "answer": text, "score": score, "accuracy": prompt.accuracy}
