"""JSON of all answers of a run: a search through every step, and the distributions of score and length.

Both read the dumps step by step for at most `BUDGET_S` a request, and say where the next request goes on: a run of
thousands of steps neither blocks the other pages nor holds its answers in memory.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rloom.errors import DataError
from rloom.view.http_errors import BadRequest
from rloom.view.query import Json, Query
from rloom.view.run_cache import RunHandle

if TYPE_CHECKING:
    from rloom.runs.dumps.index import Kind
    from rloom.runs.dumps.reader import Dumps, FoundAnswer

BUDGET_S = 0.4
MOST_FOUND, MOST_OF_A_STEP = 50, 10  # answers of one reply; the page of a step has the others
LONGEST_TEXT = 200  # characters to search for
BEFORE, AFTER = 80, 160  # characters of an excerpt around what was found
MOST_STEPS = 200  # of a chart of distributions
QUANTILES = 21  # the lowest value, every 5 %, the highest


def search(run: RunHandle, query: Query) -> Json:
    """Answers that contain a text, in any case, the last step first. `before`: go on with the steps below it."""
    kind, text, before = kind_of(query), query.text("text").strip(), query.integer("before")
    if not 0 < len(text) <= LONGEST_TEXT:
        raise BadRequest(f"text: use 1 to {LONGEST_TEXT} characters")
    found: list[Json] = []
    read = skipped = shown = 0
    with run.dumps() as dumps:
        steps = [step for step in reversed(dumps.steps(kind)) if before is None or step < before]
        for step in within_budget(steps):
            read += 1
            try:
                count, answers = dumps.answers_with(kind, step, text, MOST_OF_A_STEP)
            except DataError:  # damaged, or removed to save space since the index was read
                skipped += 1
                continue
            if count:
                found.append({"step": step, "count": count, "answers": [found_json(one, text) for one in answers]})
                shown += len(answers)
            if shown >= MOST_FOUND:
                break
    left = len(steps) - read
    return {
        "kind": kind,
        "text": text,
        "steps": found,
        "searched": read,
        "skipped": skipped,
        "left": left,
        "before": steps[read - 1] if left else None,
    }


def kind_of(query: Query) -> "Kind":
    return "train" if query.choice("kind", ("train", "validation")) == "train" else "validation"


def within_budget(steps: list[int]) -> Iterator[int]:
    """At least one, so that every request makes progress."""
    end = time.monotonic() + BUDGET_S
    for place, step in enumerate(steps):
        if place and time.monotonic() > end:
            return
        yield step


def found_json(one: "FoundAnswer", text: str) -> Json:
    at = max(0, one.text.casefold().find(text.casefold()))
    start = max(0, at - BEFORE)
    return {
        **{name: value for name, value in vars(one).items() if name != "text"},
        "excerpt": one.text[start : at + len(text) + AFTER],
        "cut": [start > 0, at + len(text) + AFTER < len(one.text)],
    }


def distributions(run: RunHandle, query: Query) -> Json:
    """Quantiles of the scores and lengths of a step, from those two columns alone. `after`: of later steps.

    Of a long run, every second, third, ... step: a chart has no room for more.
    """
    kind, after = kind_of(query), query.integer("after")
    shown: list[dict[str, Any]] = []
    with run.dumps() as dumps:
        steps = dumps.steps(kind)
        every = -(-len(steps) // MOST_STEPS) or 1
        left = [step for step in steps[::every] if after is None or step > after]
        for step in within_budget(left):
            shown.append({"step": step, **step_quantiles(dumps, kind, step)})
    return {
        "kind": kind,
        "every": every,
        **{name: [one[name] for one in shown] for name in ("step", "score", "length")},
        "left": len(left) - len(shown),
    }


def step_quantiles(dumps: "Dumps", kind: "Kind", step: int) -> dict[str, list[float] | None]:
    try:
        return dict(dumps.quantiles(kind, step, QUANTILES))
    except DataError:
        return {"score": None, "length": None}
