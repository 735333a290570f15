"""One vLLM engine per model and setting, for all tests of this folder: starting one takes seconds.

Run by `make test-vllm`, in an environment that has vLLM for CPUs; skipped in any other.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rloom.engines.local import LocalEngine
from rloom.models.checkpoint_format import CheckpointFormat
from rloom.models.network import PolicyNetwork
from rloom.models.source import ModelSource
from rloom.rollout.base import Completion, Request, Rollout
from rloom.rollout.vllm.environment import is_installed, set_environment
from tests.helpers import FAMILIES, save_model

if TYPE_CHECKING:
    from rloom.rollout.vllm.engine import VllmRollout

collect_ignore_glob = [] if is_installed() else ["test_*.py"]
CACHE_BYTES = 32 << 20
LONGEST = 64
Key = tuple[Any, ...]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own warnings


def with_wide_heads(config: PreTrainedConfig) -> PreTrainedConfig:
    """vLLM's attention on a CPU has no kernel for heads below 32."""
    if config.model_type == "qwen2":  # its head size follows from these
        config.hidden_size = 32 * config.num_attention_heads
        config.initializer_range = 0.1  # wider than the other models: logits of the same size
    else:
        config.head_dim = 32
    return config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), with_wide_heads(FAMILIES[family]()))
        return made[family]

    return folder


class Following(Rollout):
    """A shared engine with the weights of one trainer: they are sent before a batch begins.

    The contract tests are written for engines that generate with the trainer's own parameters.
    """

    def __init__(self, engine: "VllmRollout", owner: LocalEngine) -> None:
        self.engine, self.owner, self.version = engine, owner, 0

    def submit(self, request: Request) -> int:
        if not self.engine.unfinished:
            self.engine.load_weights(self.owner.weights(), self.version)
        return self.engine.submit(request)

    def poll(self) -> list[Completion]:
        return self.engine.poll()

    def cancel(self, request: int) -> None:
        self.engine.cancel(request)

    def interrupt(self, request: int) -> Completion:
        return self.engine.interrupt(request)

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        return self.engine.interrupt_all(requests)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        assert list(weights) == []
        self.version = version

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()


@pytest.fixture(scope="session")
def shared_engine() -> Callable[..., "VllmRollout"]:
    made: dict[Key, VllmRollout] = {}

    def engine(network: PolicyNetwork, dtype: torch.dtype = torch.float32, max_sequences: int = 64) -> "VllmRollout":
        set_environment()
        from rloom.rollout.vllm.arguments import VllmSettings
        from rloom.rollout.vllm.engine import VllmRollout

        folder, adapter = network.decoder.base.config._name_or_path, network.adapter_config()
        key = (folder, dtype, min(max_sequences, 256), network.temperature, adapter is None)
        if key not in made:
            settings = VllmSettings(
                source=ModelSource(folder),
                device=torch.device("cpu"),
                dtype=dtype,
                max_sequences=min(max_sequences, 256),
                max_batched_tokens=1024,
                request_seeds=True,
                max_model_tokens=min(network.decoder.base.config.max_position_embeddings, 512),
                memory_share=0.1,
                free_memory=True,
                eager=True,
                temperature=network.temperature,
                lora_rank=None if adapter is None else adapter["r"],
                reads_weights=adapter is not None,
                engine_kwargs={"kv_cache_memory_bytes": CACHE_BYTES},
            )
            made[key] = VllmRollout(settings, CheckpointFormat(network), adapter)
        return made[key]

    return engine


@pytest.fixture
def build(shared_engine: Callable[..., "VllmRollout"]) -> Callable[..., Rollout]:
    """Builds the rollout engine of the contract tests."""

    def rollout(network: PolicyNetwork, owner: LocalEngine, max_sequences: int = 64) -> Rollout:
        return Following(shared_engine(network, owner.placement.dtype, max_sequences), owner)

    return rollout
