"""The nouns made of text. (Nouns made of tensors live in `batch.py`.)

No torch here: reward workers import this file and start in milliseconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, read, rendered and tokenized."""

    index: int  # its row in the data set, stable across epochs and resumes
    messages: tuple[Message, ...]
    text: str  # what the chat template made of the messages
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One answer, as a reward gets it."""

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
    """A value with its parts, or a failure with its reason. A failure is not a zero."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)  # further numbers, averaged into the metrics
    prediction: str | None = None  # the answer as the rule read it, for majority votes
    reason: str | None = None  # why there is no value

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
        """What validation counts: the part `acc` where there is one, as of rules that score -1 or 1; else the value."""
        return None if self.value is None else self.parts.get("acc", self.value)
