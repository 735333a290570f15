"""Whole runs with mixed, normalised and failing rewards."""

import json
from pathlib import Path

import pytest

from tests.e2e.runs import command, records, same, train, weights

RLOO = "algorithm.adv_estimator=rloo"
MIX = (
    "reward_model.composite.enable=True",
    "+reward_model.composite.weights.rule_score=0.3",
    "+reward_model.composite.weights.format_score.weight=0.7",
    r"reward_model.format.pattern='.*\d+'",
)


def rows(folder: Path, step: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]


def test_a_mix_adds_its_parts_by_weight_and_logs_each(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, RLOO, *MIX, f"trainer.rollout_data_dir={tmp_path}")
    [record] = records(tmp_path / "run")
    found = rows(tmp_path, 1)
    for row in found:
        assert row["score"] == pytest.approx(0.3 * row["rule_score"] + 0.7 * row["format_score"])
        assert row["format_score"] == float(str(row["output"]).strip()[-1:].isdigit())
    means = {name: sum(row[name] for row in found) / 8 for name in ("rule_score", "format_score", "score")}
    assert record["reward/rule_score"] == pytest.approx(means["rule_score"])
    assert record["reward/format_score"] == pytest.approx(means["format_score"])
    assert record["critic/score/mean"] == pytest.approx(means["score"])
    assert record["reward/acc"] == record["reward/rule_score"]


def test_running_moments_are_saved_with_the_run_and_resume_bit_for_bit(tmp_path: Path) -> None:
    file = tmp_path / "length.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
    )
    keys = (RLOO, "reward_model.normalize=True", f"custom_reward_function.path={file}")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, 3, *keys)
    train(parts, 2, *keys)
    train(parts, 3, *keys)
    assert same(weights(whole, 3), weights(parts, 3))
    first, second, third = records(whole)
    assert [record["reward/rule_score/running_mean"] for record in records(parts)] == [
        record["reward/rule_score/running_mean"] for record in (first, second, third)
    ]
    # the first step is normalised by its own mean
    assert first["critic/score/mean"] == pytest.approx(0, abs=1e-6)
    assert first["reward/rule_score/running_mean"] == pytest.approx(first["reward/rule_score"])
    mean = (first["reward/rule_score"] + second["reward/rule_score"] + third["reward/rule_score"]) / 3
    assert third["reward/rule_score/running_mean"] == pytest.approx(mean)
    state = json.loads((parts / "global_step_3" / "trainer_state.json").read_text())
    assert state["reward"]["rule_score"][0] == 24  # three steps of 4 prompts with 2 answers


def test_failed_rewards_are_counted_with_their_reasons_and_leave_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the two answers to each prompt, the second fails: every group is left with one, whose advantage is 0."""
    file = tmp_path / "second.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return [1.0, None]\n"
    )
    keys = (f"custom_reward_function.path={file}", "reward_model.reward_manager=batch")
    assert command(tmp_path / "run", 1, RLOO, *keys) == 0
    [record] = records(tmp_path / "run")
    assert record["reward/failed"] == 4 and record["critic/score/mean"] == 1.0
    assert record["critic/advantages/max"] == record["critic/advantages/min"] == 0.0
    printed = capsys.readouterr().out
    assert "4 of 8 rewards failed: 4 × compute_score (second.py:1) returned None (NoneType)" in printed


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (("reward_model.composite.enable=True",), "reward_model.composite.weights is empty"),
        (
            ("reward_model.composite.enable=True", "+reward_model.composite.weights.rm_score=1"),
            "weights.rm_score=1: nothing computes it; set reward_model.path or reward_model.api.enable or",
        ),
        (
            ("reward_model.composite.enable=True", "+reward_model.composite.weights.rule=1"),
            "weights.rule: there is no such part; use rule_score, environment_score, rm_score",
        ),
        (("reward_model.format.pattern=x",), "reward_model.format.pattern=x: a format reward is a part of a mix"),
        (
            (
                "reward_model.composite.enable=True",
                "+reward_model.composite.weights.rule_score=1",
                "reward_model.format.pattern=x",
            ),
            "reward_model.format.pattern is set, but no weight uses it",
        ),
        (
            ("reward_model.composite.enable=True", "+reward_model.composite.weights.rule_score=0"),
            "all weights are 0",
        ),
    ],
)
def test_a_mix_that_cannot_be_computed_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...], fault: str
) -> None:
    assert command(tmp_path, 1, RLOO, *keys) != 0
    assert fault in capsys.readouterr().err
