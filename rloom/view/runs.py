"""The list of runs, the configuration of one, and the steps whose answers it has dumped."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloom.observe.compare import accuracy_curves
from rloom.observe.run_folder import RunFolder, RunState, Status, flat_config, run_name
from rloom.observe.run_summary import REWARD, algorithm_of, model_of
from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun, OpenedRuns


def list_runs(runs: OpenedRuns) -> Json:
    listed = []
    for run in runs.search():
        try:
            with run.folder() as folder:
                listed.append({"id": run.number, **describe(folder)})
        except NotFound:  # removed since
            continue
        except OSError as error:
            listed.append({"id": run.number, **unreadable(run.path, error)})
    return {"runs": listed}


def unreadable(path: Path, error: OSError) -> Json:
    state = RunState(Status.UNKNOWN, step=0, total_steps=None, started=None, updated=None, error=str(error))
    unknown: Json = {"algorithm": None, "model": None, "kind": "rl", "reward": None, "accuracy": {}}
    return {"name": run_name(path), "path": str(path), "state": state_json(state), **unknown}


def describe(folder: RunFolder) -> Json:
    metrics, algorithm = folder.metrics, algorithm_of(folder.config)
    return {
        "name": folder.name,
        "path": str(folder.path),
        "state": state_json(folder.state),
        "algorithm": algorithm,
        "model": model_of(folder.config),
        "kind": "sft" if algorithm == "sft" else "rl",
        "reward": next((step[REWARD] for step in reversed(metrics) if REWARD in step), None),
        "accuracy": accuracies(metrics),
    }


def state_json(state: RunState) -> Json:
    return asdict(state)


def accuracies(metrics: Sequence[Mapping[str, float]]) -> Json:
    """(step, value) of the first, last and best validation of each data source; the first of equal ones is the best."""
    curves = {source: list(curve.items()) for source, curve in accuracy_curves(metrics).items()}
    return {
        source: {"first": points[0], "last": points[-1], "best": max(points, key=lambda point: point[1])}
        for source, points in curves.items()
    }


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
