"""How the ranks of a Megatron engine divide a model. Imports neither torch nor megatron-core."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelParallel:
    tensor: int = 1  # ranks that divide each matrix
    pipeline: int = 1  # stages: ranks that hold consecutive layers
    expert: int = 1  # ranks that divide the experts of a layer
    expert_tensor: int | None = None  # ranks that divide the matrices of an expert; None: `tensor`
    sequence: bool = True  # between the matrices, each rank of `tensor` holds a slice of the tokens

    @property
    def replica(self) -> int:
        """Ranks that hold one copy of the model (without its experts)."""
        return self.tensor * self.pipeline

    @property
    def slices_tokens(self) -> bool:
        return self.sequence and self.tensor > 1

    def rank_of(self, worker: int, workers: int) -> int:
        """The rank in the process group of a worker of the pool.

        The workers of a replica are consecutive, since they get the same samples. megatron-core numbers ranks by the
        tensor, then the data-parallel, then the pipeline dimension.
        """
        copies = workers // self.replica
        copy, within = divmod(worker, self.replica)
        stage, part = divmod(within, self.tensor)
        return part + self.tensor * (copy + copies * stage)
