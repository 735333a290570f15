"""Whether a rollout engine computes a family correctly: its log-probs compared with the model's own forward pass."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloom.families.training import largest_difference, own_logits, two_samples
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.load import first_line
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Rollout, Sampling
from rloom.rollout.hf import HfRollout
from rloom.rollout.native.engine import NativeRollout

NEW_TOKENS = 6
TOLERANCE = 3e-3  # relative to the largest log-prob: state-space layers sum over single tokens otherwise than over many


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
