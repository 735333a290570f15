"""Weights on their way to rollout engines: a manifest first, then the trainable tensors in its order."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rloom.engines.base import Engine, Placement
from rloom.engines.fingerprint import fingerprint
from rloom.engines.weight_sync import WeightSync
from rloom.errors import ModelError
from rloom.launch.early_checks import layout_of
from rloom.launch.worker import WEIGHT_SYNC, Rendezvous, Worker
from rloom.models.load import Lora
from rloom.rollout.base import copy_weights
from rloom.runtime.placement import ACTOR, ROLLOUT
from tests.engine_subjects import sharded
from tests.helpers import configured, engine_of, policy
from tests.ranks import RankProcesses


class ServerApi:
    """A broadcast channel within this process."""

    device = torch.device("cpu")

    def __init__(self, queue: "deque[Tensor]", *, sends: bool) -> None:
        self.queue, self.sends = queue, sends

    def broadcast(self, tensor: Tensor) -> None:
        if self.sends:
            self.queue.append(tensor.clone())
        else:
            tensor.copy_(self.queue.popleft())


class Loader:
    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.version = 0

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.loaded, self.version = dict(weights), version

    def held_weights(self) -> dict[str, Tensor]:
        return self.loaded


def test_a_receiver_gets_names_shapes_and_version_from_the_wire(model_folder: Callable[[str], Path]) -> None:
    engine, target, queue = engine_of(policy(model_folder("qwen2"))), Loader(), deque[Tensor]()
    WeightSync(engine, None, ServerApi(queue, sends=True)).sync(5)
    assert len(queue) == 3 + len(engine.trainable)  # the manifest's length and text come first, fingerprints last
    WeightSync(None, target, ServerApi(queue, sends=False)).sync(5)
    assert target.version == 5 and not queue
    assert target.loaded.keys() == engine.trainable.keys()
    assert all(torch.equal(target.loaded[name], parameter) for name, parameter in engine.trainable.items())


def test_of_lora_only_the_adapter_is_sent(model_folder: Callable[[str], Path]) -> None:
    engine, target = engine_of(policy(model_folder("qwen2"), lora=Lora(rank=4))), Loader()
    WeightSync(engine, target).sync(1)
    assert target.loaded and all("lora_" in name for name in target.loaded)
    assert [spec.name for spec in engine.manifest()] == list(target.loaded)
    assert {spec.dtype for spec in engine.manifest()} == {"float32"}


def test_an_engine_on_the_actors_own_parameters_gets_the_version_alone() -> None:
    target = Loader()
    WeightSync(None, target).sync(3)
    assert (target.loaded, target.version) == ({}, 3)


# Faults of a sync, each of which is found with the name of the parameter

Named = tuple[str, Tensor]
QUERY, KEY_1, KEY_0 = (f"model.layers.{at}_proj.weight" for at in ("1.self_attn.q", "1.self_attn.k", "0.self_attn.k"))


class Copy:
    """A rollout engine on a copy of the model. `fault` is what happens to the weights on their way."""

    def __init__(self, folder: Path, lora: Lora | None = None) -> None:
        self.module = policy(folder, lora=lora).module
        self.fault: Callable[[list[Named]], Iterable[Named]] = list

    def load_weights(self, weights: Iterator[Named], version: int) -> None:
        copy_weights(iter(self.fault(list(weights))), self.module)

    def held_weights(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


def update(engine: Engine) -> None:
    """Every weight changes by a thousandth."""
    with torch.no_grad():
        for parameter in engine.trainable.values():
            parameter.add_(1e-3 * (1 + parameter.abs()))


def without(name: str) -> Callable[[list[Named]], Iterable[Named]]:
    return lambda sent: [one for one in sent if one[0] != name]


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[list[Named]], Iterable[Named]]:
    return lambda sent: [(own, change(tensor.clone()) if own == name else tensor) for own, tensor in sent]


def swapped(first: str, second: str) -> Callable[[list[Named]], Iterable[Named]]:
    other = {first: second, second: first}
    return lambda sent: [(other.get(name, name), tensor) for name, tensor in sent]


def half_copied(tensor: Tensor) -> Tensor:
    tensor[len(tensor) // 2 :] = 0
    return tensor


def last_bit(tensor: Tensor) -> Tensor:
    tensor.view(torch.int32)[-1, -1] ^= 1
    return tensor


FAULTS: dict[str, tuple[Callable[[list[Named]], Iterable[Named]], list[str]]] = {
    "skips a parameter": (without(QUERY), [f"{QUERY} (as before this update) (1 of 27 parameters)"]),
    "sends nothing": (lambda sent: [], ["(as before this update), and 22 more (27 of 27 parameters)"]),
    "swaps two": (
        swapped(KEY_0, KEY_1),
        [f"{KEY_0} (the values of {KEY_1})", f"{KEY_1} (the values of {KEY_0})", "(2 of 27 parameters)"],
    ),
    "scales one": (changed(QUERY, lambda tensor: tensor * 1.5), [f"{QUERY} (other values) (1 of 27 parameters)"]),
    "transposes one": (changed(QUERY, lambda tensor: tensor.T), [f"{QUERY} (other values) (1 of 27 parameters)"]),
    "permutes rows": (changed(QUERY, lambda tensor: tensor.flip(0)), [f"{QUERY} (other values)"]),
    "permutes columns": (changed(QUERY, lambda tensor: tensor.flip(1)), [f"{QUERY} (other values)"]),
    "copies half": (changed(QUERY, half_copied), [f"{QUERY} (other values)"]),
    "changes one bit": (changed(QUERY, last_bit), [f"{QUERY} (other values)"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_sync_is_an_error_that_names_the_parameters(name: str, model_folder: Callable[[str], Path]) -> None:
    engine, target = engine_of(policy(model_folder("qwen2"))), Copy(model_folder("qwen2"))
    sync = WeightSync(engine, target, setting="actor_rollout_ref.rollout.name=native")
    for version in (1, 2):
        update(engine)
        sync.sync(version)
    target.fault, texts = FAULTS[name]
    update(engine)
    with pytest.raises(ModelError) as found:
        sync.sync(3)
    start = "actor_rollout_ref.rollout.name=native: after the weight sync of step 3 the rollout engine does not have"
    assert str(found.value).startswith(start)
    assert all(text in str(found.value) for text in texts)


def test_an_old_tensor_is_found_whichever_sync_it_is_from(model_folder: Callable[[str], Path]) -> None:
    engine, target = engine_of(policy(model_folder("qwen2"))), Copy(model_folder("qwen2"))
    first, sync = engine.trainable[QUERY].detach().clone(), WeightSync(engine, target)
    for version in (1, 2):
        update(engine)
        sync.sync(version)
    target.fault = changed(QUERY, lambda tensor: first)
    update(engine)
    with pytest.raises(ModelError, match=re.escape(f"{QUERY} (other values) (1 of 27 parameters)")):
        sync.sync(3)


def test_a_parameter_that_the_actors_engine_forgets_is_found(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprints come from the parameters, not from what is sent."""
    engine, target = engine_of(policy(model_folder("qwen2"))), Copy(model_folder("qwen2"))
    sent = engine.weights
    monkeypatch.setattr(engine, "weights", lambda frozen: iter(without(QUERY)(list(sent()))))
    update(engine)
    with pytest.raises(ModelError, match=re.escape(QUERY)):
        WeightSync(engine, target).sync(1)
    with pytest.raises(ModelError, match=re.escape("out of the order")):
        WeightSync(engine, None, ServerApi(deque(), sends=True)).sync(1)


def test_a_fault_is_found_by_the_receivers_of_a_broadcast(model_folder: Callable[[str], Path]) -> None:
    engine, target, queue = engine_of(policy(model_folder("qwen2"))), Copy(model_folder("qwen2")), deque[Tensor]()
    update(engine)
    WeightSync(engine, None, ServerApi(queue, sends=True)).sync(1)
    WeightSync(None, target, ServerApi(queue, sends=False)).sync(1)
    assert not queue
    update(engine)
    target.fault = swapped(KEY_0, KEY_1)
    WeightSync(engine, None, ServerApi(queue, sends=True)).sync(2)
    with pytest.raises(ModelError, match=re.escape(f"{KEY_0} (the values of {KEY_1})")):
        WeightSync(None, target, ServerApi(queue, sends=False)).sync(2)


def test_an_adapter_that_does_not_arrive_is_found(model_folder: Callable[[str], Path]) -> None:
    lora, folder = Lora(rank=4), model_folder("qwen2")
    engine, target = engine_of(policy(folder, lora=lora)), Copy(folder, lora)
    sync = WeightSync(engine, target)
    sync.sync(0)
    update(engine)
    sync.sync(1)
    target.fault = lambda sent: []
    update(engine)
    with pytest.raises(ModelError, match=r"lora_A\.default\.weight \(as before this update\)"):
        sync.sync(2)
    bare = Copy(folder)
    bare.fault = lambda sent: []
    with pytest.raises(ModelError, match="the engine has no such parameter"):
        WeightSync(engine, bare).sync(1)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, Worker]:
    """Those of a run with an adapter, as it builds them: one trains, one has the native engine on a copy. peft creates
    adapters in float32, also those of a model in bfloat16."""
    keys = ("trainer.n_gpus_per_node=2", "trainer.pools.rollout=1", "trainer.device=cpu", "data.max_prompt_length=64")
    keys = (*keys, "data.max_response_length=64", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16")
    config = configured(*keys, "actor_rollout_ref.model.lora_rank=4")
    layout, queue = layout_of(config), deque[Tensor]()
    monkeypatch.setattr(
        "rloom.launch.worker.Broadcast", lambda member, members, **_: ServerApi(queue, sends=member == 0)
    )
    trains, generates = (Worker(config, layout, slot) for slot in layout.slots())
    for worker in (trains, generates):
        worker.build(Rendezvous({WEIGHT_SYNC: ""}))
    return trains, generates


ADAPTER_FAULTS: dict[str, tuple[Callable[[list[Named]], Iterable[Named]], str]] = {
    "nothing arrives": (lambda sent: [], r"lora_A\.default\.weight \(as before this update\)"),
    "lora_B does not arrive": (
        lambda sent: [one for one in sent if "lora_A" in one[0]],
        r"lora_B\.default\.weight \(as before this update\)",
    ),
    "it arrives twice as large": (
        lambda sent: [(name, 2 * tensor) for name, tensor in sent],
        r"lora_A\.default\.weight \(other values\)",
    ),
}


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
def test_a_run_with_an_adapter_reports_that_its_generating_worker_does_not_have_it(
    workers: tuple[Worker, Worker], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, rollout = workers[0].roles[ACTOR], workers[1].roles[ROLLOUT]

    def sync(version: int) -> None:
        for worker in workers:
            worker.roles[WEIGHT_SYNC].sync(version)

    sync(0)
    update(actor)
    sync(1)
    load, (change, text) = rollout.load_weights, ADAPTER_FAULTS[fault]
    monkeypatch.setattr(rollout, "load_weights", lambda sent, version: load(iter(change(list(sent))), version))
    update(actor)
    with pytest.raises(ModelError, match=text) as found:
        sync(2)
    assert "rollout.name=native: after the weight sync of step 2 the rollout engine does not have" in str(found.value)


def test_an_actor_without_trained_parameters_is_an_error(model_folder: Callable[[str], Path]) -> None:
    engine = engine_of(policy(model_folder("qwen2")))
    engine.trainable = {}
    with pytest.raises(ModelError, match="no parameter that is trained"):
        WeightSync(engine, Loader()).sync(1)


# Sharded actors: each rank sums its own rows


def sums_of_shards(
    rank: int, ranks: int, folder: Path, lora: Lora | None, dtype: torch.dtype, shards: int
) -> tuple[Tensor, Tensor]:
    engine = sharded(folder, lora=lora, placement=Placement(torch.device("cpu"), dtype), shards=shards)
    update(engine)
    return engine.fingerprints(), torch.stack([fingerprint(tensor) for _, tensor in engine.weights()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shards", "lora", "dtype"),
    [
        (2, -1, None, torch.bfloat16),
        (3, -1, Lora(rank=4), torch.float32),  # rows that do not divide evenly
        (4, 2, None, torch.float32),  # two replicas
    ],
)
def test_the_sums_of_the_shards_are_those_of_the_gathered_weights(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    ranks: int,
    shards: int,
    lora: Lora | None,
    dtype: torch.dtype,
) -> None:
    for sums, gathered in rank_processes.run(ranks, sums_of_shards, model_folder("qwen2"), lora, dtype, shards):
        assert torch.equal(sums, gathered) and len(sums)


def sync_a_swap(rank: int, ranks: int, folder: Path) -> str:
    """Two tensors of equal shape are swapped while they are gathered."""
    engine, target = sharded(folder), Copy(folder)
    sync = WeightSync(engine, target, setting="name=native")
    update(engine)
    sync.sync(1)
    gathered = engine.weights
    engine.weights = lambda frozen: iter(swapped(KEY_0, KEY_1)(list(gathered())))
    update(engine)
    try:
        sync.sync(2)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_fault_of_gathering_is_found_on_every_rank(
    rank_processes: RankProcesses, model_folder: Callable[[str], Path]
) -> None:
    for message in rank_processes.run(2, sync_a_swap, model_folder("qwen2")):
        assert f"{KEY_0} (the values of {KEY_1}), {KEY_1} (the values of {KEY_0}) (2 of 27 parameters)" in message
