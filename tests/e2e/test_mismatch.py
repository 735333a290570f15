"""Whole runs in which the rollout engine generates with the trainer's weights, and with others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.runs.run_folder import RunFolder
from tests.e2e import run_cases
from tests.e2e.runs import records, train

ON_POLICY = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
BYPASS = ("algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=True")  # two updates in each step


def warnings_of(run: Path) -> list[dict[str, object]]:
    """Without the notices of its start."""
    events = RunFolder(run).events
    return [event for event in events if event["event"] == "warning" and event["kind"] != "notice"]


@pytest.fixture
def wrong_weights() -> Iterator[None]:
    with run_cases.wrong_weights():
        yield


@pytest.mark.parametrize("keys", [ON_POLICY, BYPASS], ids=["on-policy", "bypass"])
def test_wrong_weights_in_the_engine_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong_weights: None, keys: tuple[str, ...]
) -> None:
    train(tmp_path, 3, *keys)
    healthy, wrong, _ = (record["rollout_corr/k3_kl"] for record in records(tmp_path))
    assert 0 <= healthy < 1e-8 and wrong > 0.02
    [event] = warnings_of(tmp_path)
    assert event["step"] == 2 and event["value"] == pytest.approx(wrong)
    assert event["engine_versions"] == [1] and event["trainer_version"] == 1
    assert capsys.readouterr().out.count("trainer.rollout_mismatch_warning=0.01") == 1


# a CPU without bfloat16 arithmetic takes twenty times as long for it
SHORT = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "data.max_response_length=6")


@pytest.mark.parametrize(("dtype", "steps"), [("float32", 2), ("bfloat16", 1)])
def test_a_healthy_run_has_the_figure_in_every_step_and_no_warning(tmp_path: Path, dtype: str, steps: int) -> None:
    train(tmp_path, steps, "algorithm.adv_estimator=rloo", f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}", *SHORT)
    figures = [record["rollout_corr/k3_kl"] for record in records(tmp_path)]
    assert len(figures) == steps and max(figures) < 1e-3
    assert warnings_of(tmp_path) == []
