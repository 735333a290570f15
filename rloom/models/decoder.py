"""The body of a causal language model: hidden states of packed or padded samples.

T tokens of all samples laid end to end, N samples. Lengths are on the host.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.attention import Attend, OpaqueAttention, PackedAttention, PaddedAttention, active
from rloom.models.load import first_line
from rloom.transfer import send

log = logging.getLogger(__name__)
COMPILE_KEYS = "use_torch_compile=False (of actor_rollout_ref.actor, actor_rollout_ref.ref or critic)"


class Decoder:
    """The body of a Hugging Face causal model, over packed or padded samples.

    Packed samples need rloom's attention. Padded ones are also right with a model's own, and with layers that carry a
    state from token to token (state-space layers, linear attention, convolutions): each sample has a row of its own.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, *, packed: bool) -> None:
        self.model = model
        self.base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
        self.body = body_of(self.base)
        self.packed = packed
        self.layers: list[nn.Module] = [m for m in self.body.modules() if isinstance(m, GradientCheckpointingLayer)]

    @property
    def heads(self) -> int:
        """Of the queries."""
        return int(self.base.config.get_text_config().num_attention_heads)

    @property
    def own_attention(self) -> bool:
        """It attends by transformers' code, not by rloom's."""
        return bool(self.base.config._attn_implementation != RLOOM_ATTENTION)

    def train(self) -> None:
        """Prepare for gradients. Only the layers' own flag is set, which gradient checkpointing asks for.

        Whatever else a family does while it trains (dropout, noise on a router) would make the log-prob of a token
        depend on chance: the modules stay as they are in evaluation.
        """
        self.model.eval()
        for layer in self.layers:
            layer.training = True

    def cast(self, dtype: torch.dtype) -> None:
        """Parameters only: the angles of rotary embeddings are buffers and stay float32."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def compile(self) -> None:
        """Fuse what lies between a layer's matrix products. All layers share what is compiled."""
        if not self.layers or not all(takes_keywords(layer) for layer in self.layers):
            log.warning(
                f"{type(self.base).__name__} has no layers that rloom knows how to compile: they run as they are, "
                f"more slowly. {COMPILE_KEYS} says so from the start"
            )
            return
        torch._dynamo.config.recompile_limit = 64  # training, scoring, prefill and decode each have a version
        # What a layer's products read (norms, gate times up) is made anew in the backward pass where it comes from
        # numbers that are kept anyway: a third of what a layer keeps, for one writing of it.
        torch._functorch.config.ban_recompute_materialized_backward = False
        for layer in self.layers:
            layer.compile(dynamic=True)

    @contextmanager
    def uncompiled_layers(self) -> Iterator[None]:
        """The layers without what the compiler made of them."""
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

    def hidden(self, tokens_T: Tensor, length_N: Tensor) -> Tensor:
        if not self.packed:
            return self.padded(tokens_T, length_N)
        return self.packed_hidden(tokens_T, PackedAttention(length_N, tokens_T.device))

    def packed_hidden(self, tokens_T: Tensor, attend: Attend, position_T: Tensor | None = None) -> Tensor:
        """All samples in one row; `attend` knows where each begins."""
        if position_T is None:
            assert isinstance(attend, PackedAttention)
            position_T = attend.position_T
        return self.run(tokens_T.unsqueeze(0), position_T.unsqueeze(0), attend)[0]

    def padded(self, tokens_T: Tensor, length_N: Tensor, attend: Attend | None = None) -> Tensor:
        """One sample a row, padded at the end."""
        length_N = send(length_N, tokens_T.device)
        place = torch.arange(int(length_N.max()), device=tokens_T.device)
        real = place < length_N[:, None]
        tokens = tokens_T.new_zeros(real.shape)
        tokens[real] = tokens_T
        if self.own_attention:
            hidden: Tensor = self.body(input_ids=tokens, attention_mask=real.long(), use_cache=False).last_hidden_state
            return hidden[real]
        return self.run(tokens, place.expand_as(tokens), attend or PaddedAttention())[real]

    def run(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        arguments = {"input_ids": tokens, "position_ids": position, "attend": attend, "use_cache": False}
        # an opaque attention stands for one that is running already
        with nullcontext() if isinstance(attend, OpaqueAttention) else active(attend):
            try:
                out = self.body(**arguments)
            except TorchDynamoException as error:
                log.warning(
                    f"torch.compile cannot compile the layers of {type(self.base).__name__} ({first_line(error)}): "
                    f"they run as they are, more slowly. {COMPILE_KEYS} says so from the start"
                )
                for layer in self.layers:
                    layer._compiled_call_impl = None
                attend.reset()
                out = self.body(**arguments)
        hidden: Tensor = out.last_hidden_state
        return hidden


def body_of(model: PreTrainedModel) -> Any:
    """What makes hidden states of tokens."""
    found: Any = model.get_decoder()
    if not isinstance(found, PreTrainedModel):  # some families call a part of their head `decoder`
        found = model.base_model
    whole = found.get_output_embeddings() is not None  # others give the model with its head
    return getattr(found, "model", found) if whole else found


def takes_keywords(layer: nn.Module) -> bool:
    """Whether `attend` reaches the layer's attention as an argument; a compiled layer must not look elsewhere."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
