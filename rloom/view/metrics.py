"""The metrics of a run, as one list for each of them."""

from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun
from rloom.view.query import Query
from rloom.view.runs import state_json


def metrics(run: OpenedRun, query: Query) -> Json:
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
            "state": state_json(folder.state),
            "skipped": folder.skipped,
            "fault": folder.config_fault,
        }
