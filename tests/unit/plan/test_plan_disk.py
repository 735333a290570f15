"""The disk of a run: sizes of checkpoints and answers, what `rloom train` refuses, and what it warns of."""

import logging
from pathlib import Path

import pytest
from safetensors import safe_open

from rloom.config.load import load_config, load_sft_config
from rloom.errors import ConfigError
from rloom.launch.early_checks import check_disk, check_sft_disk
from rloom.models.source import EMBEDDED_FOLDER
from rloom.plan import disk
from rloom.plan.disk import DiskPlan, SavedRole, disk_plan

MIB = 1024**2
ACTOR = "actor_rollout_ref.actor"
GRPO = (
    "algorithm.adv_estimator=grpo",
    "trainer.save_freq=10",
    "trainer.log_rollouts=False",
    "trainer.max_actor_ckpt_to_keep=null",
)


def weights() -> int:
    """Numbers of the embedded model, by its file."""
    with safe_open(EMBEDDED_FOLDER / "model" / "model.safetensors", "pt") as tensors:
        sizes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118  # no mapping
    return sum(size[0] * (size[1] if len(size) > 1 else 1) for size in sizes)


def planned(*keys: str, steps: int | None = 100, critic: bool = False, saved: int = 0) -> DiskPlan:
    return disk_plan(load_config(keys), Path("/"), steps, critic=critic, saved=saved)


def test_a_checkpoint_has_float32_weights_and_two_moments_of_them() -> None:
    numbers = weights()
    assert planned(*GRPO).checkpoint_bytes == 12 * numbers
    assert planned(*GRPO, f"{ACTOR}.checkpoint.save_contents=[model]").checkpoint_bytes == 4 * numbers
    assert planned(*GRPO, f"{ACTOR}.checkpoint.save_contents=[model,hf_model]").checkpoint_bytes == 8 * numbers
    both = planned("trainer.save_freq=10", critic=True).roles
    assert both["actor"].bytes == 12 * numbers
    assert 0 < both["critic"].bytes <= 12 * numbers + 4096  # a head of one number in place of the vocabulary's


def test_an_adapter_is_saved_without_the_weights_below_it() -> None:
    adapter = planned(*GRPO, "actor_rollout_ref.model.lora_rank=4")
    assert 0 < adapter.checkpoint_bytes < planned(*GRPO).checkpoint_bytes / 5


@pytest.mark.parametrize(
    ("keys", "steps", "saved", "saves", "together"),
    [
        ((), 100, 0, 10, 10),
        ((), 101, 0, 11, 11),  # the last step is always saved
        ((), 100, 4, 6, 6),  # it goes on from the fourth
        (("trainer.save_freq=-1",), 100, 0, 1, 1),
        (("trainer.max_actor_ckpt_to_keep=2",), 100, 0, 10, 3),  # a new one is complete before an old one is removed
        (("trainer.max_actor_ckpt_to_keep=2",), 10, 0, 1, 1),
        ((), None, 0, None, 1),
    ],
)
def test_checkpoints_of_a_run(
    keys: tuple[str, ...], steps: int | None, saved: int, saves: int | None, together: int
) -> None:
    found = planned(*GRPO, *keys, steps=steps, saved=saved)
    assert found.saves == saves
    assert found.all_bytes == together * found.checkpoint_bytes


def test_answers_take_at_most_their_limit() -> None:
    sizes = ("data.train_batch_size=64", "actor_rollout_ref.rollout.n=4", "data.max_response_length=100")
    own = ("algorithm.adv_estimator=grpo", *sizes)
    assert planned(*own, steps=10).answer_bytes == 10 * 64 * 4 * 100 * 16
    small = (*own, "trainer.log_rollouts_gb=0.001")  # a step has a 32nd of it at most
    assert planned(*small, steps=10).answer_bytes == 10 / 32 * 0.001 * 1024**3
    assert planned(*small, steps=100).answer_bytes == 0.001 * 1024**3
    assert planned(*own, "trainer.log_rollouts_gb=null", steps=10**6).answer_bytes == 10**6 * 64 * 4 * 100 * 16


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 11 * MIB)
    return monkeypatch


def test_a_disk_that_cannot_hold_one_checkpoint_is_refused(free: pytest.MonkeyPatch) -> None:
    config = load_config(["trainer.save_freq=1"])
    with pytest.raises(ConfigError) as refused:
        check_disk(config, 2048, critic=True)
    folder = Path("checkpoints/rloom_examples/embedded_gae_embedded").absolute()
    assert str(refused.value) == (
        f"trainer.default_local_dir={folder}: a checkpoint of this run takes 19.1 MiB (actor 9.6 MiB, critic 9.6 MiB), "
        "and 11.0 MiB are free there; make room, choose another directory, or save the weights alone: "
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]"
    )
    with pytest.raises(ConfigError, match=r"takes 19\.1 MiB, .*trainer\.checkpoint\.save_contents"):
        free.setattr(disk, "role_bytes", lambda *given: 19.1 * MIB)
        check_sft_disk(load_sft_config(), 2048)


def test_a_disk_that_cannot_hold_all_checkpoints_is_a_note(
    free: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config([*GRPO, "data.train_batch_size=64", "trainer.total_epochs=1"])
    check_disk(config, 2048, critic=False)
    [note] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "this run writes up to 38.2 MiB (38.2 MiB of checkpoints, 0.0 MiB of answers), and 11.0 MiB are free" in note
    assert "trainer.max_actor_ckpt_to_keep=1 keeps the newest checkpoint only" in note
    caplog.clear()
    free.setattr(disk, "free_bytes", lambda folder: None)  # a file system that does not tell
    check_disk(config, 2048, critic=False)
    assert not caplog.records


def test_a_role_that_is_kept_in_fewer_checkpoints() -> None:
    assert [SavedRole(5, kept).together(4) for kept in (None, 1, 4, 9)] == [20, 10, 20, 20]
