"""The passes of a batch through the stages of a pipeline: one forward, then one backward (1F1B).

All ranks of a replica have the same samples, so each stage computes the shapes that it receives: only hidden states and
their gradients are sent.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.engines.megatron.groups import MegatronGroups

Shape = tuple[int, ...]


class MicroBatchPass(NamedTuple):
    """One micro-batch on its way through this stage."""

    received: Tensor | None
    output: Tensor


Forward = Callable[[int, Tensor | None], Tensor]  # (number of the micro-batch, hidden states) -> hidden states, or loss


class Pipeline:
    def __init__(self, groups: MegatronGroups, device: torch.device, dtype: torch.dtype) -> None:
        self.group, self.device, self.dtype = groups.pipeline, device, dtype
        self.stage, self.stages = groups.pipeline.rank(), groups.pipeline.size()
        self.is_first, self.is_last = groups.is_first, groups.is_last
        # gloo does not send the memory of a GPU
        on_host = device.type == "cuda" and "nccl" not in dist.get_backend(self.group)
        self.message_device = torch.device("cpu") if on_host else device

    def forward(self, shapes: Sequence[Shape], forward: Forward) -> None:
        for number, shape in enumerate(shapes):
            output = forward(number, self.exchange(receive_previous=shape)[0])
            self.exchange(send_next=output)

    def forward_backward(self, shapes: Sequence[Shape], forward: Forward) -> None:
        """The output of the last stage is the loss of a micro-batch, a scalar."""
        running: list[MicroBatchPass] = []
        warmup = min(self.stages - self.stage - 1, len(shapes))

        def run(number: int, received: Tensor | None) -> Tensor:
            if received is not None:
                received.requires_grad_()
            running.append(MicroBatchPass(received, forward(number, received)))
            return running[-1].output

        for number in range(warmup):
            self.exchange(send_next=run(number, self.exchange(receive_previous=shapes[number])[0]))
        received = self.exchange(receive_previous=shapes[warmup])[0] if warmup < len(shapes) else None
        for number in range(warmup, len(shapes)):
            output = run(number, received)
            gradient = self.exchange(send_next=output, receive_next=running[0].output.shape)[1]
            following = shapes[number + 1] if number + 1 < len(shapes) else None
            received = self.exchange(send_previous=backward(running.pop(0), gradient), receive_previous=following)[0]
        while running:
            gradient = self.exchange(receive_next=running[0].output.shape)[1]
            self.exchange(send_previous=backward(running.pop(0), gradient))

    def exchange(
        self,
        *,
        send_next: Tensor | None = None,
        send_previous: Tensor | None = None,
        receive_previous: Shape | None = None,
        receive_next: Shape | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(received from the previous stage, received from the next one). One operation, so that no rank waits for
        a rank that waits for it. The first stage has no previous one, the last no next one."""
        operations: list[dist.P2POp] = []
        found: list[Tensor | None] = []
        neighbours = (
            (self.is_first, self.stage - 1, send_previous, receive_previous),
            (self.is_last, self.stage + 1, send_next, receive_next),
        )
        for absent, stage, sent, shape in neighbours:
            buffer = (
                None if absent or shape is None else torch.empty(shape, dtype=self.dtype, device=self.message_device)
            )
            if sent is not None and not absent:
                message = sent.detach().to(self.message_device).contiguous()
                operations.append(dist.P2POp(dist.isend, message, group=self.group, group_peer=stage))
            if buffer is not None:
                operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=stage))
            found.append(buffer)
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        previous, following = (None if tensor is None else tensor.to(self.device) for tensor in found)
        return previous, following


def backward(run: MicroBatchPass, gradient: Tensor | None) -> Tensor | None:
    """The gradient of what this stage received. `gradient`: of its output; None: the output is the loss."""
    torch.autograd.backward(run.output, gradient)
    return None if run.received is None else run.received.grad
