"""When each stage of a step began, how long it took and in which other it ran."""

from collections.abc import Iterable
from typing import Any

from rloom.runs.events import Event
from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun
from rloom.view.query import Query


def stages(run: OpenedRun, query: Query) -> Json:
    """Of `step`, by default the last completed one."""
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
