"""Plain torch in place of the two kernels of the head. Triton's interpreter needs a second for a small batch."""

import pytest
import torch
from torch import Tensor


def transformed(logits_RV: Tensor, inner: float, outer: float, capped: bool) -> Tensor:
    return outer * torch.tanh(inner * logits_RV) if capped else outer * logits_RV


def row_stats(
    logits_RV: Tensor,
    target_R: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    inner: float,
    outer: float,
    capped: bool,
) -> None:
    z_RV = transformed(logits_RV, inner, outer, capped)
    logprob_RV = z_RV.log_softmax(-1)
    found = (
        logprob_RV.gather(1, target_R[:, None]).squeeze(1),
        z_RV.logsumexp(-1),
        -(logprob_RV.exp() * logprob_RV).sum(-1),
    )
    for place_R, values_R in zip(out, found, strict=True):
        place_R.copy_(values_R)


def logits_gradient(
    logits_RV: Tensor,
    target_R: Tensor,
    stats: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    out_RV: Tensor,
    *,
    inner: float,
    outer: float,
    capped: bool,
    entropy_gradient: bool,
) -> None:
    logsumexp_R, entropy_R = stats
    of_logprob_R, of_entropy_R = gradients
    logprob_RV = transformed(logits_RV, inner, outer, capped) - logsumexp_R[:, None]
    probability_RV = logprob_RV.exp()
    is_target_RV = torch.nn.functional.one_hot(target_R, logits_RV.shape[1])
    gradient_RV = of_logprob_R[:, None] * (is_target_RV - probability_RV)
    if entropy_gradient:
        gradient_RV -= of_entropy_R[:, None] * probability_RV * (logprob_RV + entropy_R[:, None])
    slope_RV = outer * inner * (1 - torch.tanh(inner * logits_RV) ** 2) if capped else outer
    out_RV.copy_(gradient_RV * slope_RV)


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rloom.models.head_kernels.row_stats", row_stats)
    monkeypatch.setattr("rloom.models.head_kernels.logits_gradient", logits_gradient)
