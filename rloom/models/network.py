"""What roles need of a model: hidden states of packed samples, and what a head makes of them.

T tokens of all samples laid end to end, N samples, H hidden size, V vocabulary. Lengths and masks are on the host.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rloom.batch import TokenOutputs
from rloom.models.decoder import Decoder
from rloom.models.head import HAS_TRITON, LogitOptions, fused_logprobs, fused_loss, linear_float32, sample_ranges
from rloom.models.logprobs import Logits, token_logprobs
from rloom.transfer import send

ALL = slice(None)


class Reference(Protocol):
    """What a policy is compared with over the whole vocabulary. It has no gradient."""

    def frozen_hidden(self, tokens_T: Tensor, length_N: Tensor) -> Tensor: ...

    def frozen_logits(self, hidden_TH: Tensor) -> Tensor: ...


class LossFn(Protocol):
    """What some neighbouring samples of a pass, given by their rows and tokens in it, add to its loss."""

    def __call__(self, outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor: ...


class Network(Protocol):
    """A model with a head that says one number a token: its log-prob, or the value of the state before it."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def decoder(self) -> Decoder:
        """The body, without its head."""

    def answer_outputs(self, hidden_AH: Tensor, target_A: Tensor, *, entropy_gradient: bool = False) -> TokenOutputs:
        """What the head says of some tokens, from the hidden states before them."""

    def token_outputs(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,  # also the KL to it
    ) -> TokenOutputs: ...

    def loss(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> Tensor:
        """What `judge` says of all samples, with its gradient. It is asked once, or once for each of some parts."""

    def as_reference(self) -> Reference:
        """The model as it was before LoRA, for another, or for itself, to be compared with."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Parts that run one after the other and have about one size: the units of sharding."""

    @property
    def exact(self) -> Sequence[nn.Module]:
        """Parts whose arithmetic is float32 whatever that of the others is."""

    def without_adapter(self) -> AbstractContextManager[Any]:
        """The model as it was before LoRA."""

    def cast(self, dtype: torch.dtype) -> None:
        """Compute in this precision from now on."""

    def compile(self) -> None:
        """Let torch.compile have the layers."""


class PolicyNetwork:
    """A causal language model. Its output is the log-prob of each token at the sampling temperature."""

    def __init__(
        self, model: PreTrainedModel | PeftModel, *, packed: bool, temperature: float = 1.0, chunked: bool = True
    ) -> None:
        self.decoder = Decoder(model, packed=packed)
        self.temperature = temperature
        self.chunked = chunked
        text = self.decoder.base.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)  # Gemma
        self.scale = logit_scale(text)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.decoder.model
        return module

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self.decoder.layers

    @property
    def exact(self) -> Sequence[nn.Module]:
        return ()

    def without_adapter(self) -> AbstractContextManager[Any]:
        return self.decoder.without_adapter()

    def cast(self, dtype: torch.dtype) -> None:
        self.decoder.cast(dtype)

    def compile(self) -> None:
        self.decoder.compile()

    @property
    def plain_head(self) -> Tensor | None:
        """The weight of the head where that is all there is to it: no bias, no adapter."""
        head = self.decoder.base.get_output_embeddings()
        return head.weight if type(head) is nn.Linear and head.bias is None else None

    def fused_head(self, device: torch.device) -> Tensor | None:
        """The weight of the head where the kernels may take it from there."""
        return self.plain_head if self.chunked and kernels_run_on(device) else None

    @property
    def form(self) -> LogitOptions:
        return LogitOptions(self.temperature, self.scale, self.softcap)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """What the model's own forward makes of its last hidden state; `verify` compares them when a model is loaded.

        In float32 where a kernel gives that: bfloat16 rounds a logit of 20 by up to 0.06.
        """
        weight_VH = self.plain_head
        logits_TV: Tensor = (
            linear_float32(hidden_TH, weight_VH)
            if weight_VH is not None and hidden_TH.is_cuda
            else self.decoder.base.get_output_embeddings()(hidden_TH)
        )
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        return logits_TV if self.softcap is None else self.softcap * torch.tanh(logits_TV / self.softcap)

    def token_outputs(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> TokenOutputs:
        place = send(mask_T.nonzero().squeeze(1), tokens_T.device)
        compared = None
        if reference is not None:
            compared = reference.frozen_logits, reference.frozen_hidden(tokens_T, length_N)[place - 1]
        hidden = self.decoder.hidden(tokens_T, length_N)[place - 1]
        found = self.answer_outputs(hidden, tokens_T[place], entropy_gradient=entropy_gradient, compared=compared)
        return outputs_at(place, len(tokens_T), found)

    def answer_outputs(
        self,
        hidden_AH: Tensor,
        target_A: Tensor,
        *,
        entropy_gradient: bool = False,
        compared: tuple[Logits, Tensor] | None = None,  # a reference's logits and its hidden states
    ) -> TokenOutputs:
        weight_VH = self.fused_head(hidden_AH.device)
        if compared is None and weight_VH is not None:
            return TokenOutputs(
                *fused_logprobs(hidden_AH, weight_VH, target_A, self.form, entropy_gradient=entropy_gradient)
            )
        logprobs, entropy, kl = token_logprobs(
            self.logits,
            hidden_AH,
            target_A,
            temperature=self.temperature,
            chunked=self.chunked,
            entropy_gradient=entropy_gradient,
            reference=compared,
        )
        return TokenOutputs(logprobs, entropy, kl if compared is not None else None)

    def loss(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> Tensor:
        """Part by part where the kernels can: the logits of a part are still there when its loss is known."""
        weight_VH = self.fused_head(tokens_T.device) if reference is None else None
        place = mask_T.nonzero().squeeze(1)
        ranges = [] if weight_VH is None else sample_ranges(place, length_N, len(weight_VH))
        if weight_VH is None or not ranges:
            return loss_fn(
                self.token_outputs(tokens_T, length_N, mask_T, entropy_gradient=entropy_gradient, reference=reference),
                ALL,
                ALL,
            )
        place = send(place, tokens_T.device)

        def range_loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            span = ranges[index]
            first, last = span.tokens.start, span.tokens.stop
            outputs = outputs_at(place[span.answers] - first, last - first, TokenOutputs(logprobs, entropy))
            return loss_fn(outputs, span.rows, span.tokens)

        return fused_loss(
            self.decoder.hidden(tokens_T, length_N)[place - 1],
            weight_VH,
            tokens_T[place],
            self.form,
            [span.answers for span in ranges],
            range_loss,
            entropy_gradient=entropy_gradient,
        )

    def as_reference(self) -> Reference:
        return self

    @torch.no_grad()
    def frozen_hidden(self, tokens_T: Tensor, length_N: Tensor) -> Tensor:
        with self.without_adapter():
            return self.decoder.hidden(tokens_T, length_N)

    def frozen_logits(self, hidden_TH: Tensor) -> Tensor:
        with self.without_adapter():
            return self.logits(hidden_TH)


class ValueNetwork:
    """The same architecture with one number as its head: the return expected from the state before each token."""

    def __init__(self, model: PreTrainedModel, *, packed: bool) -> None:
        self.decoder = Decoder(model, packed=packed)
        size = self.decoder.base.get_input_embeddings().weight.shape[1]
        head = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(head.weight)  # every state is worth 0 until the critic has seen a reward
        model.set_output_embeddings(head)

    def cast(self, dtype: torch.dtype) -> None:
        self.decoder.cast(dtype)
        for module in self.exact:
            module.float()

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self.decoder.layers

    @property
    def exact(self) -> Sequence[nn.Module]:
        return (self.decoder.base.get_output_embeddings(),)  # bfloat16 cannot tell a value of 0.500 from 0.501

    def as_reference(self) -> Reference:
        raise TypeError("a critic says values: there is no distribution to compare with")

    def compile(self) -> None:
        self.decoder.compile()

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.decoder.model
        return module

    def without_adapter(self) -> AbstractContextManager[Any]:
        return self.decoder.without_adapter()

    def token_outputs(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> TokenOutputs:
        place = send(mask_T.nonzero().squeeze(1), tokens_T.device)
        hidden = self.decoder.hidden(tokens_T, length_N)[place - 1]
        return outputs_at(place, len(tokens_T), self.answer_outputs(hidden, tokens_T[place]))

    def answer_outputs(self, hidden_AH: Tensor, target_A: Tensor, *, entropy_gradient: bool = False) -> TokenOutputs:
        return TokenOutputs(self.decoder.base.get_output_embeddings()(hidden_AH.float()).squeeze(1))

    def loss(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> Tensor:
        return loss_fn(self.token_outputs(tokens_T, length_N, mask_T), ALL, ALL)


def logit_scale(text: PreTrainedConfig) -> float:
    """What a family multiplies its logits by."""

    def entry(name: str) -> float:
        value = getattr(text, name, None)
        return float(value) if isinstance(value, int | float) else 1.0

    divisor = entry("logits_scaling")  # Granite, MiniCPM
    if text.model_type.startswith("hyperclovax"):  # the same name, the other way round
        divisor = 1 / divisor
    return entry("logit_scale") * entry("lm_head_multiplier") / divisor  # Cohere, Falcon-H1


def kernels_run_on(device: torch.device) -> bool:
    return HAS_TRITON and device.type == "cuda"


def outputs_at(place_A: Tensor, tokens: int, found: TokenOutputs) -> TokenOutputs:
    """Numbers of some tokens where they belong among all."""
    zeros_T = found.output_T.new_zeros(tokens)
    numbers = (found.output_T, found.entropy_T, found.kl_T)
    placed = [None if number_A is None else zeros_T.index_put((place_A,), number_A) for number_A in numbers]
    assert placed[0] is not None
    return TokenOutputs(placed[0], *placed[1:])
