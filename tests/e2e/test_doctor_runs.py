"""`rloom doctor` on real runs of the embedded model: twenty with a planted fault each, and five healthy ones.

The runs of `LONG` are in `make test-long`, because all of them take two minutes. docs/measurements/commands.md has
their results.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloom.doctor.run.live import LiveDiagnosis
from rloom.doctor.run.report import Report
from rloom.runs.records import Event
from rloom.runs.run_folder import RunFolder
from tests.e2e.faulty_runs import FAULTY, HEALTHY, RunCase, run

LONG = {
    *("model without attention", "four passes over each batch", "KL without weight, high learning rate"),
    *("learning rate 25 times too high", "critic with a learning rate of 1e-10", "reward function keeps memory"),
    *(
        "reward function returns 0",
        "reward function returns 0.5",
        "reward for short answers",
        "slow reward function",
        "temperature of 0.01",
    ),
    *("learning rate of 1e-10", "lam of 0.3", "rewards of 5,000, not normalised"),
    *("reward depends on the prompt alone", "reward for the format"),
    *("gae", "rloo", "reinforce_plus_plus", "dapo"),
}


def parameters(cases: Any) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in cases]


def diagnosed(case: RunCase, directory: Path) -> tuple[list[str], list[Event]]:
    """Kinds of the findings, and the warnings of the run while it ran."""
    folder = RunFolder(run(case, directory))
    found = [finding.kind for finding in Report.of(folder).findings]
    return found, [event for event in folder.events if event["event"] == "warning"]


def test_there_are_twenty_faulty_runs_and_five_healthy_ones() -> None:
    assert len(FAULTY) == 20 and len({case.finding for case in FAULTY.values()}) == 20 and len(HEALTHY) == 5
    assert {*FAULTY, *HEALTHY} >= LONG


@pytest.mark.parametrize("name", parameters(FAULTY))
def test_the_planted_fault_is_named_first(tmp_path: Path, name: str) -> None:
    found, warnings = diagnosed(FAULTY[name], tmp_path)
    if FAULTY[name].finding in ("answers_cut", "repetition") and found[0] == "reward_zero":
        found = found[1:]  # no answer is complete, so none scores
    assert found[:1] == [FAULTY[name].finding]
    kinds = [event["kind"] for event in warnings if event["kind"] != "nonfinite_updates"]  # one for each step
    assert len(set(kinds)) == len(kinds), "each kind once"


@pytest.mark.parametrize("name", parameters(HEALTHY))
def test_nothing_is_wrong_with_a_healthy_run(tmp_path: Path, name: str) -> None:
    assert diagnosed(HEALTHY[name], tmp_path) == ([], [])


def test_a_running_run_warns_of_what_is_certain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(FAULTY["reward function returns 0"], steps=10)
    found, [warning] = diagnosed(case, tmp_path)
    assert found == ["reward_zero"]
    assert warning["kind"] == "diagnosis/reward_zero" and warning["step"] == 10
    assert warning["finding"]["steps"] == [1, 10]
    printed = capsys.readouterr().out
    assert "Warning: Every reward is 0: nothing to learn from: critic/score/max is 0 in all 10 steps" in printed
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
    keys = {"trainer.val_before_train": True, "data.val_max_samples": 4, "trainer.resume_mode": "auto"}
    validated = RunCase(None, keys, steps=2)
    run(validated, tmp_path)
    run(replace(validated, steps=3), tmp_path)
    assert added == [[(0, True)], [(0, True), (1, False), (2, False)]]
