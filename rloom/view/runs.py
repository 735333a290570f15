"""The list of runs, the configuration of one, and the steps whose answers it has dumped."""

from contextlib import suppress
from dataclasses import asdict

from rloom.runs.run_folder import RunState, flat_config
from rloom.runs.run_summary import RunSummary
from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun, OpenedRuns


def list_runs(runs: OpenedRuns) -> Json:
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
        return {"config": flat_config(folder.config)}


def dumped_steps(run: OpenedRun) -> Json:
    with run.dumps() as dumps:
        return {
            "train": dumps.steps("train"),
            "validation": dumps.steps("validation"),
            "skipped": dumps.skipped,
        }
