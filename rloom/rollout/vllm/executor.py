"""One rank of an engine that several workers share, in the process group that these workers have joined already."""

import secrets

import torch
import torch.distributed as dist
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


class GroupExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """The engine's ranks are those of the default process group: `as_whole_group` in rloom/engines/distributed.py.

    vLLM's own executor reads rank and address from the environment variables of a launcher such as torchrun.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        """(address, rank, device). The address is not used, but the shared memory of a CPU's ranks has its last part as
        a name: it differs from that of other runs on the machine."""
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name, src=0)
        device = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
        return f"group:{name[0]}", dist.get_rank(), device
