"""Sums of gradients over ranks that hold the same parameter, the norm of the whole gradient, and AdamW's step."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from rloom.engines.base import AdamW
from rloom.engines.megatron.flat import FlatParameters, Gather
from rloom.engines.megatron.groups import MegatronGroups
from rloom.engines.megatron.layout import Parameter
from rloom.engines.optim import make_optimizer, move_moments, step_clipped
from rloom.engines.storage import MOMENTS as SAVED_STATE

STEP, *MOMENTS = SAVED_STATE
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


class DistributedAdamW:
    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        flats: Sequence[FlatParameters],
        groups: MegatronGroups,
        settings: AdamW,
        *,
        tied: bool,
    ) -> None:
        self.parameters, self.flats, self.groups, self.settings = parameters, flats, groups, settings
        self.tied = tied and groups.sizes.pipeline > 1  # the embedding and its duplicate are on different stages
        self.optimizer = make_optimizer([flat.master for flat in flats if flat.master is not None], settings)

    def is_partial(self, parameter: Parameter) -> bool:
        """Whether the ranks of `tensor`, which all have this parameter, have different summands of its gradient."""
        if parameter.divided or self.groups.sizes.tensor == 1 or parameter.name == "value_head.weight":
            return False
        of_heads = parameter.name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        return self.groups.sizes.slices_tokens or of_heads

    def is_counted(self, parameter: Parameter) -> bool:
        """Whether this rank adds the parameter to the norm: one of the ranks that have the same."""
        if parameter.duplicate:
            return False
        return parameter.divided or self.groups.tensor.rank() == 0

    def step(self, learning_rate: float) -> Tensor:
        """Returns the norm of the gradient."""
        for flat in self.flats:
            flat.begin_gradient()  # a rank without samples has none yet
            self.sum_partial(flat)
            flat.reduce_gradient()
        norm = self.norm()
        step_clipped(self.optimizer, self.settings, learning_rate, norm)
        for flat in self.flats:
            flat.gather_parameters()
        return norm

    def sum_partial(self, flat: FlatParameters) -> None:
        assert flat.gradient is not None
        views = [flat.view(flat.gradient, name) for name in flat.shapes if self.is_partial(self.parameters[name])]
        if views:  # small ones: one collective for all
            joined = torch.cat([view.reshape(-1) for view in views])
            dist.all_reduce(joined, group=self.groups.tensor)
            for view, total in zip(views, joined.split([view.numel() for view in views]), strict=True):
                view.copy_(total.view_as(view))
        for name in EMBEDDINGS:
            if self.tied and name in flat.shapes:
                assert self.groups.embedding is not None
                dist.all_reduce(flat.view(flat.gradient, name), group=self.groups.embedding)

    def norm(self) -> Tensor:
        counted = [
            flat.segment(flat.master.grad, name)
            for flat in self.flats
            for name in flat.shapes
            if flat.master is not None and flat.master.grad is not None and self.is_counted(self.parameters[name])
        ]
        own = get_total_norm([part for part in counted if part.numel()]).to(self.flats[0].device)
        square = own.double() ** 2
        dist.all_reduce(square)
        return square.sqrt().float()

    def move_moments(self, device: torch.device) -> None:
        move_moments(self.optimizer, device)

    def moments(self, key: str) -> dict[str, Gather]:
        """Calls that gather a moment of every parameter of the stage."""
        found: dict[str, Gather] = {}
        for flat in self.flats:
            found |= flat.gatherers(self.optimizer.state[flat.master][key])  # type: ignore[index]
        return found

    @property
    def steps(self) -> Tensor | None:
        """Steps made so far; None before the first."""
        states = [self.optimizer.state.get(flat.master) for flat in self.flats if flat.master is not None]
        return states[0][STEP] if states and states[0] else None

    def load(self, steps: Tensor, read: Callable[[str, str], Tensor]) -> None:
        """`read`: (parameter, key) -> that moment, whole."""
        for flat in self.flats:
            assert flat.master is not None
            state: dict[str, Tensor] = {STEP: steps.to(flat.master.device, torch.float32)}
            state |= {key: torch.zeros_like(flat.master.data) for key in MOMENTS}
            for name in flat.shapes:
                for key in MOMENTS:
                    flat.copy_segment(state[key], name, read(name, key))
            self.optimizer.state[flat.master] = state
