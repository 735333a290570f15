"""Runs that generate ahead of training."""

import json
import os
import signal
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from rloom.rollout.base import Completion
from rloom.rollout.native.engine import NativeRollout
from rloom.runs.dumps.reader import Dumps
from rloom.training.sampling import ROUNDS, SURPLUS
from tests.e2e.runs import command, records, run_with_log, same, train, weights
from tests.ranks import forkserver
from tests.waiting import wait_until

GRPO = ("algorithm.adv_estimator=grpo",)
AHEAD = (*GRPO, "trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.max_off_policy_strategy=wait")
FILTERED = ("algorithm.filter_groups.enable=True", "actor_rollout_ref.rollout.n=4")
SPANS = "training/off_policy/trajectory_spans/max"
WORST = "training/off_policy/trajectory_staleness_worst/max"


@pytest.mark.parametrize("keys", [(), pytest.param(FILTERED, marks=pytest.mark.long)])
def test_with_nothing_ahead_a_run_computes_what_a_synchronous_one_does_bit_for_bit(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    train(tmp_path / "sync", 2, *GRPO, *keys)
    train(tmp_path / "ahead", 2, *AHEAD, "trainer.v1.colocate_async.num_warmup_batches=0", *keys)
    assert same(weights(tmp_path / "sync", 2), weights(tmp_path / "ahead", 2))
    for step in (1, 2):
        assert Dumps(tmp_path / "ahead").answers("train", step, 0) == Dumps(tmp_path / "sync").answers("train", step, 0)
    assert [record[WORST] for record in records(tmp_path / "ahead")] == [0.0, 0.0]
    found, expected = (
        [[record.get(name) for name in (ROUNDS, SURPLUS)] for record in records(tmp_path / run)]
        for run in ("ahead", "sync")
    )
    assert found == expected


def run_by_polls(directory: Path, steps: int, *overrides: str) -> None:
    """A step can end after each poll, of one token, which takes longer than a score: answers of the embedded model,
    which have about 20 tokens, are interrupted, too."""

    def slow_poll(rollout: NativeRollout) -> list[Completion]:
        time.sleep(0.05)
        return poll(rollout)

    poll, NativeRollout.poll = NativeRollout.poll, slow_poll  # type: ignore[method-assign]
    NativeRollout.polls_per_report = 1
    run_with_log(directory, steps, *overrides)


def start(directory: Path, steps: int, *overrides: str) -> ForkServerProcess:
    process: ForkServerProcess = forkserver().Process(target=run_by_polls, args=(directory, steps, *overrides))
    process.start()
    return process


def answers(folder: Path) -> Counter[tuple[str, int]]:
    """(prompt, step) of all answers of a run."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return Counter((row["input"], row["step"]) for row in map(json.loads, lines))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_answers_that_it_had_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prompt of the synchronous run is trained once, and no version of the weights is missing in an answer."""
    steps, staleness = 5, "trainer.v1.sampler.max_off_policy_threshold=2"
    train(tmp_path / "sync", steps, *GRPO, "trainer.save_freq=-1", f"trainer.rollout_data_dir={tmp_path / 'expected'}")
    run, keys = (
        tmp_path / "run",
        (
            *AHEAD,
            staleness,
            "actor_rollout_ref.rollout.max_num_seqs=4",
            f"trainer.rollout_data_dir={tmp_path / 'found'}",
        ),
    )
    killed = start(run, steps, *keys)
    wait_until(lambda: (run / "global_step_2").exists() or not killed.is_alive(), 120)
    assert killed.is_alive() and killed.pid is not None, run.with_suffix(".log").read_text()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert command(run, steps, *GRPO) != 0, "as a synchronous run it would lose these answers"
    assert "which would be lost with trainer.v1.trainer_mode=sync" in capsys.readouterr().err
    process = start(run, steps, *keys)
    process.join(timeout=240)
    assert process.exitcode == 0, run.with_suffix(".log").read_text()
    found, expected = answers(tmp_path / "found"), answers(tmp_path / "expected")
    assert Counter(prompt for prompt, _ in found.elements()) == Counter(prompt for prompt, _ in expected.elements())
    assert Counter(step for _, step in found.elements()) == dict.fromkeys(range(1, steps + 1), 8)
    measured = records(run)
    assert max(record[SPANS] for record in measured) > 1, "answers were interrupted"
    assert max(record[WORST] for record in measured) <= 2
    versions = [found for step in range(1, steps + 1) for found in versions_of(run, step)]
    assert any(len(found) > 1 for found in versions) and len(versions) == 8 * steps
    assert all(found and list(found) == sorted(found) for found in versions)


def versions_of(run: Path, step: int) -> list[tuple[int, ...]]:
    """The versions of each answer of a step; a step without an answer of several has none in its file."""
    found = [answer for group in range(4) for answer in Dumps(run).answers("train", step, group)]
    return [tuple(version for _, version in answer.versions or [(0, answer.version)]) for answer in found]
