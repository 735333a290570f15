"""Whole objectives: any split gives the same loss, everything composes, nothing is ever infinite."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rloom.algos.aggregate import AGGREGATIONS, Counts, aggregate
from rloom.algos.kl import KL_ESTIMATORS
from rloom.algos.objectives import GAP_METRICS, PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.algos.registry import ALGORITHMS, POLICY_LOSSES
from rloom.batch import TokenOutputs, TrainBatch, token_indices
from tests.algos_samples import MIXED, Case, Sample, a_few_examples, a_sample, batch_of, cases

# ratios that choose several tokens of a small batch
SETTINGS = LossSettings(clip_cov_ratio=0.2, clip_cov_lb=0.05, kl_cov_ratio=0.2)


def objective(loss: str = "vanilla", aggregation: str = "token-mean", kl: str = "low_var_kl") -> PolicyObjective:
    return PolicyObjective(
        loss_mode=loss,
        loss_settings=SETTINGS,
        aggregation=aggregation,
        entropy_coefficient=0.01,
        kl_coefficient=0.1,
        kl_estimator=kl,
    )


class Learned:
    """The loss, metrics and gradient of a mini-batch that is dealt out to ranks, each in several micro-batches."""

    def __init__(self, goal, mini: TrainBatch, case: Case, micro_batches: int = 1, ranks: int = 1) -> None:
        self.logprobs_T = case.numbers[2].clone().requires_grad_()
        self.entropy_T = case.numbers[6].clone().requires_grad_()
        mini = mini if goal.choose is None else replace(mini, chosen_T=goal.choose(mini))
        counts = Counts.of(mini, horizon=16)
        self.loss, self.metrics = 0.0, {}
        for rank in range(ranks):
            for rows in torch.arange(len(mini))[rank::ranks].tensor_split(micro_batches):
                places = token_indices(mini.length_N, rows)
                part = mini.select(rows)
                outputs = TokenOutputs(self.logprobs_T[places], self.entropy_T[places])
                loss, metrics = goal(outputs, part, counts)
                if loss.requires_grad:
                    loss.backward()
                self.loss += float(loss.detach())
                for name, value in metrics.items():
                    self.metrics[name] = self.metrics.get(name, 0.0) + float(value)

    @property
    def gradients(self) -> list[Tensor]:
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in (self.logprobs_T, self.entropy_T)]

    def assert_finite(self) -> None:
        assert math.isfinite(self.loss)
        assert all(math.isfinite(value) for value in self.metrics.values())
        assert all(gradient.isfinite().all() for gradient in self.gradients)


def assert_same(found: Learned, expected: Learned) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-9)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def corrected(mini: TrainBatch) -> TrainBatch:
    """With weights and rejections as rollout correction leaves them."""
    generator = torch.Generator().manual_seed(1)
    uniform_T = torch.rand(len(mini.mask_T), generator=generator, dtype=torch.float64)
    return replace(mini, rollout_weights_T=2 * uniform_T, keep_T=uniform_T > 0.1)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_split_gives_the_same_loss(loss: str, aggregation: str) -> None:
    goal, mini = objective(loss, aggregation, "k3+"), corrected(MIXED.train_batch())
    whole = Learned(goal, mini, MIXED)
    assert whole.loss != 0
    for micro_batches, ranks in ((8, 1), (4, 2), (1, 2)):
        assert_same(Learned(goal, mini, MIXED, micro_batches, ranks), whole)


@pytest.mark.parametrize(("loss", "factors"), [("geo_mean", [2.0, 2.0, 0.5]), ("gspo", [4.0, 1.0, 0.5])])
def test_geo_mean_weighs_an_answer_by_the_geometric_mean_of_its_weights(loss: str, factors: list[float]) -> None:
    batch = batch_of([".ww", ".w"], [1.0, 0.0])
    weights_T = torch.tensor([9, 4, 1, 9, 0.5], dtype=torch.float64)
    mini = TrainBatch(
        **vars(batch), advantages_T=batch.mask_T.double(), old_logprobs_T=batch.rollout_logprobs_T,
        ref_logprobs_T=None, values_T=None, returns_T=None, rollout_weights_T=weights_T,
    )  # fmt: skip
    goal = PolicyObjective(loss, SETTINGS, "seq-mean-token-mean", 0.0, None, "kl")
    outputs = TokenOutputs(torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64))
    found, _ = goal(outputs, mini, Counts.of(mini, horizon=16))
    first, second, alone = factors  # every ratio and every advantage is 1
    assert float(found) == pytest.approx(-((first + second) / 2 + alone) / 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_split_gives_the_same_value_loss(aggregation: str) -> None:
    goal, mini = ValueObjective(0.2, aggregation), MIXED.train_batch("gae")
    whole = Learned(goal, mini, MIXED)
    for micro_batches, ranks in ((8, 1), (4, 2)):
        assert_same(Learned(goal, mini, MIXED, micro_batches, ranks), whole)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@given(case=cases(), failed=a_sample())
@settings(parent=a_few_examples, max_examples=12)
def test_a_failed_sample_changes_no_loss(loss: str, case: Case, failed: Sample) -> None:
    more = Case((replace(failed, score=None), *case.samples))
    for aggregation in ("token-mean", "seq-mean-token-sum"):
        before = Learned(objective(loss, aggregation), case.train_batch(), case)
        after = Learned(objective(loss, aggregation), more.train_batch(), more)
        assert after.loss == pytest.approx(before.loss, rel=1e-7, abs=1e-9)
        assert after.metrics == pytest.approx(before.metrics, rel=1e-6, abs=1e-7)
        for one, other in zip(after.gradients, before.gradients, strict=True):
            torch.testing.assert_close(one[len(failed.mask) :], other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("estimator", ALGORITHMS)
def test_every_estimator_composes_with_every_loss_aggregation_and_kl(estimator: str) -> None:
    """Every loss with every aggregation; the KL estimators in turn, from another one for each estimator."""
    mini = corrected(MIXED.train_batch(estimator))
    kinds = ("kl", "abs", "mse", "k3", "kl+", "abs+", "mse+", "k3+")  # the others are second names
    first = list(ALGORITHMS).index(estimator)
    for number, (loss, aggregation) in enumerate(itertools.product(POLICY_LOSSES, AGGREGATIONS), start=first):
        Learned(objective(loss, aggregation, kinds[number % len(kinds)]), mini, MIXED).assert_finite()


def extreme(*, old: float = -1.0, scores: tuple[float | None, ...] = (1.0, 0.0), masks: tuple[str, ...]) -> TrainBatch:
    case = Case(
        tuple(Sample(mask, 0, score, seed=i) for i, (mask, score) in enumerate(zip(masks, scores, strict=True)))
    )
    mini = case.train_batch("grpo")
    shifted_T = case.numbers[2] + old
    return replace(mini, old_logprobs_T=shifted_T, ref_logprobs_T=shifted_T)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize(
    "mini",
    [
        extreme(masks=(".ww", ".w-w"), scores=(1.0, 1.0)),
        extreme(masks=(".ww", ".w-w"), scores=(0.0, 0.0)),
        extreme(masks=(".w", ".."), scores=(1.0, 0.0)),
        extreme(masks=("..", ".."), scores=(1.0, 0.0)),
        extreme(masks=(".ww", ".w"), scores=(None, None)),
        extreme(masks=(".ww", ".www"), old=50.0),
        extreme(masks=(".ww", ".www"), old=-50.0),
    ],
    ids=["equal", "zero", "one token", "no tokens", "all failed", "+50", "-50"],
)
def test_no_loss_is_ever_infinite(loss: str, mini: TrainBatch) -> None:
    masks = ["".join("w" if w else "." for w in part) for part in mini.mask_T.split(mini.length_N.tolist())]
    case = Case(tuple(Sample(mask, 0, 1.0, seed=i) for i, mask in enumerate(masks)))
    for aggregation, kl in itertools.product(AGGREGATIONS, [*KL_ESTIMATORS, "k3+"]):
        Learned(objective(loss, aggregation, kl), mini, case).assert_finite()


# two samples: losses 1, 2, 3 and 6
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 4),
        ("seq-mean-token-sum", (6 + 6) / 2),
        ("seq-mean-token-mean", (2 + 6) / 2),
        ("seq-mean-token-sum-norm", (6 + 6) / (2 * 16)),
    ],
)
def test_aggregations_by_hand(mode: str, expected: float) -> None:
    case = Case(
        (Sample(".ww-w", 0, 1.0, 0), Sample(".w", 0, 0.0, 1), Sample(".ww", 0, None, 2), Sample("..", 0, 1.0, 3))
    )
    batch = case.batch
    inf = math.inf
    value_T = torch.tensor([inf, 1, 2, inf, 3, inf, 6, inf, inf, inf, inf, inf])  # what is masked out may be anything
    assert float(aggregate(value_T, batch, mode, Counts.of(batch, horizon=16))) == pytest.approx(expected)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_honours_every_aggregation(loss: str) -> None:
    found = {mode: Learned(objective(loss, mode), MIXED.train_batch(), MIXED).metrics for mode in AGGREGATIONS}
    assert len({metrics["actor/pg_loss"] for metrics in found.values()}) == 4


def test_rollout_weights_weigh_the_policy_loss_alone() -> None:
    mini = MIXED.train_batch()
    plain = Learned(objective(), mini, MIXED).metrics
    doubled = Learned(
        objective(), replace(mini, rollout_weights_T=torch.full_like(mini.advantages_T, 2.0)), MIXED
    ).metrics
    assert doubled["actor/pg_loss"] == pytest.approx(2 * plain["actor/pg_loss"])
    assert doubled["actor/kl_loss"] == plain["actor/kl_loss"]
    assert doubled["actor/entropy"] == plain["actor/entropy"]


def test_rejected_tokens_are_as_if_they_had_not_been_written() -> None:
    mini = MIXED.train_batch()
    keep_T = torch.arange(len(mini.mask_T)) % 3 != 0
    rejected = Learned(objective("gspo"), replace(mini, keep_T=keep_T), MIXED)
    unwritten = Learned(objective("gspo"), replace(mini, mask_T=mini.mask_T & keep_T), MIXED)
    assert_same(rejected, unwritten)


def test_an_on_policy_update_needs_no_old_log_probs() -> None:
    mini = replace(MIXED.train_batch(), old_logprobs_T=None)
    found = Learned(objective("vanilla"), mini, MIXED)
    assert found.metrics["actor/ppo_kl"] == 0
    assert found.metrics.pop("rollout_corr/kl") == pytest.approx(
        float((mini.rollout_logprobs_T - MIXED.numbers[2])[mini.loss_mask_T].mean())
    ), "nobody else has looked at the gap to the rollout engine yet"
    for name in GAP_METRICS:
        found.metrics.pop(name, None)
    same = replace(mini, old_logprobs_T=MIXED.numbers[2])
    assert_same(found, Learned(objective("vanilla"), same, MIXED))


def test_only_some_losses_choose_tokens_of_a_mini_batch() -> None:
    mini = MIXED.train_batch()
    assert objective("vanilla").choose is None
    assert ValueObjective(0.2, "token-mean").choose is None
    assert objective("kl_cov").choose(mini).sum() == 4  # a fifth of 21 tokens


@pytest.mark.parametrize(
    ("entropy", "kl", "total", "gradients"),
    [
        (0.0, None, 0.5, [[-0.5, 1.0], [0.0, 0.0]]),
        (0.1, None, 0.46, [[-0.5, 1.0], [-0.05, -0.05]]),  # 0.5 - 0.1 * (0.3 + 0.5) / 2
        (0.0, 0.2, 0.45, [[-0.4, 1.1], [0.0, 0.0]]),  # 0.5 + 0.2 * (0.5 - 1) / 2
        (0.1, 0.2, 0.41, [[-0.4, 1.1], [-0.05, -0.05]]),
    ],
)
def test_entropy_is_rewarded_and_the_kl_is_punished(
    entropy: float, kl: float | None, total: float, gradients: list[list[float]]
) -> None:
    """Two tokens with advantages 1 and -2, at a ratio of 1: the policy loss is (-1 + 2) / 2."""
    case = Case((Sample("ww", 0, 1.0, 0),))
    mini = replace(
        case.train_batch(),
        advantages_T=torch.tensor([1.0, -2.0], dtype=torch.float64),
        old_logprobs_T=None,
        ref_logprobs_T=torch.tensor([-1.5, -1.0], dtype=torch.float64),
    )
    goal = replace(objective(kl="k1"), entropy_coefficient=entropy, kl_coefficient=kl)
    logprobs_T = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    entropy_T = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
    loss, _ = goal(TokenOutputs(logprobs_T, entropy_T), mini, Counts.of(mini, horizon=16))
    (loss + 0 * entropy_T.sum()).backward()
    assert float(loss.detach()) == pytest.approx(total)
    assert [logprobs_T.grad.tolist(), entropy_T.grad.tolist()] == [pytest.approx(one) for one in gradients]
