"""JSON of runs: their list, and the configuration, metrics, stages, findings and comparison of them."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from rloom.doctor.run.report import Report
from rloom.runs.compare import Point, accuracy_curves, compare_accuracies, compare_configs
from rloom.runs.records import Event
from rloom.runs.run_folder import RunState, RunSummary, flat_config
from rloom.view.http_errors import BadRequest, NotFound
from rloom.view.query import Json, Query, format_value, whole_number
from rloom.view.run_cache import RunCache, RunHandle


def list_runs(runs: RunCache) -> Json:
    listed = []
    for run in runs.search():
        with suppress(NotFound):  # removed since
            listed.append({"id": run.number, **describe(run.summary())})
    return {"runs": listed}


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
    with run.folder() as folder:
        return {"config": flat_config(folder.config)}


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
        return {
            "generation": current,
            "complete": complete,
            "steps": [int(step["step"]) for step in records],
            "metrics": {name: [step.get(name) for step in records] for name in names},
            "measures": folder.measures,
            "state": state_json(folder.state),
            "skipped": folder.skipped,
            "fault": folder.config_fault,
        }


def stages(run: RunHandle, query: Query) -> Json:
    """The stages of `step`, by default of the last completed one."""
    with run.folder() as folder:
        given = query.integer("step")
        step = folder.state.step if given is None else given
        found = timeline(event for event in folder.events if event.get("step") == step)
    if not found:
        raise NotFound(f"the run has no stages of step {step}")
    begin = min(stage["start"] for stage in found)
    return {"step": step, "begin": begin, "stages": [{**s, "start": round(s["start"] - begin, 6)} for s in found]}


def timeline(events: Iterable[Event]) -> list[dict[str, Any]]:
    """In the order of their beginning, `start` in seconds since 1970. `seconds` is None while a stage runs."""
    found: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "run":  # another process: what the one before had begun has no end
            found = [stage for stage in found if stage["seconds"] is not None and event["step"] > 0]
            running = []
        elif event["event"] == "stage_begin":
            stage = {"stage": event["stage"], "start": event["time"], "seconds": None, "depth": len(running)}
            found.append(stage)
            running.append(stage)
        elif event["event"] == "stage_end":
            ended = next((stage for stage in reversed(running) if stage["stage"] == event["stage"]), None)
            if ended is not None:
                ended["seconds"] = event["seconds"]
                running.remove(ended)
    return found


def findings(run: RunHandle) -> Json:
    with run.folder() as folder:
        return Report.of(folder).as_json()


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


def numbers_of(text: str) -> list[int]:
    numbers = [whole_number(part) for part in text.split(",")]
    known = [number for number in dict.fromkeys(numbers) if number is not None]
    if None in numbers or not 2 <= len(known) <= MOST_RUNS:
        raise BadRequest(f"runs={format_value(text)}: use the numbers of 2 to {MOST_RUNS} runs, as in runs=0,1")
    return known
