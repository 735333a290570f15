"""KL between policy and reference: estimators per token, the KL in the reward, and its coefficient.

x is the log-prob under the policy, y under the reference (Schulman, "Approximating KL divergence", 2020).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from rloom.algos.packed import masked_mean
from rloom.batch import Batch, sum_by_episode, token_scores
from rloom.errors import ConfigError

KlEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(x_T: Tensor, y_T: Tensor) -> Tensor:
    return x_T - y_T


def absolute(x_T: Tensor, y_T: Tensor) -> Tensor:
    return (x_T - y_T).abs()


def k2(x_T: Tensor, y_T: Tensor) -> Tensor:
    return 0.5 * (x_T - y_T).square()


def k3(x_T: Tensor, y_T: Tensor) -> Tensor:
    """Never negative, low variance."""
    z_T = (y_T - x_T).clamp(-20, 20)
    return (z_T.exp() - z_T - 1).clamp(-10, 10)


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}


FULL_KL = "full"  # exact, over the whole vocabulary; computed by the engine


def kl_estimator(name: str) -> KlEstimator:
    """The estimator of that name. A trailing + keeps its value and uses the gradient of k2, which is unbiased."""
    value = KL_ESTIMATORS.get(name.removesuffix("+"))
    if value is None:
        raise ConfigError(
            f"KL estimator {name!r} does not exist; use one of {', '.join(KL_ESTIMATORS)}, with or without a trailing +"
        )
    return with_gradient_of_k2(value) if name.endswith("+") else value


def with_gradient_of_k2(value: KlEstimator) -> KlEstimator:
    def straight_through(x_T: Tensor, y_T: Tensor) -> Tensor:
        gradient_T = k2(x_T, y_T)
        return value(x_T, y_T).detach() + (gradient_T - gradient_T.detach())

    return straight_through


def full_kl(logits_policy: Tensor, logits_reference: Tensor) -> Tensor:
    """KL(policy || reference) over the whole vocabulary, the last dimension. Exact."""
    x = logits_policy.log_softmax(-1)
    y = logits_reference.log_softmax(-1)
    return (x.exp() * (x - y)).sum(-1)


def token_rewards(batch: Batch, kl_T: Tensor | None = None, coefficient: float = 0.0) -> Tensor:
    """The score at the last generated token of each sample, minus coefficient * KL at every generated token.

    What turns of an episode have got of the score is at the last token of each."""
    rewards_T = token_scores(batch)
    if kl_T is not None:
        rewards_T = rewards_T - coefficient * kl_T * batch.mask_T
    return rewards_T


def mean_sample_kl(batch: Batch, kl_T: Tensor) -> float:
    """Mean over samples of their mean KL per token: the input of the adaptive controller. Branches of one episode are
    one sample."""
    mask_T = batch.loss_mask_T
    count_N = sum_by_episode(batch.counts(mask_T).to(kl_T.dtype), batch)
    total_N = sum_by_episode(batch.sums(kl_T, mask_T, kl_T.dtype), batch)
    return float(masked_mean(total_N / count_N.clamp(min=1), (count_N > 0) & batch.counted_N))


@dataclass(frozen=True)
class KlControl:
    """The coefficient of the KL in the reward. Adaptive: Ziegler et al. 2019, a proportional controller."""

    coefficient: float
    adaptive: bool = False
    target: float = 0.1
    horizon: int = 10_000

    def updated(self, kl: float, samples: int) -> "KlControl":
        if not self.adaptive:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))
