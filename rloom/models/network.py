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
from rloom.errors import ModelError
from rloom.models.attention import Attend, PackedAttention, RowsAttention
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
        """All samples in one row; `attend` knows where each begins."""
        if position_T is None:
            assert isinstance(attend, PackedAttention)
            position_T = attend.position_T
        return self.run(tokens_T.unsqueeze(0), position_T.unsqueeze(0), attend)[0]

    def padded(self, tokens_T: Tensor, length_N: Tensor) -> Tensor:
        """One sample a row, padded at the end."""
        place = torch.arange(int(length_N.max()), device=tokens_T.device)
        real = place < length_N[:, None]
        tokens = tokens_T.new_zeros(real.shape)
        tokens[real] = tokens_T
        return self.run(tokens, place.expand_as(tokens), RowsAttention())[real]

    def run(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        out = self.body(input_ids=tokens, position_ids=position, attend=attend, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden


class PolicyNetwork:
    """A causal language model. Its output is the log-prob of each token at the sampling temperature."""

    def __init__(
        self, model: PreTrainedModel | PeftModel, *, packed: bool, temperature: float = 1.0, chunked: bool = True
    ) -> None:
        self.decoder = Decoder(model, packed=packed)
        self.temperature = temperature
        self.chunked = chunked
        config = self.decoder.base.config.to_dict()
        self.softcap: float | None = config.get("final_logit_softcapping")  # Gemma 2 and 3
        self.scale = config.get("logit_scale", 1.0) / config.get("logits_scaling", 1.0)  # Cohere, Granite

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.decoder.model
        return module

    def without_adapter(self) -> AbstractContextManager[Any]:
        return self.decoder.without_adapter()

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """What the model's own forward makes of its last hidden state; `check_head` holds it to that."""
        logits_TV: Tensor = self.decoder.base.get_output_embeddings()(hidden_TH) * self.scale
        return logits_TV if self.softcap is None else self.softcap * torch.tanh(logits_TV / self.softcap)

    @torch.no_grad()
    def check_head(self, key: str) -> None:
        """Some architectures do more to their logits than we know of: better no training than a wrong one."""
        base = self.decoder.base
        tokens, attend = torch.arange(3, 8), PackedAttention(torch.tensor([5]))
        ours = self.logits(self.decoder.packed_hidden(tokens, attend))
        theirs = base(
            input_ids=tokens[None], position_ids=attend.position_T[None], attend=attend, use_cache=False
        ).logits[0]
        if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
            raise ModelError(
                f"{key}: {type(base).__name__} changes its logits in a way that rloom does not know of "
                f"(largest difference {float((ours - theirs).abs().max()):.3g}); use a model of another architecture"
            )

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
