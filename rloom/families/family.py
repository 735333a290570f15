"""Which passes and engines compute a family of models correctly, tried on a small model before weights are read."""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rloom.engines.ulysses import SequenceParallelGroup
from rloom.errors import ConfigError, ModelError
from rloom.families.training import (
    TrainingSupport,
    check_split,
    check_training,
    largest_difference,
    own_logits,
    small_model,
    two_samples,
)
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.limits import check_context
from rloom.models.load import first_line, quiet_transformers, read_config
from rloom.models.network import PolicyNetwork
from rloom.models.source import EMBEDDED_FOLDER, ModelSource
from rloom.rollout.base import Completion, Request, Rollout, Sampling
from rloom.rollout.hf import HfRollout
from rloom.rollout.native.engine import NativeRollout

log = logging.getLogger(__name__)
ENGINE_KEY = "actor_rollout_ref.rollout.name"
T = TypeVar("T")
NEW_TOKENS = 6
TOLERANCE = 3e-3  # relative to the largest log-prob: state-space layers sum over single tokens otherwise than over many
FAMILIES = "docs/models.md lists the families that are right"


@dataclass(frozen=True)
class SampleLayout:
    """Whether the samples of a pass are packed or padded, and the attention implementation for it."""

    packed: bool
    attention: str


@dataclass(frozen=True)
class HfGeneration:
    """How generate() of transformers computes a family correctly."""

    attention: str
    pads_prompts: bool


class Family:
    """The models of one config.json. Results are kept; the small models are not, since some are large."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self.name = source, f"{source.key}={source.path}"
        try:
            self.config: PreTrainedConfig = read_config(source)
        except Exception as error:  # transformers raises many kinds
            raise ModelError(f"{self.name}: its config.json cannot be read: {first_line(error)}") from error
        if source.longest is not None:
            context = getattr(self.config.get_text_config(), "max_position_embeddings", None)
            check_context(context, source.longest, self.name)
        self.training: TrainingSupport = self.tried(check_training)

    def tried(self, check: Callable[[PreTrainedModel], T], *, ranks: int = 1) -> T:
        """`ranks`: that divide the small model's attention heads."""
        source = self.source
        with quiet_transformers():
            try:
                model = small_model(
                    self.config, longest=source.longest, ranks=ranks, trust_remote_code=source.trust_remote_code
                )
            except ModelError as error:
                raise ModelError(f"{self.described}: {error}; {FAMILIES}") from error
            return check(model)

    @property
    def described(self) -> str:
        return f"{self.name} ({self.config.model_type})"

    def layout(self, *, packed: bool) -> SampleLayout:
        """Packed if requested and correct, else padded if that is correct."""
        found = self.training
        if packed and found.packed is None:
            return SampleLayout(True, RLOOM_ATTENTION)
        if found.padded is not None:
            raise ModelError(
                f"{self.described}: rloom does not compute this family correctly. Packed samples: {found.packed}. "
                f"Padded samples: {found.padded}. Use a model of another family; {FAMILIES}"
            )
        if packed:
            self.note_rows()
        return SampleLayout(False, found.attention)

    @cache  # noqa: B019 (families live as long as the process)
    def note_rows(self) -> None:
        """Cached: logged once in a process, not once for each role."""
        log.info(
            f"{self.described}: packed samples are not correct for this family ({self.training.packed}); each sample "
            "gets a row of its own, padded, as with use_remove_padding=False"
        )

    def check_split(self, group: SequenceParallelGroup, key: str) -> None:
        """Collective: the ranks of a group compute samples together whose tokens they share."""
        fault = self.tried(partial(check_split, group=group), ranks=group.ranks)
        if fault is not None:
            raise ConfigError(
                f"{key}={group.ranks}: ranks that split the tokens of samples do not compute {self.described} "
                f"correctly ({fault}); use 1"
            )

    @cache  # noqa: B019
    def hf_generation(self) -> HfGeneration:
        attention, fault = self.training.own_attention, None
        for pads_prompts in (True, False):
            fault = self.tried(partial(check_hf, attention=attention, pads_prompts=pads_prompts))
            if fault is None:
                return HfGeneration(attention, pads_prompts)
        raise ModelError(
            f"{ENGINE_KEY}=hf: generate() of transformers does not compute {self.described} correctly ({fault}); use a "
            f"model of another family; {FAMILIES}"
        )

    def check_native(self) -> None:
        fault = self.training.packed or self.tried(check_native)
        if fault is not None:
            raise ModelError(
                f"{ENGINE_KEY}=native: the native engine does not compute {self.described} correctly ({fault}); use "
                f"{ENGINE_KEY}=hf"
            )


TRIED: dict[str, Family] = {}


def family_of(source: ModelSource) -> Family:
    identity = json.dumps([source.location, source.longest, source.trust_remote_code, dict(source.overrides)])
    if identity not in TRIED:
        TRIED[identity] = Family(source)
    return TRIED[identity]


# Rollout engines: their log-probs compared with the model's own forward pass


class OnCpu:
    """Weights that stay on the CPU."""

    device = torch.device("cpu")

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()


def check_native(model: PreTrainedModel) -> str | None:
    """What is wrong with the native engine's answers; None if nothing is."""
    model.set_attn_implementation(RLOOM_ATTENTION)
    network = PolicyNetwork(model, packed=True)
    engine = NativeRollout(
        network, owner=OnCpu(), max_sequences=8, max_prefill_tokens=64, memory_share=1.0, free_cache=True
    )
    return fault_of(engine, model)


def check_hf(model: PreTrainedModel, attention: str, *, pads_prompts: bool) -> str | None:
    """What generate() of transformers does wrong with this attention implementation; None: nothing."""
    model.set_attn_implementation(attention)
    engine = HfRollout(
        PolicyNetwork(model, packed=False),
        owner=OnCpu(),
        pad_id=0,
        max_sequences=8,
        generate_kwargs={},
        attention=attention,
        pads_prompts=pads_prompts,
    )
    return fault_of(engine, model)


def fault_of(engine: Rollout, model: PreTrainedModel) -> str | None:
    """Log-probs of greedy answers to two prompts of different length."""
    prompts = two_samples(model)
    greedy = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)
    requests = [Request(tuple(prompt.tolist()), greedy, seed=0) for prompt in prompts]
    try:
        found = dict(engine.generate(requests))
        expected = own_logprobs(model, prompts, [found[i] for i in range(len(prompts))])
        written = torch.cat([found[i].logprobs_L for i in range(len(prompts))])
    except Exception as error:  # a family's code may raise anything on arguments that it does not expect
        return first_line(error)
    finally:
        model.set_attn_implementation("eager")
    apart = largest_difference(written, expected)
    return f"log-probs differ from the model's own by {apart:.2g} of their size" if apart > TOLERANCE else None


def own_logprobs(model: PreTrainedModel, prompts: Sequence[Tensor], answers: Sequence[Completion]) -> Tensor:
    whole = [torch.cat([prompt, answer.tokens_L]) for prompt, answer in zip(prompts, answers, strict=True)]
    found = []
    for prompt, tokens, logits in zip(prompts, whole, own_logits(model, whole), strict=True):
        distribution = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(distribution.gather(1, tokens[len(prompt) :, None]).squeeze(1))
    return torch.cat(found)


def write_expert_model(folder: Path) -> Sequence[str]:
    """Random weights, with the tokenizer and the shape of the embedded model, and a reward that differs between its
    random answers. Returns the keys of both."""
    shutil.copytree(EMBEDDED_FOLDER / "model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    shape = json.loads((EMBEDDED_FOLDER / "model" / "config.json").read_text())
    names = [
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size"),
        # no pad_token_id: random answers have it, and in transformers its embedding gets no gradient, in megatron one
        *("max_position_embeddings", "eos_token_id"),
    ]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **{name: shape[name] for name in names}, head_dim=32, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    reward = folder / "reward.py"
    reward.write_text("def compute_score(solution_str, **others): return len(set(solution_str)) / 10\n")
    return f"actor_rollout_ref.model.path={folder}", f"custom_reward_function.path={reward}"
