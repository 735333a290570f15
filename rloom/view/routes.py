"""Address -> the function that answers it. Runs, steps, groups and rows are whole numbers; nothing else is accepted."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rloom.view.answers import distributions, search
from rloom.view.http_errors import NotFound
from rloom.view.labels import write_labels
from rloom.view.prompts import group_answers, prompt_history, prompts
from rloom.view.query import MOST_DIGITS, Json, Query
from rloom.view.run_cache import RunCache, RunHandle
from rloom.view.runs import badges, comparison, config, dumped_steps, findings, list_runs, metrics
from rloom.view.timeline import timeline
from rloom.view.validation import compared_validations, validation

if TYPE_CHECKING:
    from rloom.runs.dumps.index import Kind

API = "/api/"
KIND = "(?P<kind>train|validation)"

OfAll = Callable[[RunCache, Query], Json]
OfRun = Callable[[RunHandle, Mapping[str, str], Query], Json]  # with the parts of the address

OF_ALL: Mapping[str, OfAll] = {
    "/api/runs": lambda runs, query: list_runs(runs),
    "/api/findings": lambda runs, query: badges(runs),
    "/api/compare": comparison,
    "/api/compare/validation": compared_validations,
}


def number(name: str) -> str:
    return f"(?P<{name}>[0-9]{{1,{MOST_DIGITS}}})"


OF_RUN: Mapping[str, OfRun] = {
    "metrics": lambda run, at, query: metrics(run, query),
    "timeline": lambda run, at, query: timeline(run, query),
    "config": lambda run, at, query: config(run),
    "dumps": lambda run, at, query: dumped_steps(run),
    "findings": lambda run, at, query: findings(run),
    "search": lambda run, at, query: search(run, query),
    "distributions": lambda run, at, query: distributions(run, query),
    "validation": lambda run, at, query: validation(run, query),
    f"{KIND}/{number('step')}/prompts": lambda run, at, query: prompts(run, kind(at), int(at["step"]), query),
    f"{KIND}/{number('step')}/prompts/{number('group')}": lambda run, at, query: group_answers(
        run, kind(at), int(at["step"]), int(at["group"])
    ),
    f"prompts/{number('index')}/history": lambda run, at, query: prompt_history(run, "train", int(at["index"])),
    f"validation/prompts/{number('index')}/history": lambda run, at, query: prompt_history(
        run, "validation", int(at["index"])
    ),
}
PATTERNS = [(re.compile(f"/api/runs/{number('run')}/{path}"), function) for path, function in OF_RUN.items()]
LABELS = re.compile(f"/api/runs/{number('run')}/labels")


def answer(runs: RunCache, path: str, query: Query) -> Json:
    if path in OF_ALL:
        return OF_ALL[path](runs, query)
    for pattern, function in PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None:
            return function(runs[int(found["run"])], found.groupdict(), query)
    raise NotFound("there is no such address")


def is_change(path: str) -> bool:
    """The only address that writes: labels of a run."""
    return LABELS.fullmatch(path) is not None


def change(runs: RunCache, path: str, query: Query) -> Json:
    found = LABELS.fullmatch(path)
    assert found is not None  # `is_change`
    return write_labels(runs[int(found["run"])], query)


def kind(at: Mapping[str, str]) -> "Kind":
    return "train" if at["kind"] == "train" else "validation"
