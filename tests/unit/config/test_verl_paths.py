"""verl's functions under verl's paths, on padded tensors with numbers worked out by hand."""

import numpy as np
import pytest
import torch

from rloom.config.reward_sections import SandboxSection
from rloom.errors import RewardError
from rloom.rewards import helpers
from rloom.rewards.helpers import default_compute_score
from rloom.trainer.ppo import core_algos, reward_score
from rloom.trainer.ppo.reward_score import gsm8k, math

# two prompts with two answers each, of 2, 3, 1 and 2 tokens; the reward is at the last token
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
REWARDS = torch.tensor([[0.0, 1, 0], [0, 0, 0], [0.5, 0, 0], [0, 0.25, 0]])
INDEX = np.array(["a", "a", "b", "b"])


def spread_over(per_row: list[float]) -> list[list[float]]:
    return (torch.tensor(per_row)[:, None] * MASK).tolist()


def test_rloo_compares_with_the_other_answers() -> None:
    advantages, returns = core_algos.compute_rloo_outcome_advantage(REWARDS, MASK, INDEX)
    assert advantages.tolist() == spread_over([1, -1, 0.25, -0.25])
    assert torch.equal(advantages, returns)


def test_rloo_of_three_answers_leaves_one_out() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.5]])
    found, _ = core_algos.compute_rloo_outcome_advantage(rewards, torch.ones(3, 1), np.array([7, 7, 7]))
    assert found.flatten().tolist() == pytest.approx([0.75, -0.75, 0.0])  # 1 - 0.25, 0 - 0.75, 0.5 - 0.5


def test_rewards_outside_the_mask_do_not_count() -> None:
    padded = REWARDS + 9 * (1 - MASK)
    assert torch.equal(
        core_algos.compute_rloo_outcome_advantage(padded, MASK, INDEX)[0],
        core_algos.compute_rloo_outcome_advantage(REWARDS, MASK, INDEX)[0],
    )


def test_grpo_divides_by_the_deviation_unless_told_not_to() -> None:
    half = 0.5**0.5  # two values ± d have the deviation d√2 with n - 1
    found, _ = core_algos.compute_grpo_outcome_advantage(REWARDS, MASK, INDEX)
    assert found[:, 0].tolist() == pytest.approx([half, -half, half, -half], abs=1e-4)
    found, _ = core_algos.compute_grpo_outcome_advantage(REWARDS, MASK, INDEX, norm_adv_by_std_in_grpo=False)
    assert found.tolist() == spread_over([0.5, -0.5, 0.125, -0.125])


def test_the_best_of_a_group_gets_its_lead() -> None:
    found, _ = core_algos.compute_grpo_passk_outcome_advantage(REWARDS, MASK, INDEX, norm_adv_by_std_in_grpo=False)
    assert found.tolist() == spread_over([1, 0, 0.25, 0])


def test_opo_weighs_by_length_and_gpg_by_the_share_of_rewarded_answers() -> None:
    found, _ = core_algos.compute_opo_outcome_advantage(REWARDS, MASK, INDEX)
    # baselines (2 * 1 + 3 * 0) / 5 and (1 * 0.5 + 2 * 0.25) / 3
    assert found[:, 0].tolist() == pytest.approx([0.6, -0.4, 1 / 6, -1 / 12])
    found, _ = core_algos.compute_gpg_outcome_advantage(REWARDS, MASK, INDEX)
    assert found[:, 0].tolist() == pytest.approx([4 / 3 * x for x in (0.5, -0.5, 0.125, -0.125)])


def test_gae_returns_are_its_sums_and_its_advantages_are_whitened() -> None:
    rewards, values, mask = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.5]]), torch.ones(1, 2)
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.5)
    # deltas 0.25, 0.5; sums 0.25 + 0.5 * 0.5 = 0.5, 0.5: equal, so whitened to 0
    assert returns.tolist() == [[0.75, 1.0]]
    assert advantages.tolist() == [[0.0, 0.0]]


def test_reinforce_plus_plus_discounts_and_remax_subtracts_the_greedy_score() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.5, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0], [0.5, 0.0]]
    found, _ = core_algos.compute_remax_outcome_advantage(rewards, torch.tensor([0.25, 1.0]), mask)
    assert found.tolist() == [[0.75, 0.75], [-0.5, 0.0]]
    found, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, ["a", "a"])
    # R - mean is 0.25, 0.25, -0.25 over tokens; mean 1/12, variance (2/36 + 4/36) / 2 = 1/12
    assert found.flatten().tolist() == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5, 0], abs=1e-4)


def test_the_kl_has_verls_names() -> None:
    one, other = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert core_algos.kl_penalty(one, other, "kl").item() == 0.5
    assert core_algos.kl_penalty(one, other, "mse").item() == 0.125


def test_gsm8k_takes_verls_arguments() -> None:
    assert gsm8k.compute_score("so it is\n#### 18", "18") == 1.0
    assert gsm8k.compute_score("so it is\n#### 17", "18", format_score=0.1) == 0.1
    assert gsm8k.compute_score("so it is 18", "18", format_score=0.1) == 0.0
    assert gsm8k.compute_score("so it is 18", "18", method="flexible", score=2.0) == 2.0
    assert gsm8k.extract_solution("#### 1,234") == "1234"
    assert gsm8k.extract_solution("no answer") is None


def test_math_and_the_default_follow_the_rules_of_the_data_source() -> None:
    assert math.compute_score(r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert default_compute_score("openai/gsm8k", "#### 18", "18") == 1.0
    assert default_compute_score("lighteval/MATH", r"\boxed{3}", "4") == 0.0
    with pytest.raises(RewardError, match="no reward rule for data_source='mine'; registered: openai/gsm8k"):
        default_compute_score("mine", "", "")
    with pytest.raises(RewardError, match=r"runs generated code in a sandbox; give its settings as sandbox=\{...\}"):
        default_compute_score("mbpp", "", "")


# solution, ground truth, score of every kind of data source
DEFAULT_SCORES = {
    "openai/gsm8k": ("#### 18", "18", 1.0),
    "lighteval/MATH": (r"\boxed{3}", "4", 0.0),
    "HuggingFaceH4/MATH-500": (r"\boxed{\frac12}", "0.5", 1.0),
    "math_dapo": ("Answer: 3", "4", {"score": -1.0, "acc": 0.0, "pred": "3"}),
    "aime2024": ("Answer: 34", "34", {"score": 1.0, "acc": 1.0, "pred": "34"}),
    "math_reasoning": ("答案：42", "42", 1.0),
    "mbpp": ("def f(x): return x + 1", '{"test_list": ["assert f(1) == 2"]}', 1.0),
    "codecontests": ("print(input())", '{"inputs": ["1"], "outputs": ["2"]}', 0.0),
}


@pytest.mark.parametrize("data_source", DEFAULT_SCORES)
def test_every_path_has_the_same_default_score(data_source: str) -> None:
    assert helpers.default_compute_score is reward_score.default_compute_score is default_compute_score
    solution, truth, expected = DEFAULT_SCORES[data_source]
    settings = SandboxSection().model_dump()
    assert default_compute_score(data_source, solution, truth, {}, method="strict", sandbox=settings) == expected
