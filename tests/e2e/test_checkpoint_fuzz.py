"""Checkpoints that were damaged or forged: nothing in them runs, and each fault is an error that names it.

Whoever forges a file can write the seals anew, so every fault is tried with the old seals and with fresh ones.
"""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rloom.config.from_checkpoint import load_saved
from rloom.engines.storage import INDEX
from rloom.errors import CheckpointError, ConfigError, ModelError, RloomError
from rloom.launch.build import evaluate_checkpoint
from rloom.launch.directory import open_checkpoint
from rloom.launch.export import export
from rloom.launch.identity import IDENTITY_FILE, compare, read_identity
from rloom.launch.models import policy_engine, policy_network
from rloom.models.source import EMBEDDED_FOLDER
from rloom.runs.run_folder import CONFIG_FILE
from rloom.trainer import main_ppo
from rloom.training.checkpoint import SEAL, STATE, read_state, seal
from tests.e2e.runs import arguments, same, train, weights
from tests.unit.data.test_data_stream import stream

EVERYTHING = frozenset({"model", "optimizer"})
RLOO = ("algorithm.adv_estimator=rloo", "data.max_response_length=8", "data.train_max_samples=16")
ONE, SHARDS = "one process", "two ranks"


class Hostile:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def as_shards(folder: Path, kind: str) -> dict[str, Tensor]:
    """What one process saved, as two ranks would have: the format, made by hand."""
    tensors = load_file(folder / f"{kind}.safetensors")
    shards = folder / f"{kind}_shards"
    shards.mkdir()
    files: list[dict[str, Tensor]] = [{}, {}]
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        half = (len(tensor) + 1) // 2 if tensor.dim() else 1
        cuts = [(0, 0, half), (1, half, len(tensor))] if tensor.dim() and len(tensor) > 1 else [(0, 0, 1)]
        for rank, start, stop in cuts:
            files[rank][name] = tensor[start:stop] if tensor.dim() else tensor
        pieces = [{"file": f"rank_{rank}.safetensors", "start": start, "stop": stop} for rank, start, stop in cuts]
        entries[name] = {"shape": list(tensor.shape), "dtype": "F32", "pieces": pieces}
    for rank, held in enumerate(files):
        save_file(held, shards / f"rank_{rank}.safetensors")
    (shards / INDEX).write_text(json.dumps({"version": 1, "tensors": entries}))
    (folder / f"{kind}.safetensors").unlink()
    return tensors


def reseal(checkpoint: Path) -> None:
    (checkpoint / "actor" / SEAL).unlink(missing_ok=True)
    (checkpoint / "actor" / SEAL).touch()  # so that the outer seal leaves the folder to it
    for folder in (checkpoint / "actor", checkpoint):
        seal(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of a real run, and the same as two ranks would have saved it."""
    run = tmp_path_factory.mktemp("run")
    train(run, 1, *RLOO)
    one = run / "global_step_1"
    two = Path(shutil.copytree(one, tmp_path_factory.mktemp("shards") / "global_step_1"))
    for kind in ("model", "optimizer"):
        as_shards(two / "actor", kind)
    reseal(two)
    return {ONE: one, SHARDS: two}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rloom.training.checkpoint.sync", lambda path: None)


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Any:
    config = load_saved(checkpoints[ONE])
    return policy_engine(config, policy_network(config))


def resume(checkpoint: Path, engine: Any) -> None:
    """What `rloom train` does with a checkpoint before its next step, without the time that the rest of it takes."""
    open_checkpoint(checkpoint)
    compare(checkpoint, load_saved(checkpoint), read_identity(checkpoint), chosen=False)
    engine.load(checkpoint / "actor", EVERYTHING)
    stream(rows=16, batch_size=4).load(read_state(checkpoint)["stream"])


def names_in(checkpoint: Path, kind: str = ONE) -> list[str]:
    """Of the one with shards, what the other has not."""
    names = sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    return [name for name in names if kind == ONE or "_shards" in name]


OURS = (".safetensors", INDEX, STATE, IDENTITY_FILE, CONFIG_FILE)  # what a resume reads, beside the seals


@contextmanager
def changed(checkpoint: Path, name: str, content: bytes | None, *, fresh_seals: bool) -> Iterator[None]:
    """With another content of one file, None: without it. Put back in the end."""
    kept = {file: file.read_bytes() for file in (checkpoint / name, *checkpoint.rglob(SEAL))}
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    if fresh_seals:
        reseal(checkpoint)
    try:
        yield
    finally:
        for file, before in kept.items():
            file.write_bytes(before)


def flipped(content: bytes, chance: random.Random) -> bytes:
    """One bit; of a large file as often in its head as anywhere else."""
    bits = 8 * (len(content) if chance.random() < 0.5 else min(len(content), 2000))
    place = chance.randrange(bits)
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def faults(content: bytes, marker: Path, chance: random.Random) -> Iterator[bytes | None]:
    yield None
    yield b""
    yield pickle.dumps(Hostile(marker))
    yield content[: chance.randrange(len(content))]
    yield content + b"\0"
    yield (2**62).to_bytes(8, "little") + content[8:]  # of safetensors: the size of the header
    for _ in range(3):
        yield flipped(content, chance)


@pytest.mark.parametrize("kind", [ONE, SHARDS])
def test_what_does_not_match_its_seal_is_named(
    checkpoints: dict[str, Path], engine: Any, tmp_path: Path, kind: str
) -> None:
    checkpoint, chance = checkpoints[kind], random.Random(1)
    resume(checkpoint, engine)
    for name in names_in(checkpoint, kind):
        for content in faults((checkpoint / name).read_bytes(), tmp_path / "marker", chance):
            with changed(checkpoint, name, content, fresh_seals=False):
                with pytest.raises(CheckpointError) as caught:
                    open_checkpoint(checkpoint)
                said = str(caught.value)
                # a flipped bit in a seal may turn up as a file that does not match it
                assert str(checkpoint) in said and (name.endswith(SEAL) or name in said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [ONE, SHARDS])
def test_with_fresh_seals_a_resume_is_right_or_refused(
    checkpoints: dict[str, Path], engine: Any, tmp_path: Path, kind: str
) -> None:
    """Another number in a weight is a number; anything else is an error that names the file."""
    checkpoint, chance = checkpoints[kind], random.Random(2)
    refused = 0
    for name in (name for name in names_in(checkpoint, kind) if name.endswith(OURS)):
        for content in faults((checkpoint / name).read_bytes(), tmp_path / "marker", chance):
            with changed(checkpoint, name, content, fresh_seals=True):
                try:
                    resume(checkpoint, engine)
                except (CheckpointError, ConfigError) as error:
                    # of a rank's file the index may be named, which says what it should hold
                    said, part = str(error), "_shards" if "_shards" in name else Path(name).name
                    assert (str(checkpoint) in said and part in said) or "data position" in said, (name, said)
                    refused += 1
    assert refused > 30
    assert not list(tmp_path.iterdir())


def cut_short(name: str, content: bytes) -> bytes:
    """Half of it. Of YAML up to a key without its colon: a half that ends with a line is a configuration again."""
    half = len(content) // 2
    return content[: content.index(b":", half)] if name.endswith(".yaml") else content[:half]


@pytest.mark.parametrize("kind", [ONE, SHARDS])
def test_a_forged_checkpoint_is_not_run_by_eval_and_export(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Every file in turn a pickle, half of itself, or gone; the seals match."""
    checkpoint, marker, target = checkpoints[kind], tmp_path / "marker", tmp_path / "exported"
    for name in (name for name in names_in(checkpoint, kind) if not name.endswith(SEAL)):
        content = (checkpoint / name).read_bytes()
        for forged in (pickle.dumps(Hostile(marker)), cut_short(name, content), None):
            with changed(checkpoint, name, forged, fresh_seals=True):
                try:
                    export(checkpoint, target)
                except RloomError as error:
                    assert isinstance(error, CheckpointError | ConfigError | ModelError)
                    assert str(checkpoint) in str(error)
                else:  # not a file that an export needs, or one that a model can do without
                    assert not name.startswith(("actor/model", "config.yaml", STATE)), (name, forged)
                shutil.rmtree(target, ignore_errors=True)
                if name.endswith(OURS) and forged is not None and name != IDENTITY_FILE:
                    with pytest.raises((CheckpointError, ConfigError, ModelError)):
                        evaluate_checkpoint(checkpoint, ["data.val_max_samples=1"])
            assert not marker.exists()


def test_a_forged_checkpoint_is_not_run_by_train(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start = Path(shutil.copytree(checkpoints[SHARDS], run / "global_step_1"))
    for name in (".metadata", "index.json", "rank_0.safetensors"):  # the first was a pickle in earlier versions
        (start / "actor" / "optimizer_shards" / name).write_bytes(pickle.dumps(Hostile(tmp_path / "marker")))
    reseal(start)
    assert main_ppo.main(arguments(run, 2, *RLOO)) == 2
    assert f"{start / 'actor' / 'optimizer_shards'}" in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()


def test_python_files_in_a_checkpoint_are_not_run(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The command in the checkpoint's own folder. Files that no seal lists may be there."""
    checkpoint = Path(shutil.copytree(checkpoints[ONE], tmp_path / "global_step_1"))
    for name in (
        "asyncio",
        "types",
        "typing",
        "code",
        "random",
        "json",
        "torch",
        "numpy",
        "flash_attn",
        "usercustomize",
    ):
        (checkpoint / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'a').write(__name__)\n")
    command = [Path(sys.executable).with_name("rloom"), "eval", ".", "data.val_max_samples=2"]
    found = subprocess.run(command, cwd=checkpoint, capture_output=True, text=True)
    assert found.returncode == 0 and "val-aux/math_reasoning/failed: 0" in found.stdout, found.stderr
    assert not (tmp_path / "marker").exists()


def spoil(file: Path, name: str, value: float) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # not of the file that is replaced
    tensors[name].view(-1)[-1] = value
    file.unlink()
    save_file(tensors, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [ONE, SHARDS])
def test_weights_that_are_not_finite_are_named(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, value: float
) -> None:
    """Greedy decoding of NaN gives answers that score 0, which looks like a model that has not learned."""
    checkpoint = Path(shutil.copytree(checkpoints[kind], tmp_path / "global_step_1"))
    file = checkpoint / "actor" / ("model.safetensors" if kind == ONE else "model_shards/rank_1.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    spoil(file, name, value)
    reseal(checkpoint)
    for command in (lambda: evaluate_checkpoint(checkpoint), lambda: export(checkpoint, tmp_path / "exported")):
        with pytest.raises((ModelError, CheckpointError), match=rf"{checkpoint}.*{name}.* NaN or infinite numbers"):
            command()
    assert not (tmp_path / "exported").exists()


def test_a_run_does_not_start_from_weights_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(EMBEDDED_FOLDER / "model", tmp_path / "model"))
    spoil(model / "model.safetensors", "model.norm.weight", float("-inf"))
    keys = (f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=64")
    assert main_ppo.main(arguments(tmp_path / "run", 1, *RLOO, *keys)) == 2
    said = f"actor_rollout_ref.model.path={model}: model.norm.weight in the weights has NaN or infinite numbers"
    assert said in capsys.readouterr().err


def test_shards_made_by_hand_are_read_as_the_whole_they_were(checkpoints: dict[str, Path], engine: Any) -> None:
    engine.load(checkpoints[SHARDS] / "actor", EVERYTHING)
    whole = weights(checkpoints[ONE].parent, 1)
    assert same(dict(engine.masters), whole)
    saved = load_file(checkpoints[ONE] / "actor" / "optimizer.safetensors")
    assert same(engine.moments(), saved)
    assert sorted(saved) == sorted(f"{name}/{key}" for name in whole for key in ("exp_avg", "exp_avg_sq", "step"))


Change = Callable[[dict[str, Any]], None]


def first(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["model.embed_tokens.weight"]  # type: ignore[no-any-return]


def set_piece(number: int, **entries: Any) -> Change:
    return lambda content: first(content)["pieces"][number].update(entries)


FORGED: Mapping[str, tuple[Change, str]] = {
    "another version": (lambda content: content.update(version=2), "its version is 2"),
    "a file elsewhere": (set_piece(0, file="../../secret.safetensors"), "not the file of a rank"),
    "an absolute file": (set_piece(0, file="/etc/passwd"), "not the file of a rank"),
    "a hole": (set_piece(1, start=60), "do not follow row"),
    "an overlap": (set_piece(1, start=1), "do not follow row"),
    "a negative row": (set_piece(0, start=-1), "is not a size"),
    "absurd rows": (set_piece(1, stop=10**18), "rows of a tensor of shape"),
    "no number": (set_piece(0, start="0"), "is not a size"),
    "a fraction": (set_piece(0, start=0.5), "is not a size"),
    "no rows": (lambda content: first(content).update(pieces=[]), "hold 0 rows"),
    "an absurd shape": (lambda content: first(content).update(shape=[10**18, 10**18]), "rows of a tensor of shape"),
    "another dtype": (lambda content: first(content).update(dtype="BF16"), "is F32"),
    "no dtype": (lambda content: first(content).update(dtype="object"), "has dtype 'object'"),
    "a tensor too few": (lambda content: content["tensors"].popitem(), "is missing there"),
    "a tensor too many": (lambda content: content["tensors"].update(new=first(content)), "missing in this model"),
    "no tensors": (lambda content: content.update(tensors=[1]), "AttributeError"),
    "a rank that is not there": (set_piece(1, file="rank_7.safetensors"), "rank_7.safetensors cannot be read"),
    "a rank that has it not": (set_piece(1, file="rank_0.safetensors"), "is twice in one file"),
}


@pytest.mark.parametrize("name", FORGED)
def test_an_index_that_no_run_wrote_is_named(checkpoints: dict[str, Path], engine: Any, name: str) -> None:
    change, says = FORGED[name]
    checkpoint, index = checkpoints[SHARDS], f"actor/model_shards/{INDEX}"
    content = json.loads((checkpoint / index).read_text())
    change(content)
    with (
        changed(checkpoint, index, json.dumps(content).encode(), fresh_seals=True),
        pytest.raises(CheckpointError) as caught,
    ):
        resume(checkpoint, engine)
    assert str(checkpoint / "actor" / "model_shards") in str(caught.value) and says in str(caught.value)


def test_a_moment_that_is_missing_is_named(checkpoints: dict[str, Path], engine: Any) -> None:
    checkpoint, index = checkpoints[SHARDS], f"actor/optimizer_shards/{INDEX}"
    content = json.loads((checkpoint / index).read_text())
    del content["tensors"]["model.embed_tokens.weight/exp_avg_sq"]
    with (
        changed(checkpoint, index, json.dumps(content).encode(), fresh_seals=True),
        pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight/exp_avg_sq is missing there"),
    ):
        resume(checkpoint, engine)


STATES: Mapping[str, Any] = {"step": -1, "kl_coefficient": float("nan"), "stream": [], "format": 1, "reward": 3}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_run_wrote_is_named(checkpoints: dict[str, Path], engine: Any, name: str) -> None:
    checkpoint = checkpoints[ONE]
    content = json.loads((checkpoint / STATE).read_text()) | {name: STATES[name]}
    with (
        changed(checkpoint, STATE, json.dumps(content).encode(), fresh_seals=True),
        pytest.raises(CheckpointError) as caught,
    ):
        resume(checkpoint, engine)
    assert str(checkpoint / STATE) in str(caught.value)


@pytest.mark.parametrize("entry", ["/etc/hostname", "../../secret", "x" * 5000])
def test_a_seal_names_files_of_its_own_folder_alone(checkpoints: dict[str, Path], entry: str) -> None:
    checkpoint = checkpoints[ONE]
    content = json.loads((checkpoint / SEAL).read_text()) | {entry: {"bytes": 1, "sha256": ""}}
    with (
        changed(checkpoint, SEAL, json.dumps(content).encode(), fresh_seals=False),
        pytest.raises(CheckpointError, match=r"seal\.json cannot be read|File name too long"),
    ):
        open_checkpoint(checkpoint)


def test_a_checkpoint_of_an_earlier_version_is_recognised_and_not_opened(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    old = Path(shutil.copytree(checkpoints[ONE], tmp_path / "global_step_1"))
    state = json.loads((old / STATE).read_text())
    del state["format"]
    (old / STATE).write_text(json.dumps(state))
    (old / "actor" / "optimizer.safetensors").unlink()
    (old / "actor" / "optimizer_shards").mkdir()
    for name in ("optimizer.pt", "optimizer_shards/.metadata", "optimizer_shards/__0_0.distcp"):
        (old / "actor" / name).write_bytes(pickle.dumps(Hostile(tmp_path / "marker")))
    reseal(old)
    for use in (open_checkpoint, evaluate_checkpoint, lambda path: export(path, tmp_path / "exported")):
        with pytest.raises(CheckpointError, match=rf"{old} was written by another version of rloom .*format 1"):
            use(old)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_a_model_folder_of_pickles_runs_none(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoints[ONE] / "actor", model, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"weight": Hostile(tmp_path / "marker")}, model / "pytorch_model.bin")
    config = load_saved(checkpoints[ONE], [f"actor_rollout_ref.model.path={model}"])
    with pytest.raises(ModelError, match=r"model\.path=.*could not be loaded"):
        policy_network(config)
    assert not (tmp_path / "marker").exists()


def test_the_pickle_of_these_tests_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Hostile(tmp_path / "marker")))
    assert (tmp_path / "marker").is_dir()
