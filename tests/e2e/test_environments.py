"""The embedded model learns rloom's own environments: a supervised start, then GRPO."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloom.cli import checkpoints
from rloom.data.prepare import prepare
from rloom.trainer import main_ppo, sft_trainer
from tests.e2e.runs import records
from tests.unit.config.test_config_examples import EXAMPLES

SFT_STEPS, STEPS, GAMES = 40, 12, 16


@pytest.mark.long
def test_the_policy_begins_to_use_what_the_environment_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start mostly says 1, 1, 1. The rest of the way takes minutes: the next test."""
    monkeypatch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
    prepare("guess_number", tmp_path / "data", None)
    rows = f"data.train_files={tmp_path}/data/train.parquet"
    own = [
        "optim.lr=1e-3",
        "data.seed=1",
        f"trainer.total_training_steps={SFT_STEPS}",
        f"trainer.default_local_dir={tmp_path}/sft",
    ]
    assert sft_trainer.main([rows, "model.path=embedded", "trainer.test_freq=-1", *own]) == 0
    assert checkpoints.export([f"{tmp_path}/sft/global_step_{SFT_STEPS}", f"{tmp_path}/start"]) == 0
    keys = [
        "algorithm.adv_estimator=grpo",
        "data.seed=1",
        "data.train_batch_size=16",
        "data.max_response_length=96",
        f"actor_rollout_ref.model.path={tmp_path}/start",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.multi_turn.environment=guess_number",
        "actor_rollout_ref.rollout.multi_turn.max_environments=64",
        # games with each number: a step draws 16 numbers, and its mean score varies with them
        f"data.val_files={tmp_path}/data/test.parquet",
        f"actor_rollout_ref.rollout.val_kwargs.n={GAMES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "trainer.val_before_train=True",
        f"trainer.test_freq={STEPS}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={tmp_path}/grpo",
        "trainer.device=cpu",
    ]
    assert main_ppo.main([rows, *keys]) == 0
    key = f"val-core/rloom/guess_number/acc/mean@{GAMES}"
    before, after = [record[key] for record in records(tmp_path / "grpo") if key in record]
    assert after > before + 0.05


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["guess_number", "calculator"])
def test_the_examples_reach_80_percent(name: str, seed: int, tmp_path: Path) -> None:
    """Fixed guesses find 43 % of the numbers; the demonstrations, which a start repeats, 15 % of the products."""
    subprocess.run(
        ["bash", str(EXAMPLES / "environments" / f"run_{name}.sh"), "trainer.device=cpu"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), "SEED": str(seed)},
        cwd=tmp_path,
        check=True,
        timeout=3600,
    )
    key = f"val-core/rloom/{name}/acc/mean@1"
    found = [record[key] for record in records(tmp_path / "grpo") if key in record]
    assert found[0] < 0.4
    assert max(found[-2:]) >= 0.8
