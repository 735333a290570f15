"""What roles need of a model: hidden states of packed samples, and what a head makes of them.

T tokens of all samples laid end to end, N samples, H hidden size, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloom.batch import TokenOutputs
from rloom.models.attention import Attend, PackedAttention
from rloom.models.logprobs import token_logprobs


class Network(Protocol):
    """A model with a head that says one number a token: its log-prob, or the value of the state before it."""

    @property
    def module(self) -> nn.Module: ...

    def token_outputs(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        *,
        entropy_gradient: bool = False,
        reference: "Network | None" = None,  # also the KL to it; itself: to what it was before LoRA
    ) -> TokenOutputs: ...

    def without_adapter(self) -> AbstractContextManager[Any]:
        """The model as it was before LoRA."""


class Decoder:
    """The body of a Hugging Face causal model, over packed or padded samples."""

    def __init__(self, model: PreTrainedModel | PeftModel, *, packed: bool) -> None:
        self.model = model
        self.base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
        self.body: Any = self.base.get_decoder()
        self.packed = packed

    def without_adapter(self) -> AbstractContextManager[Any]:
        return self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext()

    def hidden(self, tokens_T: Tensor, length_N: Tensor) -> Tensor:
        return (
            self.packed_hidden(tokens_T, PackedAttention(length_N)) if self.packed else self.padded(tokens_T, length_N)
        )

    def packed_hidden(self, tokens_T: Tensor, attend: Attend, position_T: Tensor | None = None) -> Tensor:
        if position_T is None:
            assert isinstance(attend, PackedAttention)
            position_T = attend.position_T
        out = self.body(
            input_ids=tokens_T.unsqueeze(0), position_ids=position_T.unsqueeze(0), attend=attend, use_cache=False
        )
        hidden_TH: Tensor = out.last_hidden_state[0]
        return hidden_TH

    def padded(self, tokens_T: Tensor, length_N: Tensor) -> Tensor:
        place = torch.arange(int(length_N.max()), device=tokens_T.device)
        real = place < length_N[:, None]
        tokens = tokens_T.new_zeros(real.shape)
        tokens[real] = tokens_T
        out = self.body(input_ids=tokens, attention_mask=real.long(), use_cache=False)
        hidden_TH: Tensor = out.last_hidden_state[real]
        return hidden_TH


class PolicyNetwork:
    """A causal language model. Its output is the log-prob of each token at the sampling temperature."""

    def __init__(
        self, model: PreTrainedModel | PeftModel, *, packed: bool, temperature: float = 1.0, chunked: bool = True
    ) -> None:
        self.decoder = Decoder(model, packed=packed)
        self.temperature = temperature
        self.chunked = chunked
        self.softcap: float | None = self.decoder.base.config.to_dict().get("final_logit_softcapping")

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.decoder.model
        return module

    def without_adapter(self) -> AbstractContextManager[Any]:
        return self.decoder.without_adapter()

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """What the model's own forward makes of its last hidden state."""
        logits_TV: Tensor = self.decoder.base.get_output_embeddings()(hidden_TH)
        return logits_TV if self.softcap is None else self.softcap * torch.tanh(logits_TV / self.softcap)

    def token_outputs(
        self,
        tokens_T: Tensor,
        length_N: Tensor,
        mask_T: Tensor,
        *,
        entropy_gradient: bool = False,
        reference: Network | None = None,
    ) -> TokenOutputs:
        place = mask_T.nonzero().squeeze(1)
        compared = None
        if reference is not None:
            assert isinstance(reference, PolicyNetwork)
            compared = reference.frozen_logits, reference.frozen_hidden(tokens_T, length_N)[place - 1]
        logprobs, entropy, kl = token_logprobs(
            self.logits,
            self.decoder.hidden(tokens_T, length_N)[place - 1],
            tokens_T[place],
            temperature=self.temperature,
            chunked=self.chunked,
            entropy_gradient=entropy_gradient,
            reference=compared,
        )
        zeros_T = logprobs.new_zeros(len(tokens_T))
        return TokenOutputs(
            zeros_T.index_put((place,), logprobs),
            zeros_T.index_put((place,), entropy),
            zeros_T.index_put((place,), kl) if compared is not None else None,
        )

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
        reference: Network | None = None,
    ) -> TokenOutputs:
        place = mask_T.nonzero().squeeze(1)
        hidden = self.decoder.hidden(tokens_T, length_N)[place - 1]
        values = self.decoder.base.get_output_embeddings()(hidden).squeeze(1).float()
        return TokenOutputs(values.new_zeros(len(tokens_T)).index_put((place,), values))
