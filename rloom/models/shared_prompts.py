"""A prompt that several samples of a pass begin with is computed once: by the first of them, for all.

T tokens of all samples, S of them computed, N samples, P computed tokens that are repeated, R further samples with the
same prompt. Causal attention makes the hidden states of equal prompts equal, so the log-probs and values of all samples
stay the same, up to rounding, and so does the gradient: it is the sum over the samples.

Example: [5, 6, 7] and [5, 6, 8], both with the prompt [5, 6] -> 5, 6, 7 and 8 are computed; 8 attends to 5, 6 and 8.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rloom.batch import Batch, token_ends
from rloom.models.attention import AttentionOptions, PackedAttention, has_varlen_kernel
from rloom.packing import RowPrompt
from rloom.transfer import send

LEAST_SAVED = 1 / 32  # of the tokens: below it, repeating keys and values costs what is saved
NUMBERS_AT_ONCE = 2**26  # of gradients that are summed


def shareable_prompts(batch: Batch) -> list[RowPrompt] | None:
    """The tokens before the first sampled one, of each sample. None: too few of them are equal to save time."""
    tokens, mask = batch.tokens_T.numpy(), batch.mask_T.numpy()
    prompts = []
    for start, stop in pairwise(token_ends(batch.length_N)):
        before = int(mask[start:stop].argmax()) if mask[start:stop].any() else stop - start - 1
        prompts.append(RowPrompt(tokens[start : start + before].tobytes(), before))
    saved = sum(prompt.tokens for prompt in prompts) - sum({p.key: p.tokens for p in prompts}.values())
    return prompts if saved >= LEAST_SAVED * len(tokens) else None


@dataclass(frozen=True)
class SharedPrompts:
    """Which tokens of a pass are computed, and where those that are not find their keys and values."""

    length_N: Tensor  # on the host, tokens of each sample
    computed_N: Tensor  # on the host, those that are computed: the last of each sample, of some all
    computed_S: Tensor  # the index among all tokens of each that is computed
    source_T: Tensor  # the index among the computed tokens of each token, or of the one it repeats
    repeated_P: Tensor  # the computed tokens that others repeat
    repeats_PR: Tensor  # the indices among all tokens of those that repeat them; -1 where there are fewer

    @classmethod
    def of(cls, length_N: Tensor, prompts: Sequence[RowPrompt]) -> Self:
        """All tensors on the host. The first sample with a prompt computes it."""
        ends = token_ends(length_N)
        first: dict[Hashable, int] = {}  # its row
        further: dict[int, list[int]] = defaultdict(list)  # rows that repeat the prompt of this row
        for row, prompt in enumerate(prompts):
            if first.setdefault(prompt.key, row) != row:
                further[first[prompt.key]].append(row)
        repeated = {row for rows in further.values() for row in rows}
        computed = [
            np.arange(start + (prompts[row].tokens if row in repeated else 0), stop)
            for row, (start, stop) in enumerate(pairwise(ends))
        ]
        computed_S = np.concatenate(computed)
        source_T = np.empty(ends[-1], np.int64)
        source_T[computed_S] = np.arange(len(computed_S))
        most = max(2, *map(len, further.values()))  # compiled code has a version of its own for a size of 1
        repeated_P, repeats_PR = [], []
        for row, rows in further.items():
            tokens = np.arange(prompts[row].tokens)
            repeats = np.full((len(tokens), most), -1)
            for number, other in enumerate(rows):
                repeats[:, number] = ends[other] + tokens
                source_T[ends[other] + tokens] = source_T[ends[row] + tokens]
            repeated_P.append(source_T[ends[row] + tokens])
            repeats_PR.append(repeats)
        return cls(
            length_N,
            torch.tensor([len(tokens) for tokens in computed]),
            torch.from_numpy(computed_S),
            torch.from_numpy(source_T),
            torch.from_numpy(np.concatenate(repeated_P)),
            torch.from_numpy(np.concatenate(repeats_PR)),
        )

    def to(self, device: torch.device) -> "SharedPrompts":
        """The lengths stay on the host, where sizes are read."""
        indices = (self.computed_S, self.source_T, self.repeated_P, self.repeats_PR)
        return SharedPrompts(self.length_N, self.computed_N, *(send(index, device) for index in indices))

    def repeated(self, value_SX: Tensor) -> Tensor:
        """value_TX: of each token, the value of the one that is computed for it. Differentiable."""
        value_TX: Tensor = repeat_prompts(value_SX, self.computed_S, self.source_T, self.repeated_P, self.repeats_PR)
        return value_TX


class SharedPromptAttention(PackedAttention):
    """As PackedAttention over all tokens, with the queries of those that are computed."""

    def __init__(self, shared: SharedPrompts, device: torch.device) -> None:
        super().__init__(shared.computed_N, device)
        self.shared = shared
        self.all = PackedAttention(shared.length_N, device)

    @property
    def position_T(self) -> Tensor:
        """Of the computed tokens."""
        return self.all.position_T[self.shared.computed_S]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        key, value = self.repeated(key), self.repeated(value)
        if has_varlen_kernel(query, value, options):
            return self.varlen(query, key, value, options, keys=self.all)
        return self.all(self.repeated(query), key, value, options)[:, self.shared.computed_S]

    def repeated(self, packed: Tensor) -> Tensor:
        """[1, heads, computed tokens, size] -> [1, heads, tokens, size]"""
        return self.shared.repeated(packed[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0)


# An operator, so that the compiler does not trace into it, and the sum over repeats has an order: indexing would add
# with atomic operations, in bfloat16 and in any order.
@torch.library.custom_op("rloom::repeat_prompts", mutates_args=())
def repeat_prompts(
    value_SX: Tensor, computed_S: Tensor, source_T: Tensor, repeated_P: Tensor, repeats_PR: Tensor
) -> Tensor:
    return value_SX[source_T].contiguous()  # as declared below: indexing may keep another order


@repeat_prompts.register_fake
def _(value_SX: Tensor, computed_S: Tensor, source_T: Tensor, repeated_P: Tensor, repeats_PR: Tensor) -> Tensor:
    return value_SX.new_empty(source_T.shape[0], *value_SX.shape[1:])


@torch.library.custom_op("rloom::sum_repeats", mutates_args=())
def sum_repeats(gradient_TX: Tensor, computed_S: Tensor, repeated_P: Tensor, repeats_PR: Tensor) -> Tensor:
    gradient_SX = gradient_TX[computed_S].contiguous()
    sums = torch.promote_types(gradient_TX.dtype, torch.float32)
    rows = max(1, NUMBERS_AT_ONCE // max(1, repeats_PR.shape[1] * gradient_TX[0].numel()))
    for index_P, others_PR in zip(repeated_P.split(rows), repeats_PR.split(rows), strict=True):
        others_PRX = gradient_TX[others_PR.clamp(min=0)]
        missing = (others_PR < 0).reshape(*others_PR.shape, *[1] * (gradient_TX.dim() - 1))
        total_PX = gradient_SX[index_P].to(sums) + others_PRX.masked_fill_(missing, 0).sum(1, dtype=sums)
        gradient_SX[index_P] = total_PX.to(gradient_SX.dtype)
    return gradient_SX


@sum_repeats.register_fake
def _(gradient_TX: Tensor, computed_S: Tensor, repeated_P: Tensor, repeats_PR: Tensor) -> Tensor:
    return gradient_TX.new_empty(computed_S.shape[0], *gradient_TX.shape[1:])


def save_indices(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, computed_S, _, repeated_P, repeats_PR = inputs
    ctx.save_for_backward(computed_S, repeated_P, repeats_PR)


def repeat_prompts_backward(ctx: Any, gradient_TX: Tensor) -> tuple[Tensor, None, None, None, None]:
    return sum_repeats(gradient_TX, *ctx.saved_tensors), None, None, None, None


repeat_prompts.register_autograd(repeat_prompts_backward, setup_context=save_indices)
