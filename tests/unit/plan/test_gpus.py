"""Which GPUs a process sees, and how many of them a run takes."""

import pickle
from pathlib import Path

import pytest

from rloom import gpus
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.from_checkpoint import config_text, load_saved
from rloom.config.frontends.smoke import Available, replacements
from rloom.config.load import load_config, load_sft_config, with_changes
from rloom.errors import ConfigError
from rloom.gpus import Gpu, choose, device_names, smallest_memory, visible_gpus
from rloom.launch import early_checks

GIB = 2**30
FOUR = tuple(Gpu(number, f"GPU-{letter}1", 80 * GIB) for number, letter in enumerate("abcd"))
OWN = "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct"


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "present_gpus", lambda: FOUR)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("2, 0", [2, 0]),
        ("0,-1,2", [0]),  # as CUDA: what follows an invalid name is not visible
        ("0,9,1", [0]),
        ("0,1,2,3,4", [0, 1, 2, 3]),
        ("GPU-c1,GPU-a", [2, 0]),  # a UUID, and the beginning of one
        ("GPU-e", []),
        ("MIG-1,MIG-2", [0, 1]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(names: str | None, chosen: list[int]) -> None:
    assert [gpu.number for gpu in choose(FOUR, names)] == chosen


def test_without_nvml_the_drivers_device_files_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([Path(f"/dev/nvidia{n}") for n in range(4)]))
    monkeypatch.setattr(gpus, "present_gpus", gpus.present_gpus.__wrapped__)
    assert len(visible_gpus({})) == 4
    assert len(visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})) == 2
    assert smallest_memory({}) is None


def test_the_memory_of_unequal_gpus_counts_only_if_it_is_certain_which_are_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "present_gpus", lambda: (*FOUR, Gpu(4, "GPU-e", 24 * GIB)))
    assert smallest_memory({}) is None
    assert smallest_memory({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == 24 * GIB
    assert smallest_memory({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}) == 80 * GIB
    assert smallest_memory({"CUDA_VISIBLE_DEVICES": ""}) is None


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ([OWN], 4),
        ([OWN, "trainer.nnodes=2", "trainer.master_addr=10.0.0.1"], 8),
        ([OWN, "trainer.n_gpus_per_node=2"], 2),
        ([OWN, "trainer.device=cpu"], 1),
        ([], 1),  # the embedded model
    ],
)
def test_a_model_of_the_users_own_takes_all_visible_gpus(four_gpus: None, keys: list[str], workers: int) -> None:
    assert load_config(keys).workers == workers


def test_supervised_training_takes_them_as_well(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_sft_config(["model.path=Qwen/Qwen2-7B"]).workers == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert load_sft_config(["model.path=Qwen/Qwen2-7B"]).workers == 2
    assert load_sft_config([]).workers == 1


def test_a_worker_has_the_number_of_the_whole_run(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(load_config([OWN]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # what Ray sets for a worker
    assert pickle.loads(sent).workers == 4


def test_a_saved_configuration_has_the_number_and_is_read_in_one_process(four_gpus: None, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_text(load_config([OWN])))
    assert "n_gpus_per_node: 4" in (tmp_path / "config.yaml").read_text()
    assert load_saved(tmp_path).workers == 1


def test_an_error_about_the_number_of_workers_names_its_source(four_gpus: None) -> None:
    wrong = load_config([OWN, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2",
                         "actor_rollout_ref.actor.ppo_micro_batch_size=2"])  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check(wrong, declared_needs(wrong))
    micro, source = str(caught.value).splitlines()
    assert "=2 (samples of all GPUs together) does not divide among 4 GPUs; use 4, or" in micro
    assert source == "The run has 4 GPUs (all visible; trainer.n_gpus_per_node sets another number)"


def test_several_gpus_of_one_machine_need_no_ray_and_several_machines_do(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_checks, "find_spec", lambda name: None)
    early_checks.check_extras(load_config([OWN]))
    for keys in (["trainer.nnodes=2"], ["trainer.backend=ray"], ["+ray_kwargs.ray_init.address=auto"]):
        with pytest.raises(ConfigError, match=r"need Ray, which is not installed: .*ray"):
            early_checks.check_extras(load_config([OWN, *keys]))


def test_each_worker_gets_one_of_the_chosen_gpus(four_gpus: None) -> None:
    assert device_names({}) == ["0", "1", "2", "3"]
    assert device_names({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ["3", "1"]
    assert device_names({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_the_first_line_says_how_many(four_gpus: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    early_checks.announce_run(load_config([OWN]), "1.0")
    [line] = caplog.messages
    assert "answers a step · 4 GPUs (all visible; trainer.n_gpus_per_node sets another number) · checkpoints/" in line


def test_a_smoke_run_on_two_visible_gpus_has_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model, which it trains, takes one GPU unless a number is given."""
    monkeypatch.setattr(gpus, "present_gpus", lambda: FOUR[:2])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    available = Available(gpus=2, installed=lambda package: False, environment={})
    config = load_config([OWN, "data.train_files=x.parquet", "trainer.pools.rollout=1"])
    small = with_changes(config, replacements(config, available))
    check(small, declared_needs(small))
    assert (small.workers, small.trainer.pools.own) == (2, {"rollout": 1})
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.setattr("rloom.config.frontends.smoke.find_spec", lambda name: object())
    shared = load_sft_config(["model.path=Qwen/Qwen2-7B", "engine.ulysses_sequence_parallel_size=2"])
    assert (shared.workers, shared.engine.ulysses_sequence_parallel_size) == (2, 2)


def fault(*keys: str) -> str | None:
    try:
        early_checks.check_gpus(load_config([OWN, *keys]))
    except ConfigError as error:
        return str(error)
    return None


def test_more_gpus_than_visible_are_refused(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "trainer.n_gpus_per_node=8: 8 GPUs are needed, this machine shows"
    assert fault("trainer.n_gpus_per_node=8") == f"{few} 4"
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert fault("trainer.n_gpus_per_node=8") == f"{few} 2 (CUDA_VISIBLE_DEVICES=0,1)"
    assert fault("trainer.n_gpus_per_node=4") is None
    assert fault("trainer.n_gpus_per_node=8", "trainer.device=cpu") is None


def test_gpus_elsewhere_or_of_another_kind_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "present_gpus", lambda: ())
    monkeypatch.setattr(gpus, "UNCOUNTED", ())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    eight = "trainer.n_gpus_per_node=8"
    assert "this machine shows no GPU" in str(fault(eight))
    assert "this machine shows no GPU" in str(fault(eight, "trainer.backend=ray"))
    assert fault("trainer.n_gpus_per_node=1") is None and fault() is None
    assert fault(eight, "+ray_kwargs.ray_init.address=10.0.0.1:6379") is None  # a cluster
    monkeypatch.setattr(gpus, "UNCOUNTED", ("/dev/null",))  # as /dev/kfd of an AMD GPU
    assert fault(eight) is None and fault("trainer.device=cuda") is None


def test_workers_on_the_cpu_are_called_so_in_the_first_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    early_checks.announce_run(load_config([OWN, "trainer.n_gpus_per_node=4", "trainer.device=cpu"]), "1.0")
    assert "answers a step · 4 workers on the CPU · checkpoints/" in caplog.messages[0]
