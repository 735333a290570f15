"""Each policy loss on hand-made ratios, and its gradient. The old log-prob is 0 unless said otherwise: d = log r."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rloom.algos.objectives import value_loss
from rloom.algos.policy_losses import (
    LossSettings,
    LossTerms,
    PolicyLoss,
    TokenLoss,
    choose_for_clip_cov,
    choose_for_kl_cov,
    cispo,
    clip_cov,
    geo_mean,
    gpg,
    gspo,
    kl_cov,
    log_ratio,
    sapo,
    sequence_ratio,
    vanilla,
)
from rloom.algos.registry import POLICY_LOSSES
from rloom.batch import TrainBatch
from tests.algos_samples import Case, Sample, batch_of

DEFAULT = LossSettings()


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def terms_of(
    logprobs_T: Tensor, advantages: list[float], *, samples: list[int] | None = None, chosen=None
) -> LossTerms:
    sample_T = torch.tensor([0] * len(logprobs_T) if samples is None else samples)
    return LossTerms(
        logprobs_T,
        torch.zeros_like(logprobs_T),
        numbers(advantages),
        torch.ones(len(logprobs_T), dtype=torch.bool),
        sample_T,
        int(sample_T.max()) + 1,
        None if chosen is None else torch.tensor(chosen),
    )


def at_ratios(ratios: list[float], advantages: list[float], **more) -> LossTerms:
    return terms_of(numbers(ratios).log().requires_grad_(), advantages, **more)


def gradient(loss: PolicyLoss, terms: LossTerms, settings: LossSettings = DEFAULT) -> list[float]:
    (found,) = torch.autograd.grad(loss(terms, settings).loss_T.sum(), terms.logprobs_T)
    return found.tolist()


def test_vanilla_clips_what_would_be_rewarded_and_bounds_what_is_punished() -> None:
    terms = at_ratios([1.5, 0.5, 1.5, 0.5, 5.0], [1, 1, -1, -1, -1])
    found = vanilla(terms, DEFAULT)
    assert found.loss_T.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8, 3.0])
    assert found.parts_T["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1, 0]
    assert found.parts_T["actor/pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 1]
    assert found.parts_T["actor/ppo_kl"].tolist() == pytest.approx([-math.log(r) for r in (1.5, 0.5, 1.5, 0.5, 5)])
    assert found.parts_T["actor/ppo_ratio"].tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 5])
    assert gradient(vanilla, terms) == pytest.approx([0, -0.5, 1.5, 0, 0])


def test_clip_higher_leaves_more_room_above() -> None:
    found = vanilla(at_ratios([1.5, 0.5], [1, -1]), LossSettings(clip_low=0.2, clip_high=0.28))
    assert found.loss_T.tolist() == pytest.approx([-1.28, 0.8])


@pytest.mark.parametrize("loss", [vanilla, gspo, sequence_ratio, sapo, cispo, gpg])
def test_at_ratio_one_the_gradient_is_the_policy_gradients(loss: PolicyLoss) -> None:
    terms = terms_of(numbers([0.0, 0.0, 0.0]).requires_grad_(), [2.0, -1.0, 0.5])
    assert gradient(loss, terms) == pytest.approx([-2.0, 1.0, -0.5])


def test_gspo_has_one_ratio_an_answer() -> None:
    # mean d = log 2 in the first answer, 0 in the second
    terms = at_ratios([4.0, 1.0, 2.0, 0.5], [-1, -1, 1, 1], samples=[0, 0, 1, 1])
    assert gspo(terms, DEFAULT).loss_T.tolist() == pytest.approx([2.0, 2.0, -1.0, -1.0])
    assert gradient(gspo, terms) == pytest.approx([2.0, 2.0, -1.0, -1.0])


def test_gspo_clips_the_ratio_of_the_whole_answer() -> None:
    terms = at_ratios([4.0, 1.0], [1, 1])
    found = gspo(terms, DEFAULT)
    assert found.loss_T.tolist() == pytest.approx([-1.2, -1.2])
    assert found.parts_T["actor/pg_clipfrac"].tolist() == [1, 1]
    assert gradient(gspo, terms) == [0, 0]


def test_gspo_leaves_masked_tokens_out_of_the_mean() -> None:
    terms = replace(at_ratios([4.0, 1.0, 9.0], [-1, -1, -1]), mask_T=torch.tensor([True, True, False]))
    assert gspo(terms, DEFAULT).loss_T[:2].tolist() == pytest.approx([2.0, 2.0])


def test_the_sequence_ratio_is_the_product_over_an_answer() -> None:
    terms = at_ratios([1.25, 2.0, 0.5, 0.5], [-1, -1, 1, 1], samples=[0, 0, 1, 1])  # 2.5 and 0.25
    assert sequence_ratio(terms, DEFAULT).loss_T.tolist() == pytest.approx([2.5, 2.5, -0.25, -0.25])
    assert gradient(sequence_ratio, terms) == pytest.approx([2.5, 2.5, -0.25, -0.25])
    assert gradient(sequence_ratio, at_ratios([1.1, 1.2], [1, 1])) == [0, 0]  # 1.32 is above 1.2, neither factor is


def test_sapo_is_a_soft_gate() -> None:
    found = sapo(at_ratios([1.0, 2.0, 2.0], [1, 1, -1]), DEFAULT).loss_T.tolist()
    gate = 1 / (1 + math.exp(-1.05))
    assert found == pytest.approx([-2.0, -4 * 0.7310585786, 4 / 1.05 * gate])


def test_gpg_is_plain_reinforce() -> None:
    terms = terms_of(numbers([-0.5, -2.0]).requires_grad_(), [2.0, -1.0])
    assert gpg(terms, DEFAULT).loss_T.tolist() == [1.0, -2.0]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    terms = at_ratios([1.5, 0.5, 1.1], [1, -1, 1])
    found = cispo(terms, DEFAULT)
    assert found.loss_T.tolist() == pytest.approx([-1.2 * math.log(1.5), 0.8 * math.log(0.5), -1.1 * math.log(1.1)])
    assert found.parts_T["actor/pg_clipfrac"].tolist() == [1, 1, 0]
    assert gradient(cispo, terms) == pytest.approx([-1.2, 0.8, -1.1])


def test_geo_mean_is_the_geometric_mean_of_clipped_ratios() -> None:
    terms = at_ratios([2.0, 1.1, 2.0, 1.1], [1, 1, -1, -1], samples=[0, 0, 1, 1])
    gain = math.exp((0.2 + math.log(1.1)) / 2)  # the first d is held at the clip range
    loss = math.sqrt(2.2)  # what is punished is not held
    found = geo_mean(terms, DEFAULT)
    assert found.loss_T.tolist() == pytest.approx([-gain, -gain, loss, loss])
    assert found.parts_T["actor/pg_clipfrac"].tolist() == [1, 0, 0, 0]
    assert found.parts_T["actor/pg_clipfrac_lower"].tolist() == [0, 0, 1, 0]
    assert gradient(geo_mean, terms) == pytest.approx([0, -gain, loss, loss])


def test_clip_cov_silences_the_chosen_tokens() -> None:
    terms = at_ratios([1.1, 1.1, 1.5], [1, 1, 1], chosen=[True, False, False])
    found = clip_cov(terms, DEFAULT)
    assert found.loss_T.tolist() == pytest.approx([0, -1.1, -1.2])
    assert found.parts_T["actor/pg_clipfrac"].tolist() == [1, 0, 1]
    assert gradient(clip_cov, terms) == pytest.approx([0, -1.1, 0])


def test_kl_cov_holds_the_chosen_tokens_back() -> None:
    terms = at_ratios([1.5, 1.5, 0.5], [1, 1, 1], chosen=[True, False, True])
    found = kl_cov(terms, LossSettings(ppo_kl_coef=0.1)).loss_T.tolist()
    assert found == pytest.approx([-1.5 + 0.1 * math.log(1.5), -1.5, -0.5 + 0.1 * math.log(2)])
    assert gradient(kl_cov, terms, LossSettings(ppo_kl_coef=0.1)) == pytest.approx([-1.4, -1.5, -0.6])


def train_batch(masks: list[str], advantages: list[float], old: list[float], scores: list[float | None]) -> TrainBatch:
    return TrainBatch(**vars(batch_of(masks, scores)), advantages_T=numbers(advantages), old_logprobs_T=numbers(old),
                      ref_logprobs_T=None, values_T=None, returns_T=None)  # fmt: skip


# Over the four tokens that teach: mean advantage 0, mean log-prob -1.5, covariances 3, 4, 0, 0. The last sample failed.
COVARIANCES = train_batch(
    [".ww", ".ww", ".w"], [9, 3, -4, 9, 1, 0, 9, 99], [0, -0.5, -2.5, 0, -1.5, -1.5, 0, 99], [1, 1, None]
)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        (LossSettings(clip_cov_ratio=0.5), [1, 2]),
        (LossSettings(clip_cov_ratio=0.0002), [2]),  # one at least: the middle of the sorted two, rounded up
        (LossSettings(clip_cov_ratio=1.0, clip_cov_ub=3.5), [1]),
        (LossSettings(clip_cov_ratio=1.0, clip_cov_lb=3.5), [2]),
        (LossSettings(clip_cov_ratio=1.0, clip_cov_lb=5, clip_cov_ub=6), []),
    ],
)
def test_clip_cov_chooses_between_its_bounds(settings: LossSettings, chosen: list[int]) -> None:
    assert choose_for_clip_cov(COVARIANCES, settings).nonzero().squeeze(1).tolist() == chosen


@pytest.mark.parametrize(("ratio", "chosen"), [(0.0002, [2]), (0.5, [1, 2]), (1.0, [1, 2])])
def test_kl_cov_chooses_the_largest(ratio: float, chosen: list[int]) -> None:
    assert choose_for_kl_cov(COVARIANCES, LossSettings(kl_cov_ratio=ratio)).nonzero().squeeze(1).tolist() == chosen


def test_nothing_is_chosen_where_nothing_teaches() -> None:
    empty = train_batch([".w", ".."], [1, 1, 1, 1], [0, -1, 0, 0], [None, 1])
    assert not choose_for_clip_cov(empty, DEFAULT).any()
    assert not choose_for_kl_cov(empty, DEFAULT).any()


def test_the_choice_does_not_depend_on_the_order_of_samples() -> None:
    batch = Case(tuple(Sample(".wwwwww", i % 2, float(i), seed=i) for i in range(6))).train_batch()
    settings = LossSettings(clip_cov_ratio=0.2, clip_cov_lb=0.01, kl_cov_ratio=0.2)
    order = [3, 0, 5, 1, 4, 2]
    for choose in (choose_for_clip_cov, choose_for_kl_cov):
        marked = replace(batch, chosen_T=choose(batch, settings)).select(order)
        assert 0 < int(marked.chosen_T.sum()) <= 7
        assert choose(batch.select(order), settings).tolist() == marked.chosen_T.tolist()


def frozen_weight(loss: PolicyLoss, terms: LossTerms) -> PolicyLoss:
    """cispo with its weight held at today's value, as its definition says: what finite differences can see."""
    weight_T = terms.logprobs_T.detach().exp().clamp(0.8, 1.2)
    return lambda t, _: TokenLoss(-weight_T * t.advantages_T * t.logprobs_T)


def sequence_form(loss: PolicyLoss, terms: LossTerms) -> PolicyLoss:
    """GSPO as first written: one clipped ratio an answer, differentiated through the mean; or the sum, counted once."""

    def by_answer(t: LossTerms, settings: LossSettings) -> TokenLoss:
        ratio_T = (t.sample_mean if loss is gspo else t.sample_sum)(t.logprobs_T).exp()
        plain_T, held_T = -t.advantages_T * ratio_T, -t.advantages_T * ratio_T.clamp(0.8, 1.2)
        return TokenLoss(
            torch.maximum(plain_T, held_T) / (1 if loss is gspo else t.sample_sum(torch.ones_like(plain_T)))
        )

    return by_answer


SEEN_BY_FINITE_DIFFERENCES = {"cispo": frozen_weight, "gspo": sequence_form, "sequence_ratio": sequence_form}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    loss = POLICY_LOSSES[name].loss
    start = numbers([0.5, -0.4, 0.05, -0.07, 1.3, 0.11]).requires_grad_()
    advantages, samples = [1.0, 1.0, 1.0, -0.5, -0.5, -0.5], [0, 0, 0, 1, 1, 1]
    chosen = [True, False, False, True, False, False]

    def terms_at(logprobs_T: Tensor) -> LossTerms:
        return terms_of(logprobs_T, advantages, samples=samples, chosen=chosen)

    def total(function: PolicyLoss, logprobs_T: Tensor) -> Tensor:
        return function(terms_at(logprobs_T), DEFAULT).loss_T.sum()

    form = SEEN_BY_FINITE_DIFFERENCES.get(name)
    visible = loss if form is None else form(loss, terms_at(start))
    assert torch.autograd.gradcheck(lambda x: total(visible, x), start)
    (found,) = torch.autograd.grad(total(loss, start), start)
    (expected,) = torch.autograd.grad(total(visible, start), start)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("log_ratio", [50.0, -50.0])
def test_a_log_ratio_of_fifty_stays_finite(name: str, log_ratio: float) -> None:
    for advantage in (1.0, -1.0, 0.0):
        logprobs_T = torch.tensor([log_ratio, 0.0, log_ratio], requires_grad=True)
        terms = replace(terms_of(logprobs_T, [advantage] * 3, chosen=[True, False, False]))
        terms = replace(terms, advantages_T=terms.advantages_T.float())
        found = POLICY_LOSSES[name].loss(terms, DEFAULT)
        assert found.loss_T.isfinite().all()
        assert torch.autograd.grad(found.loss_T.sum(), logprobs_T)[0].isfinite().all()
        assert all(part.isfinite().all() for part in found.parts_T.values())


def test_log_ratios_are_held_within_twenty() -> None:
    assert log_ratio(terms_of(numbers([50.0, -50.0, 19.0]), [1, 1, 1])).tolist() == [20, -20, 19]


def test_a_value_within_the_range_does_not_count_as_held_by_a_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    old_T, returns_T = torch.rand(1000, generator=draw), torch.rand(1000, generator=draw)
    values_T = old_T + 0.4 * torch.rand(1000, generator=draw) - 0.2
    assert bool((old_T + (values_T - old_T) != values_T).any())  # numbers that would be rounded
    assert float(value_loss(values_T, old_T, returns_T, clip_range=0.5).parts_T["critic/vf_clipfrac"].sum()) == 0


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    values = numbers([2.0, 0.2, 1.0]).requires_grad_()
    found = value_loss(values, numbers([0.0, 0.0, 1.0]), numbers([2.0, 0.0, 3.0]), clip_range=0.5)
    assert found.loss_T.tolist() == pytest.approx([0.5 * 1.5**2, 0.5 * 0.2**2, 0.5 * 4])
    assert found.parts_T["critic/vf_clipfrac"].tolist() == [1, 0, 0]
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, numbers([0.0, 0.0, 1.0]), numbers([2.0, 0.0, 3.0]), 0.5).loss_T, values
    )


def test_all_losses_but_kl_cov_have_no_gradient_in_an_answer_without_an_advantage() -> None:
    """The first of two answers has advantage 0; one of its tokens is chosen, which kl_cov penalises."""
    declared = {name for name, entry in POLICY_LOSSES.items() if entry.scales_with_advantage}
    for name, entry in POLICY_LOSSES.items():
        terms = at_ratios([0.5, 1.5, 0.9, 1.05], [0, 0, 1, 1], samples=[0, 0, 1, 1], chosen=[True, False, False, False])
        (gradient_T,) = torch.autograd.grad(entry.loss(terms, DEFAULT).loss_T.sum(), terms.logprobs_T)
        assert bool(gradient_T[2:].any())
        assert bool(gradient_T[:2].any()) is (name not in declared)
    assert set(POLICY_LOSSES) - declared == {"kl_cov"}
