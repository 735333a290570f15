"""The checks of a run, on histories made by hand: a healthy one, and the same with one fault each."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloom import cli
from rloom.config.keys import all_keys
from rloom.config.load import load_config
from rloom.doctor.run.checks import CHECKS, EXPLAINS, diagnose
from rloom.doctor.run.finding import Finding, Severity
from rloom.doctor.run.history import History, Series
from rloom.doctor.run.live import FIRST_STEPS, LAST_STEPS, LiveDiagnosis, live_message
from rloom.doctor.run.samples import Samples
from rloom.language import to_chinese
from rloom.runs.records import EVENTS_FILE, EventLog
from tests.architecture.source import ROOT
from tests.unit.doctor.histories import (
    EPISODES,
    FAULTY,
    GAE,
    KEYS,
    SFT,
    STEPS,
    TURN_KEYS,
    Values,
    answers,
    flat,
    history,
    kinds,
    with_answers,
)

# Each fault


@pytest.mark.parametrize("keys", [{}, GAE, {"algorithm.adv_estimator": "rloo"}], ids=["grpo", "gae", "rloo"])
@pytest.mark.parametrize("steps", [1, 5, 12, 20, 200])
def test_nothing_is_wrong_with_a_healthy_run(keys: Mapping[str, Any], steps: int) -> None:
    assert kinds(history(keys=keys, steps=steps)) == []


@pytest.mark.parametrize("steps", [1, 5, 12, 20, 200])
def test_nothing_is_wrong_with_a_healthy_run_of_several_turns(steps: int) -> None:
    assert kinds(history(EPISODES, TURN_KEYS, steps)) == []


def test_a_limit_that_fewer_and_fewer_episodes_reach_is_no_fault() -> None:
    falling = {**EPISODES, "episode/ended/turn_limit": lambda step: 0.9 - 0.02 * step}
    assert kinds(history(falling, TURN_KEYS)) == []


def test_the_limit_that_is_reached_is_the_one_to_raise() -> None:
    [finding] = diagnose(history({**EPISODES, "episode/ended/token_limit": 0.7}, TURN_KEYS))
    assert [change.assignment for change in finding.changes] == ["data.max_response_length=1024"]
    [finding] = diagnose(FAULTY["episodes_at_limit"]())
    assert [change.value for change in finding.changes] == [8]


def test_steps_that_take_too_long_are_told_from_errors() -> None:
    [finding] = diagnose(FAULTY["environment_failures"]())
    assert finding.changes == () and "raises an error" in finding.causes[0]
    hangs = {**EPISODES, "episode/failed": 0.1, "episode/ended/environment_timeout": 0.08}
    [finding] = diagnose(history(hangs, TURN_KEYS))
    assert [change.value for change in finding.changes] == [10] and "tool_timeout_s" in finding.causes[0]


def test_agents_that_ask_nothing_are_told_from_errors() -> None:
    unasked = {**EPISODES, "episode/failed": 0.1, "agent/without_answer": 0.08}
    [finding] = diagnose(history(unasked, TURN_KEYS))
    assert finding.kind == "environment_failures" and finding.causes[0].startswith(
        "the agent returns without an answer"
    )
    assert any("base_url (OPENAI_BASE_URL" in str(one) for one in finding.advice)


def test_an_environment_that_knows_more_than_the_prompt_makes_no_noise() -> None:
    same = answers(lambda number, right: float(number % 3), text=lambda n: "#### 1", prompts=1, calls=lambda number: 0)
    assert kinds(with_answers(same, EPISODES)) == []


def test_calls_that_find_right_answers_are_no_fault() -> None:
    helping = answers(lambda number, right: right, calls=lambda number: number % 2)
    assert kinds(with_answers(helping, EPISODES)) == []


def test_there_is_a_faulty_history_for_every_check() -> None:
    assert FAULTY.keys() == CHECKS.keys()


@pytest.mark.parametrize("kind", FAULTY)
def test_the_fault_is_named_first(kind: str) -> None:
    assert kinds(FAULTY[kind]())[:1] == [kind]


@pytest.mark.parametrize("kind", FAULTY)
def test_a_finding_has_numbers_steps_and_both_languages(kind: str) -> None:
    finding = diagnose(FAULTY[kind]())[0]
    first, last = finding.steps
    assert 1 <= first <= last <= (50 if kind == "no_progress" else STEPS + 1)
    assert finding.causes or kind == "unusual_keys"
    advice = [one if isinstance(one, str) else one.why for one in finding.advice]
    for text in (finding.title, *finding.evidence, *finding.causes, *advice):
        assert text.isascii() or not re.search("[一-鿿]", text)
        assert re.search("[一-鿿]", to_chinese(text)) or text == to_chinese(text)
    assert any(re.search(r"\d", text) for text in finding.evidence)
    assert json.loads(json.dumps(finding.as_json()))["kind"] == kind


@pytest.mark.parametrize("kind", FAULTY)
def test_the_keys_to_change_exist_and_their_values_are_valid(kind: str) -> None:
    for finding in diagnose(FAULTY[kind]()):
        assert {change.key for change in finding.changes} <= all_keys().keys()
        for change in finding.changes:
            load_config(["algorithm.adv_estimator=grpo", "data.max_response_length=256", change.assignment])


# Certain cases


def test_a_kl_near_zero_is_no_fault_while_the_reward_rises() -> None:
    still = {"actor/ppo_kl": 1e-9, "actor/pg_clipfrac": 0.0, "actor/kl_loss": 1e-8}
    assert kinds(history(still)) == []


def test_ratio_and_clip_fraction_say_nothing_with_one_update_a_step() -> None:
    one = {"actor/ppo_kl": 0.0, "actor/ppo_ratio": 1.0, "actor/pg_clipfrac": 0.0, "critic/score/mean": flat}
    assert kinds(history(one, {"actor_rollout_ref.actor.ppo_mini_batch_size": 64})) == []
    assert kinds(history(one)) == ["policy_static"]


def test_equal_groups_of_a_learned_task_are_no_fault() -> None:
    assert kinds(history({"rollout/equal_groups": lambda step: min(1.0, 0.2 + 0.05 * step)})) == []


def test_low_entropy_of_a_solved_task_is_no_fault() -> None:
    solved = {"actor/entropy": lambda step: 0.5 / step**2, "critic/score/mean": lambda step: 0.96 + 0.001 * (step % 2)}
    assert kinds(history(solved)) == []


def test_longer_answers_are_no_fault_while_the_accuracy_rises() -> None:
    longer: Values = {"response_length/mean": lambda step: 200.0 + 20 * step}
    better: Values = {**longer, "reward/acc": lambda step: 0.3 + 0.015 * step + 0.01 * (-1) ** step}
    no_better: Values = {**longer, "reward/acc": flat, "critic/score/mean": flat}
    assert kinds(history(no_better)) == ["length_drift"] and kinds(history(better)) == []


def test_lam_matters_only_for_long_answers_of_gae() -> None:
    assert kinds(history({"critic/score/mean": flat}, GAE)) == ["credit_decay"]
    assert kinds(history({"critic/score/mean": flat, "response_length/mean": 20.0}, GAE)) == []
    assert kinds(history({"critic/score/mean": flat}, {**GAE, "algorithm.lam": 1.0})) == []
    assert kinds(history({"critic/score/mean": flat})) == []  # grpo


def test_a_peak_of_memory_that_rises_now_and_then_is_no_leak() -> None:
    assert kinds(history({"perf/max_memory_allocated_gb": lambda step: 40.0 + 5 * (step // 7)})) == []


def test_a_fall_of_the_validation_accuracy_is_found() -> None:
    accuracy: Values = {
        "critic/score/mean": flat,
        "val-core/gsm8k/acc/mean@1": lambda step: 0.6 if step < 10 else 0.3,
    }
    [finding] = diagnose(history(accuracy))[-1:]
    assert finding.kind == "reward_falls" and "validation accuracy: 0.6 at step 1, 0.3 at step 20" in (
        text for text in finding.evidence
    )


def test_an_accuracy_in_validation_shows_a_reward_that_is_not_the_goal() -> None:
    assert kinds(history({"val-core/gsm8k/acc/mean@1": lambda step: 0.6 - 0.001 * step})) == ["reward_hacked"]


def test_two_validations_that_differ_by_chance_show_nothing() -> None:
    once: Values = {"val-core/gsm8k/acc/mean@1": None}
    found = history(once)
    records = [dict(record) for record in found.metrics]
    records[0]["val-core/gsm8k/acc/mean@1"], records[-1]["val-core/gsm8k/acc/mean@1"] = 0.6, 0.595
    assert kinds(History(records, found.config)) == []
    records[-1]["val-core/gsm8k/acc/mean@1"] = 0.5
    assert kinds(History(records, found.config)) == ["reward_hacked"]


def test_a_run_of_supervised_fine_tuning_is_told_its_own_keys() -> None:
    values: Values = {**SFT, "train/nonfinite_updates": lambda step: float(step == 7), "train/loss": lambda s: 2 / s}
    [finding] = diagnose(history(values, {"optim.lr": 1e-5}))
    assert [change.assignment for change in finding.changes] == ["optim.lr=5e-06"]


def test_failures_of_a_judge_have_its_causes_first() -> None:
    found = diagnose(history({"reward/failed": 30.0}, {"reward_model.api.enable": True}))
    assert found[0].causes[0].startswith("the judge or server refuses requests")
    assert found[0].changes[0].key == "reward_model.api.concurrency"


def test_a_stage_of_a_short_step_is_no_finding() -> None:
    short: Values = {"timing_s/step": 0.05, "timing_s/gen": 0.01, "timing_s/update_actor": 0.0, "timing_s/reward": 0.04}
    assert kinds(history(short)) == []


# Consequences


def test_a_reward_of_0_explains_what_follows_from_it() -> None:
    values: Values = {f"critic/score/{name}": 0.0 for name in ("mean", "max", "min", "std")}
    found = history(
        {**values, "rollout/equal_groups": 1.0, "critic/vf_explained_var": 0.0, "critic/vf_loss": flat}, GAE
    )
    assert kinds(found) == ["reward_zero"]


def scores_of(value: float) -> dict[str, float]:
    return {"critic/score/mean": value, "critic/score/max": value, "critic/score/min": value, "critic/score/std": 0.0}


def test_answers_that_are_all_cut_off_explain_a_reward_of_0() -> None:
    values: Values = {**scores_of(0.0), "response_length/clip_ratio": 1.0, "rollout/equal_groups": 1.0}
    [finding] = diagnose(history(values))
    assert finding.kind == "answers_cut" and finding.severity is Severity.ERROR
    assert finding.changes[0].assignment == "data.max_response_length=2048"


@pytest.mark.parametrize(
    ("limit", "share", "advised"), [(8, 1.0, 64), (16, 0.98, 128), (512, 0.3, 1664), (4096, 0.6, 8192)]
)
def test_the_advised_length_is_by_the_share_that_is_cut(limit: int, share: float, advised: int) -> None:
    [finding] = diagnose(history({"response_length/clip_ratio": share}, {"data.max_response_length": limit}))
    assert finding.kind == "answers_cut" and finding.changes[0].value == advised


@pytest.mark.parametrize(
    ("prompt", "share", "changes"),
    [
        (212.0, 1.0, ["data.max_length=1412", "data.max_response_length=1200"]),  # 300 tokens are left; four times that
        (412.0, 0.3, ["data.max_length=740"]),  # of 100 to 328, fewer than the 512 that an answer may have
        (0.0, 1.0, ["data.max_response_length=2048"]),
    ],
)
def test_the_advised_limit_is_the_one_that_cuts(prompt: float, share: float, changes: list[str]) -> None:
    values: Values = {"response_length/clip_ratio": share, "prompt_length/mean": prompt}
    [finding] = diagnose(history(values, {"data.max_response_length": 512, "data.max_length": 512}))
    assert [change.assignment for change in finding.changes if "length" in change.key] == changes


def test_answers_that_repeat_themselves_explain_a_reward_of_0() -> None:
    looping: Values = {"rollout/repetition": 0.8, "response_length/clip_ratio": 1.0}
    [finding] = diagnose(history({**scores_of(0.0), **looping}, steps=6))
    assert finding.kind == "repetition" and finding.severity is Severity.ERROR
    assert finding.causes[0].startswith("the model is damaged")
    [finding] = diagnose(history(scores_of(0.0), steps=6))
    assert finding.title == "Every reward is 0: nothing to learn from"
    assert finding.evidence[0] == "critic/score/max is 0 in all 6 steps: none of about 3,072 answers scored"
    assert to_chinese(finding.evidence[0]) == "全部 6 步的 critic/score/max 都为 0：约 3,072 个回答无一得分"


# Keys


def test_an_unusual_value_is_the_first_cause_and_its_usual_value_the_first_advice() -> None:
    keys = {"actor_rollout_ref.model.path": "embedded", "actor_rollout_ref.actor.optim.lr": 0.02}
    values: Values = {
        "critic/score/mean": lambda step: 0.42 if step == 1 else 0.0,
        "actor/ppo_kl": lambda step: 3.93 if step == 1 else 1e-4,
    }
    [finding] = diagnose(history(values, keys))
    assert finding.kind == "reward_collapse" and finding.begin_again
    assert finding.causes == (
        "actor_rollout_ref.actor.optim.lr=0.02 is 100 times the usual 0.0002 for a model of this size: the policy is "
        "damaged within a few updates",
    )
    assert finding.evidence[0].startswith("critic/score/mean: 0.42 in step 1, 0 in step 2, ")
    assert finding.evidence[1].startswith("actor/ppo_kl is 3.93 in step 1 ")
    assert finding.changes[0].assignment == "actor_rollout_ref.actor.optim.lr=0.0002" and finding.steps[0] == 2


def test_a_healthy_norm_is_no_explosion_however_small_grad_clip_is() -> None:
    [finding] = diagnose(history(keys={"actor_rollout_ref.actor.grad_clip": 1e-6}))
    assert finding.kind == "unusual_keys" and finding.severity is Severity.NOTE  # the run learns
    assert finding.changes[0].assignment == "actor_rollout_ref.actor.grad_clip=1.0"
    [finding] = diagnose(history({"critic/score/mean": flat}, {"actor_rollout_ref.actor.grad_clip": 1e-6}))
    assert finding.kind == "no_progress" and "grad_clip=1e-06" in finding.causes[0]


def test_filtering_groups_is_not_advised_if_almost_all_are_equal() -> None:
    for share, advised in ((0.92, True), (0.98, False)):
        [finding] = diagnose(history({"rollout/equal_groups": share, "critic/score/mean": flat}))
        keys = [change.key for change in finding.changes]
        assert finding.kind == "equal_groups" and ("algorithm.filter_groups.enable" in keys) is advised


def test_a_cause_that_the_scores_exclude_is_not_printed() -> None:
    [finding] = diagnose(FAULTY["gradient_explosion"]())
    assert not any(cause.startswith("rewards are far outside") for cause in finding.causes)
    large: Values = {"actor/grad_norm": 3000.0, "critic/score/max": 5000.0}
    finding = diagnose(history(large))[0]
    assert finding.causes[0].startswith("rewards are far outside") and "scores reach 5e+03" in finding.evidence
    assert finding.changes[0].assignment == "reward_model.normalize=True"


# Answers


def test_the_causes_of_a_reward_of_0_follow_the_evidence() -> None:
    zero = scores_of(0.0)
    own = diagnose(with_answers(answers(lambda number, right: 0.0), zero))[0]
    assert own.causes[0].startswith("the reward function finds no answer")
    assert "the built-in rule of the data source finds 50% of the same answers right" in own.evidence
    validated: Values = {**zero, "val-core/gsm8k/acc/mean@1": 0.4}
    rows = diagnose(history(validated))[0]
    assert (
        rows.kind == "reward_zero"
        and rows.causes[0].startswith("`ground_truth` or the prompts")
        and len(rows.causes) == 1
    )
    template = diagnose(history({**zero, "val-core/gsm8k/acc/mean@1": 0.0}))[0]
    assert template.causes[0].startswith("the chat template or the answer format")
    assert "rloom chat Qwen/Qwen2.5-1.5B-Instruct" in str(template.advice[0])


def test_a_right_answer_that_scores_lower_is_a_sign_error() -> None:
    [finding] = diagnose(with_answers(answers(lambda number, right: -right)))
    assert finding.kind == "reward_sign" and "correlation of -1.00" in finding.evidence[0]
    assert kinds(with_answers(answers(lambda number, right: right))) == []


def test_a_judge_with_a_little_noise_is_no_fault() -> None:
    def same(noise: float) -> Samples:
        return answers(lambda number, right: right + noise * (number % 3), text=lambda n: f"#### {n % 1000}")

    assert kinds(with_answers(same(0.1))) == []
    assert kinds(with_answers(same(2.0))) == ["reward_noise"]


def test_what_a_finding_explains_are_kinds_that_exist() -> None:
    assert EXPLAINS.keys() <= CHECKS.keys() and set().union(*EXPLAINS.values()) <= CHECKS.keys()


# Series


def test_a_trend_compares_thirds_in_units_of_the_scatter() -> None:
    trend = Series(tuple(range(1, 10)), (0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0)).trend
    assert trend is not None and trend.first == pytest.approx(2 / 3) and trend.last == pytest.approx(2 / 3)
    # neighbours differ by 2: a single value has a standard deviation of sqrt(4 / 2), a mean of three sqrt(2 / 3)
    assert trend.error == pytest.approx((2 / 3 + 2 / 3) ** 0.5)
    assert not trend.rises and not trend.falls
    assert Series(tuple(range(1, 9)), (1.0,) * 8).trend is None


def test_values_that_are_not_finite_are_left_out() -> None:
    found = History([{"step": 1, "actor/entropy": float("nan")}, {"step": 2, "actor/entropy": 0.5}], {})
    assert found.series("actor/entropy") == Series((2,), (0.5,))


# A running run


def reports(found: History) -> list[tuple[int, Finding]]:
    live = LiveDiagnosis(found.config)
    return [(int(r["step"]), finding) for r in found.metrics for finding in live.check(int(r["step"]), r)]


def test_a_running_run_reports_each_kind_once() -> None:
    [(step, finding)] = reports(history({"actor/pg_clipfrac": 0.45}, steps=40))
    assert step == 10 and finding.kind == "clip_high"
    message = live_message(finding, Path("runs/p/e"))
    assert message.splitlines() == [
        "Warning: Updates change the policy too much: actor/pg_clipfrac is out of range in 10 of 10 steps, 0.45 in "
        "step 1 (at most 0.3 is healthy).",
        "Likely cause: the clip range is too narrow for this loss",
        "rloom doctor runs/p/e has the evidence, the causes and further keys.",
    ]


@pytest.mark.parametrize("keys", [{}, GAE], ids=["grpo", "gae"])
def test_a_healthy_run_reports_nothing(keys: Mapping[str, Any]) -> None:
    assert reports(history(keys=keys, steps=200)) == []


def test_the_mismatch_has_a_warning_of_its_own() -> None:
    assert reports(history({"rollout_corr/k3_kl": 0.05})) == []


def test_a_run_of_any_length_keeps_the_same_number_of_steps() -> None:
    live = LiveDiagnosis(KEYS)
    for record in history(steps=500).metrics:
        live.check(int(record["step"]), record)
    assert len(live._records) == FIRST_STEPS + LAST_STEPS
    assert [record["step"] for record in live._records[:21]] == [*range(1, 21), 461]


# The command


def written(folder: Path, found: History) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(nested(found.config)))
    log = EventLog(folder / EVENTS_FILE)
    log.write("run", step=0)
    for record in found.metrics:
        metrics = {name: value for name, value in record.items() if name != "step"}
        log.write("step", step=int(record["step"]), metrics=metrics)
    log.write("end", status="finished")
    return folder


def nested(flat_keys: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat_keys.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")


def test_the_command_prints_findings_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", FAULTY["reward_zero"]())
    assert cli.main(["doctor", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [str(run), "20 steps, finished; 33 kinds of faults checked, 1 finding"]
    assert "1. ERROR Every reward is 0: nothing to learn from  [reward_zero, steps 1–20]" in lines
    assert "     critic/score/max is 0 in all 20 steps: none of about 10,240 answers scored" in lines
    assert any(line.startswith("     compare the answers of `rloom chat Qwen") for line in lines)
    assert any(line.startswith("     trainer.log_val_generations=5 ") for line in lines)


def test_the_command_is_in_the_users_language(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert cli.main(["doctor", str(written(tmp_path / "run", FAULTY["reward_zero"]()))]) == 1
    assert "1. 错误 所有奖励都为 0：没有可学习的信号  [reward_zero, 第 1–20 步]" in capsys.readouterr().out


def test_a_healthy_run_says_what_was_checked_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(written(tmp_path / "run", history()))]) == 0
    printed = capsys.readouterr().out
    assert "Nothing wrong found.\nChecked: nonfinite, " in printed
    assert (
        "Not checked, because the run does not measure it: prompts_cut, kl_high, staleness_hurts, critic_stuck, "
        "loss_not_falling, queue_grows, starving_trainer\n" in printed
    )


def test_too_few_steps_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(written(tmp_path / "run", history(steps=3)))]) == 0
    printed = capsys.readouterr().out
    assert "Too few steps for all checks: 3; levels need 5 steps, trends 9." in printed
    assert "Nothing wrong" not in printed


def test_json_of_one_run_and_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty, healthy = written(tmp_path / "faulty", FAULTY["kl_high"]()), written(tmp_path / "healthy", history())
    assert cli.main(["doctor", str(healthy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert cli.main(["doctor", str(faulty), str(healthy), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first["findings"][0]["kind"] == "kl_high" and first["findings"][0]["changes"][0] == {
        "key": "algorithm.kl_ctrl.kl_coef",
        "value": 0.005,
        "why": {"en": "a stronger KL", "zh": "更强的 KL 约束"},
    }
    assert second["steps"] == 20 and second["state"] == "finished"


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["doctor.md", "doctor.zh.md"])
def test_the_guide_lists_every_finding_in_the_order_of_the_checks(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)
    assert rows == list(CHECKS)


def test_steps_that_wait_for_programs_ask_for_a_shorter_limit_and_not_for_more_workers() -> None:
    details = {
        3: "0 of 3 tests passed; test 1: CPU time limit of 10 s",
        4: "1 of 3 tests passed; test 2: time limit of 1 s",
    }
    samples = answers(
        lambda number, right: right, detail=lambda number: details.get(number // 4, "3 of 3 tests passed")
    )
    waits: Values = {
        "reward/out_of_time": lambda step: 1 / 512 if step % 2 else 0.0,
        "timing_s/reward": lambda step: 9.5 if step % 2 else 0.2,
    }
    known = history(waits, {"reward_model.num_workers": 14})
    [finding] = diagnose(History(known.metrics, known.config, read_samples=lambda: samples))
    assert finding.kind == "slow_stage"
    assert finding.evidence[1] == (
        "in 10 of 20 steps a program ran into its time limit of up to 10 s, and the step waited 9.5 s; row of the data "
        "(test): 3 (1), 4 (2)"
    )
    assert [change.assignment for change in finding.changes] == ["reward_model.sandbox.cpu_s=2"]
    assert [one for one in finding.advice if isinstance(one, str)] == [
        "give rows without one a reference solution (extra_info.answer), or time_limit_s in their ground truth"
    ]
    slow = {**waits, "timing_s/reward": 9.5}  # with and without such a program
    known = history(slow, {"reward_model.num_workers": 14})
    [finding] = diagnose(History(known.metrics, known.config, read_samples=lambda: samples))
    assert [change.assignment for change in finding.changes] == ["reward_model.num_workers=56"]
