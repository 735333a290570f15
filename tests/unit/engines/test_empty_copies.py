"""Copies for generation that start without weights: the first sync sends all that a model consists of."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rloom.engines.base import Placement
from rloom.engines.distributed import rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.weight_sync import WeightSync
from rloom.errors import ModelError
from rloom.launch.early_checks import layout_of
from rloom.launch.worker import GenerationCopy, Rendezvous, Worker
from rloom.models.load import Lora, load_causal_lm
from rloom.models.network import PolicyNetwork
from rloom.models.source import ModelSource
from rloom.rollout.base import copy_weights
from rloom.runtime.placement import REFERENCE, ROLLOUT
from rloom.transfer import tensors_of
from tests.engine_subjects import WHOLE
from tests.helpers import configured, engine_of
from tests.ranks import RankProcesses

CPU = torch.device("cpu")
TIED, MIXTURE = "gemma", "qwen3_moe"


class Loader:
    """A rollout engine on a copy."""

    def __init__(self, network: PolicyNetwork) -> None:
        self.network, self.module = network, network.module

    def load_weights(self, weights: Any, version: int) -> None:
        copy_weights(weights, self.module)

    def held_weights(self) -> dict[str, Tensor]:
        return tensors_of(self.module)


def network_of(folder: Path, lora: Lora | None, *, empty: bool = False) -> PolicyNetwork:
    """With a buffer that is saved with the weights, as the routers of some families have, and one of whole numbers."""
    network = PolicyNetwork(load_causal_lm(ModelSource(str(folder)), lora=lora, empty=empty), packed=True)
    network.decoder.body.register_buffer("correction", torch.tensor([0.0, 0.0] if empty else [1.5, -2.5]))
    network.decoder.body.register_buffer("order", torch.tensor([0, 0] if empty else [2, 7]))
    return network


def empty_copy(folder: Path, lora: Lora | None, dtype: torch.dtype = torch.float32) -> Loader:
    network = network_of(folder, lora, empty=True)
    GenerationCopy(network, Placement(CPU, dtype), compiled=False)
    for parameter in network.module.parameters():
        parameter.data.fill_(float("nan"))  # what uninitialised memory may be
    return Loader(network)


def assert_complete(found: Loader, folder: Path, lora: Lora | None, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(1)
    expected, held = tensors_of(network_of(folder, lora).module), found.held_weights()
    assert held.keys() == expected.keys()
    parameters = dict(found.module.named_parameters())
    for name, tensor in held.items():
        wanted = expected[name].to(dtype) if name in parameters else expected[name]
        assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype, name


@pytest.mark.parametrize(("family", "lora"), [(TIED, None), (MIXTURE, None), (TIED, Lora(rank=4))])
def test_the_first_sync_fills_a_copy_that_has_nothing(
    model_folder: Callable[[str], Path], family: str, lora: Lora | None
) -> None:
    folder = model_folder(family)
    torch.manual_seed(1)
    engine, copy = engine_of(network_of(folder, lora)), empty_copy(folder, lora)
    WeightSync(engine, copy).sync(0, frozen=True)
    assert_complete(copy, folder, lora)
    own = copy.network.decoder.base
    assert (own.get_output_embeddings().weight is own.get_input_embeddings().weight) == (family == TIED)


def test_a_buffer_that_arrives_changed_is_an_error(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(TIED)
    engine, copy = engine_of(network_of(folder, None)), empty_copy(folder, None)
    load = copy.load_weights
    copy.load_weights = lambda weights, version: load(  # type: ignore[method-assign]
        ((name, tensor + 1 if "correction" in name else tensor) for name, tensor in weights), version
    )
    with pytest.raises(ModelError, match=r"correction \(other values\) \(1 of"):
        WeightSync(engine, copy).sync(0, frozen=True)


def fill_from_shards(rank: int, ranks: int, folder: Path, lora: Lora | None) -> list[str]:
    """Rank 0 alone reads the model. Returns the dtypes of its shards."""
    torch.manual_seed(1)
    network = network_of(folder, lora, empty=rank > 0)
    engine = FSDPEngine(
        network, Placement(CPU, torch.bfloat16), rank_mesh(CPU), scoring=WHOLE, training=WHOLE, optimizer=None
    )
    copy = empty_copy(folder, lora, torch.bfloat16)
    WeightSync(engine, copy).sync(0, frozen=True)
    assert_complete(copy, folder, lora, torch.bfloat16)
    return [str(parameter.dtype) for parameter in engine.parameters.values()]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_ranks_that_shard_a_model_fill_a_copy_on_each_of_them(
    rank_processes: RankProcesses, model_folder: Callable[[str], Path], lora: Lora | None
) -> None:
    for dtypes in rank_processes.run(2, fill_from_shards, model_folder(TIED), lora):
        assert {*dtypes} == {"torch.bfloat16"}  # none of them learns


def read_and_build(rank: int, ranks: int, keys: tuple[str, ...]) -> tuple[int, list[str]]:
    """The models that a worker of a run reads, and its roles."""
    read, load = Counter[str](), AutoModelForCausalLM.from_pretrained

    def counted(*arguments: Any, **settings: Any) -> Any:
        read["models"] += 1
        return load(*arguments, **settings)

    config = configured(*keys)
    layout = layout_of(config)
    worker = Worker(config, layout, layout.slots()[rank])
    worker.join_pool = lambda rendezvous, rank: None  # type: ignore[method-assign]  # this process is in a group
    AutoModelForCausalLM.from_pretrained = counted
    try:
        worker.build(Rendezvous())
    finally:
        AutoModelForCausalLM.from_pretrained = load
    assert all(not one.isnan().any() for one in worker.roles[ROLLOUT].held_weights().values())
    return read["models"], sorted(worker.roles)


@pytest.mark.slow
def test_of_all_workers_one_reads_the_model(rank_processes: RankProcesses) -> None:
    """Once for the actor and once for the reference: the other workers get parts of them, and copies their weights."""
    keys = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "actor_rollout_ref.actor.use_kl_loss=True")
    keys = (*keys, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")
    keys = (*keys, "data.max_prompt_length=64", "data.max_response_length=64")
    [first, second] = rank_processes.run(2, read_and_build, keys)
    assert {REFERENCE, ROLLOUT} < {*second[1]}
    assert (first[0], second[0]) == (2, 0)


def rank_of_a_file(rank: int, ranks: int, folder: Path) -> tuple[set[torch.dtype], dict[str, Tensor]]:
    network = PolicyNetwork(load_causal_lm(ModelSource(str(folder)), empty=rank > 0), packed=True)
    read = {parameter.dtype for parameter in network.module.parameters()}
    where = Placement(CPU, torch.float32)
    engine = FSDPEngine(network, where, rank_mesh(CPU), scoring=WHOLE, training=WHOLE, optimizer=None)
    return read, {name: tensor.clone() for name, tensor in engine.weights(frozen=True)}


@pytest.mark.slow
def test_rank_0_reads_a_file_in_its_dtype_and_shards_are_exact(
    rank_processes: RankProcesses, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("qwen2", dtype=torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    [(first, _), (second, found)] = rank_processes.run(2, rank_of_a_file, folder)
    assert (first, second) == ({torch.bfloat16}, {torch.float32})  # the second has no numbers
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter)
