"""`rloom doctor gpus`, over gloo on the CPU."""

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloom import cli
from rloom.doctor.machine import gpus
from rloom.doctor.machine.gpus import COLLECTIVES, CheckedItem, CheckFailed, Runs, check_collectives
from rloom.engines import collectives
from rloom.engines.collectives import Rank
from rloom.errors import WorkerError
from tests.run_directories import write_run


@pytest.mark.slow
def test_each_collective_is_right_and_after_one_that_fails_the_others_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "COLLECTIVES", {**COLLECTIVES, "no such collective": print, "never tried": print})
    *works, fails = [replace(item, seconds=0.0) for item in check_collectives([], 2)]
    assert works == [CheckedItem(name, 0.0, None) for name in ("process group", *COLLECTIVES)]
    # it fails on both ranks; the one that answers first is named
    assert fails.fault in [f"rank {rank} failed: KeyError: 'no such collective'" for rank in range(2)]


def runs_with(folder: Path, *norms: float) -> Runs:
    runs = Runs(folder, on_gpu=False)
    for name, norm in zip(("one process", "two"), norms, strict=True):
        steps = {step: {"actor/grad_norm": norm if step == 2 else 1.0, "perf/mfu": norm} for step in (1, 2, 3)}
        write_run(runs.place(name), {}, steps)
    return runs


def test_metrics_beyond_rounding_are_a_fault_that_names_step_metric_and_both_numbers(tmp_path: Path) -> None:
    runs_with(tmp_path / "near", 1.0, 1.004).compare("two", "one process")
    with pytest.raises(CheckFailed, match=r"^step 2: actor/grad_norm is 1\.006, in 'one process' 1\.0$"):
        runs_with(tmp_path / "apart", 1.0, 1.006).compare("two", "one process")


def test_a_run_that_fails_is_a_fault_with_its_error(tmp_path: Path) -> None:
    runs = Runs(tmp_path, on_gpu=False)
    runs.log("two").write_text("step 1\nrloom: no room\nlast line\n")
    with pytest.raises(CheckFailed, match=r"^the run ended with 3: rloom: no room \(.*two\.log\)$"):
        runs.finish("two", subprocess.Popen(["sh", "-c", "exit 3"]))
    assert runs.finish("two", subprocess.Popen(["true"])).startswith("step 1\n")


def test_a_run_that_does_not_begin_again_after_a_kill_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_with(tmp_path, 1.0, 1.0)
    monkeypatch.setattr(Runs, "start", lambda *given: subprocess.Popen(["true"]))
    runs.log("two").touch()
    with pytest.raises(CheckFailed, match="did not begin again"):
        runs.train_with_a_kill("two", (), "one process")
    runs.log("two").write_text("Restart 1 of 3\n")
    runs.train_with_a_kill("two", (), "one process")


def test_a_run_that_hangs_before_its_first_checkpoint_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(gpus, "RUN_S", 0.1)
    monkeypatch.setattr(Runs, "start", lambda *given: process)
    runs = Runs(tmp_path, on_gpu=False)
    runs.log("two").touch()
    with pytest.raises(CheckFailed, match=r"the run has not ended after 0 s"):
        runs.train_with_a_kill("two", (), "one process")
    assert process.wait() == -signal.SIGKILL


def test_a_step_or_a_metric_that_only_one_run_has_is_a_fault(tmp_path: Path) -> None:
    runs = Runs(tmp_path, on_gpu=False)
    for name, last, metrics in (("whole", 3, {"a": 1.0}), ("short", 2, {"a": 1.0}), ("more", 3, {"a": 1.0, "b": 0.0})):
        write_run(runs.place(name), {}, dict.fromkeys(range(1, last + 1), metrics))
    for name, expected in (("short", "whole"), ("short", "short")):
        with pytest.raises(CheckFailed, match=r"^2 steps instead of"):
            runs.compare(name, expected)
    for name, expected in (("more", "whole"), ("whole", "more")):
        with pytest.raises(CheckFailed, match=r"step 1: b is"):
            runs.compare(name, expected)


def test_a_rank_with_another_result_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.rank = 1
    monkeypatch.setattr(collectives, "COLLECTIVES", {"sum": lambda rank: (torch.tensor([[1.0], [3.0]]), [1.0, 2.0])})
    with pytest.raises(WorkerError, match=r"rank 1 has \[1\.0, 3\.0\] instead of \[1\.0, 2\.0\]"):
        rank.check("sum")


@pytest.mark.parametrize("fault", [None, "apart"])
def test_the_exit_code_counts_and_the_folder_stays_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str | None
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(gpus, "mkdtemp", lambda prefix: str(folder))
    monkeypatch.setattr(gpus, "check_collectives", lambda *given: iter([CheckedItem("all-reduce", 0.5, None)]))
    monkeypatch.setattr(gpus, "check_runs", lambda *given, on_gpu: iter([CheckedItem("FSDP2", 2.0, fault)]))
    assert gpus.run("gloo", as_json=True) == (fault is not None) == folder.exists()
    assert [item["fault"] for item in json.loads(capsys.readouterr().out)["checks"]] == [None, fault]


def test_nccl_without_two_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["doctor", "gpus", "--backend", "nccl"]) == 2
    assert "--backend nccl: this process sees 0 GPUs, and NCCL needs two or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "some/run", "--backend", "gloo"])
    assert "--backend is a flag of `rloom doctor gpus`" in capsys.readouterr().err


@pytest.mark.long
def test_all_checks_pass_over_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "gpus", "--backend", "gloo", "--json"]) == 0, capsys.readouterr().out
