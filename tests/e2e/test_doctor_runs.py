"""`rloom doctor` on real runs of the embedded model: twenty with a planted fault each, and five healthy ones.

The runs of `LONG` are in `make test-long`, because all of them take two minutes. docs/doctor.md has their results.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloom.diagnosis.report import Report
from rloom.observe.events import Event
from rloom.observe.run_folder import RunFolder
from tests.e2e.ill_runs import HEALTHY, ILL, Plant, run

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
    *("rloo", "reinforce_plus_plus", "dapo"),
}


def parameters(plants: Any) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in plants]


def diagnosed(plant: Plant, directory: Path) -> tuple[list[str], list[Event]]:
    """Kinds of the findings, and the warnings of the run while it ran."""
    folder = RunFolder(run(plant, directory))
    found = [finding.kind for finding in Report.of(folder).findings]
    return found, [event for event in folder.events if event["event"] == "warning"]


def test_there_are_twenty_ill_runs_and_five_healthy_ones() -> None:
    assert len(ILL) == 20 and len({plant.finding for plant in ILL.values()}) == 20 and len(HEALTHY) == 5
    assert {*ILL, *HEALTHY} >= LONG


@pytest.mark.parametrize("name", parameters(ILL))
def test_the_planted_fault_is_named_first(tmp_path: Path, name: str) -> None:
    found, warnings = diagnosed(ILL[name], tmp_path)
    assert found[:1] == [ILL[name].finding]
    assert len({event["kind"] for event in warnings}) == len(warnings), "each kind once"


@pytest.mark.parametrize("name", parameters(HEALTHY))
def test_nothing_is_wrong_with_a_healthy_run(tmp_path: Path, name: str) -> None:
    assert diagnosed(HEALTHY[name], tmp_path) == ([], [])


def test_a_running_run_warns_of_what_is_certain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant = replace(ILL["reward function returns 0"], steps=10)
    found, [warning] = diagnosed(plant, tmp_path)
    assert found == ["reward_zero"]
    assert warning["kind"] == "diagnosis/reward_zero" and warning["step"] == 10
    assert warning["finding"]["steps"] == [1, 10]
    printed = capsys.readouterr().out
    assert "Warning: The reward is always 0: critic/score/max is 0 in all 10 steps" in printed
    assert f"rloom doctor {tmp_path} has the evidence" in printed
