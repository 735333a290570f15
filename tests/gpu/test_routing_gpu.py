"""Rollout routing replay on a GPU: recorded by captured graphs and compiled layers, replayed in bfloat16."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import ROUTING_MISMATCH, PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Advantages, Batch, TrainBatch
from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.models.network import PolicyNetwork
from rloom.packing import MicroBatching
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native.engine import NativeRollout
from tests.helpers import ADAMW, VOCABULARY, eager_model, policy, save_model
from tests.moe import chosen_by_transformers
from tests.requests import trajectories

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CUDA = torch.device("cuda")
WHOLE = MicroBatching(tokens=10_000)
REINFORCE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "kl")
# prompts that answers share, more answers than slots, prompts of more than one page of 128 tokens
PROMPTS = [tuple(3 + (7 * row + at) % (VOCABULARY - 3) for at in range(6 + 60 * row)) for row in range(4)]
REQUESTS = [Request(prompt, Sampling(40), seed) for seed, prompt in enumerate(PROMPTS * 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save_model(tmp_path_factory.mktemp("qwen3_moe"), config)


def engine(network: PolicyNetwork, dtype: torch.dtype, *, compiled: bool = False) -> LocalEngine:
    placement = Placement(CUDA, dtype)
    return LocalEngine(network, placement, scoring=WHOLE, training=WHOLE, optimizer=ADAMW, compiled=compiled)


def generated(network: PolicyNetwork, owner: LocalEngine, *, eager: bool = False) -> list[Completion]:
    rollout = NativeRollout(
        network,
        owner=owner,
        max_sequences=8,
        max_prefill_tokens=512,
        memory_share=0.3,
        free_cache=True,
        eager=eager,
        records_routing=True,
    )
    completions = [completion for _, completion in sorted(rollout.generate(REQUESTS), key=lambda pair: pair[0])]
    assert rollout.decoder is not None and bool(rollout.decoder.graphs.graphs) != eager
    return completions


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("eager", "dtype", "same"), [(True, torch.float32, 0.99), (False, torch.bfloat16, 0.9)])
def test_recorded_experts_are_those_of_transformers(
    folder: Path, eager: bool, dtype: torch.dtype, same: float, compiled: bool
) -> None:
    """Of transformers in float32, but for choices that rounding decides. Graphs capture experts in bfloat16 only."""
    network, model = policy(folder, replays_routing=True), eager_model(folder)
    completions = generated(network, engine(network, dtype, compiled=compiled), eager=eager)
    for request, completion in zip(REQUESTS, completions, strict=True):
        expected = chosen_by_transformers(model, [*request.tokens, *completion.tokens_L.tolist()])[:-1]
        found = completion.experts_LMK
        assert found is not None and (found[-1] == -1).all()
        assert float((found[:-1].sort(-1).values == expected.sort(-1).values).float().mean()) > same


@pytest.mark.parametrize("compiled", [False, True])
def test_replay_lowers_the_mismatch_of_bfloat16_and_float32(folder: Path, compiled: bool) -> None:
    network = policy(folder, replays_routing=True)
    batch = Batch.pack(trajectories(REQUESTS, generated(network, engine(network, torch.bfloat16, compiled=compiled))))
    trained = policy(folder, replays_routing=True)
    trained.decoder.enable_checkpointing()
    trainer = engine(trained, torch.float32, compiled=compiled)
    found = {}
    for name, scored in (("without", batch.without_experts()), ("with", batch)):
        found[name] = float((trainer.score(scored) - batch.rollout_logprobs_T)[batch.mask_T].abs().mean())
    zeros_T = torch.zeros(len(batch.tokens_T))
    train_batch = TrainBatch.of(batch, Advantages(zeros_T + 1.0, zeros_T))
    metrics = {}
    for name, one in (("without", train_batch.without_experts()), ("with", train_batch)):
        trainer.forward_backward(one, REINFORCE, Counts.of(one, 40))
        metrics[name] = trainer.optim_step(0.0).metrics
    print("log-probs", found, "routing", metrics["with"][ROUTING_MISMATCH])
    assert found["with"] < 0.6 * found["without"]
    assert 0.001 < metrics["with"][ROUTING_MISMATCH] < 0.2 and ROUTING_MISMATCH not in metrics["without"]
