"""Families on a GPU: the native engine with graphs, and packed passes in bfloat16, beside the model's own forward."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rloom.families.family import own_logprobs
from rloom.families.training import check_training, largest_difference, own_logits, two_samples
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Request, Sampling
from rloom.rollout.native.engine import NativeRollout
from tests.families import CAUSAL_FAMILIES, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of old families


class OnGpu:
    device = torch.device("cuda", 0)

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_the_native_engine_writes_the_log_probs_of_the_models_own_forward(family: str) -> None:
    model = tiny_model(family)
    if check_training(model).packed is not None:
        pytest.skip("refused")
    on_gpu = copy.deepcopy(model).cuda()
    on_gpu.set_attn_implementation("rloom")
    engine = NativeRollout(
        PolicyNetwork(on_gpu, packed=True),
        owner=OnGpu(),
        max_sequences=8,
        max_prefill_tokens=64,
        memory_share=0.01,
        free_cache=True,
    )
    prompts = two_samples(model)
    greedy = Sampling(max_new_tokens=20, temperature=0.0)
    requests = [Request(tuple(prompt.tolist()), greedy, seed=0) for prompt in prompts for _ in range(2)]
    answers = dict(engine.generate(requests))
    written = torch.cat([answers[i].logprobs_L for i in (0, 2)])
    expected = own_logprobs(model, prompts, [answers[0], answers[2]])
    assert largest_difference(written, expected) < 3e-3
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(answers[first].tokens_L, answers[second].tokens_L)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_moe", "cohere2"])
def test_packed_passes_in_bfloat16_are_near_those_of_float32(family: str) -> None:
    model = tiny_model(family)
    samples = two_samples(model)
    expected = torch.cat(own_logits(model, samples))
    on_gpu: PreTrainedModel = copy.deepcopy(model)
    on_gpu.set_attn_implementation("rloom")
    network = PolicyNetwork(on_gpu, packed=True)
    network.cast(torch.bfloat16)
    on_gpu.cuda()
    network.decoder.train()
    tokens_T, length_N = torch.cat(samples).cuda(), torch.tensor([len(tokens) for tokens in samples])
    logits = network.logits(network.decoder.hidden(tokens_T, length_N))
    logits.float().logsumexp(-1).sum().backward()
    assert largest_difference(logits.detach().float().cpu(), expected) < 0.1
    gradients = [parameter.grad for parameter in on_gpu.parameters() if parameter.grad is not None]
    assert len(gradients) > 10 and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
