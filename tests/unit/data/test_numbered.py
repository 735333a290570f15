"""The directory of a run: named by model, algorithm and data, and numbered where it holds another run."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rloom.api.config import changed
from rloom.config.load import experiment_name, load_config, load_sft_config
from rloom.errors import ConfigError
from rloom.launch.directory import claimed, directory_of
from rloom.runs.records import EventLog
from tests.ranks import forkserver

BASE = "checkpoints/rloom_examples/embedded_gae_embedded"
METRICS = "metrics.jsonl"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(*keys: str) -> str:
    """A run with these keys, of one step; its directory."""
    with claimed(load_config(keys)) as config:
        directory = Path(config.trainer.default_local_dir)
        (directory / METRICS).write_text('{"step": 1}\n')
    assert config.trainer.experiment_name == directory.name
    assert config.reward_model.api.cache_dir == f"{directory}/judge_cache"
    return str(directory)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("Qwen/Qwen2.5-0.5B-Instruct", "gae", "/home/me/data/gsm8k/train.parquet"), "qwen2.5-0.5b-instruct_gae_gsm8k"),
        (("/models/My model/", "own.py:best", ["a/gsm8k/train.parquet", "a/sums.jsonl"]), "my-model_best_gsm8k-sums"),
        (("embedded", "rloo", "<python>"), "embedded_rloo_python"),
        (("m", "sft", "train.parquet"), "m_sft_train"),
        (("模" * 80, "gae", "d" * 80), f"{'模' * 20}_gae_{'d' * 60}"),  # 60 bytes each
    ],
)
def test_a_run_is_named_by_model_algorithm_and_data(parts: tuple[str, str, str], name: str) -> None:
    assert experiment_name(*parts) == name


def test_of_sft_the_algorithm_is_sft() -> None:
    assert load_sft_config().trainer.default_local_dir == "checkpoints/rloom_sft/embedded_sft_embedded"


def test_another_training_has_another_number_and_the_same_one_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert trained() == BASE
    assert trained("algorithm.gamma=0.9") == f"{BASE}-2"
    assert f"{BASE}-2: {BASE} holds a run with algorithm.gamma=1.0" in caplog.text
    assert trained("algorithm.gamma=0.9", "algorithm.lam=0.5") == f"{BASE}-3"
    assert f"{BASE}-3: {BASE}-2 holds a run with algorithm.lam=0.95" in caplog.text  # the most similar one
    assert trained("trainer.critic_warmup=1") == f"{BASE}-4"
    longer = ("trainer.total_epochs=9", "trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.logger=tensorboard")
    passes = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", "critic.ppo_micro_batch_size_per_gpu=2")
    memory = ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "data.val_max_samples=3", *passes)
    assert trained(*longer, *memory) == BASE
    assert trained("algorithm.gamma=0.9", "trainer.save_freq=2") == f"{BASE}-2"


def test_inputs_in_the_directory_of_another_run_are_read_there() -> None:
    saved = f"{trained()}/global_step_8"
    start = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved}",
        f"critic.model.path={saved}/critic",
    )
    with claimed(load_config(["algorithm.gamma=0.9", *start, f"trainer.rollout_data_dir={BASE}/answers"])) as config:
        assert (config.trainer.resume_from_path, config.critic.model.path) == (saved, f"{saved}/critic")
        assert config.trainer.rollout_data_dir == f"{BASE}-2/answers"


def test_a_validation_reads_the_run_that_exists() -> None:
    with claimed(load_config(["trainer.val_only=True"])):
        pass
    assert not Path(BASE, "config.yaml").exists()  # it is no run
    assert [trained(), trained("algorithm.gamma=0.9")] == [BASE, f"{BASE}-2"]
    for keys, directory in (
        (("algorithm.gamma=0.9",), f"{BASE}-2"),
        (("data.max_response_length=64",), BASE),
    ):
        with claimed(load_config([*keys, "trainer.val_only=True"])) as config:
            assert config.trainer.default_local_dir == directory


def test_a_run_that_the_user_names_is_not_numbered() -> None:
    for name in ("trainer.experiment_name=mine", "trainer.default_local_dir=mine/run"):
        for keys in ([name], [name, "algorithm.gamma=0.9"]):
            with claimed(load_config(keys)) as config:
                assert config.trainer.default_local_dir in ("checkpoints/rloom_examples/mine", "mine/run")
    numbered = load_config(["trainer.experiment_name=mine", "trainer.number_runs=True"])
    assert numbered.numbers_runs and not load_config(["trainer.number_runs=False"]).numbers_runs


def test_a_directory_in_which_nothing_was_trained_is_used_again() -> None:
    with pytest.raises(ZeroDivisionError), claimed(load_config()):
        assert Path(BASE, "config.yaml").is_file()
        raise ZeroDivisionError
    assert not Path(BASE).exists()
    Path(BASE, "logs").mkdir(parents=True)  # a run that was killed
    with claimed(load_config()):
        pass
    assert trained("algorithm.gamma=0.9") == BASE


def test_every_machine_finds_the_directory_of_machine_0() -> None:
    trained()
    machines = ["trainer.nnodes=2", "trainer.master_addr=10.0.0.1", "algorithm.gamma=0.9"]
    other = load_config([*machines, "trainer.node_rank=1"])
    assert directory_of(other) == Path(f"{BASE}-2").absolute()  # also before machine 0 has started
    trained("algorithm.lam=0.5")  # another run takes that number
    with claimed(load_config(machines)) as config:
        assert config.trainer.default_local_dir == f"{BASE}-3"
        assert directory_of(other) == Path(f"{BASE}-3").absolute()


def test_a_changed_configuration_has_the_name_of_what_it_trains() -> None:
    config = changed(load_config(), {"algorithm.adv_estimator": "rloo"})
    assert config.trainer.default_local_dir == "checkpoints/rloom_examples/embedded_rloo_embedded"
    assert config.reward_model.api.cache_dir == f"{config.trainer.default_local_dir}/judge_cache"
    own = load_config(["actor_rollout_ref.model.path=some/model"])
    rloo = changed(own, {"algorithm.adv_estimator": "rloo"})
    answers = [
        each.actor_rollout_ref.rollout.n for each in (own, rloo, changed(rloo, {"algorithm.adv_estimator": "gae"}))
    ]
    assert answers == [1, 5, 1]  # as each of them has without a number


def hold(folder: Path, gamma: float, ready: Any, found: Any, done: Any) -> None:
    os.chdir(folder)
    os.environ.pop("RLOOM_SMOKE", None)  # the process that forks may have been started by a test with it
    ready.wait()
    try:
        with claimed(load_config([f"algorithm.gamma={gamma}"])) as config:
            found.put(config.trainer.default_local_dir)
            done.wait()
    except ConfigError as error:
        found.put(type(error).__name__)


def test_commands_that_start_at_the_same_moment_do_not_share_a_directory(tmp_path: Path) -> None:
    """Three different ones, and one of them twice: the second of the two is told that the first is running."""
    context = forkserver()
    all_run = (context.Barrier(4), context.Queue(), context.Event())
    processes = [context.Process(target=hold, args=(tmp_path, gamma, *all_run)) for gamma in (0.7, 0.8, 0.9, 0.9)]
    for process in processes:
        process.start()
    _, found, done = all_run
    directories = sorted(found.get(timeout=240) for _ in processes)
    done.set()
    for process in processes:
        process.join()
    assert directories == ["DirectoryInUse", BASE, f"{BASE}-2", f"{BASE}-3"]


def ended(directory: str, *, steps: int, total_steps: int) -> None:
    events = EventLog(Path(directory, "events.jsonl"))
    events.write("run", step=0, total_steps=total_steps, host="here", pid=1)
    for step in range(1, steps + 1):
        events.write("step", step=step, metrics={"step": step})


def test_other_machines_continue_a_run_until_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    eight = ("trainer.n_gpus_per_node=8",)
    ended(trained(), steps=1, total_steps=2)
    assert directory_of(load_config(eight)) == Path(BASE).absolute()
    ended(BASE, steps=2, total_steps=2)
    assert directory_of(load_config([*eight, "trainer.total_epochs=9"])) == Path(BASE).absolute()  # it trains on
    assert directory_of(load_config(["trainer.save_freq=5"])) == Path(BASE).absolute()
    assert trained(*eight) == f"{BASE}-2"
    assert f"{BASE}-2: {BASE} holds a run with trainer.n_gpus_per_node=1" in caplog.text
    assert (trained(*eight), trained()) == (f"{BASE}-2", BASE)


def test_other_rows_in_the_same_file_are_another_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def directory(content: str, *keys: str) -> str:
        with claimed(load_config(keys), content) as config:
            found = config.trainer.default_local_dir
            Path(found, METRICS).write_text('{"step": 1}\n')
            Path(found, "identity.json").write_text(json.dumps({"rows": content}))
        return found

    assert [directory("a"), directory("a"), directory("b"), directory("a")] == [BASE, BASE, f"{BASE}-2", BASE]
    assert f"{BASE}-2: {BASE} holds a run with data.train_files=other rows in the same files" in caplog.text
    Path(BASE, "identity.json").write_text("{}")  # of an earlier version
    assert directory("c") == BASE
    # a machine that joins does not read the rows: they decide nothing
    assert directory("d", "trainer.nnodes=2", "trainer.master_addr=10.0.0.1") == BASE


def test_the_older_key_of_a_micro_batch_is_no_other_run() -> None:
    sizes = ("actor_rollout_ref.actor.ppo_micro_batch_size=4", "critic.ppo_micro_batch_size=4")
    assert (trained(), trained(*sizes)) == (BASE, BASE)
