"""Which log-probs are the denominator of the ratio, by the staleness of a run: every case by hand."""

import pytest

from rloom.algos.needs import LOSSES
from rloom.algos.off_policy import (
    Denominator,
    RatioChoice,
    RatioSettings,
    choose,
    ratio_faults,
    ratio_notices,
)
from rloom.algos.rejection import RatioBounds
from rloom.config.checks import all_faults
from rloom.config.correction_checks import off_policy_faults, off_policy_notices
from rloom.config.derived import declared_needs
from rloom.launch.build import advantage_settings, correction, old_logprobs
from rloom.training.loop import OldLogprobs
from tests.helpers import configured

UPDATE, TRAINER, ROLLOUT = Denominator.UPDATE, Denominator.TRAINER, Denominator.ROLLOUT
KEY = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("settings", "age", "denominator", "weights"),
    [
        # as without versions
        (RatioSettings(), 0, UPDATE, None),
        (RatioSettings(updates=2), 0, TRAINER, None),
        (RatioSettings(needs_old_logprobs=True), 0, TRAINER, None),
        (RatioSettings(rollout_is="sequence"), 0, TRAINER, "sequence"),
        (RatioSettings(weights_refused=True, updates=2), 0, TRAINER, None),
        # decoupled: weights lead from the behaviour policy to the anchor; in a single update that is the policy itself
        (RatioSettings(), 1, UPDATE, "token"),
        (RatioSettings(needs_old_logprobs=True), 1, TRAINER, "token"),
        (RatioSettings(updates=2), 4, TRAINER, "token"),
        (RatioSettings(rollout_is="sequence"), 4, TRAINER, "sequence"),  # one version an answer
        # bypass: the ratio itself is to the behaviour policy
        (RatioSettings(bypass_mode=True), 0, ROLLOUT, None),
        (RatioSettings(bypass_mode=True, updates=2), 4, ROLLOUT, None),
    ],
)
def test_the_denominator(settings: RatioSettings, age: int, denominator: Denominator, weights: str | None) -> None:
    assert not [*ratio_faults(settings, age, mixed=False)]
    assert choose(settings, age) == RatioChoice(denominator, weights, 2.0)


def test_icepop_is_a_weight_like_another() -> None:
    assert choose(RatioSettings(rollout_is_threshold="0.5_5.0"), 3) == RatioChoice(UPDATE, "token", "0.5_5.0")


def test_recomputed_log_probs_without_weights_are_refused_above_staleness_0() -> None:
    settings = RatioSettings(weights_refused=True)
    assert not [*ratio_faults(settings, 0, mixed=False)]
    [fault] = ratio_faults(settings, 2, mixed=False)
    assert fault.startswith(f"{KEY}.rollout_is=null with answers that are up to 2 versions old")
    assert f"Use {KEY}.rollout_is=token, or {KEY}.bypass_mode=True" in fault
    assert not [*ratio_faults(RatioSettings(weights_refused=True, bypass_mode=True), 2, mixed=False)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (RatioSettings(rollout_is="sequence"), ["rollout_is=sequence"]),
        (RatioSettings(rollout_rs="sequence"), ["rollout_rs=sequence"]),
        (RatioSettings(rollout_rs="token_k1,seq_sum_k3"), ["rollout_rs=seq_sum_k3"]),
        (
            RatioSettings(rollout_is="sequence", rollout_rs="seq_sum_k1"),
            ["rollout_is=sequence", "rollout_rs=seq_sum_k1"],
        ),
        (RatioSettings(rollout_is="token", rollout_rs="geometric"), []),
        (RatioSettings(rollout_rs="token_k2,seq_mean_k1,seq_max_k3"), []),
        (RatioSettings(rollout_rs="token"), []),
    ],
)
def test_products_over_an_answer_of_several_versions_are_refused(settings: RatioSettings, named: list[str]) -> None:
    assert not [*ratio_faults(settings, 3, mixed=False)]
    faults = [*ratio_faults(settings, 3, mixed=True)]
    assert [fault.split(" ")[0] for fault in faults] == [f"{KEY}.{setting}" for setting in named]


def test_a_mean_ratio_of_an_answer_is_said_where_its_denominator_is_mixed() -> None:
    assert [name for name, loss in LOSSES.items() if loss.ratio_of_answers] == ["gspo", "geo_mean"]
    bypassed = RatioSettings(bypass_mode=True, loss_mode="gspo", ratio_of_answers=True)
    [notice] = ratio_notices(bypassed, mixed=True)
    assert "policy_loss.loss_mode=gspo" in notice and f"{KEY}.bypass_mode=False" in notice
    assert not [*ratio_notices(bypassed, mixed=False)]
    assert not [*ratio_notices(RatioSettings(loss_mode="gspo", ratio_of_answers=True), mixed=True)]


def faults(*keys: str, staleness: int) -> list[str]:
    config = configured(*keys)
    return off_policy_faults(config, declared_needs(config), staleness)


def test_the_keys_of_a_run_are_checked_for_its_staleness() -> None:
    assert faults(staleness=4) == []
    assert len(faults(f"{KEY}.rollout_is=null", staleness=1)) == 1
    assert faults(f"{KEY}.rollout_is=null", staleness=0) == []
    assert faults(f"{KEY}.rollout_is=null", f"{KEY}.bypass_mode=True", staleness=1) == []
    assert len(faults(f"{KEY}.rollout_is=sequence", staleness=1)) == 1
    assert faults(f"{KEY}.rollout_is=sequence", staleness=0) == []
    gspo = configured("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", f"{KEY}.bypass_mode=True")
    assert len(off_policy_notices(gspo, declared_needs(gspo), 1)) == 1
    assert off_policy_notices(gspo, declared_needs(gspo), 0) == []


def test_a_run_that_generates_ahead_is_checked_for_its_staleness() -> None:
    ahead = "trainer.v1.trainer_mode=colocate_async"
    for keys, fault in {
        (): None,
        (f"{KEY}.rollout_is=null",): "up to 8 versions old",
        (f"{KEY}.rollout_is=null", "trainer.v1.sampler.max_off_policy_threshold=0"): None,
        (f"{KEY}.rollout_is=null", "trainer.v1.colocate_async.num_warmup_batches=0"): None,
        (f"{KEY}.rollout_is=sequence",): "product of their ratios",
    }.items():
        config = configured(ahead, *keys)
        found = [one for one in all_faults(config, declared_needs(config)) if KEY in one]
        assert len(found) == (fault is not None) and (fault is None or fault in found[0])


@pytest.mark.parametrize(
    ("keys", "source", "weights"),
    [
        ((), OldLogprobs.TRAINER, "token"),  # a pass over the batch, whose ratios to the engine's are the weights
        (("trainer.v1.sampler.max_off_policy_threshold=0",), OldLogprobs.TRAINER, None),
        ((f"{KEY}.bypass_mode=True",), OldLogprobs.ROLLOUT, None),
    ],
)
def test_what_a_run_that_generates_ahead_computes(
    keys: tuple[str, ...], source: OldLogprobs, weights: str | None
) -> None:
    two_updates = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    config = configured("trainer.v1.trainer_mode=colocate_async", *two_updates, *keys)
    found = correction(config)
    assert old_logprobs(config) is source and (found and found.rollout_is) == weights


def test_the_lower_bound_of_the_weights_and_the_divisor_of_the_advantages_are_the_keys() -> None:
    bounds = ("rollout_is=token", "rollout_is_threshold=5", "rollout_is_threshold_lower=0.5")
    config = configured(
        *(f"algorithm.rollout_correction.{bound}" for bound in bounds),
        *("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=batch"),
    )
    found = correction(config)
    assert found is not None and found.weight_bounds == RatioBounds(0.5, 5.0, clamps=True)
    assert advantage_settings(config).norm_by_std == "batch"
