"""Data types without tensors. (`batch.py` has those with tensors.)

Imports no torch: reward workers import this file and start in milliseconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


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


@dataclass(frozen=True)
class Sample:
    """One answer, as a reward function receives it."""

    data_source: str
    prompt: str
    response: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()  # of the prompt
    prompt_tokens: tuple[int, ...] = ()
    response_tokens: tuple[int, ...] = ()


SampleGroup = tuple[Sample, ...]  # answers to one prompt that are scored in one call


@dataclass(frozen=True)
class Score:
    """A value with its parts, or a failure with its reason. A failure is not a score of 0."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)  # further values, averaged into the metrics
    prediction: str | None = None  # the answer as parsed by the rule, for majority votes
    reason: str | None = None  # why there is no value
    detail: str | None = None  # what the reward found, for dumps

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a Score is either a value or a failure with a reason")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a Score must be finite, got {self.value}")

    @classmethod
    def failed(cls, reason: str) -> "Score":
        return cls(value=None, reason=reason)

    @property
    def ok(self) -> bool:
        return self.value is not None

    @property
    def accuracy(self) -> float | None:
        """The value for validation: the part `acc` if there is one (rules that score -1 or 1), else the value."""
        return None if self.value is None else self.parts.get("acc", self.value)
