"""JSON of validations: what changed from one to another, of one run or of two."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloom.view.http_errors import NotFound
from rloom.view.prompts import prompts_of
from rloom.view.query import Json, Query, paged
from rloom.view.run_cache import RunCache, RunHandle
from rloom.view.runs import numbers_of

if TYPE_CHECKING:
    from rloom.runs.dumps.reader import Dumps, PromptSummary

# An accuracy above this counts as right, as in the metrics of a validation. `rloom.runs.metrics` imports numpy.
RIGHT_ABOVE = 0.5
OUTCOMES = {(False, True): "fixed", (True, False): "broken", (True, True): "right", (False, False): "wrong"}
ALL = "all"


@dataclass(frozen=True)
class ValidationChange:
    """A prompt with accuracies in both validations."""

    outcome: str
    before: "PromptSummary"
    after: "PromptSummary"


@dataclass(frozen=True)
class ValidationAnswers:
    """The answers of one validation."""

    first: Mapping[int, tuple[str, float | None]]  # group -> text and score
    every: Mapping[int, Sequence[str]]  # group -> texts; empty if there is no text to search for


def validation(run: RunHandle, query: Query) -> Json:
    """Between two steps of a run, by default its first and its last."""
    return between(run, run, query)


def compared_validations(runs: RunCache, query: Query) -> Json:
    """Between a step of one run and a step of another, by default the last of each."""
    numbers = numbers_of(query.text("runs"), most=2)
    return between(runs[numbers[0]], runs[numbers[1]], query)


def between(one: RunHandle, other: RunHandle, query: Query) -> Json:
    outcome = query.choice("outcome", (ALL, *OUTCOMES.values()))
    text = query.text("text").casefold()
    with both_dumps(one, other) as (first, second):
        before = step_of(first, query.integer("before"), 0 if one is other else -1)
        after = step_of(second, query.integer("after"), -1)
        earlier, later = prompts_of(first, "validation", before), prompts_of(second, "validation", after)
        answers_before = answers_of(first, before, with_all=bool(text))
        answers_after = answers_of(second, after, with_all=bool(text))
    found = changes(earlier, later)
    kept = [
        change
        for change in found
        if outcome in (ALL, change.outcome)
        and query.text("source") in ("", change.after.data_source)
        and (not text or contains(change, answers_before, answers_after, text))
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
        "unscored": len({key(p) for p in earlier} & {key(p) for p in later}) - len(found),
        **numbers,
        "rows": [change_json(change, answers_before, answers_after) for change in shown],
    }


@contextmanager
def both_dumps(one: RunHandle, other: RunHandle) -> "Iterator[tuple[Dumps, Dumps]]":
    """Always in the same order: two requests that wait for each other's run would wait for ever."""
    with ExitStack() as locks:
        opened = {run: locks.enter_context(run.dumps()) for run in sorted({one, other}, key=lambda run: run.number)}
        yield opened[one], opened[other]


def step_of(dumps: "Dumps", given: int | None, place: int) -> int:
    """`place`: of the validation that is meant if none is given."""
    steps = dumps.steps("validation")
    if not steps:
        raise NotFound("the run has no dump of a validation yet")
    return steps[place] if given is None else given


def changes(earlier: "Sequence[PromptSummary]", later: "Sequence[PromptSummary]") -> list[ValidationChange]:
    """In the order of the data set. A prompt whose scores all failed in one of the validations is in none of them."""
    before = {key(prompt): prompt for prompt in earlier if prompt.accuracy is not None}
    after = {key(prompt): prompt for prompt in later if prompt.accuracy is not None}
    return [
        ValidationChange(OUTCOMES[is_right(before[same]), is_right(after[same])], before[same], after[same])
        for same in sorted(before.keys() & after.keys(), key=lambda place: place[0])
    ]


def key(prompt: "PromptSummary") -> tuple[int, str, str | None]:
    """What is equal for the same row of the data in two runs, whose models may have different chat templates."""
    return prompt.index, prompt.data_source, prompt.ground_truth


def is_right(prompt: "PromptSummary") -> bool:
    return prompt.accuracy is not None and prompt.accuracy > RIGHT_ABOVE


def counted(changes: Sequence[ValidationChange]) -> dict[str, int]:
    counts = Counter(change.outcome for change in changes)
    return {outcome: counts[outcome] for outcome in OUTCOMES.values()}


def answers_of(dumps: "Dumps", step: int, *, with_all: bool) -> ValidationAnswers:
    every = dumps.texts("validation", step) if with_all else {}
    return ValidationAnswers(dumps.first_answers("validation", step), every)


def contains(change: ValidationChange, before: ValidationAnswers, after: ValidationAnswers, text: str) -> bool:
    searched = [change.after.text, *before.every[change.before.group], *after.every[change.after.group]]
    return any(text in one.casefold() for one in searched)


def change_json(change: ValidationChange, before: ValidationAnswers, after: ValidationAnswers) -> Json:
    return {
        "index": change.after.index,
        "text": change.after.text,
        "ground_truth": change.after.ground_truth,
        "data_source": change.after.data_source,
        "outcome": change.outcome,
        "before": side_json(change.before, before),
        "after": side_json(change.after, after),
    }


def side_json(prompt: "PromptSummary", answers: ValidationAnswers) -> Json:
    text, score = answers.first[prompt.group]
    return {"group": prompt.group, "mean": prompt.mean, "answer": text, "score": score, "accuracy": prompt.accuracy}
