"""The checks accept any run: metrics that are missing, now and then or always, and values of any size.
Healthy runs of many kinds get no certain finding, and messages are translated."""

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.history import ROLLOUT, History
from rloom.doctor.run.live import live_message
from rloom.language import to_chinese
from tests.unit.doctor.histories import EPISODES, FAULTY, KEYS, critic_of_the_step, of_the_step

NAMES = (
    *of_the_step(1),
    *critic_of_the_step(1),
    *EPISODES,
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


# Healthy runs

VALIDATION = "val-core/gsm8k/acc/mean@1"


def learning_curve(random: Random, saturated: bool, steps: int) -> list[float]:
    """Share of right answers by step: it rises fast or slowly, early or late, or is at the top from the first step."""
    if saturated:
        level = random.uniform(0.97, 1.0)
        return [level] * steps
    first, gain, time = random.uniform(0.15, 0.5), random.uniform(0.2, 0.4), random.uniform(8, steps / 2)
    return [first + gain * (1 - math.exp(-step / time)) for step in range(steps)]


def a_healthy_history(
    random: Random, *, n: int, low: float, high: float, saturated: bool, validates: bool, steps: int
) -> History:
    """Scores are means of `64 * n` answers that are right or wrong; each prompt has its own difficulty."""
    estimator, prompts, width = random.choice(["grpo", "rloo", "gae"]), 64, high - low
    share, length, slope = learning_curve(random, saturated, steps), random.uniform(50, 600), random.uniform(-0.5, 1.5)
    records = []
    if validates:
        records.append({"step": 0.0, VALIDATION: max(0.0, share[0] + random.gauss(0, 0.01))})
    norm, entropy = random.uniform(0.05, 3), 5e-4 if saturated else random.uniform(0.2, 0.8)
    for step in range(1, steps + 1):
        p = min(1.0, max(0.0, random.gauss(share[step - 1], 0.5 / math.sqrt(prompts * min(n, 8)))))
        values = of_the_step(step) | {
            "critic/score/mean": low + width * p,
            "critic/score/min": high if p == 1 else low,
            "critic/score/max": high,
            "critic/score/std": width * math.sqrt(p * (1 - p)),
            "reward/acc": p,
            "rollout/equal_groups": min(1.0, 0.3 * (1 - p) + p**n + (1 - p) ** n),
            "actor/entropy": entropy * (1 - 0.5 * step / steps),
            "actor/grad_norm": norm * random.lognormvariate(0, 0.3),
            "actor/ppo_kl": abs(random.gauss(5e-4, 3e-4)),
            "actor/kl_loss": min(0.05, 1e-3 * step),
            "response_length/mean": length * (1 + slope * step / steps) * random.lognormvariate(0, 0.02),
        }
        if estimator == "gae":
            values |= critic_of_the_step(step) | {"critic/values/mean": low + width * p}
        if validates and step % 10 == 0:
            values[VALIDATION] = min(1.0, max(0.0, share[step - 1] + random.gauss(0, 0.01)))
        records.append({**values, "step": float(step)})
    keys: dict[str, Any] = {"algorithm.adv_estimator": estimator, "algorithm.lam": 1.0, f"{ROLLOUT}.n": n}
    return History(records, {**KEYS, **keys})


@pytest.mark.parametrize("saturated", [False, True], ids=["learns", "saturated"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 100.0)])
@pytest.mark.parametrize("n", [2, 64])
def test_a_healthy_run_gets_no_certain_finding(n: int, low: float, high: float, saturated: bool) -> None:
    random = Random(f"{n}/{low}/{high}/{saturated}")
    for number in range(50):
        found = a_healthy_history(
            random, n=n, low=low, high=high, saturated=saturated, validates=number % 2 == 0, steps=60
        )
        for last in (10, 20, 40, 61):
            certain = [f for f in diagnose(History(found.metrics[:last], found.config)) if f.certain]
            assert not certain, (number, last, certain)


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
