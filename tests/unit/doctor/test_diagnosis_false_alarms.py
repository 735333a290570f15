"""Histories that look like a fault and are none, beside the fault itself."""

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from rloom.doctor.run.answers import OVERRIDE
from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.finding import Finding, Severity
from rloom.doctor.run.history import ACTOR, ROLLOUT, History, Series, correlation_of_changes
from rloom.doctor.run.live import LiveDiagnosis
from rloom.language import to_chinese
from tests.unit.doctor.histories import GAE, SFT, Values, flat, history, kinds, of_the_step
from tests.unit.doctor.test_diagnosis import scores_of

SFT_KEYS = {"optim.lr": 1e-5, "optim.clip_grad": 1.0}
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
THRESHOLD = "trainer.rollout_mismatch_warning"


def long_history(values: Values, keys: Mapping[str, Any] | None = None, *, steps: int) -> History:
    return history({"actor/entropy": 0.4, **values}, keys, steps)


def only(found: History) -> Finding:
    [finding] = diagnose(found)
    return finding


def warned(live: LiveDiagnosis, found: History, first: int = 1) -> list[str]:
    """Kinds that the checks of a running run report, from the step `first` on."""
    later = [record for record in found.metrics if record["step"] >= first]
    return [finding.kind for record in later for finding in live.check(int(record["step"]), record)]


def noise(seed: int, size: float) -> Callable[[int], float]:
    """Normal, and the same for a step whenever it is asked."""
    return lambda step: Random(f"{seed}/{step}").gauss(0, size)


# A run that resumes


def learned(step: int) -> float:
    """Rises to 0.85 within 100 steps and stays there."""
    return 0.85 - 0.5 * math.exp(-step / 30) + 0.02 * (-1) ** step


def test_a_resumed_run_that_stays_at_its_level_has_learned() -> None:
    found = long_history({"critic/score/mean": learned}, GAE, steps=260)
    live = LiveDiagnosis(found.config)
    live.add_history(found.metrics[:200])
    assert warned(live, found, first=201) == []


def test_without_its_first_steps_a_run_is_not_certain_to_learn_nothing() -> None:
    found = long_history({"critic/score/mean": learned}, GAE, steps=260)
    later = History(found.metrics[200:], found.config)
    assert not only(later).certain and only(later).kind == "credit_decay"
    assert only(history({"critic/score/mean": flat}, GAE)).certain


def test_a_resumed_run_does_not_warn_of_what_ended_before_it() -> None:
    found = history({"actor/nonfinite_updates": lambda step: float(step in (11, 12, 13))}, steps=40)
    live = LiveDiagnosis(found.config)
    live.add_history(found.metrics[:20])
    assert warned(live, found, first=21) == []
    again = history({"actor/nonfinite_updates": lambda step: float(step in (11, 12, 13, 22))}, steps=40)
    live = LiveDiagnosis(again.config)
    live.add_history(again.metrics[:20])
    assert warned(live, again, first=21) == ["nonfinite"]


# Validations of a running run


def accuracy(step: int) -> float:
    """Rises by 0.1 in 400 steps. Between two validations chance is larger."""
    return 0.5 + 0.1 * step / 400 + (0.02 if step % 40 else -0.02)


def test_a_first_validation_that_is_the_highest_of_three_is_not_certain() -> None:
    found = history()
    for count, certain in ((3, False), (6, True)):
        measured = [{**r, "val-core/gsm8k/acc/mean@1": 0.6 - 0.01 * place} for place, r in enumerate(found.metrics)]
        records = [*measured[:count], *found.metrics[count:]]
        finding = only(History(records, found.config))
        assert finding.kind == "reward_hacked" and finding.certain is certain


@pytest.mark.parametrize("before_training", [True, False])
def test_the_first_validation_is_kept_however_long_a_run_is(before_training: bool) -> None:
    name = "val-core/gsm8k/acc/mean@1"
    rising = long_history({"critic/score/mean": lambda step: 0.3 + 0.001 * step + 0.01 * (-1) ** step}, steps=400)
    records = [
        {**record, name: accuracy(int(record["step"]))} if record["step"] % 20 == 0 else record
        for record in rising.metrics
    ]
    live = LiveDiagnosis(rising.config)
    if before_training:
        live.add_history([{"step": 0, name: accuracy(0)}])
    assert warned(live, History(records, rising.config)) == []


def test_a_running_run_compares_its_first_20_steps_with_its_last_20() -> None:
    """The length grows slowly: a mean of the first third that held recent steps would hide it."""
    values: Values = {
        "response_length/mean": lambda step: 200.0 + step + (-1) ** step,
        "critic/score/mean": flat,
        "reward/acc": flat,
    }
    found = long_history(values, steps=300)
    assert warned(LiveDiagnosis(found.config), found) == ["length_drift"]


# A critic at its beginning


def test_a_critic_whose_values_still_move_is_not_stuck() -> None:
    """Values of a healthy run of the embedded model: from 0 past the mean score of 0.4."""
    measured = [0.0, 0.047, 0.115, 0.216, 0.362, 0.529, 0.644, 0.728, 0.729, 0.682]

    def critic(values: Callable[[int], float], steps: int) -> list[str]:
        unknown: Values = {"critic/vf_loss": flat, "critic/vf_explained_var": 0.0, "critic/values/mean": values}
        return kinds(history({**unknown, "critic/score/mean": flat}, {**GAE, "algorithm.lam": 1.0}, steps))

    assert critic(lambda step: measured[step - 1], steps=10) == []
    assert critic(lambda step: measured[min(step, 10) - 1], steps=20) == ["critic_stuck"]
    assert critic(lambda step: 0.0, steps=10) == ["critic_stuck"]


def test_steps_in_which_only_the_critic_is_trained_do_not_count() -> None:
    keys = {**GAE, "trainer.critic_warmup": 20, "trainer.total_training_steps": 200}
    still: Values = {
        "response_length/mean": 300.0,
        "critic/score/mean": flat,
        "val-core/gsm8k/acc/mean@1": 0.3,
        "critic/vf_explained_var": 0.0,
        "critic/vf_loss": flat,
        "critic/values/mean": 0.3,
        "actor/reward_kl_penalty": lambda step: 0.0 if step <= 21 else 0.01,
        **{name: None for name in of_the_step(1) if name.startswith("actor/")},
    }
    for steps in (10, 20, 21, 28):
        assert kinds(history(still, keys, steps)) == []
    assert kinds(history(still, keys, 29)) == ["credit_decay"]

    def later(step: int) -> float:
        return flat(step) + 0.3 * min(1.0, max(0.0, (step - 20) / 20))

    rising: Values = {"critic/score/mean": later, "critic/values/mean": later, "val-core/gsm8k/acc/mean@1": None}
    found = history({**still, **rising}, keys, 200)
    assert kinds(found) == [] and warned(LiveDiagnosis(found.config), found) == []


def test_steps_without_progress_are_those_after_the_warm_up_of_the_critic() -> None:
    keys = {**GAE, "algorithm.lam": 1.0, "trainer.critic_warmup": 60, "trainer.total_training_steps": 200}
    still: Values = {"critic/score/mean": flat, "val-core/gsm8k/acc/mean@1": 0.3}
    assert kinds(history(still, keys, 99)) == [] and kinds(history(still, keys, 100)) == ["no_progress"]
    never = only(history(still, {**keys, "trainer.total_training_steps": 20}))
    assert never.kind == "no_progress" and never.certain and never.keys == ("trainer.critic_warmup",)
    epochs = history(still, {**keys, "trainer.total_training_steps": None})
    assert kinds(epochs) == []  # it may go on
    ended = only(History(epochs.metrics, epochs.config, [{"event": "end", "status": "finished"}]))
    assert ended.kind == "no_progress" and ended.changes[0].assignment == "trainer.critic_warmup=0"
    assert "trainer.critic_warmup is 60, and the run has 20 steps" in ended.evidence
    assert to_chinese(ended.causes[0]) == "只训练了 critic：它的预热与整个训练一样长"
    assert to_chinese(ended.evidence[-1]) == "trainer.critic_warmup 为 60，而训练共 20 步"


# Supervised fine-tuning


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_flat_loss_is_no_certain_rise(seed: int) -> None:
    chance = noise(seed, 0.05)
    found = long_history({**SFT, "train/loss": lambda step: 1.0 + chance(step)}, SFT_KEYS, steps=600)
    assert warned(LiveDiagnosis(found.config), found) == []


def test_a_loss_that_clearly_rises_is_certain() -> None:
    rising: Values = {**SFT, "train/loss": lambda step: 1.0 + 0.02 * step + 0.01 * (-1) ** step}
    finding = only(history(rising, SFT_KEYS))
    assert finding.certain and finding.changes[0].assignment == "optim.lr=2e-06"
    assert finding.causes[0].startswith("the learning rate is so high")
    slight: Values = {**SFT, "train/loss": lambda step: 1.0 + 0.001 * step}
    assert not only(history(slight, SFT_KEYS)).certain  # 1.3 %


def test_the_gradient_of_supervised_fine_tuning_has_its_own_key_and_causes() -> None:
    norm: Values = {**SFT, "train/loss": lambda s: 2 / s, "train/grad_norm": lambda step: 0.5 * 1.5**step}
    finding = only(history(norm, {**SFT_KEYS, "optim.clip_grad": 10.0}))
    assert finding.kind == "gradient_explosion"
    assert finding.evidence[0].startswith("train/grad_norm before clipping: median 2.11 at first")
    assert finding.evidence[0].endswith("clip_grad is 10")
    assert "reward" not in " ".join(cause for cause in finding.causes)
    assert kinds(history({**norm, "train/grad_norm": 300.0}, {**SFT_KEYS, "optim.clip_grad": 10.0})) == []  # 30 times


@pytest.mark.parametrize(("clip", "norm"), [(0.1, 12.0), (0.1, 60.0), (0.01, 30.0), (1.0, 90.0)])
def test_a_constant_norm_is_no_explosion_however_small_the_clip_is(clip: float, norm: float) -> None:
    values: Values = {**SFT, "train/loss": lambda s: 2 / s, "train/grad_norm": lambda s: norm * (1 + 0.1 * (-1) ** s)}
    keys = {**SFT_KEYS, "optim.clip_grad": clip}
    assert kinds(history(values, keys)) == []
    assert kinds(history({**values, "train/grad_norm": lambda s: 0.01 * norm * 1.5**s}, keys)) == ["gradient_explosion"]
    assert kinds(history({**values, "train/grad_norm": 3000.0}, keys)) == ["gradient_explosion"]


# Scores around 0


def test_scores_around_0_fall_by_their_own_scale() -> None:
    model: Values = {"critic/score/min": -3.0, "critic/score/max": 3.0, "critic/score/std": 1.0}

    def wave(size: float) -> History:
        wander = {"critic/score/mean": lambda step: size * math.sin(step / 25) + 0.02 * (-1) ** step}
        return long_history({**model, **wander}, steps=120)

    assert kinds(wave(0.2)) == [] and warned(LiveDiagnosis(wave(0.2).config), wave(0.2)) == []
    assert kinds(wave(1.0)) == ["reward_falls"]


def test_one_very_low_score_does_not_hide_a_fall() -> None:
    values: Values = {
        "critic/score/min": lambda step: -1000.0 if step == 3 else 0.0,
        "critic/score/mean": lambda step: 0.9 - 0.04 * max(0, step - 10),
    }
    assert kinds(history(values)) == ["reward_falls"]


@pytest.mark.parametrize("steps", [20, 40, 80])
def test_a_score_that_falls_on_harder_prompts_is_no_fault_while_the_validation_rises(steps: int) -> None:
    def harder(rise: float) -> History:
        chance = noise(1, 0.01)
        values: Values = {
            "critic/score/mean": lambda step: 0.8 - 0.6 * step / steps + chance(step),
            "val-core/math/acc/mean@1": lambda step: 0.3 + rise * step / steps if step % 5 == 0 else math.nan,
        }
        return long_history(values, steps=steps)

    assert kinds(harder(0.25)) == [] and warned(LiveDiagnosis(harder(0.25).config), harder(0.25)) == []
    assert not any(finding.certain for finding in diagnose(harder(0.0)))
    finding = only(harder(-0.2))
    assert finding.kind == "reward_falls" and finding.certain


@pytest.mark.parametrize(("rise", "found"), [(0.25, []), (-0.2, ["reward_collapse"])])
def test_a_score_near_0_on_much_harder_prompts_is_no_collapse(rise: float, found: list[str]) -> None:
    values: Values = {
        "critic/score/mean": lambda step: 0.8 if step < 10 else 0.05 + 0.01 * (-1) ** step,
        "val-core/math/acc/mean@1": lambda step: 0.3 + rise * step / 40 if step % 5 == 0 else math.nan,
    }
    assert kinds(long_history(values, steps=40)) == found


# Single steps


def test_one_step_with_a_mismatch_is_no_fault() -> None:
    assert kinds(history({"rollout_corr/k3_kl": lambda step: 0.05 if step == 20 else 1e-4})) == []
    assert kinds(history({"rollout_corr/k3_kl": lambda step: 0.05 if step > 16 else 1e-4})) == []
    assert only(history({"rollout_corr/k3_kl": lambda step: 0.05 if step > 15 else 1e-4})).kind == "rollout_mismatch"


def test_an_early_step_does_not_hide_a_mismatch_of_the_last_steps() -> None:
    found = long_history({"rollout_corr/k3_kl": lambda step: 0.05 if step == 2 or step > 190 else 1e-4}, steps=200)
    assert only(found).certain and only(found).kind == "rollout_mismatch"


def test_a_mismatch_has_no_threshold_where_the_key_is_null() -> None:
    assert kinds(history({"rollout_corr/k3_kl": 0.05}, {THRESHOLD: None})) == []
    assert kinds(history({"rollout_corr/k3_kl": 0.05}, {THRESHOLD: 0.1})) == []
    assert kinds(history({"rollout_corr/k3_kl": 0.05}, {THRESHOLD: 0.02})) == ["rollout_mismatch"]


def test_a_rare_skipped_update_is_a_warning_and_hides_nothing() -> None:
    skipped: Values = {"actor/nonfinite_updates": lambda step: float(step == 190)}
    finding = only(long_history(skipped, steps=200))
    assert finding.severity is Severity.WARNING and not finding.certain
    assert kinds(long_history({**skipped, "actor/grad_norm": 300.0}, steps=200)) == ["gradient_explosion", "nonfinite"]
    assert warned(LiveDiagnosis({}), long_history(skipped, steps=200)) == []


def test_one_skipped_update_of_a_short_run_is_not_certain() -> None:
    skipped: Values = {"actor/nonfinite_updates": lambda step: float(step == 8)}
    assert only(history(skipped)).severity is Severity.ERROR and warned(LiveDiagnosis({}), history(skipped)) == []
    twice: Values = {"actor/nonfinite_updates": lambda step: float(step in (8, 9))}
    assert warned(LiveDiagnosis({}), history(twice)) == ["nonfinite"]


def test_two_skipped_updates_close_to_each_other_are_an_error() -> None:
    skipped: Values = {"actor/nonfinite_updates": lambda step: float(step in (380, 390))}
    finding = only(long_history(skipped, steps=400))
    assert finding.severity is Severity.ERROR and finding.certain
    assert warned(LiveDiagnosis({}), long_history(skipped, steps=400)) == ["nonfinite"]


# Keys that the run has already


def assignments(values: Values, keys: Mapping[str, Any]) -> list[str]:
    return [change.assignment for change in only(history(values, keys)).changes]


def test_a_value_that_the_run_has_is_not_advised() -> None:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    hacked: Values = {"reward/acc": flat}
    assert f"{actor}.use_kl_loss=True" in assignments(hacked, {f"{actor}.use_kl_loss": False})
    assert f"{actor}.use_kl_loss=True" not in assignments(hacked, {f"{actor}.use_kl_loss": True})
    skipped: Values = {"actor/nonfinite_updates": 1.0}
    for clip, advised in ((5.0, True), (1.0, False), (0.5, False)):
        assert (f"{actor}.grad_clip=1.0" in assignments(skipped, {f"{actor}.grad_clip": clip})) is advised
    same: Values = {**{f"critic/score/{name}": 0.7 for name in ("mean", "max", "min")}, "actor/entropy": 1e-4}
    for temperature, advised in ((0.2, True), (1.0, False), (1.2, False)):
        assert (f"{rollout}.temperature=1.0" in assignments(same, {f"{rollout}.temperature": temperature})) is advised


@pytest.mark.parametrize(("name", "advised"), [("hf", True), ("native", False), ("vllm", False)])
def test_the_native_engine_is_advised_only_instead_of_one_that_it_was_compared_with(name: str, advised: bool) -> None:
    slow: Values = {"timing_s/gen": 9.5}
    assert ("actor_rollout_ref.rollout.name=native" in assignments(slow, {"actor_rollout_ref.rollout.name": name})) is (
        advised
    )


# Length without an accuracy


def test_a_reward_that_rises_with_longer_answers_is_no_fault_by_itself() -> None:
    longer: Values = {
        "response_length/mean": lambda step: 200.0 + 20 * step + 5 * (step % 3),
        "critic/score/mean": lambda step: 0.3 + 0.025 * step + 0.01 * (-1) ** step,
    }
    assert kinds(history(longer)) == []
    finding = only(history({**longer, "critic/score/mean": flat}))
    assert finding.kind == "length_drift" and "no accuracy is measured" in finding.evidence[1]


def test_longer_reasoning_with_a_slow_rise_is_not_certain_to_be_a_fault() -> None:
    def longer(rise: float, validations: int = 0) -> History:
        values: Values = {
            "response_length/mean": lambda step: 300.0 + 500 * min(1.0, max(0.0, step / 20 - 0.5)) + 5 * (step % 3),
            "critic/score/mean": lambda step: 0.4 + rise * step / 40 + 0.05 * (-1) ** (step // 2),
            "val-core/math/acc/mean@1": lambda step: 0.4 if step <= validations else math.nan,
        }
        return history(values, steps=40)

    for found in (longer(0.03), longer(-0.03, 1), longer(-0.03, 2)):
        assert only(found).kind == "length_drift" and not only(found).certain
    assert only(longer(-0.03)).certain and diagnose(longer(-0.03, 3))[0].certain  # and no_progress
    assert only(longer(-0.03, 2)).evidence[1] == "fewer than 3 validations, and the reward does not rise"
    assert to_chinese(only(longer(-0.03, 2)).evidence[1]) == "验证少于 3 次，奖励也没有上升"


def test_a_reward_that_changes_with_the_length_in_each_step_pays_for_it() -> None:
    def length(step: int) -> float:
        return 400.0 - 15 * step + 12 * (step % 3)

    paid: Values = {"response_length/mean": length, "critic/score/mean": lambda step: -length(step) / 500}
    finding = only(history(paid))
    assert finding.kind == "length_drift" and finding.evidence[1].endswith("(correlation -1.00)")


def test_a_correlation_of_changes_leaves_trends_out() -> None:
    steps = tuple(range(6))
    one = Series(steps, (0.0, 2.0, 1.0, 3.0, 2.0, 4.0))
    assert correlation_of_changes(one, Series(steps, (9.0, 7.0, 8.0, 6.0, 7.0, 5.0))) == pytest.approx(-1)
    assert correlation_of_changes(one, Series(steps, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0))) == 0  # only a trend
    assert correlation_of_changes(one, Series((7, 8), (0.0, 1.0))) == 0  # no common step


def test_a_gap_between_the_first_and_the_last_steps_is_no_change_from_step_to_step() -> None:
    series = Series((1, 2, 3, 101, 102, 103), (0.0, 1.0, 0.0, 50.0, 51.0, 50.0))
    assert series.changes == {2: 1.0, 3: -1.0, 102: 1.0, 103: -1.0}
    assert series.scatter == pytest.approx(0.5**0.5)
    assert Series((20, 40, 60), (0.0, 1.0, 0.0)).changes == {40: 1.0, 60: -1.0}  # validations


# What a run does not tell


def without_keys(values: Values) -> History:
    return History(history(values).metrics, {})


def test_without_a_config_a_share_of_the_answers_is_not_known() -> None:
    assert kinds(without_keys({"reward/failed": 1.0})) == []
    assert kinds(without_keys({"critic/score/mean": lambda step: 0.4 if step < 5 else 0.01})) == ["reward_falls"]
    zero = only(without_keys({f"critic/score/{name}": 0.0 for name in ("mean", "max", "min", "std")}))
    assert zero.evidence[0] == "critic/score/max is 0 in all 20 steps"
    ended = History(history({"reward/failed": 1.0}).metrics, {}, [{"event": "end", "status": "RewardError"}])
    assert only(ended).evidence[0] == "reward/failed: 20 rewards, in 20 of 20 steps"


def test_the_clip_fraction_of_gspo_has_no_limit_but_its_ratio_has() -> None:
    clipped: Values = {"actor/pg_clipfrac": 0.45}
    assert kinds(history(clipped, {LOSS_MODE: "gspo"})) == [] and kinds(history(clipped)) == ["clip_high"]
    assert kinds(history({**clipped, "actor/ppo_ratio": 1.5}, {LOSS_MODE: "gspo"})) == ["clip_high"]


@pytest.mark.parametrize(
    ("score", "more", "found"),
    [
        (0.3, {}, ["reward_constant"]),
        (1.0, {}, []),  # of a rule or a judge: every answer is right
        (2.0, {}, ["reward_constant"]),
        (2.0, {"reward/acc": 1.0}, []),
        (2.0, {"reward/acc": 0.4}, ["reward_constant"]),
        (2.0, {"val-core/math/acc/mean@1": 0.97}, []),
    ],
)
def test_a_reward_that_is_always_at_its_top_is_no_fault_of_the_reward(
    score: float, more: Values, found: list[str]
) -> None:
    assert kinds(history({**scores_of(score), **more}, steps=6)) == found


def test_a_kl_that_is_only_measured_has_no_coefficient_to_raise() -> None:
    measured = {"actor/kl_loss": None, "actor/kl_divergence": lambda step: 0.02 * step}
    [found] = diagnose(history(measured, {"algorithm.kl_metric": True}))
    keys = [change.key for change in found.changes]
    assert found.kind == "kl_high" and f"{ACTOR}.use_kl_loss" in keys and "algorithm.kl_ctrl.kl_coef" not in keys


# GRPO of Qwen2.5-Coder-1.5B-Instruct on GSM8K, 128 x 8 answers, on an H200: it learns the format of the answer first
REAL_RUN = {
    "critic/score/mean": [
        *(0.004, 0.003, 0.004, 0.006, 0.020, 0.044, 0.152, 0.294, 0.418, 0.475, 0.519, 0.461, 0.545, 0.563, 0.567),
    ],
    "actor/entropy": [
        *(0.236, 0.227, 0.233, 0.231, 0.233, 0.252, 0.293, 0.302, 0.312, 0.332, 0.336, 0.341, 0.338, 0.317, 0.298),
    ],
    "response_length/mean": [305, 301, 309, 298, 288, 284, 260, 252, 216, 200, 179, 193, 182, 185, 184],
    "actor/ppo_kl": [
        *(-2.2e-5, 2.1e-5, 3.6e-5, 2.1e-5, 1.5e-5, 1.2e-4, 2.2e-4, 1.8e-4, 1.2e-4, 1.2e-4, 2.0e-4, 5.7e-5, 3.5e-5),
        *(2.2e-5, 5.2e-5),
    ],
    "actor/pg_clipfrac": [
        0,
        0,
        3.2e-6,
        0,
        2.4e-5,
        2e-4,
        6.4e-4,
        5.5e-4,
        6.3e-4,
        7.1e-4,
        4e-4,
        1e-4,
        9.4e-5,
        6.4e-5,
        3.7e-5,
    ],
}
VALIDATIONS = {5: 0.0, 10: 0.613, 15: 0.656}


@pytest.mark.parametrize("last", range(1, 16))
def test_a_model_that_learns_the_format_of_the_answer_first_gets_no_certain_finding(last: int) -> None:
    metrics = [
        {"step": float(step), **{name: float(values[step - 1]) for name, values in REAL_RUN.items()}}
        for step in range(1, last + 1)
    ]
    for step, accuracy in VALIDATIONS.items():
        if step <= last:
            metrics[step - 1]["val-core/openai/gsm8k/acc/mean@1"] = accuracy
    config = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.optim.lr": 1e-6}
    found = diagnose(History(metrics, config))
    assert not [finding.kind for finding in found if finding.certain]
    assert last < 8 or not found


def late_format(step: int) -> float:
    """0.3 to 0.5 % of the answers for 11 steps, then it learns the format."""
    return 0.004 + 0.001 * (-1) ** step if step < 12 else min(0.6, 0.01 * 2.5 ** (step - 12))


def test_a_low_score_of_a_few_steps_is_certain_only_with_the_evidence_of_a_cause() -> None:
    found = history({"critic/score/mean": late_format, "val-core/gsm8k/acc/mean@1": None}, steps=40)
    assert kinds(found) == [] and warned(LiveDiagnosis(found.config), found) == []
    early = History(found.metrics[:10], found.config)
    assert only(early).kind == "low_score" and not only(early).certain
    validated = [{**record, "val-core/gsm8k/acc/mean@1": 0.4} for record in early.metrics]
    assert only(History(validated, found.config)).certain
    assert only(History(early.metrics, {**found.config, f"{OVERRIDE}.rope_theta": 10.0})).certain
    assert only(history({"critic/score/mean": 0.004})).certain  # 20 steps


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_no_entropy_at_the_top_of_the_scores_is_no_fault(low: float) -> None:
    high: Values = {"critic/score/mean": lambda step: 0.99 + 0.01 * (step % 2), "critic/score/min": low}
    found = history({**high, "actor/entropy": 5e-4})
    assert kinds(found) == [] and warned(LiveDiagnosis(found.config), found) == []
    for temperature, cold in ((1.0, False), (0.4, True)):
        keys = {f"{ROLLOUT}.temperature": temperature}
        finding = next(f for f in diagnose(history({"actor/entropy": 5e-4}, keys)) if f.kind == "entropy_collapse")
        assert any("temperature near 0" in cause for cause in finding.causes) is cold
