"""Another run in the same folder is never continued by mistake; the same run with other settings is."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from rloom.models.source import EMBEDDED_FOLDER
from rloom.training import checkpoint as checkpoints
from tests.e2e.runs import command, train, weights

ROWS = 16
GAE = (
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "trainer.save_freq=-1",
    "data.val_max_samples=2",
    "trainer.test_freq=1",
)


def write_data(file: Path, first: int) -> Path:
    """So many rows of the embedded set, from `first` on."""
    pq.write_table(pq.read_table(EMBEDDED_FOLDER / "train.parquet").slice(first, ROWS), file)
    return file


def own_data(file: Path) -> str:
    return f"data.train_files={file}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of gae with save_freq=-1, in `run`; the data and the model beside it."""
    folder = tmp_path_factory.mktemp("trained")
    data = own_data(write_data(folder / "train.parquet", 0))
    shutil.copytree(EMBEDDED_FOLDER / "model", folder / "model")
    model = f"actor_rollout_ref.model.path={folder / 'model'}"
    train(folder / "run", 1, *GAE, data, model, "data.val_files=embedded")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def go_on(folder: Path, steps: int, *overrides: str) -> int:
    """The same command with some keys changed. The data and the model have moved with the copy: content counts."""
    data, model = own_data(folder / "train.parquet"), f"actor_rollout_ref.model.path={folder / 'model'}"
    return command(folder / "run", steps, *GAE, data, model, "data.val_files=embedded", *overrides)


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert go_on(folder, 2, *overrides) == 2
    assert sorted(folder.rglob("*")) == before
    said = capsys.readouterr().err
    assert f"{folder / 'run' / 'global_step_1'} is of another run, which this one does not continue: " in said
    assert "choose another trainer.default_local_dir, or add trainer.resume_mode=disable" in said
    return said


def test_without_save_freq_the_last_model_is_left_behind(trained: Path) -> None:
    assert weights(trained / "run", 1)
    identity, copy = (trained / "run" / place / "identity.json" for place in ("", "global_step_1"))
    assert identity.read_text() == copy.read_text()
    assert json.loads(identity.read_text())["data"]["rows"] == ROWS


def test_other_data_with_as_many_rows_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(folder / "train.parquet", ROWS)
    said = refused(folder, capsys)
    assert "the training data is another: 16 rows, now 16 rows with other content" in said


def test_one_other_answer_is_other_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    answer = rows[-1].get("reward_model", rows[-1])
    answer["ground_truth"] = "-1"
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    assert "the training data is another" in refused(folder, capsys)


def change_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor + 0.5 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})


def test_another_model_of_the_same_shape_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(folder / "model", folder / "other"))
    change_weights(other)
    said = refused(folder, capsys, f"actor_rollout_ref.model.path={other}")
    assert "actor_rollout_ref.model.path was " in said and f"is {other}, which is another model" in said
    change_weights(folder / "model")
    said = refused(folder, capsys)
    assert f"is {folder / 'model'}, which is another model" in said


def test_another_estimator_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(folder, capsys, "algorithm.adv_estimator=grpo")
    assert "the checkpoint has a critic, which this run would drop" in said
    assert "algorithm.adv_estimator was gae, is grpo" in said
    assert "Changed keys: " in said and "algorithm.adv_estimator: gae -> grpo" in said


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "loss_mode was vanilla, is gspo"),
        ("actor_rollout_ref.model.lora_rank=4", "LoRA was off, is {'rank': 4, 'alpha': 16"),
        ("data.seed=5", "data.seed was 1, is 5"),
        ("data.shuffle=False", "data.shuffle was True, is False"),
        ("data.train_max_samples=8", "the training data is another: 16 rows, now 8 rows"),
        ("actor_rollout_ref.model.override_config={rope_theta: 5.0}", "which is another model"),
    ],
)
def test_each_of_these_is_another_run(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    assert says in refused(folder, capsys, override)


def test_other_settings_go_on_and_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rate, lengths, batch, KL, loggers: the same run. What is there is read once."""
    read: Counter[Path] = Counter()
    digest = checkpoints.file_sha256

    def counted(file: Path) -> str:
        read[file] += 1
        return digest(file)

    monkeypatch.setattr(checkpoints, "file_sha256", counted)
    capsys.readouterr()
    keys = (
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "data.max_response_length=9",
        "data.train_batch_size=2",
        "algorithm.use_kl_in_reward=True",
    )
    assert go_on(folder, 2, *keys) == 0
    said = capsys.readouterr().out
    start = folder / "run" / "global_step_1"
    assert f"Going on from {start}" in said
    [notice] = [line for line in said.splitlines() if line.startswith("Changed since that checkpoint: ")]
    for change in (
        "KL to a reference was off, is on",
        "actor_rollout_ref.actor.optim.lr: 0.0002 -> 1e-05",
        "data.max_response_length: 8 -> 9",
        "data.train_batch_size: 4 -> 2",
        "trainer.total_training_steps: 1 -> 2",
    ):
        assert change in notice
    assert "rows" not in notice and "another" not in notice
    assert {count for file, count in read.items() if start in file.parents} == {1}
    assert f"Model: {folder / 'run' / 'global_step_2'}; as a Hugging Face folder: rloom export " in said
    state = json.loads((folder / "run" / "global_step_2" / "trainer_state.json").read_text())
    assert (state["stream"]["epoch"], state["stream"]["row"]) == (0, 4 + 2)
    # SMALL has val_before_train=False: the first validation was after the first step
    [accuracy] = [line for line in said.splitlines() if line.startswith("Held-out accuracy")]
    assert "at the start" not in accuracy and "after step 1, " in accuracy and " now, best " in accuracy
    [validation] = [line for line in said.splitlines() if line.startswith("step 2 · validation")]
    assert "(step 1 " in validation


def test_a_checkpoint_that_is_named_starts_a_run_on_other_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(folder / "other.parquet", ROWS)
    start = folder / "run" / "global_step_1"
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}")
    where = (f"trainer.default_local_dir={folder / 'next'}", own_data(folder / "other.parquet"))
    capsys.readouterr()
    assert go_on(folder, 2, *named, *where, "algorithm.adv_estimator=grpo") == 0
    said = capsys.readouterr().out
    assert "the training data is another" in said and "the data is read from its beginning" in said
    assert "algorithm.adv_estimator was gae, is grpo" in said
    state = json.loads((folder / "next" / "global_step_2" / "trainer_state.json").read_text())
    assert (state["step"], state["stream"]["epoch"], state["stream"]["row"]) == (2, 0, 4)


def test_weights_are_compared_by_samples_of_large_files(tmp_path: Path) -> None:
    from rloom.models.fingerprint import weights_digest

    folders = [tmp_path / name for name in "abc"]
    for folder, change in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        numbers = torch.arange(3_000_000, dtype=torch.float32)
        save_file({"w": numbers + change, "v": torch.ones(3)}, folder / "model.safetensors")
    one, same_content, other = map(weights_digest, folders)
    assert one == same_content != other
