"""Whole runs with actor_rollout_ref.rollout.name=vllm on the embedded task."""

from pathlib import Path

import pytest

from rloom.launch.build import evaluate_checkpoint
from tests.e2e.runs import command, records, same, train, weights

VLLM, SEEDS = "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.request_seeds=True"
ACCURACY = "val-core/math_reasoning/acc/mean@1"
LEARNING = (
    VLLM,
    "data.train_max_samples=-1",
    "data.train_batch_size=32",
    "data.val_max_samples=256",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=8",
    "trainer.val_before_train=True",
)


def test_grpo_learns_the_default_task_and_its_checkpoint_answers_as_well(tmp_path: Path) -> None:
    train(tmp_path, 4, *LEARNING, "algorithm.adv_estimator=grpo", "trainer.test_freq=4", "trainer.save_freq=4")
    first, last = (record[ACCURACY] for record in records(tmp_path) if ACCURACY in record)
    assert 0.3 < first < 0.45
    assert last > first + 0.2
    steps = [record for record in records(tmp_path) if "training/rollout_probs_diff_mean" in record]
    assert max(record["training/rollout_probs_diff_mean"] for record in steps) < 1e-4  # weights are the trainer's
    assert evaluate_checkpoint(tmp_path / "global_step_4").metrics[ACCURACY] == pytest.approx(last)


@pytest.mark.parametrize("estimator", ["gae", "rloo"])
def test_ppo_and_rloo_train_on_answers_of_the_current_weights(tmp_path: Path, estimator: str) -> None:
    train(tmp_path, 3, VLLM, f"algorithm.adv_estimator={estimator}")
    gaps = [record["training/rollout_probs_diff_mean"] for record in records(tmp_path)]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    assert not same(weights(tmp_path, 1), weights(tmp_path, 3))


def test_a_resumed_run_equals_one_without_a_break(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    chosen = (VLLM, SEEDS, "algorithm.adv_estimator=grpo")
    train(whole, 2, *chosen)
    train(broken, 1, *chosen)
    train(broken, 2, *chosen)
    assert same(weights(broken, 2), weights(whole, 2))


def test_a_lora_adapter_is_trained_and_generates(tmp_path: Path) -> None:
    adapter = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01")
    train(tmp_path, 3, VLLM, "algorithm.adv_estimator=grpo", *adapter)
    gaps = [record["training/rollout_probs_diff_mean"] for record in records(tmp_path)]
    assert len(gaps) == 3 and max(gaps) < 1e-4


def test_an_unknown_engine_argument_ends_the_run_before_a_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, 1, VLLM, "+actor_rollout_ref.rollout.engine_kwargs.no_such=1") != 0
    assert "engine_kwargs.no_such=1: vLLM's EngineArgs has no such argument" in capsys.readouterr().err


def test_a_run_with_a_server_equals_one_with_the_engine_in_process(tmp_path: Path) -> None:
    server = "actor_rollout_ref.rollout.server.count=1"
    train(tmp_path / "server", 2, VLLM, SEEDS, "algorithm.adv_estimator=grpo", server)
    train(tmp_path / "process", 2, VLLM, SEEDS, "algorithm.adv_estimator=grpo")
    gaps = [record["training/rollout_probs_diff_mean"] for record in records(tmp_path / "server")]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    scores = [[record["critic/score/mean"] for record in records(tmp_path / name)] for name in ("server", "process")]
    assert scores[0] == scores[1]  # the same answers to the same seeds
