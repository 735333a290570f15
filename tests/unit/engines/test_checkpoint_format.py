"""Weights under the names of a checkpoint: those of the file that transformers itself writes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from rloom.models.checkpoint_format import CheckpointFormat
from tests.helpers import FAMILIES, SHAPE, policy, save_model

EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=24),
    "mixtral": lambda: MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4),
}


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_every_entry_of_a_checkpoint_is_made_bit_for_bit(tmp_path: Path, family: str) -> None:
    network = policy(save_model(tmp_path, (FAMILIES | MIXTURES)[family]()), packed=False)
    convert = CheckpointFormat(network)
    found = dict(convert((name, parameter.detach()) for name, parameter in network.module.named_parameters()))
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert convert.complete
    experts = [name for name in found if "experts" in name]
    assert len(experts) == (2 * 4 * 3 if family in MIXTURES else 0)  # layers × experts × matrices


def test_a_model_that_saves_buffers_is_not_complete(tmp_path: Path) -> None:
    network = policy(save_model(tmp_path, FAMILIES["qwen2"]()))
    network.decoder.base.register_buffer("router_bias", torch.zeros(3))
    assert not CheckpointFormat(network).complete
