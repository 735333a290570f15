"""`events.jsonl`: what a run did, in order. Lines are only ever appended, so a reader can follow a running run.

Every line has `time` (seconds since 1970) and `event`; all but `end` have `step`:

    run          a process has started training after `step` (0: from the beginning): `total_steps`, `host`, `pid`
    stage_begin  `stage`: gen, reward, old_log_prob, update_actor, ...
    stage_end    `stage`, `seconds`
    step         `metrics`
    validation   `metrics`
    warning      `kind`, `message`; a rollout mismatch also has `metric`, `value`, `threshold`, `engine_versions`,
                 `trainer_version`, and skipped updates `metric`, `value`
    end          `status`: finished, interrupted, or the type of the error, then with `message`
"""

import json
import time
from pathlib import Path
from typing import Any

from rloom.observe.records import plain

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
