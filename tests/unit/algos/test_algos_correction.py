"""Rollout correction on ratios made by hand. The rollout's log-probs are 0: the trainer's are the log-ratios."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rloom.algos.correction import CorrectionSettings, correct, mismatch
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
