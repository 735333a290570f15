"""Runs that generate ahead of training, and their replays."""

import random
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rloom.rollout.base import Completion
from rloom.rollout.native.engine import NativeRollout
from rloom.runs.dumps.reader import Dumps
from rloom.runs.records import SCHEDULE_FILE
from rloom.training.queue_file import QUEUE_FILE
from rloom.training.schedule import read_lines
from tests.e2e.runs import command, records, same, train, weights
from tests.e2e.test_ahead import AHEAD, SPANS
from tests.e2e.test_separate import SEPARATE

REWARD = """
import random
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(random.SystemRandom().random() * {most_s})
    return float(len(solution_str) % 7)
"""


def rewards(folder: Path, most_s: float) -> str:
    """Takes a random time, of which the score knows nothing."""
    file = folder / "reward.py"
    file.write_text(REWARD.format(most_s=most_s))
    return f"custom_reward_function.path={file}"


def check_same(one: Path, other: Path, steps: int) -> None:
    """Weights, answers with their versions, queues of checkpoints, schedules."""
    for step in range(1, steps + 1):
        assert same(weights(one, step), weights(other, step)), f"step {step}"
        assert dumped(one, step) == dumped(other, step)
        queues = [load_file(run / f"global_step_{step}" / QUEUE_FILE) for run in (one, other)]
        assert same(queues[0], queues[1])
    assert sends(one) == sends(other)


def dumped(run: Path, step: int) -> list[object]:
    return [Dumps(run).answers("train", step, group) for group in range(4)]


def sends(run: Path) -> list[object]:
    """Two threads write the lines of `separate_async`."""
    return sorted(
        (line["step"], str(line.get("sends")), str(line.get("groups"))) for line in read_lines(run / SCHEDULE_FILE)
    )


def test_a_replay_computes_what_the_run_did_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, rng = 3, random.Random(1)
    poll = NativeRollout.poll

    def slow_poll(rollout: NativeRollout) -> list[Completion]:
        time.sleep(rng.random() * 0.03)
        return poll(rollout)

    monkeypatch.setattr(NativeRollout, "poll", slow_poll)
    monkeypatch.setattr(NativeRollout, "polls_per_report", property(lambda rollout: rng.randint(1, 4)))
    keys = (*AHEAD, rewards(tmp_path, 0.2), "reward_model.num_workers=2", "actor_rollout_ref.rollout.max_num_seqs=6")
    # answers of equal length: on a busy machine, too, some are generated when those of the first groups are scored
    keys = (*keys, "data.max_response_length=48", "actor_rollout_ref.rollout.ignore_eos=True")
    train(tmp_path / "run", steps, *keys)
    assert max(record[SPANS] for record in records(tmp_path / "run")) > 1, "answers were interrupted"
    train(tmp_path / "other", steps, *keys)
    assert not same(weights(tmp_path / "run", steps), weights(tmp_path / "other", steps)), "time decides"
    replay = f"trainer.replay={tmp_path / 'run'}"
    train(tmp_path / "replay", steps, *keys, replay)
    check_same(tmp_path / "run", tmp_path / "replay", steps)
    capsys.readouterr()
    for keys_of_another, text in (
        (("data.seed=3",), "data.seed was 1, is 3"),
        (("actor_rollout_ref.actor.optim.lr=0.01",), "actor_rollout_ref.actor.optim.lr was"),
        (("trainer.v1.trainer_mode=sync",), "its command repeats it: leave the key out"),
        ((f"trainer.default_local_dir={tmp_path / 'run'}",), "is this run's own directory"),
        ((f"trainer.replay={tmp_path}",), "is not the directory of a run"),
        (("trainer.n_gpus_per_node=2",), "trainer.n_gpus_per_node was 1, is 2"),
    ):
        assert command(tmp_path / "refused", steps, *keys, replay, *keys_of_another) != 0
        assert text in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


@pytest.mark.long
@pytest.mark.usefixtures("time_limit")
def test_a_replay_of_two_generating_workers_computes_what_they_did_bit_for_bit(tmp_path: Path) -> None:
    """With a validation. Answers are sent to whichever worker has room, and are interrupted by each weight sync."""
    steps = 3
    keys = (*SEPARATE, "trainer.n_gpus_per_node=3", "trainer.pools.rollout=2", rewards(tmp_path, 0.2))
    keys = (*keys, "actor_rollout_ref.rollout.max_num_seqs=2", "trainer.test_freq=2", "data.max_response_length=48")
    keys = (*keys, "actor_rollout_ref.rollout.ignore_eos=True", "data.val_max_samples=2")
    train(tmp_path / "run", steps, *keys)
    measured = [record for record in records(tmp_path / "run") if SPANS in record]
    assert max(record[SPANS] for record in measured) > 1, "answers were interrupted"
    train(tmp_path / "replay", steps, *keys, f"trainer.replay={tmp_path / 'run'}")
    check_same(tmp_path / "run", tmp_path / "replay", steps)
