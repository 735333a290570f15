"""The list of runs, the configuration of one, and the steps whose answers it has dumped."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloom.observe.run_folder import RunState, Status, flat_config, run_name
from rloom.observe.run_summary import RunSummary
from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun, OpenedRuns


def list_runs(runs: OpenedRuns) -> Json:
    listed = []
    for run in runs.search():
        try:
            listed.append({"id": run.number, **describe(run.summary())})
        except NotFound:  # removed since
            continue
        except OSError as error:
            listed.append({"id": run.number, **unreadable(run.path, error)})
    return {"runs": listed}


def unreadable(path: Path, error: OSError) -> Json:
    state = RunState(Status.UNKNOWN, step=0, total_steps=None, started=None, updated=None, error=str(error))
    unknown: Json = {"algorithm": None, "model": None, "kind": "rl", "reward": None, "accuracy": {}}
    return {"name": run_name(path), "path": str(path), "state": state_json(state), **unknown}


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
                "first": (found.first_step, found.first),
                "last": (found.last_step, found.last),
                "best": (found.best_step, found.best),
            }
            for source, found in run.accuracy.items()
        },
    }


def state_json(state: RunState) -> Json:
    return asdict(state)


def config(run: OpenedRun) -> Json:
    with run.folder() as folder:
        return {"config": {key: plain(value) for key, value in flat_config(folder.config).items()}}


def dumped_steps(run: OpenedRun) -> Json:
    with run.dumps() as dumps:
        return {"train": dumps.steps("train"), "validation": dumps.steps("validation")}


def plain(value: Any) -> Json:
    """YAML also has dates and keys that are no text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return str(value)
