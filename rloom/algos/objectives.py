"""Objectives: from a model's output for a micro-batch to the loss that an engine minimises, and its metrics.

Loss and metrics are shares of the whole mini-batch: the sum over micro-batches and ranks is the total. They stay
tensors, because reading a value here would synchronise host and device in every pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts, aggregate
from rloom.algos.correction import CorrectionSettings, Ratios, k3_kl, kept, weights
from rloom.algos.kl import FULL_KL, kl_estimator
from rloom.algos.policy_losses import LossSettings, LossTerms, TokenLoss
from rloom.algos.registry import resolve_policy_loss
from rloom.batch import TokenOutputs, TrainBatch

Metrics = dict[str, float]
Shares = dict[str, Tensor]  # share of this batch in each metric

# Measured by `PolicyObjective.gap`. Valid in the first update of a step only: later ones have new weights.
GAP_METRICS = (
    "training/rollout_probs_diff_mean",
    "training/rollout_logprobs_diff_mean",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
)
ROUTING_MISMATCH = "training/rollout_routing_mismatch"  # share of the rollout's experts that the trainer's routers lack
FIRST_UPDATE_METRICS = (*GAP_METRICS, ROUTING_MISMATCH)


class Objective(Protocol):
    @property
    def needs_entropy_gradient(self) -> bool: ...

    @property
    def records_tokens(self) -> bool:
        """Whether an update also returns the model's output for each token of the samples that are recorded."""

    @property
    def choose(self) -> Callable[[TrainBatch], Tensor] | None:
        """Computes chosen_T of a whole mini-batch, before it is split. None: the loss chooses no tokens."""

    @property
    def needs_full_kl(self) -> bool: ...

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether samples whose advantage is 0 at every token have no gradient and are left out of the update."""

    def __call__(self, outputs: TokenOutputs, batch: TrainBatch, counts: Counts) -> tuple[Tensor, Shares]: ...


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, minus the entropy bonus, plus the KL to the reference."""

    loss_mode: str
    loss_settings: LossSettings
    aggregation: str
    entropy_coefficient: float
    kl_coefficient: float | None  # None: no KL loss
    kl_estimator: str
    measures_gap: bool = True  # report the difference to the rollout engine's log-probs if no earlier stage did
    bypass: bool = False  # the old log-probs are the rollout engine's, so no earlier stage did
    records_tokens: bool = False
    correction: CorrectionSettings | None = None  # by the current policy: no earlier pass has computed log-probs
    skips_zero_advantages: bool = False  # config/correction_checks.py refuses it where such samples have a gradient

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient != 0

    @property
    def choose(self) -> Callable[[TrainBatch], Tensor] | None:
        choose = resolve_policy_loss(self.loss_mode).choose
        return None if choose is None else lambda mini: choose(mini, self.loss_settings)

    @property
    def needs_full_kl(self) -> bool:
        return self.kl_coefficient is not None and self.kl_estimator == FULL_KL

    def __call__(self, outputs: TokenOutputs, batch: TrainBatch, counts: Counts) -> tuple[Tensor, Shares]:
        output_T, entropy_T, measured = outputs.output_T, outputs.entropy_T, counts.measured or counts
        assert entropy_T is not None  # a policy's head computes it
        old_T = output_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
        entry = resolve_policy_loss(self.loss_mode)
        terms = LossTerms(
            output_T, old_T, batch.advantages_T, batch.loss_mask_T, batch.sample_T, len(batch), batch.chosen_T
        )
        token_loss = entry.loss(terms, self.loss_settings)
        loss_T, weights_T, corrected = token_loss.loss_T, batch.rollout_weights_T, Shares()
        if self.correction is not None:
            keep_T, weights_T, corrected = self.corrected(self.correction, output_T.detach(), batch, measured)
            loss_T = loss_T.where(keep_T, 0)
        if weights_T is not None:
            loss_T = loss_T * (terms.geometric_mean(weights_T) if entry.weighs_answers else weights_T)
        loss = aggregate(loss_T, batch, self.aggregation, counts)
        entropy = aggregate(entropy_T, batch, self.aggregation, measured)
        metrics = {"actor/pg_loss": loss.detach(), "actor/entropy": entropy.detach()} | corrected
        for name, value_T in token_loss.parts_T.items():
            metrics[name] = aggregate(value_T.detach(), batch, "token-mean", measured)
        # a single update, or bypass mode: no earlier pass computed log-probs
        if self.measures_gap and (batch.old_logprobs_T is None or self.bypass):
            metrics |= self.gap(output_T.detach(), batch, measured)
        if outputs.routing_mismatch_T is not None:
            metrics[ROUTING_MISMATCH] = aggregate(outputs.routing_mismatch_T, batch, "token-mean", measured)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * entropy
        if self.kl_coefficient is not None:
            kl = aggregate(self.kl(outputs, batch), batch, self.aggregation, counts)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + self.kl_coefficient * kl
        return loss, metrics

    @staticmethod
    def corrected(
        settings: CorrectionSettings, logprobs_T: Tensor, batch: TrainBatch, counts: Counts
    ) -> tuple[Tensor, Tensor | None, Shares]:
        """(tokens that are kept, their weights), by the ratio of the current policy to the rollout engine. A rejected
        token stays in the counts. Branches of an episode, which may be in several micro-batches, are answers of their
        own."""
        ratios = Ratios.of_members(batch, logprobs_T, batch.sample_T)
        keep_T, weights_T, metrics = kept(ratios, settings, batch.advantages_T), None, Shares()
        if settings.rejects:
            metrics["rollout_corr/rollout_rs_masked_fraction"] = aggregate(
                (~keep_T).to(logprobs_T.dtype), batch, "token-mean", counts
            )
        if settings.rollout_is is not None:
            weights_T = weights(ratios, settings.rollout_is, settings.weight_bounds).to(logprobs_T.dtype)
            metrics["rollout_corr/rollout_is_mean"] = aggregate(weights_T, batch, "token-mean", counts)
        return keep_T, weights_T, metrics

    def gap(self, logprobs_T: Tensor, batch: TrainBatch, counts: Counts) -> Shares:
        """The differences between the rollout engine's and the trainer's probabilities, and the KL between them."""
        rollout_T = batch.rollout_logprobs_T
        found = (
            (rollout_T.exp() - logprobs_T.exp()).abs(),
            (rollout_T - logprobs_T).abs(),
            rollout_T - logprobs_T,
            k3_kl(rollout_T, logprobs_T),
        )
        names = zip(GAP_METRICS, found, strict=True)
        return {name: aggregate(value_T, batch, "token-mean", counts) for name, value_T in names}

    def kl(self, outputs: TokenOutputs, batch: TrainBatch) -> Tensor:
        if self.needs_full_kl:
            assert outputs.kl_T is not None  # needs_full_kl: the engine computes it
            return outputs.kl_T
        assert batch.ref_logprobs_T is not None  # with a KL loss, the reference has scored the batch
        return kl_estimator(self.kl_estimator)(outputs.output_T, batch.ref_logprobs_T)


class OutputObjective:
    """Objectives that need the model's output alone: no entropy, no KL, no advantages."""

    needs_entropy_gradient = False
    records_tokens = False
    needs_full_kl = False
    skips_zero_advantages = False
    choose = None


@dataclass(frozen=True)
class SupervisedObjective(OutputObjective):
    """Minus the mean log-prob of the answer tokens: the cross-entropy of supervised fine-tuning."""

    def __call__(self, outputs: TokenOutputs, batch: TrainBatch, counts: Counts) -> tuple[Tensor, Shares]:
        loss = aggregate(-outputs.output_T, batch, "token-mean", counts)
        return loss, {"train/loss": loss.detach()}


@dataclass(frozen=True)
class ValueObjective(OutputObjective):
    clip_range: float
    aggregation: str

    def __call__(self, outputs: TokenOutputs, batch: TrainBatch, counts: Counts) -> tuple[Tensor, Shares]:
        assert batch.values_T is not None and batch.returns_T is not None  # needs_critic
        token_loss = value_loss(outputs.output_T, batch.values_T, batch.returns_T, self.clip_range)
        loss = aggregate(token_loss.loss_T, batch, self.aggregation, counts)
        metrics = {"critic/vf_loss": loss.detach()}
        for name, value_T in token_loss.parts_T.items():
            metrics[name] = aggregate(value_T.detach(), batch, "token-mean", counts)
        return loss, metrics


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip_range: float) -> TokenLoss:
    """Half the larger of two squared errors: of the value, and of the value clipped to old ± `clip_range`."""
    # not old + clamp(new - old): that rounds, and a value inside the range would count as clipped
    clamped_T = values_T.clamp(old_values_T - clip_range, old_values_T + clip_range)
    plain_T = (values_T - returns_T).square()
    clipped_T = (clamped_T - returns_T).square()
    return TokenLoss(
        0.5 * torch.maximum(plain_T, clipped_T), {"critic/vf_clipfrac": (clipped_T > plain_T).detach().float()}
    )
