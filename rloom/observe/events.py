"""`events.jsonl`: what a run did, in order. Lines are only ever appended, so a reader can follow a running run.

Every line has `time` (seconds since 1970) and `event`; all but `end` have `step`:

    run          a process has started training after `step` (0: from the beginning): `total_steps`, `host`, `pid`
    stage_begin  `stage`: gen, reward, old_log_prob, update_actor, ...
    stage_end    `stage`, `seconds`
    rollout      one answer (trainer.log_rollouts=True): `group`, `version`, `prompt`, `tokens`, `logprobs`,
                 `advantages`, `score`, `reason`, `finished`
    step         `metrics`
    validation   `metrics`
    warning      `kind`, `message`; a rollout mismatch also has `metric`, `value`, `threshold`, `engine_versions`,
                 `trainer_version`
    end          `status`: finished, interrupted, or the type of the error, then with `message`
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloom.observe.records import plain

if TYPE_CHECKING:  # it imports torch, and commands read this module's names before that
    from rloom.batch import TrainBatch, Trajectory

EVENTS_FILE = "events.jsonl"
Event = dict[str, Any]


class EventLog:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._ends_in_a_line = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps(plain({"time": time.time(), "event": event, **fields}), ensure_ascii=False, allow_nan=False)
        with self._file.open("a", encoding="utf-8") as out:
            # a crash may have cut the last line short: readers skip it
            out.write(line + "\n" if self._ends_in_a_line else f"\n{line}\n")
        self._ends_in_a_line = True


def read_events(file: Path) -> list[Event]:
    """The events in effect: a run that resumed from a step replaces what an earlier process wrote of later steps."""
    events: list[Event] = []
    for event in _whole_events(file):
        if event["event"] == "run":
            events = [earlier for earlier in events if earlier.get("step", 0) <= event["step"]]
        events.append(event)
    return events


def metrics_by_step(events: Iterable[Event]) -> list[dict[str, float]]:
    """One dict for each step, with its validation's metrics, in the order of the steps."""
    steps: dict[int, dict[str, float]] = {}
    for event in events:
        if event["event"] in ("step", "validation"):
            known = {name: value for name, value in event["metrics"].items() if value is not None}
            steps.setdefault(event["step"], {"step": event["step"]}).update(known)
    return [steps[step] for step in sorted(steps)]


def rollout_fields(trajectories: "Sequence[Trajectory]", batch: "TrainBatch") -> Iterator[Event]:
    """The fields of a `rollout` event for each trajectory, given the batch that was packed of them."""
    advantages = batch.advantages_T.split(batch.length_N.tolist())
    for trajectory, advantages_L in zip(trajectories, advantages, strict=True):
        mask_L = trajectory.mask_L
        yield {
            "group": trajectory.group,
            "version": min((turn.version for turn in trajectory.turns), default=0),
            "prompt": trajectory.prompt.text,
            "tokens": trajectory.answer_tokens,
            "logprobs": trajectory.logprobs_L[mask_L].tolist(),
            "advantages": advantages_L[mask_L].tolist(),
            "score": trajectory.score.value,
            "reason": trajectory.score.reason,
            "finished": trajectory.finished,
        }


def _whole_events(file: Path) -> Iterator[Event]:
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:  # cut short by a crash, or being written
                continue
            if isinstance(event, Mapping) and "event" in event:
                yield dict(event)
