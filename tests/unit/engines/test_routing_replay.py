"""The trainer uses the experts that it is given: their weights are its own router's, and gradients reach the router."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import silu

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import ROUTING_MISMATCH, PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TrainBatch
from rloom.engines.distributed import rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.local import LocalEngine
from rloom.engines.ulysses import check_heads
from rloom.errors import ConfigError, ModelError
from rloom.models.load import Lora
from rloom.models.network import PolicyNetwork
from rloom.models.routing import RoutingRecord, RoutingReplay, RoutingShape, routed
from rloom.packing import MicroBatching
from tests.engine_subjects import local_gradients, sharded_gradients
from tests.helpers import ADAMW, CPU, Weights, a_batch, assert_near, policy, save_model
from tests.moe import EXPERTS, MOE_FAMILIES

REINFORCE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "kl")
MICRO = MicroBatching(tokens=30)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), MOE_FAMILIES[family]())
        return made[family]

    return folder


def replaying(folder: Path, **settings: Any) -> PolicyNetwork:
    return policy(folder, replays_routing=True, **settings)


def own_choices(network: PolicyNetwork, batch: TrainBatch) -> Tensor:
    shape = network.decoder.install_replay()
    record = RoutingRecord(len(batch.tokens_T), shape, CPU.device)
    with torch.no_grad():
        network.decoder.hidden(batch.tokens_T, batch.length_N, record)
    return record.experts_TMK


def other_choices(own_TMK: Tensor) -> Tensor:
    """Each expert's successor: distinct where the own ones are distinct."""
    return ((own_TMK + 1) % EXPERTS).to(torch.int16)


def engine(network: PolicyNetwork) -> LocalEngine:
    return LocalEngine(network, CPU, scoring=MICRO, training=MICRO, optimizer=ADAMW)


def gradients_of(network: PolicyNetwork, batch: TrainBatch) -> Weights:
    found = engine(network)
    found.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
    return local_gradients(found)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_replaying_the_own_choices_changes_no_bit(moe_folder: Callable[[str], Path], family: str, packed: bool) -> None:
    folder, batch = moe_folder(family), a_batch()
    network = replaying(folder, packed=packed)
    expected_T = engine(policy(folder, packed=packed)).score(batch)
    assert torch.equal(engine(network).score(batch), expected_T)  # replayable, and nothing is replayed
    with_own = replace(batch, experts_TMK=own_choices(network, batch))
    assert torch.equal(engine(network).score(with_own), expected_T)


@pytest.mark.parametrize(("family", "normalised"), [("qwen3_moe", True), ("mixtral", True), ("olmoe", False)])
def test_given_experts_are_mixed_with_the_routers_own_probabilities(
    moe_folder: Callable[[str], Path], family: str, normalised: bool
) -> None:
    network = replaying(moe_folder(family))
    block: Any = network.decoder.layers[0].mlp
    hidden_TH = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    shape = network.decoder.install_replay()
    given_TMK = torch.tensor([0, 5, 3][: shape.experts], dtype=torch.int16).expand(5, *shape).clone()
    given_TMK[4] = -1
    replay = RoutingReplay(given_TMK, shape)
    with torch.no_grad(), routed(replay):
        found_TH = block(hidden_TH[None])[0]
    with torch.no_grad():
        own_TH, own_TK = block(hidden_TH[None])[0], block.gate(hidden_TH)[2]
        probability_TE = (hidden_TH @ block.gate.weight.T).softmax(-1)
        for token in range(4):
            given = given_TMK[token, 0].tolist()
            weights = probability_TE[token, given]
            weights = weights / weights.sum() if normalised else weights
            mixed_H = torch.zeros(32)
            for weight, expert in zip(weights, given, strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ hidden_TH[token]).chunk(2)
                mixed_H += weight * (block.experts.down_proj[expert] @ (silu(gate) * up))
            torch.testing.assert_close(found_TH[token], mixed_H)
            differing = len(set(given) - set(own_TK[token].tolist()))
            assert replay.mismatch_T[token].item() == pytest.approx(differing / (shape.layers * shape.experts))
    torch.testing.assert_close(found_TH[4], own_TH[4])  # -1: the router's own choice
    assert replay.mismatch_T[4] == 0


def test_gradients_reach_the_router_and_checkpointing_recomputes_with_the_given_experts(
    moe_folder: Callable[[str], Path],
) -> None:
    folder, batch = moe_folder("qwen3_moe"), a_batch()
    given = replace(batch, experts_TMK=other_choices(own_choices(replaying(folder), batch)))
    expected = gradients_of(replaying(folder), given)
    checkpointed = replaying(folder)
    checkpointed.decoder.enable_checkpointing()
    assert_near(gradients_of(checkpointed, given), expected, relative=1e-6)
    router = "model.layers.0.mlp.gate.weight"
    without = gradients_of(replaying(folder), batch)
    assert float(expected[router].norm()) > 0
    # another gradient than that of the own choices, which a layer recomputed without the replay would have
    assert float((expected[router] - without[router]).norm()) > 0.5 * float(without[router].norm())


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_engine_replays_as_one_process_does(moe_folder: Callable[[str], Path]) -> None:
    folder, batch = moe_folder("mixtral"), a_batch()
    given = replace(batch, experts_TMK=other_choices(own_choices(replaying(folder), batch)))
    plain, checkpointed = engine(replaying(folder)), replaying(folder)
    checkpointed.decoder.enable_checkpointing()
    mesh = rank_mesh(CPU.device)
    sharded = FSDPEngine(checkpointed, CPU, mesh, scoring=MICRO, training=MICRO, optimizer=ADAMW)
    scores_T = plain.score(given)
    torch.testing.assert_close(sharded.score(given), scores_T, rtol=0, atol=1e-6)
    assert float((scores_T - plain.score(batch)).abs().max()) > 0.1
    for one in (plain, sharded):
        one.forward_backward(given, REINFORCE, Counts.of(given, 16))
    assert_near(sharded_gradients(sharded), local_gradients(plain), relative=1e-6)
    metrics = plain.optim_step(0.0).metrics
    assert sharded.optim_step(0.0).metrics[ROUTING_MISMATCH] == pytest.approx(metrics[ROUTING_MISMATCH])


def test_the_share_of_differing_choices_is_a_metric_of_the_update(moe_folder: Callable[[str], Path]) -> None:
    """The second of two layers gets one other expert of two: a quarter, for the tokens before those in the loss."""
    network, batch = replaying(moe_folder("mixtral")), a_batch()
    own_TMK = own_choices(network, batch)
    given_TMK = own_TMK.clone()
    absent_T = torch.tensor([min(set(range(EXPERTS)) - set(row)) for row in own_TMK[:, 1].tolist()])
    given_TMK[:, 1, 0] = absent_T.to(torch.int16)
    found = engine(network)
    for experts_TMK, share in ((own_TMK, 0.0), (given_TMK, 0.25)):
        found.forward_backward(replace(batch, experts_TMK=experts_TMK), REINFORCE, Counts.of(batch, 16))
        assert found.optim_step(0.0).metrics[ROUTING_MISMATCH] == pytest.approx(share, abs=1e-6)
    found.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
    assert ROUTING_MISMATCH not in found.optim_step(0.0).metrics


def test_the_reference_of_a_kl_over_the_vocabulary_chooses_its_own_experts(
    moe_folder: Callable[[str], Path],
) -> None:
    """The policy's adapter is new: with its own choices the KL is 0, with others it is not."""
    network, batch = replaying(moe_folder("mixtral"), lora=Lora(rank=4, target_modules=["q_proj", "v_proj"])), a_batch()
    own_TMK = own_choices(network, batch)
    for experts_TMK, least, most in ((own_TMK, 0.0, 1e-6), (other_choices(own_TMK), 0.01, 100.0)):
        with torch.no_grad():
            given = replace(batch, experts_TMK=experts_TMK)
            kl_T = network.token_outputs(given, given, reference=network).kl_T
        assert kl_T is not None and least <= float(kl_T.mean()) <= most


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_share_their_code_and_replay_in_each_layer(tmp_path: Path) -> None:
    config = MOE_FAMILIES["mixtral"]()
    config.num_hidden_layers = 5
    folder = save_model(tmp_path, config)
    plain, compiled = replaying(folder), replaying(folder)
    torch._dynamo.reset()
    counters.clear()
    for network in (plain, compiled):
        network.decoder.base.set_experts_implementation("batched_mm")  # without loops over experts
    for layer in compiled.decoder.layers:
        layer.compile = partial(torch.nn.Module.compile, layer, backend="aot_eager")  # type: ignore[method-assign]
    compiled.compile()
    for samples in (8, 5):
        batch = a_batch(samples).select(range(samples))
        given = replace(batch, experts_TMK=other_choices(own_choices(plain, batch)))
        found, expected = (one.token_outputs(given, given) for one in (compiled, plain))
        torch.testing.assert_close(found.output_T, expected.output_T)
        torch.testing.assert_close(found.routing_mismatch_T, expected.routing_mismatch_T)
    assert counters["stats"]["unique_graphs"] == 1


def test_choices_of_another_model_and_a_divided_sequence_are_refused(moe_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="experts of 3 layers, 2 per token; the trained model has 2 and 2"):
        RoutingReplay(torch.zeros(4, 3, 2, dtype=torch.int16), RoutingShape(2, 2))
    network, key = replaying(moe_folder("mixtral")), "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    check_heads(network, 1, 2, key)
    with pytest.raises(ConfigError, match=f"{key}=2: .*router_replay.mode=R3.*use 1, or mode=disabled"):
        check_heads(network, 2, 2, key)
