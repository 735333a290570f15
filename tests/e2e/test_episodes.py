"""Runs whose answers have several turns: workers, resume, validation, rewards, a saved checkpoint."""

import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rloom.cli.checkpoints import evaluate
from tests.e2e.runs import command, fork, records, same, train, weights
from tests.waiting import is_running, wait_until

ENVIRONMENT = '''
import os
import time


class Digits:
    """Three turns; the reward of each is a tenth of its digits."""

    def __init__(self, turns=3):
        self.left = turns

    def reset(self, **row): ...

    def step(self, text):
        self.left -= 1
        return "+", sum(map(str.isdigit, text)) / 10, self.left == 0


class Slow(Digits):
    def step(self, text):
        with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as pids:
            print(os.getpid(), file=pids)
        time.sleep(600)


class Once:
    def reset(self, **row): ...

    def step(self, text):
        return "", None, True


class ToolsOnly:
    def reset(self, **row): ...

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b
'''
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert solution_str.endswith(extra_info["final_answer"]) and "+" in solution_str
    assert [m["role"] for m in extra_info["messages"]] == ["user", *["assistant", "user"] * 2, "assistant"]
    assert abs(sum(extra_info["turn_scores"]) - extra_info["environment_reward"]) < 1e-9
    return {"score": extra_info["num_turns"], "turns": len(extra_info["turn_scores"])}
"""
DIGITS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(str.isdigit, solution_str)) / 10
"""
KEY, LENGTH = "actor_rollout_ref.rollout.multi_turn.environment", "data.max_response_length=96"
GRPO = "algorithm.adv_estimator=grpo"
# the training numbers that are the same on one and on two workers; sums over workers differ in the last digits
NUMBERS = (
    *("critic/score/mean", "episode/turns/mean", "response_length/mean", "actor/pg_loss", "actor/ppo_kl"),
    *("val-core/math_reasoning/acc/mean@1", "val-aux/episode/turns/mean"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").write_text(ENVIRONMENT)
    return tmp_path / "digits.py"


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_workers_a_resume_and_validations_change_no_episode(tmp_path: Path, file: Path, steps: int) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    keys = (GRPO, LENGTH, f"{KEY}={file}:Digits", "trainer.test_freq=1", "trainer.log_rollouts=False")
    train(one, steps, *keys)
    for step in range(1, steps + 1):
        train(two, step, *keys, "trainer.n_gpus_per_node=2")
    assert len(records(one)) == len(records(two)) == 2 * steps  # each step, and its validation
    for alone, shared in zip(records(one), records(two), strict=True):
        names = [name for name in NUMBERS if name in alone]
        assert [alone[name] for name in names] == pytest.approx([shared[name] for name in names], abs=1e-5) and names
    assert steps == 1 or not same(weights(one, 1), weights(one, 2))


def test_episodes_of_one_answer_are_a_run_without_an_environment(tmp_path: Path, file: Path) -> None:
    """Samples, seeds, advantages and weights of both models, bit for bit: an environment adds metrics alone. Log-probs
    of the rollout may differ in their last place: requests that arrive one by one are decoded in other batches."""
    (tmp_path / "reward.py").write_text(DIGITS)
    keys = (LENGTH, f"custom_reward_function.path={tmp_path}/reward.py")
    plain, episodes = tmp_path / "plain", tmp_path / "episodes"
    train(plain, 2, *keys)
    train(episodes, 2, *keys, f"{KEY}={file}:Once")
    timed = ("perf/", "timing", "val-aux/episode/", "episode/")
    for one, other in zip(records(plain), records(episodes), strict=True):
        assert other["episode/turns/mean"] == 1
        expected = {name: value for name, value in one.items() if not name.startswith(timed)}
        found = {name: value for name, value in other.items() if not name.startswith(timed)}
        of_rollout = {name for name in expected if name.startswith(("rollout_corr/", "training/rollout_"))}
        assert {name: found[name] for name in of_rollout} == pytest.approx(
            {name: expected[name] for name in of_rollout}, abs=1e-5
        )
        assert {**found, **dict.fromkeys(of_rollout)} == {**expected, **dict.fromkeys(of_rollout)}
    for step in (1, 2):
        one = pq.read_table(plain / "rollouts" / "train" / f"{step}.parquet")
        other = pq.read_table(episodes / "rollouts" / "train" / f"{step}.parquet")
        assert {"tokens", "turns", "logprobs", "advantages", "ratio", "version", "score"} <= {*one.column_names}
        exact = [name for name in one.column_names if name not in ("logprobs", "ratio")]
        assert one.select(exact).equals(other.select(exact))
        sampled, again = (
            [number for row in table["logprobs"].to_pylist() for number in row if number is not None]
            for table in (one, other)
        )
        assert sampled == pytest.approx(again, abs=1e-5) and any(sampled)
        assert len({*one["length"].to_pylist()}) > 1
        assert all(same(weights(plain, step, role), weights(episodes, step, role)) for role in ("actor", "critic"))


def test_a_function_receives_the_conversation_and_replaces_the_reward_of_the_environment(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reward.py").write_text(FUNCTION)
    train(
        tmp_path / "run", 1, GRPO, LENGTH, f"{KEY}={file}:Digits", f"custom_reward_function.path={tmp_path}/reward.py"
    )
    [record] = records(tmp_path / "run")
    assert (record["critic/score/min"], record["critic/score/max"], record["reward/turns"]) == (6.0, 6.0, 3.0)
    assert "rewards of the episodes themselves are not in the score" in caplog.text


def test_a_mix_adds_the_reward_of_the_environment(tmp_path: Path, file: Path) -> None:
    mix = ("environment_score=2.0", "format_score=1.0")
    weights_of = [f"+reward_model.composite.weights.{part}" for part in mix]
    keys = ("reward_model.composite.enable=True", "reward_model.format.pattern='^.'", *weights_of)
    train(tmp_path / "run", 1, LENGTH, f"{KEY}={file}:Digits", *keys)
    [record] = records(tmp_path / "run")
    own = 2 * record["reward/environment_score"] + record["reward/format_score"]
    assert record["critic/score/mean"] == pytest.approx(own) and record["reward/environment_score"] > 0


def test_an_environment_without_a_reward_is_refused_before_the_start(
    tmp_path: Path, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "run", 1, GRPO, LENGTH, f"{KEY}={file}:ToolsOnly") == 2
    assert f"{KEY}={file}:ToolsOnly: it gives no reward, and the episodes are scored by it" in capfd.readouterr().err


def test_a_checkpoint_is_validated_with_its_environment(
    tmp_path: Path, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", 1, GRPO, LENGTH, f"{KEY}={file}:Digits")
    checkpoint = str(tmp_path / "run" / "global_step_1")
    assert evaluate([checkpoint]) == 2  # a checkpoint is not trusted to run code
    assert f"{KEY}={file}:Digits" in capfd.readouterr().err
    assert evaluate([checkpoint, f"{KEY}={file}:Digits"]) == 0
    assert re.search(r"val-core/math_reasoning/acc/mean@1\W+[0-9.]+", capfd.readouterr().out)


def test_a_second_signal_in_the_middle_of_an_episode_ends_the_run_and_its_processes(tmp_path: Path, file: Path) -> None:
    """The first one lets the step end, which waits for the environment."""
    run = fork(tmp_path / "run", 1, GRPO, LENGTH, f"{KEY}={file}:Slow")
    wait_until((tmp_path / "pids").exists, 240)
    assert run.pid is not None
    os.kill(run.pid, signal.SIGINT)
    wait_until(lambda: "Stopping: this step is finished" in (tmp_path / "run.log").read_text())
    os.kill(run.pid, signal.SIGINT)
    run.join(240)
    assert run.exitcode == 130, (tmp_path / "run.log").read_text()[-2000:]
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not is_running(int(pid)))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ([f"{KEY}=guess"], "it takes guess_number"),
        ([f"{KEY}=guess_number", "actor_rollout_ref.rollout.agent.command=x"], "keep one"),
        (["actor_rollout_ref.rollout.multi_turn.max_turn_length=4"], "answers have one turn; set"),
        ([f"{KEY}=guess_number", "actor_rollout_ref.rollout.agent.port=8000"], "it is read only with an agent; set"),
        ([f"{KEY}=no_such_package.game:Game"], "there is no module 'no_such_package.game'"),
    ],
)
def test_keys_of_episodes_are_checked_before_torch_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], keys: list[str], sentence: str
) -> None:
    assert command(tmp_path / "run", 1, *keys) == 2
    assert sentence in capfd.readouterr().err


def test_a_name_that_the_file_does_not_have(tmp_path: Path, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "run", 1, f"{KEY}={file}:Digit") == 2
    assert f"{KEY}={file}:Digit: {file} has no 'Digit'; it has Digits, Slow, Once, ToolsOnly" in capfd.readouterr().err
    (tmp_path / "broken.py").write_text("class A(:")
    assert command(tmp_path / "run", 1, f"{KEY}={tmp_path}/broken.py:A") == 2
    assert "cannot be loaded (SyntaxError" in capfd.readouterr().err


OWN_KIND = """
from rloom.episodes.kinds import EpisodeKind
from rloom.launch.episodes import environment_driver


def build(config, texts, limits):
    keys = {"environment": "%s:Digits", "environment_kwargs": {"turns": 2}}
    rollout = config.actor_rollout_ref.rollout
    multi_turn = rollout.multi_turn.model_copy(update=keys)
    rollout = rollout.model_copy(update={"multi_turn": multi_turn})
    roles = config.actor_rollout_ref.model_copy(update={"rollout": rollout})
    return environment_driver(config.model_copy(update={"actor_rollout_ref": roles}), texts, limits)


TWICE = EpisodeKind(title="two turns", build=build)
"""


def test_a_kind_of_a_users_file_runs_the_episodes(
    tmp_path: Path, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kind.py").write_text(OWN_KIND % file)
    kind = "actor_rollout_ref.rollout.multi_turn.kind"
    train(tmp_path / "run", 1, GRPO, LENGTH, f"{kind}={tmp_path}/kind.py:TWICE")
    [record] = records(tmp_path / "run")
    assert record["episode/turns/mean"] == 2.0
    assert command(tmp_path / "other", 1, f"{kind}=twice") == 2
    assert f"{kind}=twice: no installed package registers it" in capfd.readouterr().err
