"""Whole runs scored by a judge: a local server that speaks a provider's protocol."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.runs import command, records, same, train, weights
from tests.judge_server import INPUT_TOKENS, KEY, OUTPUT_TOKENS, Body, JudgeServer, serving

GRPO = "algorithm.adv_estimator=grpo"
PROMPT = "'ANSWER<{response}> TRUTH<{ground_truth}>'"


def worth(body: Body, user: str) -> str:
    """10 for an answer whose last number is the ground truth, 1 for another."""
    found = re.search(r"ANSWER<(.*)> TRUTH<(.*)>", user, re.DOTALL)
    assert found is not None, user
    answer, truth = found.groups()
    return json.dumps({"reason": "checked", "score": 10 if re.findall(r"-?\d+", answer)[-1:] == [truth] else 1})


def judged_by(server: JudgeServer) -> tuple[str, ...]:
    return (
        "reward_model.api.enable=True",
        "reward_model.api.type=openai",
        f"reward_model.api.base_url={server.base_url('openai')}",
        f"reward_model.api.scoring_prompt={PROMPT}",
    )


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def test_a_judge_of_the_rules_opinion_teaches_what_the_rule_teaches_bit_for_bit(tmp_path: Path) -> None:
    """A 10 of 1 to 10 is the rule's 1, a 1 its 0. What is learned from the rule: `test_train.py`."""
    many = ("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4")
    with serving(say=worth) as server:
        train(tmp_path / "judge", 2, GRPO, *many, *judged_by(server))
    train(tmp_path / "rule", 2, GRPO, *many)
    steps = records(tmp_path / "judge")
    assert [(step["reward/failed"], step["critic/score/min"], step["critic/score/max"]) for step in steps] == [
        (0, 0, 1)
    ] * 2
    assert same(weights(tmp_path / "judge", 2), weights(tmp_path / "rule", 2))
    assert not same(weights(tmp_path / "judge", 1), weights(tmp_path / "judge", 2))


def test_a_spent_budget_stops_the_run_and_a_larger_one_goes_on_without_paying_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step has 8 answers; equal answers share a call. A call costs 120 × 1 + 20 × 2 = 160 millionths."""
    run, cost = tmp_path / "run", (INPUT_TOKENS * 1.0 + OUTPUT_TOKENS * 2.0) / 1e6
    prices = ("reward_model.api.input_price=1", "reward_model.api.output_price=2", "reward_model.api.concurrency=1")
    with serving(say=worth) as server:
        keys = (GRPO, *judged_by(server), *prices)
        assert command(run, 3, *keys, f"reward_model.api.budget={11.5 * cost}") != 0
        printed = capsys.readouterr().err
        assert f"reward_model.api.budget={11.5 * cost:g}: spent {12 * cost:.4g}; raise it to go on" in printed
        assert re.search(r"Stopped after step [12], saved in", printed) and len(server.received) == 12
        train(run, 3, *keys, "reward_model.api.budget=1")
        bodies = [json.dumps(request.body, sort_keys=True) for request in server.received]
    assert len(set(bodies)) == len(bodies), "no answer was paid twice"
    steps = records(run)
    assert [record["reward/requests"] + record["reward/cached"] for record in steps] == [8, 8, 8]
    assert [record["reward/cost"] for record in steps] == pytest.approx([r["reward/requests"] * cost for r in steps])
    assert sum(record["reward/requests"] for record in steps) <= len(bodies) - 1  # the step that was stopped paid some


def test_no_key_is_in_any_file_of_a_run_or_on_its_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))
    with serving(say=worth, plan=lambda number: "401" if number % 3 == 0 else "") as server:
        train(tmp_path, 1, GRPO, *judged_by(server), "trainer.logger=[console,tensorboard,file]")
    printed = capfd.readouterr()
    assert "rewards failed" in printed.out
    assert KEY not in printed.out + printed.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".safetensors" for file in files) and (tmp_path / "judge_cache").is_dir()
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_a_mix_of_judge_and_rule_has_the_weights_of_the_kits_yaml(tmp_path: Path) -> None:
    with serving(say=worth) as server:
        train(
            tmp_path / "run",
            1,
            GRPO,
            *judged_by(server),
            "composite_reward.enable=True",
            "+composite_reward.weights.rm_score=0.7",
            "+composite_reward.weights.rule_score=0.3",
            f"trainer.rollout_data_dir={tmp_path}",
        )
    rows = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["score"] == pytest.approx(0.7 * row["rm_score"] + 0.3 * row["rule_score"])
        assert row["detail"].startswith("rm_score: 10 of 1 to 10" if row["rm_score"] else "rm_score: 1 of 1 to 10")
