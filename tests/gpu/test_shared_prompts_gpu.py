"""Shared prompts on a GPU: layers compiled for all lengths, and torch's varlen kernel with more keys than queries."""

import copy
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from rloom.batch import TrainBatch
from rloom.models.network import PolicyNetwork
from tests.helpers import FAMILIES, VOCABULARY, a_batch, policy, save_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # the compiler imports what is deprecated
DEVICE = torch.device("cuda", 0)


def groups_of_any_length(seed: int) -> TrainBatch:
    """Only tokens, lengths and masks are read."""
    draw = Random(seed)
    samples, prompts = [], []
    for _ in range(draw.randint(1, 6)):
        prompt = draw.choices(range(3, VOCABULARY), k=draw.randint(1, 200))
        for _ in range(draw.randint(1, 9)):
            samples.append(prompt + draw.choices(range(3, VOCABULARY), k=draw.randint(1, 300)))
            prompts.append(len(prompt))
    mask = [torch.arange(len(sample)) >= prompt for sample, prompt in zip(samples, prompts, strict=True)]
    rows = torch.zeros(len(samples), dtype=torch.long)
    return replace(
        a_batch().select(rows),
        tokens_T=torch.tensor([token for sample in samples for token in sample]),
        mask_T=torch.cat(mask),
        length_N=torch.tensor([len(sample) for sample in samples]),
    )


def outputs_and_gradient(network: PolicyNetwork, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    on_device = replace(batch, tokens_T=batch.tokens_T.to(DEVICE))
    weight_T = torch.randn(len(batch.tokens_T), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    output_T = network.token_outputs(batch, on_device).output_T
    (output_T * weight_T).sum().backward()
    gradients = [p.grad.float().flatten() for p in network.module.parameters() if p.grad is not None]
    network.module.zero_grad()
    return output_T.detach(), torch.cat(gradients)


def test_passes_of_any_length_are_those_of_samples_that_compute_their_own_prompts(tmp_path: Path) -> None:
    own = policy(save_model(tmp_path, FAMILIES["qwen2"]()))
    own.cast(torch.bfloat16)
    shared = copy.deepcopy(own)
    shared.decoder.shares_prompts = True
    for network in (own, shared):
        network.module.to(DEVICE)
        network.decoder.train()
        network.compile()
    for seed in range(12):
        batch = groups_of_any_length(seed)
        (expected_T, expected), (found_T, found) = (outputs_and_gradient(one, batch) for one in (own, shared))
        torch.testing.assert_close(found_T, expected_T, rtol=0, atol=0.02)
        assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.999
