"""The process groups of megatron-core, and the parts of it that assume a GPU or random draws."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.engines.megatron.core import parallel_state, tensor_parallel
from rloom.engines.megatron.sizes import ModelParallel


@dataclass(frozen=True)
class Groups:
    """This rank's process groups. All engines of a process use the same."""

    sizes: ModelParallel
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    stage: dist.ProcessGroup  # all ranks that hold the same layers: tensor x data
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_parts: dist.ProcessGroup  # the ranks that hold all experts of a layer once: expert_tensor x expert
    expert_data: dist.ProcessGroup
    embedding: dist.ProcessGroup | None  # first and last stage; None on the others

    @property
    def is_first(self) -> bool:
        return self.pipeline.rank() == 0

    @property
    def is_last(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1


def make_groups(sizes: ModelParallel, device: torch.device) -> Groups:
    """Collective over all ranks; a second call in a process returns the same groups."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            create_gloo_process_groups=False,
        )
        parallel_state._GLOBAL_MEMORY_BUFFER = DeviceBuffer(device)
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER = NoRandomness()
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    return Groups(
        sizes,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        stage=parallel_state.get_tensor_and_data_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_parts=parallel_state.get_expert_tensor_and_model_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        embedding=parallel_state.get_embedding_group(check_initialized=False) if in_embedding_group() else None,
    )


def in_embedding_group() -> bool:
    return bool(parallel_state.is_rank_in_embedding_group())


class DeviceBuffer:
    """megatron-core's buffer for gathered tokens, on the engine's device: its own is on a GPU always."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self, tensor_shape: list[int], dtype: torch.dtype, name: str, mem_alloc_context: Any = None
    ) -> Tensor:
        size, key = prod(tensor_shape), (name, dtype)
        if key not in self.buffers or self.buffers[key].numel() < size:
            self.buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
        return self.buffers[key][:size].view(*tensor_shape)


class NoRandomness:
    """In place of megatron-core's tracker of random states: a model without dropout draws nothing."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True
