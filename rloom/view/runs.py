"""The list of runs, the configuration of one, and the steps whose answers it has dumped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloom.observe.display import validation_accuracies
from rloom.observe.run_folder import RunFolder, RunState, Status, flat_config
from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun, OpenedRuns

REWARD = "critic/score/mean"


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
    return {"name": "/".join(path.parts[-2:]), "path": str(path), "state": state_json(state), **unknown}


def describe(folder: RunFolder) -> Json:
    flat = flat_config(folder.config)
    metrics = folder.metrics
    kind = "sft" if "model" in folder.config and "algorithm" not in folder.config else "rl"
    model = flat.get("actor_rollout_ref.model.path") or flat.get("model.path")
    return {
        "name": folder.name,
        "path": str(folder.path),
        "state": state_json(folder.state),
        "algorithm": "sft" if kind == "sft" else flat.get("algorithm.adv_estimator"),
        "model": model,
        "kind": kind,
        "reward": next((step[REWARD] for step in reversed(metrics) if REWARD in step), None),
        "accuracy": accuracies(metrics),
    }


def state_json(state: RunState) -> Json:
    return asdict(state)


def accuracies(metrics: Sequence[Mapping[str, float]]) -> Json:
    """(step, value) of the first, last and best validation of each data source; the first of equal ones is the best."""
    series: dict[str, list[tuple[int, float]]] = {}
    for step in metrics:
        for source, value in validation_accuracies(step).items():
            if math.isfinite(value):
                series.setdefault(source, []).append((int(step["step"]), value))
    return {
        source: {"first": points[0], "last": points[-1], "best": max(points, key=lambda point: point[1])}
        for source, points in series.items()
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
