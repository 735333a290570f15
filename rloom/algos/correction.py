"""Rollout correction: the rollout engine's log-probs differ slightly from the trainer's. T tokens, N samples.

w = exp(trainer - rollout) is the importance ratio of a token or of a whole answer. Weighting the loss by the truncated
ratio corrects for the difference; rejection removes tokens or answers whose ratio is out of bounds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rloom.algos.packed import masked_mean, sum_by_sample
from rloom.algos.rejection import Criterion, RatioBounds, Threshold, bounds_of, criteria
from rloom.batch import Batch, TokenMoments, masked_blocks, sum_by_episode

Level = Literal["token", "sequence", "geometric"]
LEVELS: dict[str, Level] = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
MAX_LOG_RATIO = 20.0  # log-ratios are clamped to ± this, so that the ratio and its square are finite
SMALLEST_FACTOR = 1e-8  # weights with a smaller mean are not normalised


@dataclass(frozen=True)
class CorrectionSettings:
    rollout_is: Literal["token", "sequence"] | None = None  # weight by the ratio of a token or of its whole answer
    rollout_is_threshold: Threshold = 2.0  # weights are truncated here; `lower_upper`: 0 outside of these (IcePop)
    rollout_is_batch_normalize: bool = False  # to mean 1 over the batch
    # reject by the ratio of a token, of its answer, or the answer's geometric mean: a Level; or by verl's criteria
    rollout_rs: str | None = None
    rollout_rs_threshold: Threshold | None = None  # largest ratio kept; bounds of the criteria
    rollout_rs_threshold_lower: float | None = None  # smallest ratio kept; None: 1 / the largest
    rollout_token_veto_threshold: float | None = None  # a single token below this ratio rejects its whole answer
    # reject tokens of negative advantage in answers whose mean of log(rollout / trainer) is above this
    off_policy_mask_threshold: float | None = None
    rollout_is_threshold_lower: float | None = None  # smaller weights are raised to this

    @property
    def weight_bounds(self) -> RatioBounds:
        found, lower = bounds_of(self.rollout_is_threshold), self.rollout_is_threshold_lower
        return found if lower is None else RatioBounds(lower, found.upper, clamps=True)

    @property
    def rejects(self) -> bool:
        further = (self.rollout_token_veto_threshold, self.off_policy_mask_threshold)
        return self.rollout_rs is not None or any(value is not None for value in further)


@dataclass(frozen=True)
class Correction:
    weights_T: Tensor | None  # iff rollout_is is set
    keep_T: Tensor  # bool, False where a token is rejected
    metrics: Mapping[str, float]


def correct(
    batch: Batch, trainer_logprobs_T: Tensor, settings: CorrectionSettings, advantages_T: Tensor | None = None
) -> Correction:
    """Weights, rejections, and the metrics of the difference between engine and trainer, which are always computed.

    `advantages_T`: for off_policy_mask_threshold.
    """
    ratios = Ratios.of(batch, trainer_logprobs_T)
    metrics = mismatch(batch, trainer_logprobs_T)
    weights_T = None
    if settings.rollout_is is not None:
        weights_T, found = importance_weights(ratios, settings.rollout_is, settings)
        metrics |= found
    if settings.rollout_rs is not None and settings.rollout_rs not in LEVELS:
        metrics |= criteria_metrics(ratios, settings)
    if settings.rollout_token_veto_threshold is not None:
        metrics |= veto_metrics(ratios, settings.rollout_token_veto_threshold)
    if settings.off_policy_mask_threshold is not None:
        masked_T = off_policy(ratios, advantages_T, settings.off_policy_mask_threshold)
        metrics["rollout_corr/off_policy_masked_fraction"] = ratios.share_of_tokens(masked_T)
    keep_T = kept(ratios, settings, advantages_T)
    if settings.rejects:
        metrics |= rejected(ratios, keep_T)
    return Correction(None if weights_T is None else weights_T.to(trainer_logprobs_T.dtype), keep_T, metrics)


def kept(ratios: "Ratios", settings: CorrectionSettings, advantages_T: Tensor | None = None) -> Tensor:
    keep_T = torch.ones_like(ratios.mask_T)
    if settings.rollout_rs in LEVELS:
        keep_T = within_bounds(ratios, LEVELS[settings.rollout_rs], settings)
    elif settings.rollout_rs is not None:
        for criterion in settings_criteria(settings):
            keep_T = keep_T & passes(ratios.divergence(criterion), criterion)
    if settings.rollout_token_veto_threshold is not None:
        keep_T = keep_T & ~vetoed(ratios, settings.rollout_token_veto_threshold)
    if settings.off_policy_mask_threshold is not None:
        keep_T = keep_T & ~off_policy(ratios, advantages_T, settings.off_policy_mask_threshold)
    return keep_T


@dataclass(frozen=True)
class Ratios:
    """log w of each token in the loss, 0 elsewhere, and its sums over answers. In float64."""

    token_T: Tensor
    mask_T: Tensor
    sample_T: Tensor
    length_N: Tensor  # tokens in the loss

    @classmethod
    def of(cls, batch: Batch, trainer_logprobs_T: Tensor) -> "Ratios":
        return cls.of_members(batch, trainer_logprobs_T, batch.episode_T)  # branches of an episode are one answer

    @classmethod
    def of_members(cls, batch: Batch, trainer_logprobs_T: Tensor, sample_T: Tensor) -> "Ratios":
        mask_T = batch.loss_mask_T
        token_T = (trainer_logprobs_T.double() - batch.rollout_logprobs_T.double()).where(mask_T, 0)
        return cls(token_T, mask_T, sample_T, sum_by_sample(mask_T.double(), sample_T, len(batch)))

    def at(self, level: Level) -> Tensor:
        if level == "token":
            return self.token_T
        total_N = self.by_sample(self.token_T)
        return (total_N if level == "sequence" else total_N / self.length_N.clamp(min=1))[self.sample_T]

    def divergence(self, criterion: Criterion) -> Tensor:
        """k1, k2 or k3 of each token, 0 outside of the loss, or what the criterion makes of an answer's."""
        log_T = self.token_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        each_T = {"k1": -log_T, "k2": 0.5 * log_T.square(), "k3": log_T.expm1() - log_T}[criterion.estimator]
        if criterion.over == "token":
            return each_T
        if criterion.over == "seq_max":  # k2 and k3 are at least 0
            zeros_N = torch.zeros_like(self.length_N)
            return zeros_N.scatter_reduce(0, self.sample_T, each_T, "amax")[self.sample_T]
        total_N = self.by_sample(each_T)
        return (total_N if criterion.over == "seq_sum" else total_N / self.length_N.clamp(min=1))[self.sample_T]

    def by_sample(self, value_T: Tensor) -> Tensor:
        return sum_by_sample(value_T, self.sample_T, len(self.length_N))

    def mean_by_sample(self, value_T: Tensor) -> Tensor:
        """Mean over the tokens in the loss, for the samples that have any."""
        has_N = self.length_N > 0
        return self.by_sample(value_T.where(self.mask_T, 0))[has_N] / self.length_N[has_N]

    def share_of_tokens(self, hit_T: Tensor) -> float:
        return float(masked_mean(hit_T.double(), self.mask_T))

    def share_of_samples(self, hit_T: Tensor) -> float:
        """The share of samples with a hit among their tokens in the loss, of the samples that have such tokens."""
        hit_N = self.by_sample((hit_T & self.mask_T).double()) > 0
        return float(masked_mean(hit_N.double(), self.length_N > 0))


def importance_weights(
    ratios: Ratios, level: Literal["token", "sequence"], settings: CorrectionSettings
) -> tuple[Tensor, dict[str, float]]:
    bounds = settings.weight_bounds
    weights_T = weights(ratios, level, bounds)
    metrics = weight_metrics(ratios, level, weights_T, bounds)
    if settings.rollout_is_batch_normalize:
        each_X = weights_T[ratios.mask_T] if level == "token" else ratios.mean_by_sample(weights_T)
        factor = float(each_X.mean()) if len(each_X) else 1.0
        factor = factor if factor > SMALLEST_FACTOR else 1.0
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
        weights_T = weights_T / factor
    return weights_T, metrics


def weights(ratios: Ratios, level: Level, bounds: RatioBounds) -> Tensor:
    """Truncated at the bounds, or, with a lower bound that does not clamp, 0 outside of the two (IcePop: Ling team
    2025)."""
    raw_T = ratios.at(level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().where(ratios.mask_T, 0)
    if bounds.lower is None or bounds.clamps:
        return raw_T.clamp(bounds.lower, bounds.upper).where(ratios.mask_T, 0)
    return raw_T.where((raw_T >= bounds.lower) & (raw_T <= bounds.upper), 0)


def weight_metrics(ratios: Ratios, level: Level, weights_T: Tensor, bounds: RatioBounds) -> dict[str, float]:
    """Metrics of the weights before truncation and normalisation, with verl's definitions.

    std and eff_sample_size are of the weights clamped to the bounds, of which the lower one is 1 / threshold unless it
    is set; with IcePop, they and the mean are of the weights that are used. At the level `sequence`, the fractions, min
    and max are over answers; all others, also the mean, are over tokens.
    """
    log_A = ratios.at(level)[ratios.mask_T]
    if len(log_A) == 0:
        return {}
    threshold, icepop = bounds.upper, bounds.lower is not None and not bounds.clamps
    lower = 1 / threshold if bounds.lower is None else bounds.lower
    weight_A = log_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clamped_A = weights_T[ratios.mask_T] if icepop else weight_A.clamp(lower, threshold)
    answer_N = ratios.mean_by_sample(ratios.at(level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
    unit_X = answer_N if level == "sequence" else weight_A  # the fractions are over these
    found = {
        "mean": (clamped_A if icepop else weight_A).mean(),
        "std": clamped_A.std(correction=0),
        "max": weight_A.max(),
        "min": log_A.min().exp() if level == "sequence" else weight_A.min(),
        "eff_sample_size": clamped_A.mean().square() / clamped_A.square().mean().clamp(min=SMALLEST_FACTOR**2),
        "ratio_fraction_high": (unit_X > threshold).double().mean(),
        "ratio_fraction_low": (unit_X < lower).double().mean(),
        "seq_mean": answer_N.mean(),
        "seq_std": answer_N.std() if len(answer_N) > 1 else torch.zeros(()),
        "seq_max": answer_N.max(),
        "seq_min": answer_N.min(),
        "seq_max_deviation": (answer_N - 1).abs().max(),
        "seq_fraction_high": (answer_N > threshold).double().mean(),
        "seq_fraction_low": (answer_N < lower).double().mean(),
    }
    if icepop:
        found["oob_ratio"] = ((weight_A < lower) | (weight_A > threshold)).double().mean()
    return {f"rollout_corr/rollout_is_{name}": float(value) for name, value in found.items()}


def within_bounds(ratios: Ratios, level: Level, settings: CorrectionSettings) -> Tensor:
    assert settings.rollout_rs_threshold is not None  # checked in config/correction_checks.py
    upper, lower = float(settings.rollout_rs_threshold), settings.rollout_rs_threshold_lower
    log_ratio_T = ratios.at(level)
    return (log_ratio_T <= math.log(upper)) & (log_ratio_T >= (-math.log(upper) if lower is None else math.log(lower)))


def settings_criteria(settings: CorrectionSettings) -> list[Criterion]:
    assert settings.rollout_rs is not None and settings.rollout_rs_threshold is not None  # correction_checks.py
    return criteria(settings.rollout_rs, settings.rollout_rs_threshold)


def passes(divergence_T: Tensor, criterion: Criterion) -> Tensor:
    lower, upper = criterion.bounds.lower, criterion.bounds.upper
    if lower is None:
        return divergence_T <= upper
    return (divergence_T >= math.log(lower)) & (divergence_T <= math.log(upper))  # the bounds are those of exp(k1)


def criteria_metrics(ratios: Ratios, settings: CorrectionSettings) -> dict[str, float]:
    """Each of verl's criteria: its values, and the shares of tokens and of answers that it alone would reject."""
    metrics: dict[str, float] = {}
    if not bool(ratios.mask_T.any()):
        return metrics
    for criterion in settings_criteria(settings):
        value_T = ratios.divergence(criterion)
        value_A, rejected_T = value_T[ratios.mask_T], ~passes(value_T, criterion)
        found = {
            "mean": float(value_A.mean()),
            "max": float(value_A.max()),
            "min": float(value_A.min()),
            "masked_fraction": ratios.share_of_tokens(rejected_T),
            "seq_masked_fraction": ratios.share_of_samples(rejected_T),
        }
        metrics |= {f"rollout_corr/rollout_rs_{criterion.name}_{name}": value for name, value in found.items()}
    return metrics


def catastrophic(ratios: Ratios, threshold: float) -> Tensor:
    return (ratios.token_T < math.log(threshold)) & ratios.mask_T


def vetoed(ratios: Ratios, threshold: float) -> Tensor:
    return (ratios.by_sample(catastrophic(ratios, threshold).double()) > 0)[ratios.sample_T]


def veto_metrics(ratios: Ratios, threshold: float) -> dict[str, float]:
    return {
        "rollout_corr/rollout_is_veto_fraction": ratios.share_of_samples(vetoed(ratios, threshold)),
        "rollout_corr/rollout_is_catastrophic_token_fraction": ratios.share_of_tokens(catastrophic(ratios, threshold)),
    }


def off_policy(ratios: Ratios, advantages_T: Tensor | None, threshold: float) -> Tensor:
    """DeepSeek-V3.2's off-policy sequence mask (2025, section 3.1): what the model would not write any more teaches
    only where it was good. The mean of k1 over an answer estimates KL(rollout || trainer) of its tokens."""
    assert advantages_T is not None  # the caller has them
    return (ratios.divergence(Criterion("seq_mean_k1", RatioBounds(None, threshold))) > threshold) & (advantages_T < 0)


def rejected(ratios: Ratios, keep_T: Tensor) -> dict[str, float]:
    return {
        "rollout_corr/rollout_rs_masked_fraction": ratios.share_of_tokens(~keep_T),
        "rollout_corr/rollout_rs_seq_masked_fraction": ratios.share_of_samples(~keep_T),
    }


def k3_kl(rollout_T: Tensor, trainer_T: Tensor) -> Tensor:
    """k3 of each token: its mean over tokens that the rollout engine sampled estimates KL(rollout || trainer)."""
    log_ratio_T = (trainer_T - rollout_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_T.expm1() - log_ratio_T  # exp(x) - 1 - x would lose the digits of a small x


def mismatch(batch: Batch, trainer_logprobs_T: Tensor) -> dict[str, float]:
    """How much rollout engine and trainer differ, over every generated token, also of failed samples. Always finite.

    A: generated tokens.
    """
    difference, absolute, kl, k3, chi2 = TokenMoments(correction=1), *(TokenMoments() for _ in range(4))
    for rollout_A, trainer_A in masked_blocks(batch.mask_T, batch.rollout_logprobs_T, trainer_logprobs_T):
        log_ratio_A = (trainer_A - rollout_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        difference.add((rollout_A.exp() - trainer_A.exp()).abs())
        absolute.add((rollout_A - trainer_A).abs())
        kl.add(rollout_A - trainer_A)
        k3.add(k3_kl(rollout_A, trainer_A))
        chi2.add((2 * log_ratio_A).exp())
    if difference.count == 0:
        return {}
    return {
        "training/rollout_probs_diff_mean": difference.mean,
        "training/rollout_probs_diff_max": difference.largest,
        "training/rollout_probs_diff_std": math.sqrt(difference.variance),
        "training/rollout_logprobs_diff_mean": absolute.mean,
        # the rollout engine sampled the tokens, so these two estimate KL(rollout || trainer)
        "rollout_corr/kl": kl.mean,
        "rollout_corr/k3_kl": k3.mean,
        "rollout_corr/chi2_token": chi2.mean - 1,
        **by_answer(batch, trainer_logprobs_T),
    }


def by_answer(batch: Batch, trainer_logprobs_T: Tensor) -> dict[str, float]:
    """Perplexities per answer, and the chi-squared divergence of whole answers. The branches of an episode are one."""
    sums = [
        sum_by_episode(batch.sums(values_T, batch.mask_T, torch.float64), batch)[batch.counted_N]
        for values_T in (batch.rollout_logprobs_T, trainer_logprobs_T)
    ]
    count_N = sum_by_episode(batch.counts(batch.mask_T).double(), batch)[batch.counted_N]
    written_N = count_N > 0
    rollout_N, trainer_N = (-sum_N[written_N] / count_N[written_N] for sum_N in sums)
    difference_N = trainer_N - rollout_N
    log_ratio_N = (-difference_N * count_N[written_N]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    found = {
        "training_ppl": trainer_N.clamp(max=MAX_LOG_RATIO).exp().mean(),
        "training_log_ppl": trainer_N.mean(),
        "rollout_ppl": rollout_N.clamp(max=MAX_LOG_RATIO).exp().mean(),
        "rollout_log_ppl": rollout_N.mean(),
        "log_ppl_diff": difference_N.mean(),
        "log_ppl_abs_diff": difference_N.abs().mean(),
        "log_ppl_diff_max": difference_N.max(),
        "log_ppl_diff_min": difference_N.min(),
        "ppl_ratio": difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().mean(),
        "chi2_seq": (2 * log_ratio_N).exp().mean() - 1,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in found.items()}
