"""The checks accept any run: metrics that are missing, now and then or always, and values of any size."""

from random import Random

from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.history import History
from tests.unit.doctor.test_diagnosis import KEYS, critic_of_the_step, of_the_step

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
