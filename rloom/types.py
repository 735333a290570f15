"""Data types without tensors. (`batch.py` has those with tensors.)

Imports no torch: reward workers import this file and start in milliseconds.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
LARGEST_REWARD = 1e30  # the largest magnitude of a reward: training is in float32, whose largest number is 3.4e38
ENVIRONMENT_FAILED = "the environment failed: "  # how the reason of a score begins whose episode failed
TIMEOUTS = ("CallTimeout", "TimeoutError", "no answer")  # how the reason of a call that took too long begins
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")  # all but tabs and line breaks


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, read, rendered and tokenized."""

    index: int  # row in the data set, the same in all epochs and after a resume
    messages: tuple[Message, ...]
    text: str  # the messages, rendered by the chat template
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)  # columns of the row; `prompt` as in the file


@dataclass(frozen=True)
class SampledEpisode:
    """What followed the prompt in an episode of several turns, as rewards receive it."""

    messages: tuple[Message, ...]  # of the policy and of the environment
    text: str  # of the tokens after the prompt, without special ones
    tokens: tuple[int, ...]  # after the prompt
    reward: float | None = None  # of the environment or the agent
    info: Mapping[str, Any] = field(default_factory=dict)  # for functions, beside the `extra_info` of the row
    state: Mapping[str, Any] = field(default_factory=dict)  # plain attributes of the user's environment
    no_reward: str = ""  # why the reward is not known


@dataclass(frozen=True)
class Sample:
    """One answer, as a reward function receives it. Of an episode of several turns, `response` is the last turn."""

    data_source: str
    prompt: str
    response: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the prompt's chat
    prompt_tokens: tuple[int, ...] = ()
    response_tokens: tuple[int, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)  # as in Prompt
    episode: SampledEpisode | None = None  # iff the answer has several turns

    @property
    def whole_response(self) -> str:
        """All that followed the prompt: in an episode, what the environment added, too."""
        return self.response if self.episode is None else self.episode.text

    @property
    def answer_messages(self) -> tuple[Message, ...]:
        if self.episode is None:
            return ({"role": "assistant", "content": self.response},)
        return self.episode.messages

    @property
    def info(self) -> Mapping[str, Any]:
        """`extra_info`, and what is known about the episode."""
        return self.extra_info if self.episode is None else {**self.extra_info, **self.episode.info}


SampleGroup = tuple[Sample, ...]  # answers to one prompt that are scored in one call


@dataclass(frozen=True)
class Score:
    """A value with its parts, or a failure with its reason. A failure is not a score of 0.

    Numbers are at most LARGEST_REWARD in magnitude. Texts are as of `plain_text`: they are printed, logged and dumped.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)  # further values, averaged into the metrics
    prediction: str | None = None  # the answer as parsed by the rule, for majority votes
    reason: str | None = None  # why there is no value
    detail: str | None = None  # what the reward found, for the dumps: "2 of 3 tests passed"
    applies: bool = True  # False: no value, because the reward is not for this row

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a Score is either a value or a failure with a reason")
        if self.value is not None and not is_usable(self.value):
            raise ValueError(f"a Score must be finite and at most {LARGEST_REWARD:g} in magnitude, got {self.value}")
        texts = {"prediction": self.prediction, "reason": self.reason, "detail": self.detail}
        for name, text in texts.items():
            if text is not None:
                object.__setattr__(self, name, plain_text(text))
        if not all(map(str.isprintable, self.parts)):
            object.__setattr__(self, "parts", {plain_text(name): value for name, value in self.parts.items()})

    @classmethod
    def of(
        cls,
        value: float,
        parts: Mapping[str, float] = MappingProxyType({}),
        *,
        subject: str,  # who gave which value, for the reason of a failure
        prediction: str | None = None,
        detail: str | None = None,
    ) -> "Score":
        """A failure if the value or a part is a number that training cannot use."""
        for name, number in {"the reward": value, **parts}.items():
            if not is_usable(number):
                fault = f"beyond {LARGEST_REWARD:g}" if math.isfinite(number) else "not finite"
                return cls.failed(f"{subject}; {name} is {number:g}, which is {fault}")
        return cls(value, dict(parts), prediction=prediction, detail=detail)

    @classmethod
    def failed(cls, reason: str, *, applies: bool = True) -> "Score":
        return cls(value=None, reason=reason, applies=applies)

    @property
    def ok(self) -> bool:
        return self.value is not None

    @property
    def accuracy(self) -> float | None:
        """The value for validation: the part `acc` if there is one (rules that score -1 or 1), else the value."""
        return None if self.value is None else self.parts.get("acc", self.value)


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as it is logged and shown."""

    name: str
    arguments: str
    result: str
    seconds: float = 0.0
    error: str | None = None  # why there is no result

    @property
    def timed_out(self) -> bool:
        return self.error is not None and self.error.startswith(TIMEOUTS)


@dataclass(frozen=True)
class EpisodeStep:
    """A message of an episode of several turns, or several that were added together."""

    source: str  # prompt, policy or environment
    start: int  # first token, in the tokens of its branch
    stop: int
    messages: tuple[tuple[str, str], ...]  # (role, content)
    trained: bool = False  # sampled; in the first branch that has it
    version: int = 0  # of the weights, if of the policy
    finished: bool = True  # if of the policy: ended with a stop token
    seconds: float = 0.0  # of generation, or of the environment
    reward: float | None = None  # if of the policy: of this turn
    calls: tuple[ToolCall, ...] = ()  # if of the policy: that it made


@dataclass(frozen=True)
class EpisodeSummary:
    """What an episode of several turns did, for metrics, dumps and the pages of `rloom view`."""

    ending: str
    branches: tuple[tuple[EpisodeStep, ...], ...]
    origins: tuple[str, ...]  # what began each branch: the prompt, the chat template, or the agent
    reward: float | None = None  # of the environment
    failure: str | None = None  # why the environment failed
    environment_s: float = 0.0
    rewritten: int = 0  # times the chat template wrote the past in another way
    branched: int = 0  # times an agent changed its history
    tools: int = 0  # that the prompt lists
    requests: Mapping[str, int] = field(default_factory=dict)  # of an agent: counts by kind; see AgentSession
    requested_tokens: int = 0  # of all requests for answers
    reused_tokens: int = 0  # of them: the engine had their keys and values
    metrics: Mapping[str, float] = field(default_factory=dict)  # that the environment and its tools report

    @property
    def turns(self) -> tuple[EpisodeStep, ...]:
        """Of the policy, each once."""
        return tuple(step for branch in self.branches for step in branch if step.trained)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(call for turn in self.turns for call in turn.calls)


def is_usable(number: float) -> bool:
    """Whether training can use this number: not NaN, and at most LARGEST_REWARD in magnitude."""
    return abs(number) <= LARGEST_REWARD


def plain_text(text: str) -> str:
    """Text that files and terminals accept: halves of surrogate pairs, which JSON may hold, and control characters
    other than tabs and line breaks become U+FFFD."""
    if text.isprintable():
        return text
    return CONTROL.sub("\ufffd", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
