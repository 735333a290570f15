"""A run that stops, however it stops, goes on as if it had not."""

import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.engines.local import LocalEngine
from rloom.runs.dumps.reader import Dumps
from tests.e2e.runs import command, fork, records, same, train, weights
from tests.waiting import wait_until

# gae with everything that has a state of its own: critic, adaptive KL, schedule, several mini-batches and epochs
STATEFUL = (
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=16",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.rollout.n=1",
)


def test_two_steps_and_one_more_equal_three_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, 3, *STATEFUL)
    train(parts, 2, *STATEFUL)
    train(parts, 3, *STATEFUL)
    for role in ("actor", "critic"):
        assert same(weights(whole, 3, role), weights(parts, 3, role))
        assert not same(weights(whole, 2, role), weights(whole, 3, role))
    assert Dumps(parts).steps("train") == [1, 2, 3]
    assert Dumps(parts).answers("train", 3, 0) == Dumps(whole).answers("train", 3, 0)
    coefficients = [record["actor/kl_coef"] for record in records(parts)]
    assert coefficients == [record["actor/kl_coef"] for record in records(whole)]
    assert len(set(coefficients)) > 1, "the adaptive coefficient moved, so the resume had something to lose"


def test_resume_from_an_earlier_checkpoint_sets_later_ones_aside(tmp_path: Path) -> None:
    train(tmp_path, 3, "algorithm.adv_estimator=rloo")
    third = weights(tmp_path, 3)
    train(
        tmp_path,
        3,
        "algorithm.adv_estimator=rloo",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'global_step_1'}",
        "trainer.log_rollouts=False",
    )
    assert same(third, weights(tmp_path, 3))
    assert Dumps(tmp_path).steps("train") == [1]  # the others were of steps that this run has replaced
    [aside] = tmp_path.glob("superseded-*")
    assert sorted(path.name for path in aside.iterdir()) == ["global_step_2", "global_step_3"]
    assert [record["training/global_step"] for record in records(tmp_path)] == [1, 2, 3]


def test_looking_at_an_earlier_checkpoint_moves_nothing(tmp_path: Path) -> None:
    train(tmp_path, 2, "algorithm.adv_estimator=rloo")
    before = sorted(path.name for path in tmp_path.iterdir())
    start = f"trainer.resume_from_path={tmp_path / 'global_step_1'}"
    keys = ("algorithm.adv_estimator=rloo", "trainer.val_only=True", "trainer.resume_mode=resume_path", start)
    assert command(tmp_path, 2, *keys) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert [r["training/global_step"] for r in records(tmp_path) if "training/global_step" in r] == [1, 2]


def test_starting_anew_keeps_what_the_old_run_left(tmp_path: Path) -> None:
    train(tmp_path, 2, "algorithm.adv_estimator=rloo")
    train(tmp_path, 1, "algorithm.adv_estimator=rloo", "trainer.resume_mode=disable")
    [aside] = tmp_path.glob("superseded-*")
    assert sorted(path.name for path in aside.iterdir()) == [
        "events.jsonl",
        "global_step_1",
        "global_step_2",
        "metrics.jsonl",
        "rollouts",
    ]


def test_lora_resumes_bit_for_bit(tmp_path: Path) -> None:
    lora = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
    )
    train(tmp_path / "whole", 2, *lora)
    train(tmp_path / "halves", 1, *lora)
    train(tmp_path / "halves", 2, *lora)
    assert same(
        weights(tmp_path / "whole", 2, file="lora.safetensors"),
        weights(tmp_path / "halves", 2, file="lora.safetensors"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.long)])
def test_kills_at_random_instants_change_nothing(tmp_path: Path, kills: int) -> None:
    """Half of the kills wait until a checkpoint is being written."""
    steps, chance = kills + 1, random.Random(7)
    rloo = ("algorithm.adv_estimator=rloo",)
    undisturbed = fork(tmp_path / "undisturbed", steps, *rloo)
    run_directory = tmp_path / "killed"
    for kill in range(kills):
        process = fork(run_directory, steps, *rloo)
        kill_at(process, run_directory, while_writing=kill % 2 == 1, delay_s=chance.uniform(0, 0.3))
    last = fork(run_directory, steps, *rloo)
    for process, log in ((last, tmp_path / "killed.log"), (undisturbed, tmp_path / "undisturbed.log")):
        process.join(timeout=480)
        assert process.exitcode == 0, log.read_text()
    assert same(weights(run_directory, steps), weights(tmp_path / "undisturbed", steps))
    assert not list(run_directory.glob(".writing-*"))


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    never = ("algorithm.adv_estimator=rloo", "trainer.save_freq=-1")
    run = tmp_path / "run"
    process = fork(run, 500, *never)
    wait_until(lambda: (run / "metrics.jsonl").exists() and "\n" in (run / "metrics.jsonl").read_text(), 240)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=240)
    assert process.exitcode == 130
    said = (tmp_path / "run.log").read_text()
    [checkpoint] = run.glob("global_step_*")
    assert f"saved in {checkpoint}. The same command goes on from there." in said
    assert "Traceback" not in said
    step = int(checkpoint.name.removeprefix("global_step_"))
    assert [record["training/global_step"] for record in records(run)] == list(range(1, step + 1))
    train(run, step + 1, *never)
    assert [record["training/global_step"] for record in records(run)] == list(range(1, step + 2))


BROKEN_FROM_THE_SECOND_STEP = """
from rloom.algos.estimators import gae
from rloom.algos.registry import Algorithm
from rloom.batch import Advantages

steps = 0

def estimate(inputs, settings):
    global steps
    steps += 1
    found = gae(inputs, settings)
    return Advantages(found.advantages_T * (1.0 if steps == 1 else float("nan")), found.returns_T)

entry = Algorithm(estimate, needs_critic=True)
"""


def test_updates_that_are_never_finite_stop_the_run_and_name_the_last_good_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(BROKEN_FROM_THE_SECOND_STEP)
    keys = (f"algorithm.adv_estimator={tmp_path / 'mine.py'}:entry", "trainer.max_nonfinite_updates=2")
    assert command(tmp_path / "run", 5, *keys) == 2
    said = capsys.readouterr().err
    assert "2 actor updates in a row had a gradient that is not finite" in said
    assert f"The last good checkpoint is {tmp_path / 'run' / 'global_step_1'}" in said
    # the critic had already learned from the second step: half a step is not saved as if it were a whole one
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_1"]


def test_memory_that_runs_out_before_the_first_update_of_a_step_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("algorithm.adv_estimator=rloo", "trainer.save_freq=-1")
    passes = []

    def run_out(engine: LocalEngine, *arguments: Any) -> None:
        passes.append(1)
        if len(passes) == 3:  # of two mini-batches a step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        forward_backward(engine, *arguments)

    forward_backward = LocalEngine.forward_backward
    monkeypatch.setattr(LocalEngine, "forward_backward", run_out)
    assert command(tmp_path / "run", 3, *keys) == 2
    said = capsys.readouterr().err
    first, *_, last = said[said.index("rloom: ") :].splitlines()
    assert first.startswith(
        "rloom: training error: the GPU ran out of memory in the actor's update: CUDA out of memory."
    )
    assert last.startswith(f"Stopped after step 1, saved in {tmp_path / 'run' / 'global_step_1'}.")
    monkeypatch.undo()
    train(tmp_path / "whole", 1, *keys[:1])
    assert same(weights(tmp_path / "run", 1), weights(tmp_path / "whole", 1))


def test_a_run_that_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 1, "algorithm.adv_estimator=rloo")
    train(tmp_path, 1, "algorithm.adv_estimator=rloo")
    assert "This run has already ended, at step 1." in capsys.readouterr().out


def kill_at(process: ForkServerProcess, directory: Path, *, while_writing: bool, delay_s: float) -> None:
    before = len(list(directory.glob("global_step_*")))

    def the_moment() -> bool:
        if while_writing:
            return any(directory.glob(".writing-*")) or process.exitcode is not None
        return len(list(directory.glob("global_step_*"))) > before or process.exitcode is not None

    wait_until(the_moment, 240, poll_s=0.002)  # a checkpoint is written in a few hundredths of a second
    time.sleep(0 if while_writing else delay_s)
    process.kill()
    process.join()
