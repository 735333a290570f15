"""The models of the roles: a decoder with a head for log-probs (policy, reference) or for values (critic).

T tokens, packed, A of them in the mask, N samples, H hidden size, V vocabulary. A pass is given a micro-batch twice:
lengths and masks are read on the host, tokens and experts on the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rloom.batch import Batch, TokenOutputs
from rloom.models.decoder import Decoder
from rloom.models.head import (
    HAS_TRITON,
    LogitOptions,
    Logits,
    SampleRange,
    fused_logprobs,
    fused_loss,
    linear_float32,
    sample_ranges,
    token_logprobs,
)
from rloom.transfer import send

ALL = slice(None)


class Reference(Protocol):
    """The distribution for a KL over the whole vocabulary, without gradient."""

    def frozen_hidden(self, host_batch: Batch, tokens_T: Tensor) -> Tensor: ...

    def frozen_logits(self, hidden_TH: Tensor) -> Tensor: ...


class LossFn(Protocol):
    """The loss of consecutive samples of a micro-batch, which `rows` and `tokens` select."""

    def __call__(self, outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor: ...


class Network(ABC):
    """A decoder below a head with one output per token: its log-prob, or the value of the state before it."""

    def __init__(self, model: PreTrainedModel | PeftModel, *, packed: bool, shares_prompts: bool = False) -> None:
        self.decoder = Decoder(model, packed=packed, shares_prompts=shares_prompts)  # the model without its head

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.decoder.model
        return module

    @abstractmethod
    def head_outputs(self, hidden_AH: Tensor, target_A: Tensor, *, entropy_gradient: bool = False) -> TokenOutputs:
        """The head's outputs for some tokens, from the hidden states before them."""

    @abstractmethod
    def token_outputs(
        self,
        host_batch: Batch,
        device_batch: Batch,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,  # also the KL to it
    ) -> TokenOutputs: ...

    @abstractmethod
    def loss(
        self,
        host_batch: Batch,
        device_batch: Batch,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> Tensor:
        """The sum of `loss_fn` over all samples, differentiable. It is called once, or once per range of samples."""

    @abstractmethod
    def as_reference(self) -> Reference:
        """The model without its LoRA adapter, as the reference of another network or of itself."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The transformer layers: the units of sharding."""
        return self.decoder.layers

    @property
    def exact(self) -> Sequence[nn.Module]:
        """Modules that compute in float32, whatever the dtype of the others."""
        return ()

    def without_adapter(self) -> AbstractContextManager[Any]:
        """Disable the LoRA adapter within the context."""
        return self.decoder.without_adapter()

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the parameters to `dtype`, except those of `exact`."""
        self.decoder.cast(dtype)
        for module in self.exact:
            module.float()

    def compile(self) -> None:
        """torch.compile the layers."""
        self.decoder.compile()


class PolicyNetwork(Network):
    """A causal language model. Its output is the log-prob of each token at the sampling temperature."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        packed: bool,
        temperature: float = 1.0,
        chunked: bool = True,
        shares_prompts: bool = False,
        replays_routing: bool = False,  # passes are given the experts that the rollout's routers chose
    ) -> None:
        super().__init__(model, packed=packed, shares_prompts=shares_prompts)
        if replays_routing:
            self.decoder.install_replay()
        self.temperature = temperature
        self.chunked = chunked
        text = self.decoder.base.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)  # Gemma
        self.scale = logit_scale(text)

    def adapter_config(self) -> dict[str, Any] | None:
        """peft's configuration of the LoRA adapter, if there is one."""
        model = self.decoder.model
        if not isinstance(model, PeftModel):
            return None
        config: dict[str, Any] = model.peft_config[model.active_adapter].to_dict()
        return config

    @property
    def plain_head_weight(self) -> Tensor | None:
        """The weight of the head if it has neither bias nor adapter."""
        head = self.decoder.base.get_output_embeddings()
        return head.weight if type(head) is nn.Linear and head.bias is None else None

    def fused_head_weight(self, device: torch.device) -> Tensor | None:
        """The weight of the head if the fused kernels can be used."""
        return self.plain_head_weight if self.chunked and kernels_run_on(device) else None

    @property
    def logit_options(self) -> LogitOptions:
        return LogitOptions(self.temperature, self.scale, self.softcap)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Equal to what the model's own forward computes from its last hidden state (`verify` compares them).

        In float32 where a kernel supports it: bfloat16 rounds a logit of 20 by up to 0.06.
        """
        weight_VH = self.plain_head_weight
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
        host_batch: Batch,
        device_batch: Batch,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> TokenOutputs:
        tokens_T = device_batch.tokens_T
        index_A = send(host_batch.mask_T.nonzero().squeeze(1), tokens_T.device)
        frozen = None
        if reference is not None:
            frozen = reference.frozen_logits, reference.frozen_hidden(host_batch, tokens_T)[index_A - 1]
        hidden_AH, mismatch_A = self.hidden_states(host_batch, device_batch, index_A)
        outputs = self.head_outputs(hidden_AH, tokens_T[index_A], entropy_gradient=entropy_gradient, frozen=frozen)
        return scatter_outputs(index_A, len(tokens_T), replace(outputs, routing_mismatch_T=mismatch_A))

    def hidden_states(self, host_batch: Batch, device_batch: Batch, index_A: Tensor) -> tuple[Tensor, Tensor | None]:
        """The states before the tokens at `index_A`, and the mismatch of their routing if it is replayed."""
        replay, shared = self.decoder.replay_of(device_batch.experts_TMK), self.decoder.shared_prompts(host_batch)
        hidden_TH = self.decoder.hidden(device_batch.tokens_T, host_batch.length_N, replay, shared)
        return hidden_TH[index_A - 1], None if replay is None else replay.mismatch_T[index_A - 1]

    def head_outputs(
        self,
        hidden_AH: Tensor,
        target_A: Tensor,
        *,
        entropy_gradient: bool = False,
        frozen: tuple[Logits, Tensor] | None = None,  # a reference's head and its hidden states
    ) -> TokenOutputs:
        weight_VH = self.fused_head_weight(hidden_AH.device)
        if frozen is None and weight_VH is not None:
            return TokenOutputs(
                *fused_logprobs(hidden_AH, weight_VH, target_A, self.logit_options, entropy_gradient=entropy_gradient)
            )
        logprobs, entropy, kl = token_logprobs(
            self.logits,
            hidden_AH,
            target_A,
            temperature=self.temperature,
            chunked=self.chunked,
            entropy_gradient=entropy_gradient,
            reference=frozen,
        )
        return TokenOutputs(logprobs, entropy, kl if frozen is not None else None)

    def loss(
        self,
        host_batch: Batch,
        device_batch: Batch,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> Tensor:
        """One range of samples at a time with the fused kernels, so that logits are computed once (see head.py)."""
        tokens_T, length_N = device_batch.tokens_T, host_batch.length_N
        weight_VH = self.fused_head_weight(tokens_T.device) if reference is None else None
        index_A = host_batch.mask_T.nonzero().squeeze(1)
        ranges = [] if weight_VH is None else sample_ranges(index_A, length_N, len(weight_VH))
        if weight_VH is not None and ranges:
            index_A = send(index_A, tokens_T.device)
            hidden_AH, mismatch_A = self.hidden_states(host_batch, device_batch, index_A)
            options = self.logit_options
            return fused_token_loss(
                hidden_AH, weight_VH, tokens_T, index_A, ranges, loss_fn, options, entropy_gradient, mismatch_A
            )
        outputs = self.token_outputs(host_batch, device_batch, entropy_gradient=entropy_gradient, reference=reference)
        return loss_fn(outputs, ALL, ALL)

    def as_reference(self) -> Reference:
        return self

    @torch.no_grad()
    def frozen_hidden(self, host_batch: Batch, tokens_T: Tensor) -> Tensor:
        shared = self.decoder.shared_prompts(host_batch.without_experts())
        with self.without_adapter():
            return self.decoder.hidden(tokens_T, host_batch.length_N, shared=shared)

    def frozen_logits(self, hidden_TH: Tensor) -> Tensor:
        with self.without_adapter():
            return self.logits(hidden_TH)


class ValueNetwork(Network):
    """The policy's architecture with a scalar head: the return expected from the state before each token."""

    def __init__(self, model: PreTrainedModel, *, packed: bool, shares_prompts: bool = False) -> None:
        super().__init__(model, packed=packed, shares_prompts=shares_prompts)
        size = self.decoder.base.get_input_embeddings().weight.shape[1]
        head = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(head.weight)  # all values are 0 before the first update
        model.set_output_embeddings(head)

    @property
    def exact(self) -> Sequence[nn.Module]:
        return (self.decoder.base.get_output_embeddings(),)  # bfloat16 cannot tell a value of 0.500 from 0.501

    def as_reference(self) -> Reference:
        raise TypeError("a critic has no distribution over tokens: it cannot be the reference of a KL")

    def token_outputs(
        self,
        host_batch: Batch,
        device_batch: Batch,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> TokenOutputs:
        tokens_T = device_batch.tokens_T
        index_A = send(host_batch.mask_T.nonzero().squeeze(1), tokens_T.device)
        assert device_batch.experts_TMK is None  # the rollout has no critic whose routing could be replayed
        shared = self.decoder.shared_prompts(host_batch)
        hidden = self.decoder.hidden(tokens_T, host_batch.length_N, shared=shared)[index_A - 1]
        return scatter_outputs(index_A, len(tokens_T), self.head_outputs(hidden, tokens_T[index_A]))

    def head_outputs(self, hidden_AH: Tensor, target_A: Tensor, *, entropy_gradient: bool = False) -> TokenOutputs:
        return TokenOutputs(self.decoder.base.get_output_embeddings()(hidden_AH.float()).squeeze(1))

    def loss(
        self,
        host_batch: Batch,
        device_batch: Batch,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool = False,
        reference: Reference | None = None,
    ) -> Tensor:
        return loss_fn(self.token_outputs(host_batch, device_batch), ALL, ALL)


def fused_token_loss(
    hidden_AH: Tensor,
    weight_VH: Tensor,
    tokens_T: Tensor,
    index_A: Tensor,  # positions of the tokens in the mask, on the device
    ranges: Sequence[SampleRange],
    loss_fn: LossFn,
    options: LogitOptions,
    entropy_gradient: bool,
    routing_mismatch_A: Tensor | None = None,
) -> Tensor:
    """The sum of `loss_fn` over ranges of samples, each called while the range's logits exist (see head.py)."""

    def range_loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        samples = ranges[index]
        first, last = samples.tokens.start, samples.tokens.stop
        mismatch = None if routing_mismatch_A is None else routing_mismatch_A[samples.answers]
        outputs = TokenOutputs(logprobs, entropy, routing_mismatch_T=mismatch)
        scattered = scatter_outputs(index_A[samples.answers] - first, last - first, outputs)
        return loss_fn(scattered, samples.rows, samples.tokens)

    return fused_loss(
        hidden_AH,
        weight_VH,
        tokens_T[index_A],
        options,
        [samples.answers for samples in ranges],
        range_loss,
        entropy_gradient=entropy_gradient,
    )


def logit_scale(text: PreTrainedConfig) -> float:
    """The factor by which a family multiplies its logits."""

    def entry(name: str) -> float:
        value = getattr(text, name, None)
        return float(value) if isinstance(value, int | float) else 1.0

    divisor = entry("logits_scaling")  # Granite, MiniCPM
    if text.model_type.startswith("hyperclovax"):  # multiplies by it
        divisor = 1 / divisor
    return entry("logit_scale") * entry("lm_head_multiplier") / divisor  # Cohere, Falcon-H1


def kernels_run_on(device: torch.device) -> bool:
    return HAS_TRITON and device.type == "cuda"


def scatter_outputs(index_A: Tensor, tokens: int, outputs: TokenOutputs) -> TokenOutputs:
    """Outputs of the tokens at `index_A` among all tokens; 0 elsewhere."""
    zeros_T = outputs.output_T.new_zeros(tokens)
    fields = (outputs.output_T, outputs.entropy_T, outputs.kl_T, outputs.routing_mismatch_T)
    scattered = [None if field_A is None else zeros_T.index_put((index_A,), field_A) for field_A in fields]
    assert scattered[0] is not None
    return TokenOutputs(scattered[0], *scattered[1:])
