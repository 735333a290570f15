"""What every policy loss takes and gives. T tokens, N samples.

A policy loss is a pure function `(terms, settings) -> TokenLoss`: one loss a token, not yet aggregated. It may look at
the other tokens of a sample but not at other samples, so that any split of a mini-batch gives the same loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rloom.algos.packed import sum_by_sample


@dataclass(frozen=True)
class LossTerms:
    """What a policy loss is made of. Outside the mask every entry is to be ignored."""

    logprobs_T: Tensor  # of the policy that learns; carries the gradient
    old_logprobs_T: Tensor  # of the policy that wrote
    advantages_T: Tensor
    mask_T: Tensor
    sample_T: Tensor  # which sample each token belongs to
    samples: int
    chosen_T: Tensor | None = None  # iff the entry chooses tokens: those it chose over the whole mini-batch

    def sample_mean(self, value_T: Tensor) -> Tensor:
        """For each token, the mean over the masked tokens of its sample."""
        total_N = sum_by_sample(value_T.where(self.mask_T, 0), self.sample_T, self.samples)
        count_N = sum_by_sample(self.mask_T.to(value_T.dtype), self.sample_T, self.samples)
        return (total_N / count_N.clamp(min=1))[self.sample_T]

    def geometric_mean(self, weight_T: Tensor) -> Tensor:
        """For each token, the geometric mean over the masked tokens of its sample; a weight of 0 counts as 1e-10."""
        return self.sample_mean((weight_T + 1e-10).log()).exp()


@dataclass(frozen=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0  # vanilla
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002  # clip_cov
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002  # kl_cov
    ppo_kl_coef: float = 0.1


@dataclass(frozen=True)
class TokenLoss:
    loss_T: Tensor
    parts_T: Mapping[str, Tensor] = field(default_factory=dict)  # averaged over tokens into metrics of that name


PolicyLoss = Callable[[LossTerms, LossSettings], TokenLoss]


def log_ratio(terms: LossTerms) -> Tensor:
    """Clamped: a ratio of e^20 says all there is to say, and its square is still finite."""
    return (terms.logprobs_T - terms.old_logprobs_T).clamp(-20, 20)


def clip_parts(clipped_T: Tensor, log_ratio_T: Tensor) -> dict[str, Tensor]:
    return {"actor/pg_clipfrac": clipped_T.float(), "actor/ppo_kl": -log_ratio_T.detach()}
