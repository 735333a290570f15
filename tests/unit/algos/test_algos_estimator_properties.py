"""What must hold of every estimator, whatever the batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, gae
from rloom.algos.registry import ALGORITHMS
from rloom.batch import Advantages, token_indices
from tests.algos_samples import MASKS, Case, Sample, a_few_examples, a_sample, cases

SETTINGS = [AdvantageSettings(gamma=0.9, lam=0.8), AdvantageSettings(norm_by_std=False, normalize=True)]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def advantages(name: str, case: Case, settings: AdvantageSettings = SETTINGS[0], shift: float = 0.0) -> Advantages:
    return ALGORITHMS[name].estimate(case.inputs(shift), settings)


@pytest.mark.parametrize("name", ["rloo", "grpo"])
@given(case=cases(), shift=st.floats(-5, 5))
@a_few_examples
def test_shifting_all_rewards_of_a_group_changes_nothing(name: str, case: Case, shift: float) -> None:
    # an answer without a token has no place for a reward
    case = Case(tuple(replace(s, mask=s.mask + "w") for s in case.samples))
    for settings in SETTINGS:
        before, after = advantages(name, case, settings), advantages(name, case, settings, shift)
        torch.testing.assert_close(after.advantages_T, before.advantages_T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(case=cases(), data=st.data())
@a_few_examples
def test_permuting_samples_permutes_the_result(name: str, case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.samples))))
    permuted = Case(tuple(case.samples[i] for i in order))
    places = token_indices(case.batch.length_N, torch.tensor(order))
    for settings in SETTINGS:
        before, after = advantages(name, case, settings), advantages(name, permuted, settings)
        assert_close(after.advantages_T, before.advantages_T[places])
        assert_close(after.returns_T, before.returns_T[places])


@pytest.mark.parametrize("name", ALGORITHMS)
@given(case=cases(), failed=a_sample(), data=st.data())
@a_few_examples
def test_adding_a_failed_sample_changes_nothing(name: str, case: Case, failed: Sample, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(case.samples)))
    more = Case((*case.samples[:at], replace(failed, score=None), *case.samples[at:]))
    others = [i for i in range(len(more.samples)) if i != at]
    places = token_indices(more.batch.length_N, torch.tensor(others))
    for settings in SETTINGS:
        before, after = advantages(name, case, settings), advantages(name, more, settings)
        assert_close(after.advantages_T[places], before.advantages_T)
        assert after.advantages_T[token_indices(more.batch.length_N, torch.tensor([at]))].abs().sum() == 0


@given(case=cases())
@a_few_examples
def test_the_advantages_of_rloo_sum_to_zero_in_each_group(case: Case) -> None:
    case = Case(tuple(replace(s, mask=".w") for s in case.samples))  # one token an answer
    batch, found = case.batch, advantages("rloo", case)
    for group in batch.group_N.unique():
        in_group_T = (batch.group_N == group)[batch.sample_T]
        assert float(found.advantages_T[in_group_T].sum()) == pytest.approx(0, abs=1e-9)


@given(case=cases(), gamma=st.floats(0, 1))
@a_few_examples
def test_gae_with_lambda_one_and_no_values_is_the_discounted_return(case: Case, gamma: float) -> None:
    inputs = case.inputs()
    inputs = AdvantageInputs(inputs.batch, inputs.rewards_T, torch.zeros_like(inputs.rewards_T))
    found_T = gae(inputs, AdvantageSettings(gamma=gamma, lam=1.0)).advantages_T
    expected_T = torch.zeros_like(found_T)
    for sample in range(len(case.samples)):
        total = 0.0
        places = (inputs.batch.loss_mask_T & (inputs.batch.sample_T == sample)).nonzero().squeeze(1).tolist()
        for t in reversed(places):
            total = float(inputs.rewards_T[t]) + gamma * total
            expected_T[t] = total
    assert_close(found_T, expected_T)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("score", [0.0, 0.1, 3.0])
def test_equal_rewards_stay_finite(name: str, score: float) -> None:
    case = Case(tuple(Sample(mask, i % 2, score, seed=i) for i, mask in enumerate(MASKS)))
    assert advantages(name, case).advantages_T.isfinite().all()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "samples",
    [
        [(".w", 0, 1.0)],  # one valid token
        [("..", 0, 1.0)],  # none at all
        [("..", 0, 1.0), (".w", 0, 2.0), (".w", 0, 0.0)],
        [(".w", 0, None), (".ww", 0, None)],  # every score failed
    ],
)
def test_batches_with_hardly_anything_in_them_stay_finite(name: str, samples: list) -> None:
    found = advantages(name, Case(tuple(Sample(*sample, seed=i) for i, sample in enumerate(samples))))
    assert found.advantages_T.isfinite().all() and found.returns_T.isfinite().all()
