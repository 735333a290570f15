"""The prompts of a step: sorted, filtered, a page at a time."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun
from rloom.view.paging import paged
from rloom.view.query import Query

if TYPE_CHECKING:
    from rloom.runs.dumps.layout import Kind
    from rloom.runs.dumps.reader import Dumps, PromptSummary

ORDERS = ("asc", "desc")
KEYS: "dict[str, Callable[[PromptSummary], Any]]" = {
    "group": lambda prompt: prompt.group,
    "index": lambda prompt: prompt.index,
    "mean": lambda prompt: prompt.mean,
    "best": lambda prompt: prompt.best,
    "worst": lambda prompt: prompt.worst,
    "spread": lambda prompt: prompt.spread,
    "failed": lambda prompt: prompt.failed,
    "length": lambda prompt: prompt.length,
    "source": lambda prompt: prompt.data_source,
}


def prompts(run: OpenedRun, kind: "Kind", step: int, query: Query) -> Json:
    key = KEYS[query.choice("sort", tuple(KEYS))]
    descending = query.choice("order", ORDERS) == "desc"
    with run.dumps() as dumps:
        every = prompts_of(dumps, kind, step)
        kept = [prompt for prompt in every if fits(prompt, query)]
        if query.text("text"):
            groups = groups_with(dumps, kind, step, kept, query.text("text"))
            kept = [prompt for prompt in kept if prompt.group in groups]
    numbers, shown = paged(in_order(kept, key, descending), query)
    sources = sorted({prompt.data_source for prompt in every})
    return {
        "step": step,
        "total": len(every),
        **numbers,
        "sources": sources,
        "prompts": [prompt_json(prompt) for prompt in shown],
    }


def prompts_of(dumps: "Dumps", kind: "Kind", step: int) -> "Sequence[PromptSummary]":
    if step not in dumps.steps(kind):
        raise NotFound(f"the run has no dump of the answers of {kind} step {step}")
    return dumps.prompts(kind, step)


def fits(prompt: "PromptSummary", query: Query) -> bool:
    """A prompt whose scores have all failed has no mean: it is in no range."""
    source, least, most = query.text("source"), query.number("min"), query.number("max")
    if source and prompt.data_source != source:
        return False
    if least is None and most is None:
        return True
    mean = _number(prompt.mean)
    return mean is not None and (least is None or mean >= least) and (most is None or mean <= most)


def groups_with(dumps: "Dumps", kind: "Kind", step: int, prompts: "Sequence[PromptSummary]", text: str) -> set[int]:
    """Whose prompt, or any answer to it, contains the text, in any case."""
    wanted = text.casefold()
    answers = dumps.texts(kind, step)
    return {
        prompt.group
        for prompt in prompts
        if any(wanted in searched.casefold() for searched in (prompt.text, *answers.get(prompt.group, [])))
    }


def in_order(
    prompts: "Sequence[PromptSummary]", key: "Callable[[PromptSummary], Any]", descending: bool
) -> "list[PromptSummary]":
    """Prompts without a value are last in both orders; equal ones stay in the order of their groups."""
    known = [prompt for prompt in prompts if _number(key(prompt)) is not None]
    unknown = [prompt for prompt in prompts if _number(key(prompt)) is None]
    return [*sorted(known, key=key, reverse=descending), *unknown]


def prompt_json(prompt: "PromptSummary") -> Json:
    return {
        "group": prompt.group,
        "index": prompt.index,
        "data_source": prompt.data_source,
        "text": prompt.text,
        "ground_truth": prompt.ground_truth,
        "answers": prompt.answers,
        "mean": prompt.mean,
        "best": prompt.best,
        "worst": prompt.worst,
        "spread": prompt.spread,
        "failed": prompt.failed,
        "length": prompt.length,
    }


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
