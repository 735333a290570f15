"""Address -> the function that answers it. Runs, steps, groups and rows are whole numbers; nothing else is accepted."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rloom.view.http_errors import NotFound
from rloom.view.prompts import group_answers, prompt_history, prompts, validation
from rloom.view.query import MOST_DIGITS, Json, Query
from rloom.view.run_cache import RunCache, RunHandle
from rloom.view.runs import comparison, config, dumped_steps, findings, list_runs, metrics, stages

if TYPE_CHECKING:
    from rloom.runs.dumps.index import Kind

API = "/api/"
KIND = "(?P<kind>train|validation)"

OfAll = Callable[[RunCache, Query], Json]
OfRun = Callable[[RunHandle, Mapping[str, str], Query], Json]  # with the parts of the address

OF_ALL: Mapping[str, OfAll] = {
    "/api/runs": lambda runs, query: list_runs(runs),
    "/api/compare": comparison,
}


def number(name: str) -> str:
    return f"(?P<{name}>[0-9]{{1,{MOST_DIGITS}}})"


OF_RUN: Mapping[str, OfRun] = {
    "metrics": lambda run, at, query: metrics(run, query),
    "stages": lambda run, at, query: stages(run, query),
    "config": lambda run, at, query: config(run),
    "dumps": lambda run, at, query: dumped_steps(run),
    "findings": lambda run, at, query: findings(run),
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


def answer(runs: RunCache, path: str, query: Query) -> Json:
    if path in OF_ALL:
        return OF_ALL[path](runs, query)
    for pattern, function in PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None:
            return function(runs[int(found["run"])], found.groupdict(), query)
    raise NotFound("there is no such address")


def kind(at: Mapping[str, str]) -> "Kind":
    return "train" if at["kind"] == "train" else "validation"
