"""Weights and rejections by the ratio of the current policy to the rollout engine, in each update.

Of bypass mode, and of a step with a single update.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.correction import CorrectionSettings, correct
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TokenOutputs, TrainBatch
from rloom.runtime.group import LocalGroup
from rloom.training.batch_store import BatchStore
from rloom.training.loop import OldLogprobs, Training
from tests.algos_samples import batch_of

# Two answers of two tokens and one, whose rollout log-probs are 0: the current policy's are the log-ratios
RATIOS = [4.0, 0.5, 1.25]
SPARSE = [1, 2, 4]  # their places: each sample has one token of a prompt


def mini_batch(advantages: list[float]) -> TrainBatch:
    batch = batch_of([".ww", ".w"], [1.0, 0.0])
    zeros_T = torch.zeros(5, dtype=torch.float64)
    advantages_T = zeros_T.index_put((torch.tensor(SPARSE),), torch.tensor(advantages, dtype=torch.float64))
    return TrainBatch(
        **vars(replace(batch, rollout_logprobs_T=zeros_T)),
        advantages_T=advantages_T,
        old_logprobs_T=zeros_T,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )


@pytest.mark.parametrize(("source", "expected"), [(OldLogprobs.ROLLOUT, [0, -0.5, -0.25, 0, -1]), (None, None)])
def test_the_old_log_probs_of_bypass_mode_are_the_rollout_engines(
    source: OldLogprobs | None, expected: list[float] | None
) -> None:
    """No model computes them."""
    batch = replace(batch_of([".ww", ".w"], [1.0, 0.0]), rollout_logprobs_T=torch.tensor([0, -0.5, -0.25, 0, -1]))
    roles = SimpleNamespace(policy=None, reference=None, critic=None)
    loop: Any = SimpleNamespace(roles=roles, settings=SimpleNamespace(old_logprobs=source))
    old_T, *others = Training.model_outputs(loop, batch, BatchStore(LocalGroup([]), batch.length_N, []))
    assert (None if old_T is None else old_T.tolist()) == expected and others == [None, None]


def loss(
    settings: CorrectionSettings, mode: str, advantages: list[float]
) -> tuple[float, list[float], dict[str, float]]:
    """(loss, gradient of each token, metrics)"""
    logprobs_T = torch.zeros(5, dtype=torch.float64)
    logprobs_T[SPARSE] = torch.tensor(RATIOS, dtype=torch.float64).log()
    logprobs_T.requires_grad_(True)
    batch = mini_batch(advantages)
    objective = PolicyObjective(
        mode, LossSettings(), "token-mean", 0.0, None, "low_var_kl", bypass=True, correction=settings
    )
    found, metrics = objective(TokenOutputs(logprobs_T, torch.zeros(5)), batch, Counts.of(batch, 8))
    found.backward()
    gradient: Tensor | None = logprobs_T.grad
    assert gradient is not None
    return (
        float(found.detach()),
        gradient[SPARSE].tolist(),
        {name: float(value.detach()) for name, value in metrics.items()},
    )


def test_reinforce_is_weighted_by_the_truncated_ratio_which_carries_no_gradient() -> None:
    found, gradient, metrics = loss(CorrectionSettings(rollout_is="token"), "gpg", [1.0, 1.0, -3.0])
    weighted = [2 * math.log(4), 0.5 * math.log(0.5), 1.25 * -3 * math.log(1.25)]
    assert found == pytest.approx(-sum(weighted) / 3)
    assert gradient == pytest.approx([-2 / 3, -0.5 / 3, 1.25])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((2 + 0.5 + 1.25) / 3)


def test_sequence_weights_multiply_the_tokens_of_an_answer() -> None:
    _, gradient, _ = loss(CorrectionSettings(rollout_is="sequence", rollout_is_threshold=3.0), "gpg", [1.0, 1.0, 1.0])
    assert gradient == pytest.approx([-2 / 3, -2 / 3, -1.25 / 3])


def test_a_rejected_token_has_no_gradient_and_stays_in_the_count() -> None:
    settings = CorrectionSettings(rollout_rs="token_k1", rollout_rs_threshold=3.0)
    _, gradient, metrics = loss(settings, "vanilla", [-1.0, 1.0, 1.0])
    assert gradient == pytest.approx([0, -0.5 / 3, 0])  # 1.25 is clipped
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)


def test_the_sequence_mask_reads_the_advantages() -> None:
    """The mean of log(rollout / current) is -log(2) / 2 and -log(1.25): only the second is above -0.3."""
    settings = CorrectionSettings(off_policy_mask_threshold=-0.3)
    assert loss(settings, "gpg", [-1.0, -1.0, -1.0])[1] == pytest.approx([1 / 3, 1 / 3, 0])
    assert loss(settings, "gpg", [-1.0, -1.0, 1.0])[1] == pytest.approx([1 / 3, 1 / 3, -1 / 3])


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "geo_mean", "cispo", "gpg"])
def test_a_single_update_weighs_tokens_as_a_scoring_pass_before_it_would(mode: str) -> None:
    settings = CorrectionSettings(rollout_is="token")
    logprobs_T = torch.tensor([0.0, 4.0, 0.5, 0.0, 1.25], dtype=torch.float64).clamp(min=0.1).log()
    batch = replace(mini_batch([1.0, 1.0, -3.0]), old_logprobs_T=None)
    scored = replace(batch, old_logprobs_T=logprobs_T, rollout_weights_T=correct(batch, logprobs_T, settings).weights_T)
    found = []
    for one, correction in ((batch, settings), (scored, None)):
        current_T = logprobs_T.clone().requires_grad_(True)
        objective = PolicyObjective(
            mode, LossSettings(), "token-mean", 0.0, None, "low_var_kl", measures_gap=False, correction=correction
        )
        loss, _ = objective(TokenOutputs(current_T, torch.zeros(5)), one, Counts.of(one, 8))
        loss.backward()
        assert current_T.grad is not None
        found.append((loss.item(), current_T.grad[SPARSE].tolist()))
    assert found[0] == found[1]
    if mode == "vanilla":  # 4 is truncated at 2
        assert found[0][1] == pytest.approx([-2 / 3, -0.5 / 3, 1.25])
