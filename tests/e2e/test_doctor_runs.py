"""`rloom doctor` on real runs of the embedded model: `ill_runs.py` has the ill ones with a planted fault each, and the
healthy ones. Those of `QUICK` are in `make test`, all with several seeds in `make test-long`.
docs/measurements/commands.md has their results.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloom.doctor.run import numerics
from rloom.doctor.run.finding import Finding
from rloom.doctor.run.live import LiveDiagnosis
from rloom.doctor.run.report import Report
from rloom.runs.records import Event
from rloom.runs.run_folder import RunFolder
from rloom.trainer.main_ppo import main
from tests.e2e.ill_runs import HEALTHY, ILL
from tests.e2e.run_cases import RunCase, follow_first_advice, learned, run
from tests.e2e.unseen_runs import RUNS as UNSEEN
from tests.e2e.unseen_runs import command

QUICK = {"grpo, 6 steps"}  # one ill run is in `test_a_running_run_warns_of_what_is_certain`
SEEDS = (1, 2, 3)


def parameters(cases: Any) -> list[Any]:
    """(name, seed). Those of `make test` do not try the advice."""
    return [
        pytest.param(name, seed, marks=() if name in QUICK and seed == 1 else pytest.mark.long, id=f"{name}-{seed}")
        for name in cases
        for seed in SEEDS
    ]


def diagnosed(case: RunCase, directory: Path, seed: int = 1) -> tuple[list[Finding], list[Event]]:
    """Findings, and the warnings of the run while it ran."""
    folder = RunFolder(run(case, directory, seed))
    found = list(Report.of(folder).findings)
    return found, [event for event in folder.events if event["event"] == "warning" and event["kind"] != "notice"]


def test_there_are_enough_ill_and_healthy_runs() -> None:
    assert len(ILL) >= 60 and len(HEALTHY) >= 30
    assert {*ILL, *HEALTHY} >= QUICK


@pytest.mark.parametrize(("name", "seed"), parameters(ILL))
def test_the_planted_fault_is_named_first_and_the_first_advice_helps(tmp_path: Path, name: str, seed: int) -> None:
    case, directory = ILL[name], tmp_path / "run"
    found, warnings = diagnosed(case, directory, seed)
    first = found[0]
    told = " ".join([*first.evidence, *first.causes[:1], *map(str, first.advice[:1])])
    assert first.kind in case.kinds and case.names in told, (first, [finding.kind for finding in found])
    kinds = [event["kind"] for event in warnings if event["kind"] != "nonfinite_updates"]  # one for each step
    assert len(set(kinds)) == len(kinds), "each kind once"
    is_quick = name in QUICK and seed == 1
    if case.learns and not is_quick and first.kind != "unusual_keys":  # with a note the run learns
        assert learned(case, follow_first_advice(case, first, directory, seed)), first.advice[0]


@pytest.fixture
def of_any_duration(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Which stage takes long is not looked at: one pause of the machine is a large share of so short a run."""
    return lambda: monkeypatch.setattr(numerics, "SHORTEST_S", math.inf)


@pytest.mark.parametrize(("name", "seed"), parameters(HEALTHY))
def test_nothing_is_wrong_with_a_healthy_run(
    tmp_path: Path, of_any_duration: Callable[[], None], name: str, seed: int
) -> None:
    if name in QUICK and seed == 1:
        of_any_duration()
    assert diagnosed(HEALTHY[name], tmp_path, seed) == ([], [])


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run_", UNSEEN, ids=[one["name"] for one in UNSEEN])
def test_a_fault_that_was_planted_without_knowledge_of_the_checks_is_named_first(
    tmp_path: Path, run_: dict[str, Any], seed: int
) -> None:
    assert main(command(run_, tmp_path, seed)) == 0
    found = Report.of(RunFolder(tmp_path / "run")).findings
    if run_["healthy"]:
        assert not found
    else:
        told = json.dumps(found[0].as_json(), ensure_ascii=False).lower()
        assert any(name.lower() in told for name in run_["names"]), told


def test_a_running_run_warns_of_what_is_certain(
    tmp_path: Path, of_any_duration: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    of_any_duration()
    keys = {"trainer.total_training_steps": 10, "trainer.test_freq": -1, "trainer.val_before_train": False}
    small = {"data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
    [found], [warning] = diagnosed(ILL["reward 0"].with_keys({**keys, **small}), tmp_path)
    assert found.kind == "reward_zero"
    assert warning["kind"] == "diagnosis/reward_zero" and warning["step"] == 10
    assert warning["finding"]["steps"] == [1, 10]
    printed = capsys.readouterr().out
    assert "Warning: Every reward is 0: nothing to learn from: critic/score/max is 0 in all 10 steps" in printed
    assert "Likely cause: the reward function finds no answer in the text" in printed
    assert "Try: correct the reward function: `rloom reward try FILE`" in printed
    assert f"rloom doctor {tmp_path} has the evidence" in printed


def test_a_resumed_run_compares_with_its_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[list[tuple[int, bool]]] = []  # step, and whether it has an accuracy of validation

    class Recording(LiveDiagnosis):
        def add_history(self, records: Iterable[Mapping[str, float]]) -> None:
            known = list(records)
            accuracies = [any(name.startswith("val-core/") for name in record) for record in known]
            added.append([(int(record["step"]), has) for record, has in zip(known, accuracies, strict=True)])
            super().add_history(known)

    monkeypatch.setattr("rloom.launch.job.LiveDiagnosis", Recording)
    keys = {"data.val_max_samples": 4, "trainer.test_freq": -1, "trainer.resume_mode": "auto"}
    validated = RunCase(keys={**keys, "trainer.total_training_steps": 2})
    run(validated, tmp_path)
    run(replace(validated, keys={**keys, "trainer.total_training_steps": 3}), tmp_path)
    assert added == [[(0, True)], [(0, True), (1, False), (2, False)]]
