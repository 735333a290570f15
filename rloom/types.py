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
class Sample:
    """One answer, as a reward function receives it."""

    data_source: str
    prompt: str
    response: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # the prompt's chat
    prompt_tokens: tuple[int, ...] = ()
    response_tokens: tuple[int, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)  # as in Prompt
    conversation: tuple[Message, ...] = ()  # all messages of an episode of several turns
    environment_reward: float | None = None  # of that episode
    turns: tuple[Message, ...] = ()  # of that episode after the prompt, with the calls of tools apart from the text
    environment_state: Mapping[str, Any] = field(default_factory=dict)  # plain attributes of the user's environment


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


def is_usable(number: float) -> bool:
    """Whether training can use this number: not NaN, and at most LARGEST_REWARD in magnitude."""
    return abs(number) <= LARGEST_REWARD


def plain_text(text: str) -> str:
    """Text that files and terminals accept: halves of surrogate pairs, which JSON may hold, and control characters
    other than tabs and line breaks become U+FFFD."""
    if text.isprintable():
        return text
    return CONTROL.sub("\ufffd", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
