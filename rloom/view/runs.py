"""JSON of runs: their list, and the configuration, metrics, stages, findings and comparison of them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from rloom.doctor.run.history import History
from rloom.doctor.run.report import Report
from rloom.runs.compare import Point, compare_accuracies, compare_configs
from rloom.runs.provenance import without_secrets
from rloom.runs.records import Event, to_json_value
from rloom.runs.run_folder import RunState, RunSummary, accuracy_curves, algorithm_of, flat_config
from rloom.view.http_errors import BadRequest, NotFound
from rloom.view.labels import read_labels
from rloom.view.query import Json, Query, format_value, whole_number
from rloom.view.run_cache import RunCache, RunHandle

BADGES_S = 0.5  # of one request


def list_runs(runs: RunCache) -> Json:
    listed = []
    for run in runs.search():
        with suppress(NotFound):  # removed since
            listed.append({"id": run.number, **describe(run.summary()), **asdict(read_labels(run.path))})
    return {"runs": listed}


def badges(runs: RunCache) -> Json:
    """How many findings each run has, and the worst. `waiting`: runs of a later request; reading one takes a while."""
    end = time.monotonic() + BADGES_S
    found, waiting = {}, 0
    for run in runs.search():
        if not run.has_report and time.monotonic() > end:
            waiting += 1
            continue
        with suppress(Exception):  # removed since, or a file of it has what no check expects: the others have theirs
            found[run.number] = badge(run.report())
    return {"badges": found, "waiting": waiting}


def badge(report: Report) -> Json:
    worst = report.worst
    return {"count": len(report.findings), "worst": None if worst is None else worst.as_json()}


def describe(run: RunSummary) -> Json:
    return {
        "name": run.name,
        "path": str(run.path),
        "state": state_json(run.state),
        "algorithm": run.algorithm,
        "model": run.model,
        "kind": "sft" if run.algorithm == "sft" else "rl",
        "reward": run.reward,
        "accuracy": {
            source: {
                "measure": found.measure,
                "first": (found.first_step, found.first),
                "last": (found.last_step, found.last),
                "best": (found.best_step, found.best),
            }
            for source, found in run.accuracy.items()
        },
    }


def state_json(state: RunState) -> Json:
    return asdict(state)


def config(run: RunHandle) -> Json:
    """The configuration, and what the run recorded of its start. `changed`: key -> its default."""
    with run.folder() as folder:
        values = flat_config(folder.config)
        known = run.defaults("sft" if algorithm_of(folder.config) == "sft" else "rl")
        starts = [event for event in folder.events if event["event"] == "run"]
        notices = [event for event in folder.events if event["event"] == "warning"]
        fault = folder.config_fault
    last = starts[-1] if starts else {}
    return {
        "config": without_secrets(values),
        "changed": changed_keys(values, known),
        "start": {name: last.get(name) for name in ("command", "commit", "versions", "host", "pid", "time")},
        "starts": len(starts),
        "notices": [{name: event.get(name) for name in ("time", "step", "kind", "message")} for event in notices],
        "fault": fault,
    }


def changed_keys(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose value is not the default, with the default. Not those whose default follows from other keys."""
    known = {name: to_json_value(default) for name, default in defaults.items()}
    derived = {name for name, default in known.items() if isinstance(default, str) and "${" in default}
    keys = [name for name, value in values.items() if name not in derived and value != known.get(name)]
    return {name: known.get(name) for name in keys} if known else {}


def dumped_steps(run: RunHandle) -> Json:
    with run.dumps() as dumps:
        return {
            "train": dumps.steps("train"),
            "validation": dumps.steps("validation"),
            "skipped": dumps.skipped,
        }


def metrics(run: RunHandle, query: Query) -> Json:
    """All steps, or those from `after` on if the page has the earlier ones. The step `after` itself may have gained
    the metrics of its validation."""
    generation, after = query.integer("generation"), query.integer("after")
    with run.folder() as folder:
        current = run.generation(folder)
        complete = generation != current or after is None
        records = [step for step in folder.metrics if complete or after is None or step["step"] >= after]
        names = sorted({name for step in records for name in step} - {"step"})
        elapsed = elapsed_seconds(folder.events)
        return {
            "generation": current,
            "complete": complete,
            "steps": [int(step["step"]) for step in records],
            "metrics": {name: [step.get(name) for step in records] for name in names},
            "measures": folder.measures,
            "seconds": [elapsed.get(int(step["step"])) for step in records],
            "answers_per_step": History.of(folder).answers_per_step,
            "state": state_json(folder.state),
            "skipped": folder.skipped,
            "fault": folder.config_fault,
        }


def elapsed_seconds(events: Iterable[Event]) -> dict[int, float]:
    """Step -> seconds of training at its end, over all processes of the run; not the time between two of them."""
    found: dict[int, float] = {}
    before = total = begin = 0.0
    for event in events:
        if event["event"] == "run":
            before, begin = total, event["time"]
        elif event["event"] in ("step", "validation"):
            total = before + max(0.0, event["time"] - begin)
            found.setdefault(event["step"], round(total, 3))
    return found


def findings(run: RunHandle) -> Json:
    """As new as `RunHandle.report`; whether a process still runs is seen in no file."""
    return {**run.report().as_json(), "state": run.summary().state.status.value}


MOST_RUNS = 20


def comparison(runs: RunCache, query: Query) -> Json:
    numbers = numbers_of(query.text("runs"))
    with ExitStack() as locks:
        # always in the same order: two requests that wait for each other's run would wait for ever
        folders = {number: locks.enter_context(runs[number].folder()) for number in sorted(numbers)}
        configs = [folders[number].config for number in numbers]
        curves = [accuracy_curves(folders[number].metrics) for number in numbers]
        return {
            "runs": numbers,
            "config": [
                {"key": found.key, "values": found.values, "present": found.present}
                for found in compare_configs(configs, {})
            ],
            "accuracy": [
                {
                    "source": found.source,
                    "measure": found.measure,
                    "first": [next(iter(curve.get(found.source, {}).items()), None) for curve in curves],
                    "best": points(found.best),
                    "last": points(found.last),
                    "first_common": points(found.first_common),
                    "last_common": points(found.last_common),
                }
                for found in compare_accuracies([folders[number] for number in numbers])
            ],
        }


def points(found: Sequence[Point | None]) -> list[tuple[int, float] | None]:
    return [None if point is None else (point.step, point.value) for point in found]


def numbers_of(text: str, most: int = MOST_RUNS) -> list[int]:
    numbers = [whole_number(part) for part in text.split(",")]
    known = [number for number in dict.fromkeys(numbers) if number is not None]
    if None in numbers or not 2 <= len(known) <= most:
        count = "2" if most == 2 else f"2 to {most}"
        raise BadRequest(f"runs={format_value(text)}: use the numbers of {count} runs, as in runs=0,1")
    return known
