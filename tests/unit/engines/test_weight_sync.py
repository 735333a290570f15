"""Weights on their way to rollout engines: a manifest first, then the trainable tensors in its order."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from rloom.engines.weight_sync import WeightSync
from rloom.models.load import Lora
from tests.helpers import engine_of, policy


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


def test_a_receiver_gets_names_shapes_and_version_from_the_wire(model_folder: Callable[[str], Path]) -> None:
    engine, target, queue = engine_of(policy(model_folder("qwen2"))), Loader(), deque[Tensor]()
    WeightSync(engine, None, ServerApi(queue, sends=True)).sync(5)
    assert len(queue) == 2 + len(engine.trainable)  # the manifest's length and text come first
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
