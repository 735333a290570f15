"""Rollout correction on ratios made by hand. The rollout's log-probs are 0: the trainer's are the log-ratios."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rloom.algos.correction import CorrectionSettings, correct, mismatch
from rloom.algos.rejection import bounds_of, criteria
from rloom.batch import Batch
from tests.algos_samples import MIXED, batch_of


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Ratios of the tokens written: 4 and 1/2 in the first answer, 1 in the second; the third answer's score failed.
BATCH = batch_of([".ww", ".w", ".w"], [1.0, 0.0, None])
TRAINER_T = numbers([9, math.log(4), math.log(0.5), 9, 0, 9, 3])


def weights(**settings) -> list[float]:
    found = correct(BATCH, TRAINER_T, CorrectionSettings(**settings)).weights_T
    assert found is not None
    return found.tolist()


def test_token_weights_are_truncated() -> None:
    assert weights(rollout_is="token") == pytest.approx([0, 2, 0.5, 0, 1, 0, 0])
    assert weights(rollout_is="token", rollout_is_threshold=10.0) == pytest.approx([0, 4, 0.5, 0, 1, 0, 0])


def test_sequence_weights_are_the_product_over_the_answer() -> None:
    assert weights(rollout_is="sequence", rollout_is_threshold=5.0) == pytest.approx([0, 2, 2, 0, 1, 0, 0])


def test_normalised_weights_have_mean_one_over_tokens_or_answers() -> None:
    mean = (2 + 0.5 + 1) / 3
    expected = [0, 2 / mean, 0.5 / mean, 0, 1 / mean, 0, 0]
    assert weights(rollout_is="token", rollout_is_batch_normalize=True) == pytest.approx(expected)
    found = correct(BATCH, TRAINER_T, CorrectionSettings("sequence", 5.0, True))
    assert found.weights_T.tolist() == pytest.approx([0, 2 / 1.5, 2 / 1.5, 0, 1 / 1.5, 0, 0])
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (CorrectionSettings(), [1, 1, 1]),
        (CorrectionSettings(rollout_rs="token", rollout_rs_threshold=3.0), [0, 1, 1]),
        (CorrectionSettings(rollout_rs="token", rollout_rs_threshold=1.5), [0, 0, 1]),  # below 1 / 1.5 too
        (CorrectionSettings(rollout_rs="token", rollout_rs_threshold=5.0, rollout_rs_threshold_lower=0.6), [1, 0, 1]),
        (CorrectionSettings(rollout_rs="sequence", rollout_rs_threshold=1.9), [0, 0, 1]),  # the answer's ratio is 2
        (CorrectionSettings(rollout_rs="geometric", rollout_rs_threshold=1.4), [0, 0, 1]),  # its geometric mean 1.414
        (CorrectionSettings(rollout_rs="geometric", rollout_rs_threshold=1.5), [1, 1, 1]),
        (CorrectionSettings(rollout_token_veto_threshold=0.6), [0, 0, 1]),
        (CorrectionSettings(rollout_token_veto_threshold=0.4), [1, 1, 1]),
    ],
)
def test_rejection_by_hand(settings: CorrectionSettings, kept: list[int]) -> None:
    found = correct(BATCH, TRAINER_T, settings)
    assert found.keep_T[BATCH.loss_mask_T].tolist() == [bool(k) for k in kept]
    assert found.weights_T is None


def test_rejections_are_counted() -> None:
    settings = CorrectionSettings(rollout_rs="token", rollout_rs_threshold=3.0, rollout_token_veto_threshold=0.6)
    metrics = correct(BATCH, TRAINER_T, settings).metrics
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 2)
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 3)


def weight_metrics(settings: CorrectionSettings) -> dict[str, float]:
    metrics = correct(BATCH, TRAINER_T, settings).metrics
    return {name.removeprefix("rollout_corr/rollout_is_"): value for name, value in metrics.items() if "_is_" in name}


def test_token_weights_are_described_as_verl_does() -> None:
    # weights 4, 1/2 and 1; held between 1/2 and 2 for std and sample size; the answers' means are 2.25 and 1
    mean, square = (2 + 0.5 + 1) / 3, (4 + 0.25 + 1) / 3
    assert weight_metrics(CorrectionSettings(rollout_is="token")) == pytest.approx(
        {
            "mean": 5.5 / 3,
            "std": math.sqrt(square - mean**2),
            "max": 4.0,
            "min": 0.5,
            "eff_sample_size": mean**2 / square,
            "ratio_fraction_high": 1 / 3,
            "ratio_fraction_low": 0.0,
            "seq_mean": 1.625,
            "seq_std": 1.25 / math.sqrt(2),
            "seq_max": 2.25,
            "seq_min": 1.0,
            "seq_max_deviation": 1.25,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 0.0,
        }
    )


def test_sequence_weights_are_described_as_verl_does() -> None:
    # weights 2 for both tokens of the first answer, 1 for the second's; held between 2/3 and 1.5
    mean, square = (1.5 + 1.5 + 1) / 3, (2.25 + 2.25 + 1) / 3
    assert weight_metrics(CorrectionSettings(rollout_is="sequence", rollout_is_threshold=1.5)) == pytest.approx(
        {
            "mean": 5 / 3,  # over tokens
            "std": math.sqrt(square - mean**2),
            "max": 2.0,
            "min": 1.0,
            "eff_sample_size": mean**2 / square,
            "ratio_fraction_high": 1 / 2,  # of answers
            "ratio_fraction_low": 0.0,
            "seq_mean": 1.5,
            "seq_std": 1 / math.sqrt(2),
            "seq_max": 2.0,
            "seq_min": 1.0,
            "seq_max_deviation": 1.0,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 0.0,
        }
    )


def test_the_mismatch_is_measured_whatever_is_corrected() -> None:
    batch = replace(batch_of([".ww", ".w"], [1.0, None]), rollout_logprobs_T=numbers([0, 0.5, 0.25, 0, 0.5]).log())
    trainer_T = numbers([1, 0.25, 0.25, 1, 0.5]).log()
    metrics = correct(batch, trainer_T, CorrectionSettings()).metrics
    half = math.log(2)
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": 0.25 / 3,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_std": 0.25 / math.sqrt(3),  # with n - 1
            "training/rollout_logprobs_diff_mean": half / 3,
            "rollout_corr/kl": half / 3,
            "rollout_corr/k3_kl": (0.5 + half - 1) / 3,
            "rollout_corr/chi2_token": (0.25 + 1 + 1) / 3 - 1,
            "rollout_corr/training_ppl": (4 + 2) / 2,
            "rollout_corr/training_log_ppl": (math.log(4) + half) / 2,
            "rollout_corr/rollout_ppl": (math.sqrt(8) + 2) / 2,
            "rollout_corr/rollout_log_ppl": (math.log(8) / 2 + half) / 2,
            "rollout_corr/log_ppl_diff": half / 4,
            "rollout_corr/log_ppl_abs_diff": half / 4,
            "rollout_corr/log_ppl_diff_max": half / 2,
            "rollout_corr/log_ppl_diff_min": 0.0,
            "rollout_corr/ppl_ratio": (math.sqrt(2) + 1) / 2,
            "rollout_corr/chi2_seq": (0.25 + 1) / 2 - 1,
        }
    )


EVERYTHING = [
    CorrectionSettings(weigh, 2.0, True, reject, 2.0, None, 1e-4)
    for weigh in ("token", "sequence")
    for reject in ("token", "sequence", "geometric")
]


@pytest.mark.parametrize("settings", EVERYTHING)
@pytest.mark.parametrize("gap", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("batch", [MIXED.batch, BATCH, batch_of([".."], [1.0]), batch_of([".w"], [None])])
def test_nothing_is_ever_infinite(settings: CorrectionSettings, gap: float, batch: Batch) -> None:
    found = correct(batch, batch.rollout_logprobs_T + gap, settings)
    assert found.weights_T.isfinite().all()
    assert all(math.isfinite(value) for value in found.metrics.values())


def test_no_token_no_mismatch() -> None:
    assert mismatch(batch_of([".."], [1.0]), torch.zeros(2)) == {}


# verl's criteria and IcePop: ratios 4, 1/2 and 1 as above; the answers have k1 (-log 4, log 2) and (0)

K2 = [math.log(4) ** 2 / 2, math.log(2) ** 2 / 2]  # 0.961, 0.240
K3 = [3 - math.log(4), math.log(2) - 0.5]  # 1.614, 0.193


@pytest.mark.parametrize(
    ("name", "threshold", "kept"),
    [
        ("token_k1", 3.0, [0, 1, 1]),
        ("token_k1", "0.2_1.9", [1, 0, 1]),  # the bounds of 1 / r: 1/4 and 2
        ("token_k1", "0.3_2.1", [0, 1, 1]),
        ("token_k2", 0.5, [0, 1, 1]),
        ("token_k2", 0.2, [0, 0, 1]),
        ("token_k3", "1.7", [1, 1, 1]),
        ("token_k3", 0.19, [0, 0, 1]),
        ("seq_sum_k1", 1.9, [0, 0, 1]),  # the sum is -log 2
        ("seq_sum_k1", "0.49_1.0", [1, 1, 1]),
        ("seq_sum_k2", sum(K2) + 0.01, [1, 1, 1]),
        ("seq_sum_k2", sum(K2) - 0.01, [0, 0, 1]),
        ("seq_sum_k3", sum(K3) - 0.01, [0, 0, 1]),
        ("seq_mean_k1", 1.4, [0, 0, 1]),  # its mean is -log 2 / 2
        ("seq_mean_k1", 1.5, [1, 1, 1]),
        ("seq_mean_k2", sum(K2) / 2 - 0.01, [0, 0, 1]),
        ("seq_mean_k3", sum(K3) / 2 + 0.01, [1, 1, 1]),
        ("seq_max_k2", K2[0] - 0.01, [0, 0, 1]),
        ("seq_max_k3", K3[0] + 0.01, [1, 1, 1]),
        ("token_k1,seq_mean_k3", "5,0.5", [0, 0, 1]),
        ("token_k2, token_k1, token_k2", "0.5,1.9", [0, 0, 1]),  # each counts once
        ("token_k2,token_k3", 0.5, [0, 1, 1]),
    ],
)
def test_criteria_of_verl_by_hand(name: str, threshold: float | str, kept: list[int]) -> None:
    found = correct(BATCH, TRAINER_T, CorrectionSettings(rollout_rs=name, rollout_rs_threshold=threshold))
    assert found.keep_T[BATCH.loss_mask_T].tolist() == [bool(k) for k in kept]


def test_each_criterion_is_measured_alone() -> None:
    settings = CorrectionSettings(rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="0.5,1")
    metrics = correct(BATCH, TRAINER_T, settings).metrics
    own = {name.removeprefix("rollout_corr/rollout_rs_"): value for name, value in metrics.items() if "_rs_" in name}
    assert own == pytest.approx(
        {
            "token_k2_mean": sum(K2) / 3,
            "token_k2_max": K2[0],
            "token_k2_min": 0.0,
            "token_k2_masked_fraction": 1 / 3,
            "token_k2_seq_masked_fraction": 1 / 2,
            "seq_max_k3_mean": 2 * K3[0] / 3,
            "seq_max_k3_max": K3[0],
            "seq_max_k3_min": 0.0,
            "seq_max_k3_masked_fraction": 2 / 3,
            "seq_max_k3_seq_masked_fraction": 1 / 2,
            "masked_fraction": 2 / 3,
            "seq_masked_fraction": 1 / 2,
        }
    )


def test_weights_below_the_lower_bound_are_raised_to_it() -> None:
    raised = {"rollout_is_threshold": 3.0, "rollout_is_threshold_lower": 0.8}
    assert weights(rollout_is="token", **raised) == pytest.approx([0, 3, 0.8, 0, 1, 0, 0])
    metrics = weight_metrics(CorrectionSettings(rollout_is="token", **raised))
    assert metrics["mean"] == pytest.approx(5.5 / 3) and metrics["ratio_fraction_low"] == pytest.approx(1 / 3)
    assert "oob_ratio" not in metrics


def test_icepop_gives_tokens_outside_of_the_bounds_no_weight() -> None:
    assert weights(rollout_is="token", rollout_is_threshold="0.6_5.0") == pytest.approx([0, 4, 0, 0, 1, 0, 0])
    assert weights(rollout_is="token", rollout_is_threshold="0.5_4.0") == pytest.approx([0, 4, 0.5, 0, 1, 0, 0])
    assert weights(rollout_is="sequence", rollout_is_threshold="0.5_1.5") == pytest.approx([0, 0, 0, 0, 1, 0, 0])
    assert weights(rollout_is="token", rollout_is_threshold="2.0") == pytest.approx([0, 2, 0.5, 0, 1, 0, 0])
    metrics = weight_metrics(CorrectionSettings(rollout_is="token", rollout_is_threshold="0.6_5.0"))
    assert metrics["oob_ratio"] == pytest.approx(1 / 3) and metrics["mean"] == pytest.approx(5 / 3)
    assert metrics["ratio_fraction_low"] == pytest.approx(1 / 3) and metrics["ratio_fraction_high"] == 0


def test_the_sequence_mask_keeps_good_answers_and_near_ones() -> None:
    """Both answers have log(rollout / trainer) of 0.4 on average: log 1/4 and log 2 would be less than 0."""
    trainer_T = numbers([9, -0.6, -0.2, 9, -0.4, 9, 3])
    advantages_T = numbers([0, -1, -1, 0, 2, 0, -1])

    def kept(threshold: float) -> list[bool]:
        settings = CorrectionSettings(off_policy_mask_threshold=threshold)
        found = correct(BATCH, trainer_T, settings, advantages_T)
        share = found.metrics["rollout_corr/off_policy_masked_fraction"]
        assert share == pytest.approx(1 - found.keep_T[BATCH.loss_mask_T].double().mean())
        return found.keep_T[BATCH.loss_mask_T].tolist()

    assert kept(0.39) == [False, False, True]
    assert kept(0.41) == [True, True, True]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda: bounds_of("5.0_0.5"), "5.0 is above 0.5; write LOWER_UPPER"),
        (lambda: bounds_of("a_2.0"), "a is no number"),
        (lambda: bounds_of(0.0), "0.0 is not above 0"),
        (lambda: criteria("token_k4", 1), "token_k4 is neither token, sequence, geometric nor a list of token_k1"),
        (lambda: criteria("seq_max_k1", 1), "seq_max_k1 is neither"),
        (lambda: criteria("token_k1,token_k2", "1,2,3"), "1,2,3 has 3 values for 2 criteria"),
        (lambda: criteria("token_k2", "0.5_2.0"), "token_k2 has an upper bound alone, not 0.5_2.0"),
    ],
)
def test_other_forms_are_named(read: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        read()
