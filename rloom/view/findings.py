"""What `rloom doctor` finds in the run."""

from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun


def findings(run: OpenedRun) -> Json:
    with run.folder() as folder:
        return {"steps": len(folder.metrics), "findings": []}
