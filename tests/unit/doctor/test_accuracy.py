"""Hand-worked validation numbers, and brute force beside the closed forms."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.batch import Trajectory
from rloom.runs import accuracy
from rloom.runs.accuracy import validation_metrics
from rloom.training.evaluate import Evaluator
from rloom.types import Prompt, Score

NAN = float("nan")


def one_prompt(scores: Sequence[float], predictions: Sequence[str | None]) -> dict[str, float]:
    metrics = validation_metrics(["s"], np.array([scores]), [predictions])
    return {name.removeprefix("val-aux/s/acc/"): value for name, value in metrics.items()}


def test_one_greedy_answer_a_prompt_gives_its_mean_under_every_name() -> None:
    metrics = validation_metrics(["gsm8k"] * 4, np.array([[1.0], [0.0], [1.0], [1.0]]), [["4"], ["5"], ["6"], ["7"]])
    assert metrics == {
        "val-core/gsm8k/acc/mean@1": 0.75,
        "val-aux/gsm8k/acc/best@1": 0.75,
        "val-aux/gsm8k/acc/pass@1": 0.75,
        "val-aux/gsm8k/acc/maj@1": 0.75,
        "val-aux/gsm8k/failed": 0.0,
    }


def test_k_runs_over_the_powers_of_two_and_n() -> None:
    metrics = one_prompt([0.0] * 6, ["1"] * 6)
    assert [name for name in metrics if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@6"]


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    # 2 of 4 right: a pair misses both with C(2,2)/C(4,2) = 1/6, a triple of the rest does not exist.
    metrics = one_prompt([1.0, 0.0, 0.0, 1.0], ["7", "3", "4", "7"])
    assert metrics["pass@1"] == pytest.approx(1 / 2)
    assert metrics["pass@2"] == pytest.approx(5 / 6)
    assert metrics["pass@4"] == pytest.approx(1.0)


def test_half_a_point_is_not_yet_correct() -> None:
    assert one_prompt([0.5, 0.5], ["a", "a"])["pass@2"] == 0.0
    assert one_prompt([0.5, 0.51], ["a", "b"])["pass@2"] == 1.0


def test_best_at_k_is_the_expected_maximum() -> None:
    # The six pairs of 0.1, 0.4, 0.2, 0.8 have the maxima 0.4, 0.2, 0.8, 0.4, 0.8, 0.8.
    metrics = one_prompt([0.1, 0.4, 0.2, 0.8], [None] * 4)
    assert metrics["best@1"] == pytest.approx(0.375)
    assert metrics["best@2"] == pytest.approx(3.4 / 6)
    assert metrics["best@4"] == pytest.approx(0.8)


def test_the_majority_of_all_answers_wins() -> None:
    assert one_prompt([0.0, 1.0, 1.0, 0.0], ["3", "7", "7", "4"])["maj@4"] == 1.0


def test_a_tie_of_all_answers_goes_to_the_prediction_seen_first() -> None:
    assert one_prompt([0.0, 1.0, 1.0, 0.0], ["3", "7", "7", "3"])["maj@4"] == 0.0
    assert one_prompt([1.0, 0.0, 0.0, 1.0], ["7", "3", "3", "7"])["maj@4"] == 1.0


def test_a_majority_of_fewer_answers_is_the_mean_over_subsets_where_ties_share() -> None:
    # Pairs of 7 7 3 4 (right, right, wrong, wrong): {7,7} 1, four pairs of a 7 and another 1/2 each, {3,4} 0.
    metrics = one_prompt([1.0, 1.0, 0.0, 0.0], ["7", "7", "3", "4"])
    assert metrics["maj@2"] == pytest.approx((1 + 4 * 0.5 + 0) / 6)
    assert metrics["maj@1"] == pytest.approx(0.5)


def test_an_answer_without_a_prediction_casts_no_vote() -> None:
    metrics = one_prompt([0.0, 0.0, 0.0, 1.0], [None, None, None, "7"])
    assert metrics["maj@4"] == 1.0
    assert metrics["maj@2"] == pytest.approx(0.5)  # three of the six pairs hold the only vote, the others score 0


def test_a_source_without_predictions_has_no_majority() -> None:
    assert not any("maj@" in name for name in one_prompt([0.2, 0.7], [None, None]))


def test_a_failed_score_is_left_out_and_counted() -> None:
    scores = np.array([[1.0, NAN, 0.0, NAN], [NAN, NAN, NAN, NAN], [1.0, 1.0, 1.0, 0.0]])
    predictions: list[list[str | None]] = [["7", "3", "4", None], [None] * 4, ["5", "5", "6", "1"]]
    metrics = validation_metrics(["s", "s", "s"], scores, predictions)
    assert metrics["val-aux/s/failed"] == 6.0
    assert metrics["val-core/s/acc/mean@4"] == pytest.approx((0.5 + 0.75) / 2)
    assert metrics["val-aux/s/acc/pass@2"] == pytest.approx((1.0 + 1.0) / 2)
    assert metrics["val-aux/s/acc/pass@1"] == pytest.approx((0.5 + 0.75) / 2)
    assert metrics["val-aux/s/acc/best@4"] == pytest.approx(1.0)  # only two answers are left of the first: both stand
    assert metrics["val-aux/s/acc/maj@4"] == pytest.approx((1.0 + 1.0) / 2)


def test_a_source_whose_scores_all_failed_reports_only_the_failures() -> None:
    metrics = validation_metrics(["a", "b"], np.array([[NAN], [1.0]]), [[None], ["1"]])
    assert [name for name in metrics if "/a/" in name] == ["val-aux/a/failed"]
    assert metrics["val-aux/a/failed"] == 1.0
    assert metrics["val-core/b/acc/mean@1"] == 1.0


def test_each_data_source_is_reported_apart() -> None:
    metrics = validation_metrics(["a", "b", "a"], np.array([[1.0], [0.0], [0.0]]), [["1"], ["2"], ["3"]])
    assert metrics["val-core/a/acc/mean@1"] == 0.5
    assert metrics["val-core/b/acc/mean@1"] == 0.0


def test_no_prompts_give_no_metrics() -> None:
    assert validation_metrics([], np.zeros((0, 4)), []) == {}


def majority_by_brute_force(scores: list[float], predictions: list[str | None], k: int) -> float:
    """The vote of every ordered draw of k answers, first seen wins."""
    outcomes = []
    for draw in permutations(range(len(scores)), k):
        said = [predictions[i] for i in draw if predictions[i] is not None]
        most = max(map(said.count, said), default=0)
        winner = next((p for p in said if said.count(p) == most), None)
        outcomes.append(next(scores[i] for i in draw if predictions[i] == winner or winner is None))
    return sum(outcomes) / len(outcomes)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["1", "2", "3", None])), min_size=3, max_size=6))
def test_the_expectations_equal_brute_force(answers: list[tuple[float, str | None]]) -> None:
    scores, predictions = [score for score, _ in answers], [prediction for _, prediction in answers]
    metrics = one_prompt(scores, predictions)
    n, right = len(scores), sum(score > 0.5 for score in scores)
    best = np.mean([max(scores[i] for i in draw) for draw in permutations(range(n), 2)])
    assert metrics["best@2"] == pytest.approx(best)
    assert metrics["pass@2"] == pytest.approx(1 - comb(n - right, 2) / comb(n, 2))
    if any(predictions):
        assert metrics["maj@2"] == pytest.approx(majority_by_brute_force(scores, predictions, 2))


def test_many_subsets_are_drawn_from_a_fixed_seed_and_come_close() -> None:
    # 10 of 16 say the right 7: the exact majority of 8 is right when five or more 7s are drawn, half right at four.
    scores, predictions = [1.0] * 10 + [0.0] * 6, ["7"] * 10 + ["3"] * 6
    exact = sum(comb(10, i) * comb(6, 8 - i) * (1.0 if i > 4 else 0.5 if i == 4 else 0.0) for i in range(2, 9))
    drawn = one_prompt(scores, predictions)["maj@8"]
    assert drawn == pytest.approx(exact / comb(16, 8), abs=0.03)
    accuracy._subsets.cache_clear()
    assert one_prompt(scores, predictions)["maj@8"] == drawn


def test_chunks_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    scores = generator.integers(0, 2, (50, 8)).astype(float)
    predictions = [[str(number) for number in row] for row in generator.integers(0, 4, (50, 8))]
    whole = validation_metrics(["s"] * 50, scores, predictions)
    monkeypatch.setattr(accuracy, "CHUNK_NUMBERS", 1)
    assert validation_metrics(["s"] * 50, scores, predictions) == pytest.approx(whole)


def test_it_needs_no_torch() -> None:
    code = "import sys, rloom.runs.accuracy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_validation_counts_the_accuracy_of_rules_that_score_minus_one_or_one() -> None:
    prompt = Prompt(index=0, messages=(), text="", tokens=(1,), data_source="math_dapo", ground_truth="34")
    scores = [Score(1.0, {"acc": 1.0}), Score(-1.0, {"acc": 0.0}), Score(-1.0, {"acc": 0.0}), Score.failed("late")]
    nothing = torch.zeros(0)
    answers = [Trajectory(prompt, 0, nothing, nothing, (), True, score) for score in scores]
    metrics = Evaluator([prompt], sampler=None, sampling=None, answers_per_prompt=4, prompts_at_once=None).metrics(
        answers
    )
    assert metrics["val-core/math_dapo/acc/mean@4"] == pytest.approx(1 / 3)
    assert Score(0.75).accuracy == 0.75
    assert Score.failed("late").accuracy is None
