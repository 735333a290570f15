"""`rloom doctor gpus`, over gloo on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from rloom import cli
from rloom.doctor.machine import gpus
from rloom.doctor.machine.gpus import COLLECTIVES, CheckedItem, CheckFailed, Runs, check_collectives
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
