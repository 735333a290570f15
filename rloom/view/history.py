"""One prompt over the steps that have dumped answers to it."""

from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun


def prompt_history(run: OpenedRun, kind: str, index: int) -> Json:
    """`index`: the row of the data set."""
    with run.dumps() as dumps:
        steps = dumps.history(index, kind)
        if not steps:
            raise NotFound(f"no dump of a {kind} step has row {index} of the data")
        last = steps[-1]
        prompt = next(p for p in dumps.prompts(kind, last.step) if p.group == last.group)
    return {
        "index": index,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "steps": [
            {"step": at.step, "group": at.group, "answers": at.answers, "mean": at.mean, "kind": kind} for at in steps
        ],
    }
