"""The checks accept any run: metrics that are missing, now and then or always, and values of any size.
Their messages are translated."""

from pathlib import Path
from random import Random

import pytest

from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.history import History
from rloom.doctor.run.live import live_message
from rloom.language import to_chinese
from tests.unit.doctor.test_diagnosis import FAULTY, KEYS, critic_of_the_step, of_the_step

NAMES = (
    *of_the_step(1),
    *critic_of_the_step(1),
    *("actor/kl_loss", "actor/reward_kl_penalty", "reward/acc", "timing_s/testing", "train/loss"),
    "val-core/gsm8k/acc/mean@1",
)
ENDS = (
    [],
    [{"event": "end", "status": "RewardError"}],
    [{"event": "end", "status": "TrainingError", "message": "3 updates were not finite"}],
)


def a_history(random: Random) -> History:
    kept = [name for name in NAMES if random.random() < 0.7]
    scales = {name: random.choice([0.0, 1e-12, 1.0, 1.0, -1.0, 1e6]) for name in kept}
    records = []
    for step in range(1 + random.choice([0, 1, 4, 5, 8, 9, 12, 20])):
        sizes = {name: scales[name] * random.choice([0.0, 1.0, random.random(), step / 10]) for name in kept}
        records.append({**{name: size for name, size in sizes.items() if random.random() < 0.9}, "step": float(step)})
    estimator = random.choice(["gae", "grpo", "remax", "my_module:own"])
    keys = {**KEYS, "algorithm.adv_estimator": estimator} if random.random() < 0.8 else {}
    return History(records, keys, random.choice(ENDS))


def test_no_run_makes_a_check_fail() -> None:
    random = Random(1)
    found = {finding.kind for _ in range(500) for finding in diagnose(a_history(random))}
    assert len(found) > 15  # they were reached


# The message of a running run in Chinese


def test_the_report_of_a_running_run_in_chinese() -> None:
    (finding,) = diagnose(FAULTY["reward_falls"]())
    assert live_message(finding, Path("runs/p/e"), to_chinese).splitlines() == [
        "警告：奖励在到达峰值后下降：critic/score/mean（6 步平均）：第 12 步 0.555，第 20 步 0.375。",
        "可能的原因：学习率过高",
        "可尝试：actor_rollout_ref.actor.optim.lr=5e-07。",
        "rloom doctor runs/p/e 给出依据、原因和更多配置项。",
    ]


@pytest.mark.parametrize("kind", FAULTY)
def test_every_part_of_a_report_is_translated(kind: str) -> None:
    for finding in diagnose(FAULTY[kind]()):
        english, chinese = (live_message(finding, Path("runs/p/e"), to) for to in (str, to_chinese))
        assert chinese.startswith("警告：") and "Warning" not in chinese
        assert english.count("\n") == chinese.count("\n") and to_chinese(finding.title) in chinese
