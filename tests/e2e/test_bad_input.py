"""Bad input through the real command line: exit code 2, an error that helps, nothing half-written."""

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.models.source import EMBEDDED_FOLDER
from tests.e2e.runs import arguments, command, records, train, weights

ROW = {"data_source": "math_reasoning", "prompt": "1+1=", "ground_truth": "2"}
RLOO = ("algorithm.adv_estimator=rloo", "data.max_response_length=8")
SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command sets up logging and warnings for its process; the tests share theirs."""
    handlers = logging.root.handlers[:]
    with warnings.catch_warnings():
        yield
    logging.root.handlers[:] = handlers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that went well for two steps."""
    directory = tmp_path_factory.mktemp("trained")
    train(directory, 2, *RLOO)
    return directory


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


class Failure:
    """A run that must fail: what it said, and what it left."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str], *overrides: str, steps: int = 1) -> None:
        self.directory = directory
        code = command(directory, steps, *RLOO, *overrides)
        self.said = capsys.readouterr().err
        assert code == 2, self.said
        assert any(line.startswith("rloom: ") for line in self.said.splitlines())
        assert "Traceback" not in self.said

    def names(self, *parts: str) -> "Failure":
        for part in parts:
            assert part in self.said, f"{part!r} is not in: {self.said}"
        return self

    def leaves_nothing(self) -> None:
        assert not self.directory.exists()

    def leaves_no_checkpoint(self) -> None:
        assert not list(self.directory.glob("global_step_*"))
        assert not list(self.directory.glob(".writing-*"))


def parquet(file: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), file)
    return file


def reward_file(folder: Path, body: str) -> str:
    file = folder / "my_reward.py"
    file.write_text(body)
    return f"custom_reward_function.path={file}"


# as a user types it, in a process of its own


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "data.train_batch_sise=4",
            "rloom: configuration error: data.train_batch_sise: there is no such key; "
            "did you mean data.train_batch_size? (`rloom config` lists them all)\n",
        ),
        (
            "actor_rollout_ref.rollout.n=1",
            "rloom: configuration error: actor_rollout_ref.rollout.n=1: rloo compares the answers to one prompt; "
            "use 2 or more, or algorithm.adv_estimator=gae\n",
        ),
    ],
)
def test_the_command_line_ends_with_one_line_and_code_2(tmp_path: Path, override: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rloom.trainer.main_ppo", *arguments(tmp_path / "run", 1, *RLOO, override)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


# keys


def test_a_batch_size_that_does_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    Failure(tmp_path / "run", capsys, *overrides).names(
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.train_batch_size=10", "use 2 or 5"
    ).leaves_nothing()


def test_an_unknown_estimator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Failure(tmp_path / "run", capsys, "algorithm.adv_estimator=ppo").names(
        "algorithm.adv_estimator=ppo", "gae", "rloo", "grpo"
    ).leaves_nothing()


# data


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet(tmp_path / "train.parquet", [ROW] * 8)
    missing = tmp_path / "trian.parquet"
    Failure(tmp_path / "run", capsys, f"data.train_files={missing}").names(
        "data.train_files", str(missing), "no such file", "train.parquet"
    ).leaves_nothing()


def test_a_parquet_without_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = parquet(tmp_path / "train.parquet", [{"data_source": "math_reasoning", "question": "1+1="}] * 8)
    Failure(tmp_path / "run", capsys, f"data.train_files={file}").names(
        str(file), "row 0", "'prompt'", "its columns are 'data_source', 'question'", "data.prompt_key"
    ).leaves_nothing()


def test_an_unknown_data_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = parquet(tmp_path / "train.parquet", [*[ROW] * 7, {**ROW, "data_source": "mystery"}])
    Failure(tmp_path / "run", capsys, f"data.train_files={file}").names(
        "data_source 'mystery' (row 7)", "openai/gsm8k", "custom_reward_function.path"
    ).leaves_nothing()


def test_an_empty_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = pa.schema([("prompt", pa.string()), ("data_source", pa.string())])
    file = parquet(tmp_path / "train.parquet", [], columns)
    Failure(tmp_path / "run", capsys, f"data.train_files={file}").names(
        "data.train_files", str(file), "no rows", "name another file"
    ).leaves_nothing()


def test_fewer_rows_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = parquet(tmp_path / "train.parquet", [ROW] * 3)
    Failure(tmp_path / "run", capsys, f"data.train_files={file}").names(
        "data.train_batch_size=4", "3 rows"
    ).leaves_nothing()


@pytest.mark.parametrize(
    ("filtered", "way_out"),
    [(False, "data.filter_overlong_prompts=True"), (True, "Raise data.max_prompt_length")],
)
def test_all_prompts_over_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], filtered: bool, way_out: str
) -> None:
    file = parquet(tmp_path / "train.parquet", [ROW] * 8)
    overrides = (
        f"data.train_files={file}",
        "data.max_prompt_length=2",
        f"data.filter_overlong_prompts={filtered}",
    )
    Failure(tmp_path / "run", capsys, *overrides).names(
        "data.train_files", "data.max_prompt_length=2", "8 ", "12", way_out
    ).leaves_nothing()


# models


def test_a_model_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_FOLDER / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    Failure(tmp_path / "run", capsys, f"actor_rollout_ref.model.path={folder}").names(
        f"actor_rollout_ref.model.path={folder}", "no weights", "*.safetensors", "config.json"
    ).leaves_nothing()


def test_a_model_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    Failure(tmp_path / "run", capsys, f"actor_rollout_ref.model.path={folder}").names(
        f"actor_rollout_ref.model.path={folder}", "no such folder"
    ).leaves_nothing()


# checkpoints


def test_a_damaged_checkpoint_is_named_and_the_newest_good_one_offered(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, good = (run_copy / f"global_step_{step}" for step in (2, 1))
    file = damaged / "actor" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = sorted(run_copy.rglob("*"))
    Failure(run_copy, capsys, steps=3).names(
        f"{damaged} is damaged: {file} does not match its checksum", f"trainer.resume_from_path={good}"
    )
    assert sorted(run_copy.rglob("*")) == before
    # the way out works
    train(run_copy, 2, *RLOO, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={good}")
    assert weights(run_copy, 2)


def test_a_checkpoint_that_lacks_a_file(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_copy / "global_step_2" / "actor" / "optimizer.safetensors"
    file.unlink()
    Failure(run_copy, capsys, steps=3).names(f"{file} is missing", str(run_copy / "global_step_1"))


def test_the_only_checkpoint_damaged(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_copy / "global_step_1")
    seal = run_copy / "global_step_2" / "seal.json"
    seal.write_text("{")
    Failure(run_copy, capsys, steps=3).names(str(seal), "trainer.resume_mode=disable")


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "global_step_9"
    foreign.mkdir()
    overrides = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={foreign}")
    Failure(tmp_path / "run", capsys, *overrides).names(
        str(foreign), "not a checkpoint of rloom"
    ).leaves_no_checkpoint()


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_9'}")
    Failure(tmp_path / "run", capsys, *overrides).names(
        f"trainer.resume_from_path={tmp_path / 'global_step_9'}", "no such folder", "resume_mode=auto"
    ).leaves_nothing()


# the output directory


def test_an_output_directory_below_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    Failure(file / "run", capsys).names(
        f"trainer.default_local_dir={file / 'run'}", f"{file} is a file", "choose another"
    )
    assert file.read_text() == "kept"


@pytest.mark.parametrize("key", ["trainer.rollout_data_dir", "trainer.validation_data_dir"])
def test_a_folder_for_answers_below_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    (tmp_path / "file").touch()
    Failure(tmp_path / "run", capsys, f"{key}={tmp_path / 'file' / 'answers'}").names(
        f"{key}={tmp_path / 'file' / 'answers'}", "is a file", "choose another"
    ).leaves_nothing()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_directory_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    Failure(closed / "run", capsys).names(
        f"trainer.default_local_dir={closed / 'run'}", f"{closed} cannot be written to", "choose another"
    ).leaves_nothing()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody can write to")
def test_a_read_only_output_directory(capsys: pytest.CaptureFixture[str]) -> None:
    Failure(Path("/proc/run"), capsys).names("trainer.default_local_dir=/proc/run", "cannot be written to", "choose")


# rewards


def test_a_reward_function_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = reward_file(tmp_path, SIGNATURE + "    raise ValueError('no such answer')\n")
    Failure(tmp_path / "run", capsys, own).names(
        "8 of 8 rewards failed (100.0%)",
        "max_failed_share=0.5",
        "8 × ValueError: no such answer (my_reward.py:2 in compute_score)",
        "Mend the reward function",
    ).leaves_no_checkpoint()


def test_a_reward_function_that_returns_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = reward_file(tmp_path, SIGNATURE + "    return float('nan')\n")
    Failure(tmp_path / "run", capsys, own).names("8 × ", "my_reward.py", "nan", "not finite").leaves_no_checkpoint()


def test_a_reward_function_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = reward_file(tmp_path, "import time\n" + SIGNATURE + "    time.sleep(60)\n")
    overrides = (own, "reward_model.timeout_s=0.5", "data.train_batch_size=2", "reward_model.num_workers=4")
    Failure(tmp_path / "run", capsys, *overrides).names(
        "4 × timed out after reward_model.timeout_s=0.5 s"
    ).leaves_no_checkpoint()


def test_a_reward_file_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = reward_file(tmp_path, "def compute_score(:\n")
    Failure(tmp_path / "run", capsys, own).names(
        "custom_reward_function.path=", "SyntaxError", "my_reward.py:1"
    ).leaves_nothing()


def test_failures_later_in_a_run_leave_what_was_learned_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight answers are scored, the next eight fail."""
    count = tmp_path / "count"
    body = f"    with open({str(count)!r}, 'a+') as calls:\n        calls.write('x')\n"
    own = reward_file(
        tmp_path, SIGNATURE + body + f"    assert len(open({str(count)!r}).read()) <= 8\n    return 1.0\n"
    )
    directory = tmp_path / "run"
    Failure(directory, capsys, own, "trainer.save_freq=-1", steps=2).names(
        "8 × AssertionError", f"Stopped after step 1, saved in {directory / 'global_step_1'}"
    )
    assert sorted(path.name for path in directory.glob("global_step_*")) == ["global_step_1"]
    assert not list(directory.glob(".writing-*"))


def test_a_reward_that_fails_only_sometimes_is_counted_and_left_out_of_the_baseline(tmp_path: Path) -> None:
    """Two prompts, four answers each. Of a prompt's four scores, 1 2 and 6, one failed: the mean of those that did not
    is 3, so rloo gives 3/2 × (score − 3) = −3, −1.5 and 4.5, and the failed answer teaches nothing. A failure counted
    as 0 would make the baselines smaller and the advantages −5/3, −1/3, 5 and −3.
    """
    turns = tmp_path / "turns"
    own = reward_file(
        tmp_path,
        SIGNATURE
        + f"    folder = {str(turns)!r}\n"
        + "    import os\n"
        + "    os.makedirs(folder, exist_ok=True)\n"
        + "    name = os.path.join(folder, str(extra_info['prompt']))\n"
        + "    with open(name, 'a') as seen:\n"
        + "        seen.write('x')\n"
        + "    return [1.0, None, 2.0, 6.0][os.path.getsize(name) - 1]\n",
    )
    rows = [{**ROW, "prompt": f"{number}+1=", "extra_info": {"prompt": number}} for number in (1, 2)]
    directory, dumps = tmp_path / "run", tmp_path / "answers"
    train(
        directory,
        1,
        *RLOO,
        own,
        f"data.train_files={parquet(tmp_path / 'train.parquet', rows)}",
        f"trainer.rollout_data_dir={dumps}",
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.ignore_eos=True",  # eight tokens each: every answer weighs the same
        "reward_model.max_failed_share=0.25",
    )
    [record] = records(directory)
    assert record["reward/failed"] == 2
    assert record["critic/score/mean"] == pytest.approx(3.0)
    assert record["critic/advantages/max"] == pytest.approx(4.5)
    assert record["critic/advantages/min"] == pytest.approx(-3.0)
    assert record["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    dumped = [json.loads(line) for line in (dumps / "1.jsonl").read_text().splitlines()]
    assert sorted(row["score"] for row in dumped if row["score"] is not None) == [1, 1, 2, 2, 6, 6]
    assert all("returned None" in row["reason"] for row in dumped if row["score"] is None)
    assert (directory / "global_step_1").is_dir()


def test_rejection_without_a_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Failure(tmp_path / "run", capsys, "algorithm.rollout_correction.rollout_rs=token").names(
        "algorithm.rollout_correction.rollout_rs=token needs algorithm.rollout_correction.rollout_rs_threshold"
    ).leaves_nothing()


def test_dynamic_sampling_that_finds_nothing_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = reward_file(tmp_path, SIGNATURE + "    return 1.0\n")
    keys = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=2")
    Failure(tmp_path / "run", capsys, own, *keys).names(
        "algorithm.filter_groups.max_num_gen_batches=2: after so many rounds only 0 of 4 groups"
    ).leaves_no_checkpoint()


def test_dynamic_sampling_needs_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("algorithm.adv_estimator=reinforce_plus_plus", "actor_rollout_ref.rollout.n=1")
    Failure(tmp_path / "run", capsys, *keys, "algorithm.filter_groups.enable=True").names(
        "algorithm.filter_groups.enable=True", "actor_rollout_ref.rollout.n=1"
    ).leaves_nothing()


def test_an_over_long_buffer_longer_than_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Failure(tmp_path / "run", capsys, "reward_model.overlong_buffer.enable=True").names(
        "reward_model.overlong_buffer.len=128 is more than data.max_response_length=8"
    ).leaves_nothing()


def test_validation_without_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = parquet(tmp_path / "train.parquet", [ROW] * 4)
    Failure(tmp_path / "run", capsys, f"data.train_files={file}", "trainer.test_freq=1").names(
        "trainer.test_freq=1 needs validation prompts", "set data.val_files=FILE"
    ).leaves_nothing()


def test_dropout_has_no_place_in_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Failure(tmp_path / "run", capsys, "+actor_rollout_ref.model.override_config.attention_dropout=0.1").names(
        "actor_rollout_ref.model.override_config.attention_dropout=0.1"
    ).leaves_nothing()


def test_a_failure_in_validation_does_not_cost_what_was_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = reward_file(tmp_path, SIGNATURE + "    assert extra_info['split'] == 'train'\n    return 1.0\n")
    directory = tmp_path / "run"
    Failure(directory, capsys, own, "trainer.test_freq=1", "trainer.save_freq=-1").names(
        "AssertionError", f"Stopped after step 1, saved in {directory / 'global_step_1'}"
    )


@pytest.mark.parametrize("key", ["no_such_option", "temperature"])
def test_an_argument_that_generate_does_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    keys = ("actor_rollout_ref.rollout.name=hf", f"+actor_rollout_ref.rollout.engine_kwargs.{key}=3")
    Failure(tmp_path / "run", capsys, *keys).names(
        f"actor_rollout_ref.rollout.engine_kwargs={{'{key}': 3}}: generate() of transformers refuses them"
    ).leaves_no_checkpoint()
