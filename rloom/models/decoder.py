"""The body of a causal language model: hidden states of packed or padded samples.

T tokens of all samples, packed, N samples. Lengths are on the host.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.batch import Batch
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.attention import Attend, OpaqueAttention, PackedAttention, PaddedAttention, active
from rloom.models.joined import JoinedProducts
from rloom.models.load import first_line
from rloom.models.routing import (
    PaddedRouting,
    Routing,
    RoutingReplay,
    RoutingShape,
    checkpoint_contexts,
    install_replay,
    routed,
)
from rloom.models.shared_prompts import SharedPromptAttention, SharedPrompts, shareable_prompts
from rloom.packing import RowPrompt
from rloom.transfer import send

log = logging.getLogger(__name__)
COMPILE_KEYS = "use_torch_compile=False (of actor_rollout_ref.actor, actor_rollout_ref.ref or critic)"


class Decoder:
    """The body of a Hugging Face causal model, over packed or padded samples.

    Packed samples need rloom's attention. Padded samples, one per row, also work with the model's own attention, and
    with layers that carry a state from token to token (state-space layers, linear attention, convolutions).
    """

    def __init__(self, model: PreTrainedModel | PeftModel, *, packed: bool, shares_prompts: bool = False) -> None:
        self.model = model
        self.base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
        self.body = body_of(self.base)
        self.packed = packed
        self.shares_prompts = shares_prompts and packed
        self.routing_shape: RoutingShape | None = None  # iff `install_replay` was called
        self.joined: JoinedProducts | None = None  # iff `join_products` was called
        self.layers: list[nn.Module] = [m for m in self.body.modules() if isinstance(m, GradientCheckpointingLayer)]

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.base.config.get_text_config().num_attention_heads)

    @property
    def own_attention(self) -> bool:
        """Whether the model runs transformers' attention, not rloom's."""
        return bool(self.base.config._attn_implementation != RLOOM_ATTENTION)

    def train(self) -> None:
        """Prepare for gradients.

        All modules stay in evaluation mode: what families do in training mode (dropout, router noise) would make
        log-probs random. Only gradient checkpointing requires the training flag of a layer; see `checkpointed`.
        """
        self.model.eval()
        for layer in self.layers:
            layer.training = bool(layer.gradient_checkpointing)

    def enable_checkpointing(self) -> None:
        """Recompute the activations of layers in the backward pass."""
        settings = {"use_reentrant": False, "context_fn": checkpoint_contexts}
        self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        self.base.enable_input_require_grads()  # with LoRA no input would carry a gradient otherwise
        layers: list[Any] = self.layers
        for layer in layers:
            layer._gradient_checkpointing_func = partial(checkpointed, layer, layer._gradient_checkpointing_func)

    def cast(self, dtype: torch.dtype) -> None:
        """Parameters only: rotary embeddings are buffers and stay float32."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def compile(self) -> None:
        """torch.compile the layers: fuses the operations between matmuls. All layers share the compiled code."""
        if not self.layers or not all(takes_keywords(layer) for layer in self.layers):
            log.warning(
                f"the layers of {type(self.base).__name__} cannot be compiled: they run uncompiled, more slowly. "
                f"{COMPILE_KEYS} avoids this warning"
            )
            return
        torch._dynamo.config.recompile_limit = 64  # training, scoring, prefill and decode are compiled separately
        # Recompute the inputs of matmuls (norms, gate * up) in the backward pass from tensors that are saved anyway:
        # saves a third of a layer's activation memory for one more write.
        torch._functorch.config.ban_recompute_materialized_backward = False
        for layer in self.layers:
            layer.compile(dynamic=True)

    @contextmanager
    def uncompiled_layers(self) -> Iterator[None]:
        """Run the layers uncompiled."""
        compiled = [layer._compiled_call_impl for layer in self.layers]
        for layer in self.layers:
            layer._compiled_call_impl = None
        try:
            yield
        finally:
            for layer, implementation in zip(self.layers, compiled, strict=True):
                layer._compiled_call_impl = implementation

    def without_adapter(self) -> AbstractContextManager[Any]:
        return self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext()

    def install_replay(self) -> RoutingShape:
        """Let passes record or replay the experts that the routers of a mixture-of-experts model choose."""
        if self.routing_shape is None:
            self.routing_shape = install_replay(self.body)
        return self.routing_shape

    def join_products(self) -> None:
        """Let passes within `joined_products` compute products with the same input as one. Again once weights moved."""
        self.joined = self.joined or JoinedProducts(self.body)
        self.joined.lay_out()

    def joined_products(self) -> AbstractContextManager[None]:
        assert self.joined is not None  # `join_products` comes before the first pass
        return self.joined.active()

    def replay_of(self, experts_TMK: Tensor | None) -> RoutingReplay | None:
        if experts_TMK is None:
            return None
        assert self.routing_shape is not None  # `install_replay` comes before the first pass
        return RoutingReplay(experts_TMK, self.routing_shape)

    def prompts(self, host_batch: Batch) -> list[RowPrompt] | None:
        """Those that `hidden` can compute once for several samples. None: it computes every token.

        The rollout's routing, which is replayed, may differ between samples with the same prompt.
        """
        return shareable_prompts(host_batch) if self.shares_prompts and host_batch.experts_TMK is None else None

    def shared_prompts(self, host_batch: Batch) -> SharedPrompts | None:
        prompts = self.prompts(host_batch)
        return None if prompts is None else SharedPrompts.of(host_batch.length_N, prompts)

    def hidden(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        routing: Routing | None = None,
        shared: SharedPrompts | None = None,  # None: each sample's prompt is computed
    ) -> Tensor:
        if not self.packed:
            return self.padded(tokens_T, length_N, routing=routing)
        if shared is not None:
            shared = shared.to(tokens_T.device)
            attend = SharedPromptAttention(shared, tokens_T.device)
            return shared.repeated(self.packed_hidden(tokens_T[shared.computed_S], attend))
        with routed(routing):
            return self.packed_hidden(tokens_T, PackedAttention(length_N, tokens_T.device))

    def packed_hidden(self, tokens_T: Tensor, attend: Attend, position_T: Tensor | None = None) -> Tensor:
        """All samples in one row; `attend` separates them."""
        if position_T is None:
            assert isinstance(attend, PackedAttention)
            position_T = attend.position_T
        return self.run(tokens_T.unsqueeze(0), position_T.unsqueeze(0), attend)[0]

    def padded(
        self, tokens_T: Tensor, length_N: Tensor, attend: Attend | None = None, routing: Routing | None = None
    ) -> Tensor:
        """One sample per row, padded at the end."""
        length_N = send(length_N, tokens_T.device)
        position = torch.arange(int(length_N.max()), device=tokens_T.device)
        mask = position < length_N[:, None]
        tokens = tokens_T.new_zeros(mask.shape)
        tokens[mask] = tokens_T
        with routed(None if routing is None else PaddedRouting(routing, mask)):
            hidden: Tensor = (
                self.body(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state
                if self.own_attention
                else self.run(tokens, position.expand_as(tokens), attend or PaddedAttention())
            )
        return hidden[mask]

    def run(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        arguments = {"input_ids": tokens, "position_ids": position, "attend": attend, "use_cache": False}
        # an OpaqueAttention calls the one that is active already
        with nullcontext() if isinstance(attend, OpaqueAttention) else active(attend):
            try:
                out = self.body(**arguments)
            except TorchDynamoException as error:
                log.warning(
                    f"torch.compile cannot compile the layers of {type(self.base).__name__} ({first_line(error)}): "
                    f"they run uncompiled, more slowly. {COMPILE_KEYS} avoids this warning"
                )
                for layer in self.layers:
                    layer._compiled_call_impl = None
                attend.reset()
                out = self.body(**arguments)
        hidden: Tensor = out.last_hidden_state
        return hidden


def checkpointed(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *inputs: Any) -> Any:
    """Checkpoint a layer whose flag is set, and run its forward, now and in the backward pass, in evaluation mode."""

    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return forward(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *inputs)


def body_of(model: PreTrainedModel) -> Any:
    """The module that computes hidden states from tokens."""
    body: Any = model.get_decoder()
    if not isinstance(body, PreTrainedModel):  # in some families, `decoder` is a part of the head
        body = model.base_model
    has_head = body.get_output_embeddings() is not None  # other families return the model with its head
    return getattr(body, "model", body) if has_head else body


def takes_keywords(layer: nn.Module) -> bool:
    """Whether `attend` reaches the layer's attention as an argument: compiled code must not read it from ACTIVE."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
