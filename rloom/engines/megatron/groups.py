"""The process groups of megatron-core, and what it assumes of a process: a GPU, and random draws."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.engines.megatron.core import parallel_state, tensor_parallel
from rloom.engines.megatron.sizes import ModelParallel

IGNORED_WARNINGS = (  # shown in each pass: newer names in torch, and a variable for Transformer Engine
    "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # the experts' groups
    "When using sequence parallelism it is recommended to set the environment variable",
)


@dataclass(frozen=True)
class MegatronGroups:
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


def make_groups(sizes: ModelParallel, device: torch.device) -> MegatronGroups:
    """Collective over all ranks; a second call in a process returns the same groups."""
    if not parallel_state.model_parallel_is_initialized():
        for message in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            create_gloo_process_groups=False,
        )
        if device.type == "cpu":
            use_cpu()
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER = NoRandomness()
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    return MegatronGroups(
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


def use_cpu() -> None:
    """megatron-core creates buffers on torch.cuda.current_device(), which fails in a process without a GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


class NoRandomness:
    """In place of megatron-core's tracker of random states: a model without dropout draws nothing."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        pass
