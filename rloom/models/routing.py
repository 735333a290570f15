"""Mixture of experts: record the experts that routers choose, and replay choices that were made elsewhere.

Rollout engine and trainer round differently, so their routers choose different experts for some tokens, and log-probs
then differ by far more than rounding. Rollout routing replay (R3) uses the rollout's choices in training: the weight of
a given expert comes from the trainer's own router, so that the router still has a gradient.

T rows of a router's input (tokens, packed), M layers with a router, K experts per token.

Layers may be compiled, and all layers share the compiled code. So a router calls the custom op `rloom::choose_experts`,
which the compiler does not trace into; the op reads the routing of the running pass from the module-level stack
ACTIVE. The number of the layer is a tensor: the compiler would compile a layer again for each value of an int.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rloom.errors import ModelError

# Their routers return (logits, weights, indices): softmax over all experts, the K largest, divided by their sum unless
# `norm_topk_prob` is False.
ROUTERS = frozenset(
    f"{family}TopKRouter"
    for family in ("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3VLMoeText", "Mixtral", "MiniMax", "Olmoe", "FlexOlmo")
)
NO_CHOICE = -1  # entry of a token that the rollout did not compute: the router chooses


class RoutingShape(NamedTuple):
    """The choices for one token."""

    layers: int
    experts: int  # per token and layer

    @property
    def bytes(self) -> int:
        return self.layers * self.experts * torch.int16.itemsize


class Routing(Protocol):
    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        """The experts to use, in new memory, given those that the router of this layer chooses."""


ACTIVE: list[Routing] = []  # the running pass's; none: routers use their own choices


@contextmanager
def active_routing(routing: Routing) -> Iterator[None]:
    ACTIVE.append(routing)
    try:
        yield
    finally:
        ACTIVE.pop()


def routed(routing: Routing | None) -> AbstractContextManager[None]:
    """Within the context, the routers of all replayable models call `routing`."""
    return nullcontext() if routing is None else active_routing(routing)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch's checkpoint: a layer that is recomputed in the backward pass uses the same routing."""
    return nullcontext(), routed(ACTIVE[-1] if ACTIVE else None)


@torch.library.custom_op("rloom::choose_experts", mutates_args=())
def choose_experts(own_TK: Tensor, layer: Tensor) -> Tensor:
    return ACTIVE[-1].choose(int(layer), own_TK) if ACTIVE else own_TK.clone()


@choose_experts.register_fake
def _(own_TK: Tensor, layer: Tensor) -> Tensor:
    return torch.empty_like(own_TK)


class ReplayableRouter:
    """Comes before the class of a family's router in the class of an object: see `install_replay`."""

    router_layer: Tensor  # on the CPU: reading it does not wait for a device
    divides_by_sum: bool

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, own_weight_TK, own_TK = super().forward(hidden_states)  # type: ignore[misc]
        chosen_TK = choose_experts(own_TK, self.router_layer)
        weight_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, chosen_TK)
        if self.divides_by_sum:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return logits_TE, weight_TK.to(own_weight_TK.dtype), chosen_TK


def install_replay(body: nn.Module) -> RoutingShape:
    """Let the routers of a model call the active routing. Called before the first pass of a compiled model."""
    routers: list[Any] = [m for m in body.modules() if type(m).__name__ in ROUTERS]
    if not routers:
        raise ModelError(
            f"{type(body).__name__} has no router whose choices rloom can replay; supported are "
            f"{', '.join(sorted(ROUTERS))}. Use actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    family: type = type(routers[0])
    replayable = type(f"Replayable{family.__name__}", (ReplayableRouter, family), {})  # one: layers share compiled code
    for layer, router in enumerate(routers):
        router.divides_by_sum = bool(getattr(router, "norm_topk_prob", True))
        router.router_layer = torch.tensor(layer, device="cpu")
        router.__class__ = replayable
    return RoutingShape(len(routers), routers[0].top_k)


class RoutingRecord:
    """Records the routers' own choices."""

    def __init__(self, tokens: int, shape: RoutingShape, device: torch.device) -> None:
        self.experts_TMK = torch.empty(tokens, *shape, dtype=torch.int16, device=device)

    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        self.experts_TMK[:, layer] = own_TK
        return own_TK.clone()


def with_last_token(experts_LMK: Tensor) -> Tensor:
    """Add a sample's last token, which no engine has as its input."""
    return torch.cat([experts_LMK, experts_LMK.new_full((1, *experts_LMK.shape[1:]), NO_CHOICE)])


class RoutingReplay:
    """Uses given choices, and measures how many of them the routers would not have made."""

    def __init__(self, experts_TMK: Tensor, shape: RoutingShape) -> None:
        if tuple(experts_TMK.shape[1:]) != tuple(shape):
            raise ModelError(
                f"the rollout recorded experts of {experts_TMK.shape[1]} layers, {experts_TMK.shape[2]} per token; the "
                f"trained model has {shape.layers} and {shape.experts}: rollout and trainer have different models"
            )
        self.experts_TMK, self.choices = experts_TMK, shape.layers * shape.experts
        # the share of a token's choices that differ. A recomputed layer counts twice: read it before the backward pass
        self.mismatch_T = torch.zeros(len(experts_TMK), device=experts_TMK.device)

    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        return replayed(self.experts_TMK[:, layer], own_TK, self.mismatch_T, self.choices)


def replayed(experts_TK: Tensor, own_TK: Tensor, mismatch_T: Tensor, choices: int) -> Tensor:
    """The given experts, and the router's own where there are none. The share that differs, of all `choices` of a
    token, is added to the mismatch."""
    given_TK = experts_TK.long()
    is_given_T1 = given_TK[:, :1] != NO_CHOICE
    differs_TK = (given_TK[:, :, None] != own_TK[:, None, :]).all(-1) & is_given_T1
    mismatch_T += differs_TK.sum(-1) / choices
    return given_TK.where(is_given_T1, own_TK)


class PaddedRouting:
    """The routing of packed tokens in a pass over padded rows. Routers choose for the padding."""

    def __init__(self, routing: Routing, mask: Tensor) -> None:
        self.routing, self.index_T = routing, mask.flatten().nonzero().squeeze(1)

    def choose(self, layer: int, own_RK: Tensor) -> Tensor:
        return own_RK.index_copy(0, self.index_T, self.routing.choose(layer, own_RK[self.index_T]))
