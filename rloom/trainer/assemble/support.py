"""Which passes and engines compute this run's models rightly: asked of a small twin, before any weights are read."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from rloom.config.context import check_context
from rloom.config.schema import Config
from rloom.errors import ModelError
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.load import ModelSource, check_folder, first_line, read_config
from rloom.models.verify import TrainingSupport, examine, quiet_transformers, small_model
from rloom.trainer.assemble.inputs import policy_source
from rloom.trainer.assemble.rollout_support import examine_hf, examine_native

log = logging.getLogger(__name__)
ENGINE_KEY = "actor_rollout_ref.rollout.name"
T = TypeVar("T")
FAMILIES = "docs/models.md lists the families that are right"


@dataclass(frozen=True)
class SampleLayout:
    """How the samples of a pass lie, and the attention that goes with it."""

    packed: bool
    attention: str


@dataclass(frozen=True)
class HfGeneration:
    """How generate() of transformers is right for a family."""

    attention: str
    pads_prompts: bool


class Family:
    """The models of one configuration. What was tried is kept, the twin is not: some are large."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self.name = source, f"{source.key}={source.path}"
        try:
            self.config: PreTrainedConfig = read_config(source)
        except Exception as error:  # transformers raises many kinds
            raise ModelError(f"{self.name}: its config.json cannot be read: {first_line(error)}") from error
        if source.longest is not None:
            context = getattr(self.config.get_text_config(), "max_position_embeddings", None)
            check_context(context, source.longest, self.name)
        self.training: TrainingSupport = self.tried(examine)

    def tried(self, examination: Callable[[PreTrainedModel], T]) -> T:
        source = self.source
        with quiet_transformers():
            try:
                twin = small_model(self.config, longest=source.longest, trust_remote_code=source.trust_remote_code)
            except ModelError as error:
                raise ModelError(f"{self.described}: {error}; {FAMILIES}") from error
            return examination(twin)

    @property
    def described(self) -> str:
        return f"{self.name} ({self.config.model_type})"

    def layout(self, *, packed: bool) -> SampleLayout:
        """Packed where that is asked for and right, else a row for each sample, where that is right."""
        found = self.training
        if packed and found.packed is None:
            return SampleLayout(True, RLOOM_ATTENTION)
        if found.padded is not None:
            raise ModelError(
                f"{self.described}: rloom does not compute this family rightly. Packed samples: {found.packed}. "
                f"Padded samples: {found.padded}. Use a model of another family; {FAMILIES}"
            )
        if packed:
            self.note_rows()
        return SampleLayout(False, found.attention)

    @cache  # noqa: B019 (families live as long as the process)
    def note_rows(self) -> None:
        """Once a process, not once a role."""
        log.info(
            f"{self.described}: packed samples are not right for this family ({self.training.packed}); each sample "
            "gets a row of its own, padded, as with use_remove_padding=False"
        )

    @cache  # noqa: B019
    def hf_generation(self) -> HfGeneration:
        attention, fault = self.training.own_attention, None
        for pads_prompts in (True, False):
            fault = self.tried(partial(examine_hf, attention=attention, pads_prompts=pads_prompts))
            if fault is None:
                return HfGeneration(attention, pads_prompts)
        raise ModelError(
            f"{ENGINE_KEY}=hf: generate() of transformers does not compute {self.described} rightly ({fault}); use a "
            f"model of another family; {FAMILIES}"
        )

    def check_native(self) -> None:
        fault = self.training.packed or self.tried(examine_native)
        if fault is not None:
            raise ModelError(
                f"{ENGINE_KEY}=native: the native engine does not compute {self.described} rightly ({fault}); use "
                f"{ENGINE_KEY}=hf"
            )


TRIED: dict[str, Family] = {}


def family_of(source: ModelSource) -> Family:
    identity = json.dumps([source.location, source.longest, source.trust_remote_code, dict(source.overrides)])
    if identity not in TRIED:
        TRIED[identity] = Family(source)
    return TRIED[identity]


def check_policy_family(config: Config) -> None:
    """Before weights are read: is there a way to train this model, and to generate with it?"""
    source = policy_source(config)
    check_folder(source)
    family = family_of(source)
    family.layout(packed=config.actor_rollout_ref.model.use_remove_padding)
    if config.actor_rollout_ref.rollout.name == "native":
        family.check_native()
    else:
        family.hf_generation()
