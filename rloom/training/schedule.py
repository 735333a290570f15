"""What time decides in a run that generates ahead of training: `schedule.jsonl` in its directory, and its replay.

A line for each stream of requests, when it has ended, and one for each step, when it takes its groups:

    {"step": 3, "part": 0, "sends": [[[0, [4, 5], [31, -40, -40, 17]], [22, [6], [-40, -40]]]]}
    {"step": 3, "groups": {"4": ["9c1f2ab0", "00d12c7e"], "6": ["d2a8e1f3", "51b07e4c"]}}

`sends` has for each share what it was sent: [polls before, groups, ends], with an end for each answer that was open
(`end_of`). An engine is a function of its requests and of the polls between them. All else that is decided follows from
the groups, whose answers the step's line has the digests of.
"""

import json
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from rloom.atomic import replace_text
from rloom.errors import ConfigError, TrainingError
from rloom.rollout.base import Completion, InterruptAll, PollUntil, Request, StreamItem, WaitIfIdle
from rloom.runs.records import SCHEDULE_FILE

KEY = "trainer.replay"
POLLS_PER_SEND = 16  # in a replay: answers are scored while others are generated
OTHER = (
    "another machine, version of rloom or of torch, or another reward; a run is repeated bit for bit with all the same"
)


class Sent(NamedTuple):
    """Groups that a share was sent together."""

    polls: int  # before
    groups: tuple[int, ...]
    ends: tuple[int, ...]  # of each of their answers that was open: see `end_of`


def end_of(completion: Completion) -> int:
    """Polls when it was complete; less the polls when it was interrupted."""
    return -completion.polls[1] if completion.interrupted else completion.polls[1]


@dataclass(frozen=True)
class StreamRecord:
    """What was sent and reported in a stream."""

    shares: int
    answers: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # (share, index, group, polls, end)

    def add(self, share: int, index: int, group: int, completion: Completion) -> None:
        self.answers.append((share, index, group, completion.polls[0], end_of(completion)))

    def sends(self) -> list[list[Sent]]:
        """Of each share, in order."""
        found: list[list[Sent]] = [[] for _ in range(self.shares)]
        for (share, polls), sent in groupby(sorted(self.answers), key=lambda one: (one[0], one[3])):
            answers = [(group, end) for *_, group, _, end in sent]
            groups = dict.fromkeys(group for group, _ in answers)
            found[share].append(Sent(polls, tuple(groups), tuple(end for _, end in answers)))
        return found


class ScheduleWriter:
    """Appends to the file, one thread at a time. Lines of an earlier process after `last_step` are replaced."""

    def __init__(self, file: Path) -> None:
        self.file, self.last_step, self.begun = file, 0, False

    def stream(self, step: int, part: int, record: StreamRecord) -> None:
        self.write({"step": step, "part": part, "sends": record.sends()})

    def trained(self, step: int, digests: Mapping[int, Sequence[str]]) -> None:
        self.write({"step": step, "groups": digests})

    def write(self, line: Mapping[str, Any]) -> None:
        if not self.begun:
            kept = [line for line in read_lines(self.file) if line["step"] <= self.last_step]
            replace_text(self.file, "".join(map(as_text, kept)))
            self.begun = True
        with self.file.open("a", encoding="utf-8") as file:
            file.write(as_text(line))
            file.flush()
            os.fsync(file.fileno())  # a checkpoint is on the disk, too


def as_text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole: a run that was killed may leave part of the last one."""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)


def digest(completion: Completion, runs: Sequence[tuple[int, int]]) -> str:
    """Of an answer's tokens, log-probs and versions, bit for bit."""
    found = crc32(completion.tokens_L.int().numpy().tobytes())
    found = crc32(completion.logprobs_L.float().numpy().tobytes(), found)
    return f"{crc32(repr(tuple(runs)).encode(), found):08x}"


class RecordedStream(NamedTuple):
    part: int
    sends: list[list[Sent]]


class RecordedRun:
    """The schedule of the run that this one repeats."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.streams: dict[int, list[RecordedStream]] = defaultdict(list)  # by step
        self.digests: dict[int, dict[int, list[str]]] = {}  # by step, then group
        file = directory / SCHEDULE_FILE
        if not file.is_file():
            raise ConfigError(
                f"{KEY}={directory}: there is no {file}; name the directory of a run with trainer.v1.trainer_mode="
                "colocate_async or separate_async and the native engine"
            )
        try:
            for line in read_lines(file):
                if "groups" in line:
                    self.digests[line["step"]] = {int(number): found for number, found in line["groups"].items()}
                else:
                    sends = [
                        [Sent(polls, tuple(groups), tuple(ends)) for polls, groups, ends in of] for of in line["sends"]
                    ]
                    self.streams[line["step"]].append(RecordedStream(line["part"], sends))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read ({type(error).__name__}: {error}); repeat another run") from error

    def where(self, step: int) -> str:
        return f"{KEY}={self.directory}: step {step}"

    def groups(self, step: int) -> list[int]:
        """Those that the step trains."""
        if step not in self.digests:
            raise TrainingError(f"{self.where(step)} is not in its schedule: the replay ends before it")
        return sorted(self.digests[step])

    def check(self, step: int, digests: Mapping[int, Sequence[str]]) -> None:
        for group, found in digests.items():
            for member, (own, was) in enumerate(zip(found, self.digests[step][group], strict=True)):
                if own != was:
                    raise TrainingError(
                        f"{self.where(step)}: answer {member} to group {group} has other tokens or log-probs than in "
                        f"that run: {OTHER}"
                    )


class ReplayedStream:
    """In place of a Dispatcher: sends what a recorded stream sent, and prescribes the polls between."""

    has_unfinished = False  # nothing is sent that is not in `recorded`

    def __init__(
        self,
        recorded: RecordedStream,
        where: str,  # for errors
        answers: Sequence[tuple[int, int]],  # (group, place in it) of each row
        begin: Callable[[Sequence[int]], tuple[range, list[Request]] | None],  # see `next_requests`
    ) -> None:
        self.where, self.answers, self.begin = where, answers, begin
        self.left = [deque(sends) for sends in recorded.sends]
        self.rows: list[list[int]] = [[] for _ in self.left]  # of each share, in the order of its requests
        self.ends: list[dict[int, int]] = [{} for _ in self.left]  # of its requests that were not reported, by index
        self.last_end = [0] * len(self.left)
        self.polls = [0] * len(self.left)  # that were prescribed
        self.waits = [0] * len(self.left)  # sends without polls, in succession
        self.interrupted: set[int] = set()
        self.finished = 0

    def next_requests(self, share: int) -> Sequence[StreamItem] | None:
        """`begin` adds the open answers of groups to the rows, and returns these with their requests. None: a step that
        is being trained has yet to admit them."""
        requests: list[Request] = []
        if self.polls[share] == self.goal(share):
            if not self.left[share]:
                ended = share in self.interrupted
                self.interrupted.add(share)
                return None if ended else [InterruptAll()]
            begun = self.begin(self.left[share][0].groups)
            if begun is None:
                return self.wait(share)
            rows, requests = begun
            ends = self.left[share].popleft().ends
            if len(rows) != len(ends):
                raise TrainingError(f"{self.where}: {len(rows)} answers go on, and {len(ends)} in that run: {OTHER}")
            first = len(self.rows[share])
            self.ends[share].update(enumerate(ends, start=first))
            self.last_end[share] = max(self.last_end[share], *map(abs, ends))
            self.rows[share] += rows
        self.waits[share] = 0
        self.polls[share] = min(self.goal(share), self.polls[share] + POLLS_PER_SEND)
        return [*requests, PollUntil(self.polls[share])]

    def goal(self, share: int) -> int:
        """Polls until it is sent something else."""
        return self.left[share][0].polls if self.left[share] else self.last_end[share]

    def wait(self, share: int) -> list[StreamItem]:
        """An answer that should have ended by now may be what the groups wait for."""
        self.waits[share] += 1
        if self.waits[share] > 2:  # what was sent before has been answered: see Group.stream
            for index, end in self.ends[share].items():
                if 0 < end <= self.polls[share]:
                    raise self.error(share, index, end, complete=False)
        return [WaitIfIdle()]

    def finish(self, share: int, index: int) -> int:
        """As of a Dispatcher."""
        self.finished += 1
        return self.rows[share][index]

    def check(self, share: int, index: int, completion: Completion) -> None:
        was, found = self.ends[share].pop(index), end_of(completion)
        if found != was:
            raise self.error(share, index, completion.polls[1], complete=found > 0)

    def error(self, share: int, index: int, polls: int, *, complete: bool) -> TrainingError:
        group, member = self.answers[self.rows[share][index]]
        is_and_was = (
            f"is complete after {polls} polls of the engine, and was not"
            if complete
            else f"is not complete after {polls} polls of the engine, and was"
        )
        return TrainingError(f"{self.where}: answer {member} to group {group} {is_and_was} in that run: {OTHER}")
