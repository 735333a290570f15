import pytest
import torch

from rloom.algos.estimators import (
    AdvantageInputs,
    AdvantageSettings,
    gae,
    gpg,
    grpo,
    grpo_passk,
    normalized,
    opo,
    reinforce_plus_plus_baseline,
    remax,
    returns_to_go,
    rloo,
)
from rloom.algos.kl import token_rewards
from rloom.algos.packed import Actions
from rloom.algos.registry import ALGORITHMS
from tests.algos_samples import batch_of, outcome

PLAIN = AdvantageSettings(norm_by_std=False)
STD = AdvantageSettings(norm_by_std=True)


def numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def written(inputs: AdvantageInputs, value_T: torch.Tensor) -> list[float]:
    return value_T[inputs.batch.mask_T].tolist()


def test_rloo_is_leave_one_out() -> None:
    inputs = outcome([".w"] * 4, [1, 0, 2, 4], groups=[0, 0, 1, 1])
    assert written(inputs, rloo(inputs, STD).advantages_T) == [1.0, -1.0, -2.0, 2.0]


def test_rloo_of_three_compares_with_the_mean_of_the_other_two() -> None:
    inputs = outcome([".w"] * 3, [3, 1, 2])
    assert written(inputs, rloo(inputs, STD).advantages_T) == pytest.approx([1.5, -1.5, 0.0])


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    inputs = outcome([".w"] * 4, [1, 0, 0, 1])  # mean 1/2, std sqrt(1/3)
    expected = 0.5 / (3**-0.5 + 1e-6)
    assert written(inputs, grpo(inputs, STD).advantages_T) == pytest.approx([expected, -expected, -expected, expected])


def test_grpo_without_std_is_the_distance_to_the_mean() -> None:
    inputs = outcome([".w"] * 4, [1, 0, 0, 1])
    assert written(inputs, grpo(inputs, PLAIN).advantages_T) == [0.5, -0.5, -0.5, 0.5]


def test_grpo_divides_by_the_standard_deviation_of_the_whole_step() -> None:
    inputs = outcome([".w"] * 4, [1, 0, 3, 3], groups=[0, 0, 1, 1])  # means 1/2 and 3; of all four 7/4, variance 9/4
    expected = 0.5 / (1.5 + 1e-6)
    batch = AdvantageSettings(norm_by_std="batch")
    assert written(inputs, grpo(inputs, batch).advantages_T) == pytest.approx([expected, -expected, 0, 0])


def test_every_token_of_an_answer_gets_its_advantage_and_the_rest_get_none() -> None:
    inputs = outcome(["..ww-w", ".w"], [1, 0])
    assert rloo(inputs, STD).advantages_T.tolist() == [0, 0, 1, 1, 0, 1, 0, -1]


def test_groups_may_differ_in_size_and_lie_apart() -> None:
    inputs = outcome([".w"] * 5, [1, 6, 0, 0, 2], groups=[7, 3, 7, 3, 3])
    assert written(inputs, rloo(inputs, STD).advantages_T) == pytest.approx([1, 5, -1, -4, -1])


def test_a_failed_sample_enters_no_mean_and_gets_nothing() -> None:
    inputs = outcome([".w"] * 3, [3, None, 1])
    for estimator in (rloo, grpo, opo, gpg, grpo_passk, reinforce_plus_plus_baseline):
        assert estimator(inputs, PLAIN).advantages_T[3] == 0
    assert written(inputs, rloo(inputs, STD).advantages_T) == [2.0, 0.0, -2.0]


@pytest.mark.parametrize("estimator", [rloo, grpo, opo, gpg, grpo_passk, reinforce_plus_plus_baseline])
def test_a_group_reduced_to_one_valid_sample_has_advantage_zero(estimator) -> None:
    inputs = outcome([".w"] * 4, [5, None, 1, 0], groups=[0, 0, 1, 1])
    found = written(inputs, estimator(inputs, STD).advantages_T)
    assert found[:2] == [0, 0]
    assert found[2] > 0


@pytest.mark.parametrize("estimator", [rloo, grpo, opo, gpg, grpo_passk, reinforce_plus_plus_baseline])
def test_equal_scores_give_exactly_zero_even_where_floats_round(estimator) -> None:
    batch = batch_of([".w", ".w", ".w"], [0.1, 0.1, 0.1])
    rewards_T = token_rewards(batch, None, 0.0).float()
    assert estimator(AdvantageInputs(batch, rewards_T), STD).advantages_T.tolist() == [0.0] * 6


def test_opo_weighs_the_baseline_by_length() -> None:
    inputs = outcome([".w", ".www"], [1, 0])  # (1 * 1 + 3 * 0) / 4
    assert written(inputs, opo(inputs, STD).advantages_T) == [0.75, -0.25, -0.25, -0.25]


def test_gpg_scales_up_for_samples_that_earned_nothing() -> None:
    inputs = outcome([".w"] * 4, [1, 0, 0, 0], groups=[0, 0, 1, 1])  # 4 samples, 1 with a reward
    assert written(inputs, gpg(inputs, STD).advantages_T) == [2.0, -2.0, 0.0, 0.0]


def test_pass_at_k_rewards_the_best_by_its_lead() -> None:
    inputs = outcome([".w"] * 3, [1, 3, 0])
    assert written(inputs, grpo_passk(inputs, PLAIN).advantages_T) == [0.0, 2.0, 0.0]
    std = (((1 / 3) ** 2 + (5 / 3) ** 2 + (4 / 3) ** 2) / 2) ** 0.5
    assert written(inputs, grpo_passk(inputs, STD).advantages_T) == pytest.approx([0, 2 / (std + 1e-6), 0])


def test_pass_at_k_gives_nothing_for_a_shared_first_place() -> None:
    inputs = outcome([".w"] * 3, [3, 3, 0])
    assert written(inputs, grpo_passk(inputs, PLAIN).advantages_T) == [0.0, 0.0, 0.0]


def test_reinforce_plus_plus_normalises_the_discounted_return() -> None:
    inputs = outcome([".ww", ".w"], [1, 0])
    found = ALGORITHMS["reinforce_plus_plus"].estimate(inputs, AdvantageSettings(gamma=0.5))
    assert written(inputs, found.returns_T) == [0.5, 1.0, 0.0]  # mean 1/2, variance 1/4
    assert written(inputs, found.advantages_T) == pytest.approx([0.0, 1.0, -1.0], abs=1e-6)


def test_reinforce_plus_plus_baseline_normalises_the_distance_to_the_mean() -> None:
    inputs = outcome([".w"] * 4, [1, 0, 3, 1], groups=[0, 0, 1, 1])  # 1/2 -1/2 1 -1, variance 2.5/3
    scale = (2.5 / 3) ** -0.5
    expected = [0.5 * scale, -0.5 * scale, scale, -scale]
    found = ALGORITHMS["reinforce_plus_plus_baseline"].estimate(inputs, STD)
    assert written(inputs, found.advantages_T) == pytest.approx(expected)
    assert written(inputs, found.returns_T) == [0.5, -0.5, 1.0, -1.0]


def test_normalised_rloo_has_mean_0_and_standard_deviation_1_over_the_tokens_of_the_step() -> None:
    inputs = outcome([".ww", ".w", ".w", ".w"], [1, 0, 2, 4], groups=[0, 0, 1, 1])
    # rloo: 1 1 -1 -2 2, mean 1/5, squared distances .64 .64 1.44 4.84 3.24, together 10.8, variance 10.8 / 4
    scale = 2.7**-0.5
    found = ALGORITHMS["rloo"].estimate(inputs, AdvantageSettings(normalize=True))
    expected = [0.8 * scale, 0.8 * scale, -1.2 * scale, -2.2 * scale, 1.8 * scale]
    assert written(inputs, found.advantages_T) == pytest.approx(expected)
    assert written(inputs, ALGORITHMS["rloo"].estimate(inputs, AdvantageSettings()).advantages_T) == [1, 1, -1, -2, 2]


def test_answers_without_an_estimate_stay_0_when_the_others_are_normalised() -> None:
    inputs = outcome([".w", ".w", ".www", ".w"], [9, None, 1, 0], groups=[0, 0, 1, 1])
    # rloo of the second group: 1 1 1 -1, mean 1/2, variance (3 * 1/4 + 9/4) / 3 = 1
    found = normalized(rloo(inputs, STD), inputs.batch)
    assert written(inputs, found.advantages_T) == pytest.approx([0, 0, 0.5, 0.5, 0.5, -1.5])


def test_without_normalisation_gae_and_reinforce_plus_plus_keep_their_scale() -> None:
    batch = batch_of([".www"], [1.0])
    inputs = AdvantageInputs(batch, token_rewards(batch, None, 0.0), numbers([9, 0.5, 0.4, 0.2]))
    plain = AdvantageSettings(gamma=0.9, lam=0.5, normalize=False)
    assert written(inputs, ALGORITHMS["gae"].estimate(inputs, plain).advantages_T) == pytest.approx(GAE_ADVANTAGES)
    found = ALGORITHMS["reinforce_plus_plus"].estimate(inputs, plain)
    assert written(inputs, found.advantages_T) == pytest.approx([0.81, 0.9, 1.0])


def test_remax_subtracts_the_greedy_score_discounted_like_the_score() -> None:
    inputs = outcome([".w-ww", ".w"], [1, 3])
    inputs = AdvantageInputs(inputs.batch, inputs.rewards_T, greedy_N=numbers([0.5, 5.0]))
    assert written(inputs, remax(inputs, PLAIN).advantages_T) == [0.5, 0.5, 0.5, -2.0]
    found = remax(inputs, AdvantageSettings(gamma=0.5))
    assert written(inputs, found.returns_T) == [0.25, 0.5, 1.0, 3.0]
    assert written(inputs, found.advantages_T) == [0.25 * 0.5, 0.5 * 0.5, 0.5, -2.0]


def test_remax_gives_no_advantage_to_an_answer_as_good_as_the_greedy_one() -> None:
    inputs = outcome([".www", ".w"], [1, 1])
    inputs = AdvantageInputs(inputs.batch, inputs.rewards_T, greedy_N=numbers([1.0, 1.0]))
    assert written(inputs, remax(inputs, AdvantageSettings(gamma=0.9)).advantages_T) == [0.0] * 4


def test_remax_discounts_the_kl_along_the_way_and_the_baseline_from_the_end() -> None:
    batch = batch_of([".ww"], [1.0])
    rewards_T = token_rewards(batch, numbers([0, 0.5, 0.25]), 1.0)  # -1/2, then 1 - 1/4
    inputs = AdvantageInputs(batch, rewards_T, greedy_N=numbers([1.0]))
    # returns -1/2 + 3/4 / 2 and 3/4; baseline 1/2 and 1
    assert written(inputs, remax(inputs, AdvantageSettings(gamma=0.5)).advantages_T) == [-0.625, -0.25]


def test_remax_leaves_out_a_prompt_whose_greedy_score_failed() -> None:
    inputs = outcome([".w", ".w"], [1, 3], groups=[0, 1])
    inputs = AdvantageInputs(inputs.batch, inputs.rewards_T, greedy_N=numbers([torch.nan, 1.0]))
    assert written(inputs, remax(inputs, PLAIN).advantages_T) == [0.0, 2.0]


GAE = AdvantageSettings(gamma=0.9, lam=0.5)
# delta: .9 * .4 - .5, .9 * .2 - .4, 1 - .2; then A = delta + .45 A'
GAE_ADVANTAGES = [-0.077, 0.14, 0.8]


@pytest.mark.parametrize(
    ("mask", "values"), [("..www", [9, 9, 0.5, 0.4, 0.2]), (".w--ww-", [9, 0.5, 9, 9, 0.4, 0.2, 9])]
)
def test_gae_skips_tokens_the_policy_did_not_write(mask: str, values: list[float]) -> None:
    batch = batch_of([mask], [1.0])
    inputs = AdvantageInputs(batch, token_rewards(batch, None, 0.0), numbers(values))
    assert written(inputs, gae(inputs, GAE).advantages_T) == pytest.approx(GAE_ADVANTAGES)
    found = ALGORITHMS["gae"].estimate(inputs, GAE)
    assert written(inputs, found.returns_T) == pytest.approx([0.423, 0.54, 1.0])
    assert written(inputs, found.advantages_T) == pytest.approx([-0.79837, -0.32329, 1.12165], abs=1e-5)
    assert found.advantages_T[~batch.mask_T].abs().sum() == 0


def test_gae_of_one_sample_does_not_see_the_next() -> None:
    batch = batch_of([".w", ".www"], [7.0, 1.0])
    inputs = AdvantageInputs(batch, token_rewards(batch, None, 0.0), numbers([0, 3, 0, 0.5, 0.4, 0.2]))
    assert written(inputs, gae(inputs, GAE).advantages_T) == pytest.approx([4.0, *GAE_ADVANTAGES])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100])
def test_the_discounted_sum_in_blocks_is_the_recursion(length: int) -> None:
    inputs = outcome(["." + "w" * length, ".ww"], [1, 2])
    rewards_T = torch.randn(len(inputs.rewards_T), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = returns_to_go(AdvantageInputs(inputs.batch, rewards_T), gamma=0.97)
    expected = 0.0
    for t in reversed(range(1, length + 1)):
        expected = float(rewards_T[t]) + 0.97 * expected
        assert float(found[t]) == pytest.approx(expected)


def test_actions_know_their_place_and_what_follows() -> None:
    actions = Actions.of(batch_of([".w-w", "..", ".ww"], [1, 1, 1]))
    assert actions.place_A.tolist() == [1, 3, 7, 8]
    assert actions.count_N.tolist() == [2, 0, 2]
    assert actions.following(numbers([1, 2, 3, 4])).tolist() == [2, 0, 4, 0]
    assert actions.put_back(numbers([1, 2, 3, 4])).tolist() == [0, 1, 0, 2, 0, 0, 0, 3, 4]
    assert actions.discounted_sum(numbers([1, 2, 3, 4]), 0.5).tolist() == [2, 2, 5, 4]
