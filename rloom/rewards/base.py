"""The reward protocols: groups of samples in, scores out; and the messages between the pool and its worker processes.

The messages are pickles, each preceded by its length.
pool → worker: one Setup, then Requests; end of file ends the worker.
worker → pool: the Style of the function or a Refusal, then a list of Scores for each group of a request, as soon as it
has them. LOADING … READY in between suspends the time limit of a group while a library is imported.
"""

import enum
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from rloom.rewards.framing import LENGTH_BYTES, frame_end, framed, read_frame
from rloom.types import SampleGroup, Score


class ScoringUnit(Enum):
    """The answers that a reward has to receive together. They are submitted as soon as the unit is complete."""

    ANSWER = "answer"  # each answer on its own
    PROMPT = "prompt"  # all answers to a prompt, to compare them
    BATCH = "batch"  # all answers of one generation, such as for a model on the workers that generate


class Reward(Protocol):
    @property
    def unit(self) -> ScoringUnit: ...

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        """A Score for each sample of each group, in order. A failure is a `Score.failed`, not an exception.

        A RewardError stops the run, such as when a budget is spent.
        """

    def check(self) -> None:
        """Raise a RewardError if it cannot be used. Called once, before anything is generated."""

    def metrics(self) -> Mapping[str, float]:
        """Of the calls since the last `metrics`: requests, tokens, cost."""

    def close(self) -> None: ...


class PendingScores(Protocol):
    """Scores that may still be computed. A Future is one."""

    def result(self) -> list[list[Score]]:
        """Waits. One list for each group that was submitted."""

    def done(self) -> bool:
        """Whether nothing is being computed: `result` returns, or computes them itself."""

    def add_done_callback(self, callback: "Callable[[Future[list[list[Score]]]], object]", /) -> None:
        """Called, in any thread, with each part that is complete or has failed; not by those that `result` computes."""


class ScoreQueue(Protocol):
    """A reward that runs beside the caller."""

    @property
    def unit(self) -> ScoringUnit: ...

    def submit(self, groups: Sequence[SampleGroup]) -> PendingScores: ...

    def metrics(self) -> Mapping[str, float]:
        """As in Reward."""


@dataclass(frozen=True)
class Setup:
    path: str | None  # the user's file; None: the rules
    name: str
    reward_kwargs: Mapping[str, Any]
    whole_groups: bool  # call the function once for all answers to a prompt, with lists
    timeout_s: float  # for one call
    load_limit_s: float  # for importing a file or a library
    sandbox: Mapping[str, Any] | None = None  # reward_model.sandbox, for the rules that run generated code
    reads_episodes: bool = False  # it gets all that followed the prompt; rules get the last turn


class Style(enum.Enum):
    """How a reward function is called."""

    ANSWER = "answer"  # once for each answer: data_source, solution_str, ground_truth, extra_info
    GROUP = "group"  # once for a group, with lists: data_sources, solution_strs, ground_truths, extra_infos
    QUERIES = "queries"  # OpenRLHF: once for each answer, with lists of one: queries, prompts, labels
    COLUMNS = "columns"  # TRL: once for a group, with lists: prompts, completions, completion_ids and the row's columns


class LoadProgress(enum.Enum):
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True)
class Refusal:
    """The user's function cannot be used, and why."""

    message: str


Fields = tuple[Any, ...]  # the first fields of a Sample
# For each group the number of its samples and the pickle of their Fields, which are plain tuples: a dataclass takes
# several times longer. One pickle for all groups would make them share the mutable objects of their rows.
Request = list[tuple[int, bytes]]
Reply = list[Score] | Style | LoadProgress | Refusal


def encode(message: Setup | Request | Reply) -> bytes:
    return framed(pickled(message))


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


class FrameBuffer:
    """Messages from the bytes of a connection, as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def messages(self, data: bytes) -> Iterator[Any]:
        self._bytes += data
        at = 0
        with memoryview(self._bytes) as view:
            while (end := frame_end(view, at)) is not None:
                yield pickle.loads(view[at + LENGTH_BYTES : end])
                at = end
        del self._bytes[:at]


def decode(receive: Callable[[int], bytes]) -> Any:
    return pickle.loads(read_frame(receive))
