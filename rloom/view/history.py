"""One prompt over the steps that have dumped answers to it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rloom.errors import DataError
from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun

if TYPE_CHECKING:
    from rloom.runs.dumps.layout import Kind
    from rloom.runs.dumps.reader import Dumps, PromptAtStep, PromptSummary


def prompt_history(run: OpenedRun, kind: "Kind", index: int) -> Json:
    """`index`: the row of the data set."""
    with run.dumps() as dumps:
        steps = dumps.history(kind, index)
        if not steps:
            raise NotFound(f"no dump of a {kind} step has row {index} of the data")
        prompt = first_readable(dumps, kind, reversed(steps))
    return {
        "index": index,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "steps": [
            {"step": at.step, "group": at.group, "answers": at.answers, "mean": at.mean, "kind": kind} for at in steps
        ],
    }


def first_readable(dumps: "Dumps", kind: "Kind", places: "Iterable[PromptAtStep]") -> "PromptSummary":
    """The index has no texts; a dump may be damaged, or have been removed to save space since the index was read."""
    fault: DataError | None = None
    for place in places:
        try:
            found = [prompt for prompt in dumps.prompts(kind, place.step) if prompt.group == place.group]
        except DataError as error:
            fault = error
            continue
        if found:
            return found[0]
    raise fault or NotFound("no dump of this prompt can be read")
