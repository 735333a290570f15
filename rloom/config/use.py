"""The types of uses.py: a row of its table, and what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloom.config.algorithm_needs import Needs, needs_old_logprobs
from rloom.config.schema import Config


@dataclass(frozen=True)
class Run:
    """What determines whether a key is used."""

    config: Config
    needs: Needs
    on_cpu: bool

    @property
    def has_reference_model(self) -> bool:
        """With LoRA the reference is the actor without its adapter."""
        return self.config.uses_reference and not self.config.actor_rollout_ref.model.has_lora

    @property
    def scores_with_the_actor(self) -> bool:
        compares_adapter = self.config.uses_reference and self.config.actor_rollout_ref.model.has_lora
        return compares_adapter or needs_old_logprobs(self.config, self.needs.loss)


@dataclass(frozen=True)
class Use:
    keys: Sequence[str]  # keys, or whole sections
    used: Callable[[Run], bool]
    otherwise: str  # the reason if not used, and the way out; {key} is replaced by key=value
    error: bool = False
    switch: str | None = None  # if the user set this key too, a notice replaces the error
    harmless: Sequence[Any] = ()  # values that are not reported
    apart_from: Sequence[str] = ()


@dataclass(frozen=True)
class WithoutEffect:
    """Sentences about keys that the user set and this run does not use."""

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
