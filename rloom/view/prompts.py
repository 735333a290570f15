"""JSON of prompts: those of a step, their answers, one prompt over the steps."""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rloom.errors import DataError
from rloom.view.http_errors import NotFound
from rloom.view.query import Json, Query, paged
from rloom.view.run_cache import RunHandle

if TYPE_CHECKING:
    from rloom.runs.dumps.index import Kind
    from rloom.runs.dumps.reader import DumpedAnswer, Dumps, PromptAtStep, PromptSummary


ORDERS = ("asc", "desc")
KEYS: "dict[str, Callable[[PromptSummary], Any]]" = {
    **{name: attrgetter(name) for name in ("group", "index", "mean", "best", "worst", "spread", "failed", "length")},
    "source": attrgetter("data_source"),
}


def prompts(run: RunHandle, kind: "Kind", step: int, query: Query) -> Json:
    key = KEYS[query.choice("sort", tuple(KEYS))]
    descending = query.choice("order", ORDERS) == "desc"
    with run.dumps() as dumps:
        every, of_step = prompts_of(dumps, kind, step), dumps.groups_of_step(kind, step)
        kept = [prompt for prompt in every if fits(prompt, query)]
        if query.text("text"):
            groups = groups_with(dumps, kind, step, kept, query.text("text"))
            kept = [prompt for prompt in kept if prompt.group in groups]
    numbers, shown = paged(in_order(kept, key, descending), query)
    sources = sorted({prompt.data_source for prompt in every})
    return {
        "step": step,
        "total": len(every),
        "of_step": of_step,  # prompts of which these were drawn; null: these are all
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
    return {name: value for name, value in vars(prompt).items() if name != "accuracy"}


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def group_answers(run: RunHandle, kind: "Kind", step: int, group: int) -> Json:
    with run.dumps() as dumps:
        prompts = {prompt.group: prompt for prompt in prompts_of(dumps, kind, step)}
        if group not in prompts:
            raise NotFound(f"the dump of {kind} step {step} has no group {group}")
        answers = dumps.answers(kind, step, group)
        steps = len(dumps.history(kind, prompts[group].index))
    groups = sorted(prompts)
    place = groups.index(group)
    return {
        "step": step,
        "steps": steps,  # whose dumps have the prompt
        "prompt": prompt_json(prompts[group]),
        "previous": groups[place - 1] if place > 0 else None,
        "next": groups[place + 1] if place + 1 < len(groups) else None,
        "answers": answers_json(answers),
    }


def answers_json(answers: "Sequence[DumpedAnswer]") -> list[Json]:
    """Further branches of an episode are in `branches` of its first."""
    found: list[Json] = []
    for answer in answers:
        row = answer_json(answer)
        if answer.branch and found:
            found[-1]["branches"].append(row)
        else:
            found.append(row if answer.episode is None else {**row, "branches": []})
    return found


def answer_json(answer: "DumpedAnswer") -> Json:
    """Without `branch`, and without `versions` and `episode` where the dump has none."""
    left_out = {name for name in ("versions", "episode") if getattr(answer, name) is None} | {"branch"}
    found = {name: value for name, value in vars(answer).items() if name not in left_out}
    return {**found, "pieces": None if answer.pieces is None else [vars(piece) for piece in answer.pieces]}


def prompt_history(run: RunHandle, kind: "Kind", index: int) -> Json:
    """`index`: the row of the data set."""
    with run.dumps() as dumps:
        steps = dumps.history(kind, index)
        if not steps:
            raise NotFound(f"no dump of a {kind} step has row {index} of the data")
        prompt = first_readable(dumps, kind, reversed(steps))
    return {
        "index": index,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "steps": [{**vars(at), "kind": kind} for at in steps],
    }


def first_readable(dumps: "Dumps", kind: "Kind", places: "Iterable[PromptAtStep]") -> "PromptSummary":
    """The index has no texts; a dump may be damaged, or have been removed to save space since the index was read."""
    fault: DataError | None = None
    for place in places:
        try:
            found = [prompt for prompt in dumps.prompts(kind, place.step) if prompt.group == place.group]
        except DataError as error:
            fault = error
            continue
        if found:
            return found[0]
    raise fault or NotFound("no dump of this prompt can be read")
