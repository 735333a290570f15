"""Kinds of rewards from outside rloom: of a file or an installed package, trained with, saved and refused."""

import json
from pathlib import Path

import pytest

from rloom.config.derived import reward_parts
from rloom.config.from_checkpoint import load_saved
from rloom.config.load import load_config
from rloom.errors import ConfigError
from tests.e2e.runs import records, train

KIND = """
from rloom.rewards.base import ScoringUnit
from rloom.rewards.kinds import RewardKind
from rloom.types import Score


class DigitReward:
    unit = ScoringUnit.ANSWER

    def __init__(self, digit):
        self.digit = digit

    async def score(self, groups):
        return [[Score(float(sample.response.count(self.digit))) for sample in group] for group in groups]

    def check(self): ...

    def metrics(self):
        return {"digit": float(self.digit)}

    def close(self): ...


THREES = RewardKind(parts=("digit_score",), build=lambda config: DigitReward("3"))
TAKEN = RewardKind(parts=("rm_score",), build=lambda config: DigitReward("3"))
"""
GRPO, DUMP = "algorithm.adv_estimator=grpo", "trainer.rollout_data_dir"
MIX = ("reward_model.composite.enable=True", "+reward_model.composite.weights.rule_score=0.5")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "digit_kind.py").write_text(KIND)
    return tmp_path / "digit_kind.py"


def answers(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for step in (1, 2) for line in (folder / f"{step}.jsonl").read_text().splitlines()]


def test_a_kind_of_a_users_file_scores_the_answers_of_a_run(tmp_path: Path, file: Path) -> None:
    run, dump = tmp_path / "run", tmp_path / "dump"
    train(run, 2, GRPO, f"reward_model.kinds=['{file}:THREES']", f"{DUMP}={dump}")
    found = answers(dump)
    assert [row["score"] for row in found] == [float(str(row["output"]).count("3")) for row in found]
    assert max(float(str(row["score"])) for row in found) > 0
    assert [step["reward/digit"] for step in records(run)] == [3.0, 3.0]
    # a checkpoint is not trusted to run that file
    checkpoint = next(run.glob("**/global_step_2"))
    with pytest.raises(ConfigError, match=r"reward_model\.kinds=.*digit_kind\.py:THREES.*not trusted"):
        load_saved(checkpoint)


def test_a_kind_of_an_installed_package_is_a_part_of_a_mix(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "digits-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: digits\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rloom.reward_kinds]\nthrees = digit_kind:THREES\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run, dump = tmp_path / "run", tmp_path / "dump"
    weights = (*MIX, "+reward_model.composite.weights.digit_score=0.25")
    train(run, 2, GRPO, "reward_model.kinds=[threes]", *weights, f"{DUMP}={dump}")
    found = answers(dump)
    threes = [str(row["output"]).count("3") for row in found]
    assert [row["digit_score"] for row in found] == threes
    assert [row["score"] for row in found] == [
        0.5 * float(str(row["rule_score"])) + 0.25 * count for row, count in zip(found, threes, strict=True)
    ]
    [rule, own] = reward_parts(load_config(["reward_model.kinds=[threes]", *weights]))
    assert (rule.source, own.source, own.weight) == ("rules", "threes", 0.25)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ("[nothing]", r"reward_model.kinds=nothing: no installed package registers it \(rloom.reward_kinds\)"),
        ("['FILE:DigitReward']", "DigitReward is a type; use a RewardKind"),
        ("['FILE:TAKEN']", "TAKEN computes the part rm_score; choose a name that no other reward has"),
        ("['FILE:ABSENT']", "has no 'ABSENT'; it has"),
    ],
)
def test_what_is_no_kind_is_named_with_the_way_out(file: Path, kinds: str, message: str) -> None:
    config = load_config([f"reward_model.kinds={kinds.replace('FILE', str(file))}"])
    with pytest.raises(ConfigError, match=message):
        reward_parts(config)
