import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rloom.algos.kl import KL_ESTIMATORS, KlControl, full_kl, kl_estimator, mean_sample_kl, token_rewards
from rloom.errors import ConfigError
from tests.algos_samples import a_few_examples, batch_of


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


X, Y = numbers([-1.0, -2.0]), numbers([-1.5, -1.0])  # x - y is 0.5 and -1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("kl", "k1"), [0.5, -1.0]),
        (("abs",), [0.5, 1.0]),
        (("mse", "k2"), [0.125, 0.5]),
        (("low_var_kl", "k3"), [math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1]),
    ],
)
def test_estimators_by_hand(names: tuple[str, ...], expected: list[float]) -> None:
    for name in names:
        assert kl_estimator(name)(X, Y).tolist() == pytest.approx(expected)
        assert kl_estimator(name + "+")(X, Y).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimator(name)(x, Y), x)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_trailing_plus_takes_the_gradient_of_k2(name: str) -> None:
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(kl_estimator(name + "+")(x, Y).sum(), x)
    assert found.tolist() == pytest.approx([0.5, -1.0])  # of (x - y)^2 / 2


@given(x=st.floats(-100, 0), y=st.floats(-100, 0))
@a_few_examples
def test_low_var_kl_is_never_negative(x: float, y: float) -> None:
    assert 0 <= float(kl_estimator("low_var_kl")(numbers([x]), numbers([y]))) <= 10


@pytest.mark.parametrize("gap", [50.0, -50.0])
def test_far_log_probs_stay_finite(gap: float) -> None:
    for name in [*KL_ESTIMATORS, *(name + "+" for name in KL_ESTIMATORS)]:
        x = torch.tensor([gap], requires_grad=True)
        value = kl_estimator(name)(x, torch.zeros(1))
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", ["k4", "k3++", "+", "full"])
def test_an_unknown_estimator_is_named_with_those_there_are(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"does not exist; use one of kl, k1, abs, mse, k2, low_var_kl, k3, with or without"
    ):
        kl_estimator(name)


def test_full_kl_sums_over_the_vocabulary() -> None:
    policy = numbers([0.5, 0.25, 0.25]).log() + 7  # logits are free up to a constant
    reference = numbers([0.25, 0.5, 0.25]).log()
    assert float(full_kl(policy, reference)) == pytest.approx(0.25 * math.log(2))
    assert full_kl(policy.expand(2, 4, 3), reference.expand(2, 4, 3)).shape == (2, 4)
    assert float(full_kl(policy, policy)) == pytest.approx(0, abs=1e-12)


def test_full_kl_has_the_gradient_of_finite_differences() -> None:
    policy = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: full_kl(p, torch.zeros(3, 5, dtype=torch.float64)), policy)


def test_full_kl_of_far_logits_stays_finite() -> None:
    found = full_kl(torch.tensor([50.0, -50.0]), torch.tensor([-50.0, 50.0]))
    assert float(found) == pytest.approx(100.0)


def test_the_expectation_of_the_estimators_is_the_full_kl() -> None:
    policy, reference = numbers([0.5, 0.3, 0.2]), numbers([0.4, 0.3, 0.3])
    exact = float(full_kl(policy.log(), reference.log()))
    for name in ("k1", "k3"):
        assert float((policy * kl_estimator(name)(policy.log(), reference.log())).sum()) == pytest.approx(exact)


def test_the_score_stands_at_the_last_token_written_and_the_kl_at_each() -> None:
    batch = batch_of(["..ww-", ".w-w"], [1.0, 2.0])
    assert token_rewards(batch, None, 0.5).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 2]
    found = token_rewards(batch, torch.ones(9, dtype=torch.float64), 0.5)
    assert found.tolist() == [0, 0, -0.5, 0.5, 0, 0, -0.5, 0, 1.5]


def test_the_kl_of_a_batch_is_a_mean_over_samples_of_means_over_tokens() -> None:
    batch = batch_of([".ww", ".w", ".w", ".."], [1.0, 1.0, None, 1.0])
    assert mean_sample_kl(batch, numbers([9, 1, 3, 9, 4, 9, 9, 9, 9])) == pytest.approx((2 + 4) / 2)


def test_the_adaptive_coefficient_moves_at_most_a_fifth() -> None:
    control = KlControl(0.1, adaptive=True, target=0.1, horizon=1000)
    assert control.updated(kl=0.11, samples=500).coefficient == pytest.approx(0.1 * (1 + 0.1 / 2))
    assert control.updated(kl=9.0, samples=500).coefficient == pytest.approx(0.1 * (1 + 0.2 / 2))
    assert control.updated(kl=0.0, samples=500).coefficient == pytest.approx(0.1 * (1 - 0.2 / 2))
    assert KlControl(0.1).updated(kl=9.0, samples=500).coefficient == 0.1
