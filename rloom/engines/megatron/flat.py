"""Parameters, gradients, masters and moments of a stage in flat buffers, divided over the data-parallel ranks.

Each rank has all parameters of its stage in the dtype of the forward pass, but the float32 masters and the moments of a
chunk of them only (ZeRO-1; megatron-core's name for it is distributed optimizer). An update is one reduce-scatter of
the gradients, one step of AdamW on the chunk, and one all-gather of the parameters.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

Named = Mapping[str, tuple[int, ...]]  # shapes by name
Gather = Callable[[], Tensor]


class FlatParameters:
    """Parameters of one dtype that are equal on the ranks of `group`."""

    def __init__(
        self, shapes: Named, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device, *, trained: bool
    ) -> None:
        self.shapes, self.dtype, self.group, self.device = shapes, dtype, group, device
        self.first: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.first[name], end = end, end + prod(shape)
        ranks = group.size()
        self.chunk = -(-end // ranks)  # elements of a rank
        self.start = group.rank() * self.chunk  # where this rank's chunk begins
        self.data = torch.zeros(self.chunk * ranks, dtype=dtype, device=device)
        self.parameters = {name: nn.Parameter(view, requires_grad=trained) for name, view in self.views(self.data)}
        self.gradient: Tensor | None = None
        self.master: nn.Parameter | None = None
        if trained:
            own = self.own(self.data)
            self.master = nn.Parameter(own if dtype == torch.float32 else own.float())
            if dtype != torch.float32:
                for name, parameter in self.parameters.items():
                    parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.accumulate(name, p))

    def views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        return [(name, self.view(flat, name)) for name in self.shapes]

    def view(self, flat: Tensor, name: str) -> Tensor:
        first, shape = self.first[name], self.shapes[name]
        return flat[first : first + prod(shape)].view(shape)

    def own(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.chunk]

    def segment(self, chunk: Tensor, name: str) -> Tensor:
        """The part of a parameter that this rank's chunk holds, possibly empty."""
        first = self.first[name] - self.start
        return chunk[max(first, 0) : max(first + prod(self.shapes[name]), 0)]

    def assign(self, name: str, exact: Tensor) -> None:
        """Set a parameter and its master."""
        self.view(self.data, name).copy_(exact)
        if self.master is not None and self.dtype != torch.float32:
            self.copy_segment(self.master.detach(), name, exact)

    def copy_segment(self, chunk: Tensor, name: str, exact: Tensor) -> None:
        target = self.segment(chunk, name)
        skipped = max(self.start - self.first[name], 0)  # elements in the chunks of earlier ranks
        target.copy_(exact.reshape(-1)[skipped : skipped + target.numel()])

    def begin_gradient(self) -> None:
        """Allocate the gradient, if this is the first batch of a mini-batch."""
        if self.gradient is not None:
            return
        self.gradient = torch.zeros(self.data.numel(), dtype=torch.float32, device=self.device)
        if self.dtype == torch.float32:  # autograd adds to it in place
            for name, parameter in self.parameters.items():
                parameter.grad = self.view(self.gradient, name)

    def accumulate(self, name: str, parameter: Tensor) -> None:
        """Sum the gradients of micro-batches in float32."""
        assert self.gradient is not None and parameter.grad is not None
        self.view(self.gradient, name).add_(parameter.grad)
        parameter.grad = None

    def reduce_gradient(self) -> None:
        """Sum over the ranks of `group`; the master's gradient is this rank's chunk of the sum."""
        assert self.gradient is not None and self.master is not None
        gradient, self.gradient = self.gradient, None
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.group.size() == 1:
            self.master.grad = gradient
            return
        self.master.grad = torch.empty(self.chunk, dtype=torch.float32, device=self.device)
        dist.reduce_scatter_tensor(self.master.grad, gradient, group=self.group)

    def gather_parameters(self) -> None:
        """After an update: the parameters of all chunks, rounded to their dtype."""
        assert self.master is not None
        own = self.own(self.data)
        if self.dtype != torch.float32:
            own.copy_(self.master.detach())
        if self.group.size() > 1:
            dist.all_gather_into_tensor(self.data, own.clone(), group=self.group)

    def gatherers(self, chunk: Tensor) -> dict[str, Gather]:
        """For each parameter a call that returns its values, such as its master, from the chunks of all ranks.

        The ranks of `group` call the same one together.
        """
        return {name: partial(self.gather, chunk, name) for name in self.shapes}

    def gather(self, chunk: Tensor, name: str) -> Tensor:
        own = self.segment(chunk, name).to(self.device)
        if self.group.size() == 1:
            return own.view(self.shapes[name])
        # each number is on one rank: adding the bits as integers keeps them, which -0.0 + 0.0 would not
        bits = torch.zeros(prod(self.shapes[name]), dtype=torch.int32, device=self.device)
        skipped = max(self.start - self.first[name], 0)
        bits[skipped : skipped + own.numel()] = own.view(torch.int32)
        dist.all_reduce(bits, group=self.group)
        return bits.view(torch.float32).view(self.shapes[name])

    def move(self, device: torch.device) -> None:
        """Parameters to the device or to the host. A float32 master is a part of them and moves along."""
        self.data = self.data.to(device)
        for name, view in self.views(self.data):
            self.parameters[name].data = view
        if self.master is not None and self.dtype == torch.float32:
            self.master.data = self.own(self.data)

    def move_master(self, device: torch.device) -> None:
        if self.master is not None and self.dtype != torch.float32:
            self.master.data = self.master.data.to(device)


def place_parameters(module: nn.Module, flats: list[FlatParameters]) -> None:
    """Replace the module's parameters, which are on the meta device, by those of the buffers."""
    for flat in flats:
        for name, parameter in flat.parameters.items():
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            vars(parameter).update(vars(getattr(owner, attribute)))  # attributes that megatron-core sets
            setattr(owner, attribute, parameter)
