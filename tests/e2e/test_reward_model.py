"""Runs whose reward is a reward model: it is learned from, wherever it runs, and a resumed run computes the same."""

import json
import os
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray reads it when it is imported

from rloom.launch.build import evaluate_checkpoint
from tests.classifiers import save_random_policy, save_share_counter
from tests.e2e.runs import command, records, same, train, weights

# every letter and digit, with digits between the letters: a token each
LIKED = "1".join(string.ascii_letters) + string.digits
SHORT = ("data.max_prompt_length=40", "data.max_response_length=8")
OWN = ("timing_s/", "perf/")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A policy that answers at random, and a reward model that prefers letters and digits."""
    policy, reward = (tmp_path_factory.mktemp(name) for name in ("policy", "reward"))
    save_random_policy(policy)
    save_share_counter(reward, LIKED)
    return f"actor_rollout_ref.model.path={policy}", f"reward_model.path={reward}", *SHORT


def scores(directory: Path) -> list[float]:
    return [record["critic/score/mean"] for record in records(directory)]


def numbers(directory: Path) -> list[dict[str, float]]:
    return [{key: value for key, value in one.items() if not key.startswith(OWN)} for one in records(directory)]


def test_ppo_learns_what_a_reward_model_prefers(models: tuple[str, ...], tmp_path: Path) -> None:
    train(
        tmp_path,
        8,
        *models,
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "critic.optim.lr=0.01",
        "trainer.save_freq=-1",
    )
    first, *_, last = scores(tmp_path)
    # 62 of 360 tokens at first; a share of 0.17 gives √8 · 0.17 / √(0.17² + 0.83²) = 0.57
    assert 0.2 < first < 0.7
    assert last > 2 * first


STEPS = (
    "algorithm.adv_estimator=gae",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.optim.lr=0.001",
)


@pytest.fixture(scope="module")
def alone(models: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    train(directory, 3, *models, *STEPS)
    return directory


def test_a_resumed_run_gets_the_same_scores_bit_for_bit(models: tuple[str, ...], alone: Path, tmp_path: Path) -> None:
    train(tmp_path, 1, *models, *STEPS)
    train(tmp_path, 3, *models, *STEPS)
    assert numbers(tmp_path) == numbers(alone)
    assert same(weights(tmp_path, 3), weights(alone, 3))


def test_scores_are_normalised_by_the_moments_that_the_model_has_saved(
    models: tuple[str, ...], alone: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(models[1].removeprefix("reward_model.path="), tmp_path / "reward")
    file = copied / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mean": 0.5, "std": 0.25}))
    keys = (f"reward_model.path={copied}", "reward_model.model.normalize=True")
    train(tmp_path / "run", 1, models[0], *models[2:], *keys, *STEPS)
    assert scores(tmp_path / "run") == pytest.approx([(scores(alone)[0] - 0.5) / 0.25], abs=1e-5)


def test_a_checkpoint_is_evaluated_with_the_reward_model(alone: Path) -> None:
    found = evaluate_checkpoint(alone / "global_step_3", ["data.val_files=embedded", "data.val_max_samples=4"]).metrics
    # between a share of 0 and of 1; the rules would give 0 or 1 to each answer
    assert all(0 <= value <= 8**0.5 + 1e-5 for value in found.values())
    assert any(value not in (0.0, 1.0) for value in found.values())


def test_a_reward_model_without_head_ends_the_run_with_the_reason(
    models: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = models[0].partition("=")[2]
    assert command(tmp_path, 1, models[0], f"reward_model.path={policy}", *SHORT) == 2
    assert f"reward_model.path={policy}: the checkpoint has no score.weight" in capsys.readouterr().err


@pytest.fixture
def with_workers(tmp_path: Path) -> Callable[..., Path]:
    def run(workers: int, *overrides: str) -> Path:
        train(tmp_path / "workers", 3, *overrides, f"trainer.n_gpus_per_node={workers}")
        return tmp_path / "workers"

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "pools",
    [
        ("trainer.pools.reward=1",),
        (),
        pytest.param(("trainer.pools.rollout=[0,1]", "trainer.pools.reward=[2,3]"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_workers_get_the_scores_of_one_process(
    models: tuple[str, ...], alone: Path, with_workers: Callable[..., Path], pools: tuple[str, ...]
) -> None:
    together = with_workers(4 if len(pools) == 2 else 2, *models, *STEPS, *pools)
    assert scores(together) == pytest.approx(scores(alone), rel=1e-4)
    for one, other in zip(numbers(together), numbers(alone), strict=True):
        assert one["critic/score/max"] == pytest.approx(other["critic/score/max"], rel=1e-4)
