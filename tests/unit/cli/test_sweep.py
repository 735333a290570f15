"""`rloom sweep`: which runs it makes, that it goes on after a failure, and what it does not run again."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloom import cli
from rloom.cli import sweep
from rloom.cli.sweep import SweptRun, combinations, overrides, read_axes, train_once
from rloom.config.load import load_config
from rloom.interrupts import deferred_interrupt
from tests.run_directories import write_run

ACCURACY = "val-core/sums/acc/mean@1"


def chosen(given: list[str], *, random: int | None = None, seed: int = 0) -> list[dict[str, str]]:
    axes, fixed = read_axes(given, [])
    settings: Any = SimpleNamespace(random=random, seed=seed)
    return [dict(run.chosen) for run in combinations(axes, fixed, Path("runs"), settings)]


def test_the_grid_has_every_combination_in_order() -> None:
    assert chosen(["lr=1e-5,1e-6", "n=4,8", "data.seed=7"]) == [
        {"lr": "1e-5", "n": "4"},
        {"lr": "1e-5", "n": "8"},
        {"lr": "1e-6", "n": "4"},
        {"lr": "1e-6", "n": "8"},
    ]
    assert chosen(["data.train_files=[a,b],[c]"]) == [{"data.train_files": "[a,b]"}, {"data.train_files": "[c]"}]


def test_short_names_become_keys_with_what_follows_and_each_run_has_its_folder() -> None:
    axes, fixed = read_axes(["lr=1e-5,1e-6"], ["batch=16", "algorithm=grpo", "+data.seed=3"])
    settings: Any = SimpleNamespace(random=None, seed=0)
    first, second = combinations(axes, fixed, Path("my runs"), settings)
    assert first.keys == {
        "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
        "data.train_batch_size": "16",
        "algorithm.adv_estimator": "grpo",
        "data.seed": "3",
        "actor_rollout_ref.actor.optim.lr": "1e-5",
        "trainer.default_local_dir": "'my runs/lr-1e-5'",
    }
    assert second.folder == Path("my runs/lr-1e-6")


def test_random_values_depend_on_seed_and_number_alone_and_are_uniform_by_logarithm() -> None:
    few = chosen(["lr=1e-6..1e-4", "n=2..16", "seed=1,2"], random=3, seed=0)
    many = chosen(["lr=1e-6..1e-4", "n=2..16", "seed=1,2"], random=200, seed=0)
    assert many[:3] == few and chosen(["lr=1e-6..1e-4"], random=3, seed=1) != chosen(
        ["lr=1e-6..1e-4"], random=3, seed=0
    )
    rates = [float(run["lr"]) for run in many]
    assert 1e-6 <= min(rates) < 2e-6 and 5e-5 < max(rates) <= 1e-4
    assert sum(rate < 1e-5 for rate in rates) / len(rates) == pytest.approx(0.5, abs=0.1)
    assert {int(run["n"]) for run in many} <= set(range(2, 17)) and {run["seed"] for run in many} == {"1", "2"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lr=1e-5"], "no key has several values; write them with commas"),
        (["lr=1e-6..1e-4"], "lr: a range needs --random N"),
        (["lr=1e-4..1e-6", "--random", "2"], "the smaller one first"),
        (["lr=a..b", "n=2,4"], "optim.lr='a..b'"),  # not a range: a path may have two dots
        (["lr=1e-5,1e-6", "--random", "0"], "--random 0: use 1 or more"),
        (["lrr=1,2"], "lrr: there is no such key"),
        (["lr"], "'lr' is not a key=value pair"),
        (["lr=1,2", "--", "actor_rollout_ref.actor.optim.lr=3"], "lr has several values and one"),
        (["lr=1,2", "actor_rollout_ref.actor.optim.lr=3,4"], "optim.lr is given twice, as lr and as actor"),
        (["lr=1,2", "n=4", "--", "actor_rollout_ref.rollout.n=8"], "rollout.n is given twice, as n and as actor"),
        (["lr=1,2", "output_dir=mine"], "output_dir: each run of a sweep has a folder of its own; --dir DIR"),
        (["n=4,0"], "n=0: .*rollout.n=0"),  # checked before the first run begins
    ],
)
def test_a_wrong_sweep_is_refused_before_a_run_begins(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "train_all", lambda runs, folder: pytest.fail("a run begins"))
    assert cli.main(["sweep", *arguments]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_failed_run_does_not_end_the_sweep_finished_ones_are_kept_and_the_best_is_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "C")
    started: list[str] = []
    results = {"1e-4": 0.25, "2e-4": None, "4e-4": 0.75}

    def train_once(run: SweptRun) -> int:
        rate = run.keys["actor_rollout_ref.actor.optim.lr"]
        started.append(rate)
        value = results[rate]
        steps = {} if value is None else {1: {ACCURACY: value, "critic/score/mean": 0.5}}
        write_run(run.folder, {}, steps, end="failed" if value is None else "finished", total_steps=1)
        return 2 if value is None else 0

    monkeypatch.setattr(sweep, "train_once", train_once)
    command = ["sweep", "lr=1e-4,2e-4,4e-4", "--dir", "runs", "--", "steps=1"]
    assert cli.main(command) == 1 and started == ["1e-4", "2e-4", "4e-4"]
    said = capsys.readouterr().out
    assert "Run 2 of 3 failed, with exit code 2; the sweep goes on." in said
    table = [line.split()[0] for line in said.splitlines() if line.startswith("lr=")]
    assert table == ["lr=4e-4", "lr=1e-4", "lr=2e-4"]
    assert "rloom compare runs/lr-4e-4 runs/lr-1e-4 runs/lr-2e-4" in said and "rloom view runs" in said
    results["2e-4"] = 0.5
    started.clear()
    assert cli.main(command) == 0 and started == ["2e-4"]
    assert json.loads(Path("runs/sweep.json").read_text()) == {"trainer.total_training_steps": "1"}
    assert cli.main([*command[:-1], "steps=2"]) == 2
    assert (
        "runs holds a sweep with another trainer.total_training_steps (1); use another --dir" in capsys.readouterr().err
    )


def runs_of(given: list[str], folder: str = "runs") -> list[SweptRun]:
    settings: Any = SimpleNamespace(random=None, seed=0)
    return list(combinations(*read_axes(given, []), Path(folder), settings))


def test_a_key_by_its_full_name_sets_no_other() -> None:
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    full, short = (runs_of([f"{name}=16,32"])[0].keys for name in ("data.train_batch_size", "batch"))
    assert mini_batch not in full and short[mini_batch] == "4"
    assert runs_of(["batch=16,32", f"{mini_batch}=8"])[0].keys[mini_batch] == "8"


def test_every_run_has_another_folder_also_with_an_apostrophe() -> None:
    runs = runs_of(["model=a/b,a-b"], "Ada's runs")
    assert len({run.folder for run in runs}) == 2 and runs[1].folder.name == "model-a-b"
    for run in runs:
        assert load_config(overrides(run)).trainer.default_local_dir == str(run.folder)


@pytest.mark.parametrize(
    ("number", "usual"),
    [
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),  # in the background of a shell
    ],
)
def test_a_signal_to_the_sweep_ends_its_run(
    number: signal.Signals, usual: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import os, signal, time; os.kill(os.getppid(), {int(number)}); time.sleep(600)"
    monkeypatch.setattr(sweep, "child_command", lambda *arguments: [sys.executable, "-c", program])
    begun, before = time.monotonic(), signal.signal(signal.SIGINT, usual)
    try:
        assert train_once(SweptRun({}, {}, tmp_path)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 300


def test_signals_of_a_scheduler_of_torchrun_and_of_the_sweep_are_one_interrupt_and_ctrl_c_twice_is_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, now, before = list[int](), [0.0], [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("rloom.interrupts.time", SimpleNamespace(monotonic=lambda: now[0]))
    with deferred_interrupt(told.append):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # torchrun sends a second SIGTERM
            signal.raise_signal(number)
        assert told == [signal.SIGTERM]
        now[0] = 2.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    with deferred_interrupt(told.append), pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_is_a_process_whose_exit_code_counts(tmp_path: Path) -> None:
    assert train_once(SweptRun({}, {"data.sed": "1"}, tmp_path)) == 2
