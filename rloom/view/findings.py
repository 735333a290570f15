"""What `rloom doctor` finds in the run."""

from rloom.doctor.run.report import Report
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun


def findings(run: OpenedRun) -> Json:
    with run.folder() as folder:
        return Report.of(folder).as_json()
