"""A checkpoint is written while the run goes on: it counts once it is sealed, and its errors are not lost."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from rloom.config.load import load_config
from rloom.engines.storage import CheckpointWriter, TensorFile, whole_file
from rloom.errors import CheckpointError, WorkerError
from rloom.hashed_files import hashed_file, read_report
from rloom.launch.build import RunParts
from rloom.runtime.group import LocalGroup
from rloom.training import checkpoint
from rloom.training.best import BestSettings
from rloom.training.checkpoint import Checkpoints, Saving, Writing, verify_checkpoint
from tests.unit.runs.test_best_checkpoint import Loop, best_of
from tests.waiting import wait_until

NUMBERS = b"numbers of one rank"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, keep={"actor": 1})


class Workers:
    """They write one file a step when they are told to, or fail."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.failure: Exception | None = None
        self.on_wait: Callable[[], None] = lambda: None

    def write(self, draft: Path, background: bool = True) -> Writing:
        (draft / "actor").mkdir()
        self.files = [draft / "actor" / "model.safetensors"]
        return Writing(list(self.files), self.check)

    def check(self, wait: bool) -> None:
        if self.failure is not None:
            raise self.failure
        if wait:
            self.on_wait()

    def complete(self) -> None:
        for file in self.files:
            with hashed_file(file) as opened:
                opened.write(NUMBERS)


def begin(checkpoints: Checkpoints, workers: Workers, step: int) -> Saving:
    return checkpoints.begin(step, workers.write, {"step": step, "stream": {}})


def test_a_checkpoint_counts_when_all_is_written_and_older_ones_go_only_then(checkpoints: Checkpoints) -> None:
    first = Workers()
    first.on_wait = first.complete
    begin(checkpoints, first, 1).finish()
    workers = Workers()
    saving = begin(checkpoints, workers, 2)
    assert checkpoints.steps() == [1] and checkpoints.newest() == checkpoints.path(1)
    workers.complete()
    assert saving.finish() == checkpoints.path(2) and checkpoints.steps() == [2]
    verify_checkpoint(checkpoints.path(2))


def test_the_driver_does_not_read_what_workers_hashed(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hash_file = checkpoint.file_sha256
    monkeypatch.setattr(checkpoint, "file_sha256", lambda file: (read.append(file.name), hash_file(file))[1])
    workers = Workers()
    workers.on_wait = workers.complete
    path = begin(checkpoints, workers, 1).finish()
    assert read == ["trainer_state.json"]
    assert json.loads((path / "actor" / "seal.json").read_text()) == {
        "model.safetensors": {"bytes": len(NUMBERS), "sha256": hashlib.sha256(NUMBERS).hexdigest()}
    }
    assert not list(path.rglob("*.written*"))


def test_an_error_of_a_writer_keeps_the_checkpoints_before_it(checkpoints: Checkpoints) -> None:
    first, workers = Workers(), Workers()
    first.on_wait = first.complete
    begin(checkpoints, first, 1).finish()
    saving = begin(checkpoints, workers, 2)
    workers.failure = CheckpointError("no room")
    with pytest.raises(CheckpointError, match="no room"):
        saving.check()
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == [
        "global_step_1", "latest_checkpointed_iteration.txt"
    ]  # fmt: skip


def test_after_a_lost_worker_the_others_complete_the_checkpoint_or_it_is_discarded(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "STALLED_S", 0.2)
    for step, completes in ((1, True), (2, False)):
        workers = Workers()
        saving = begin(checkpoints, workers, step)
        workers.failure = WorkerError("worker 1 died", lost=True)
        with pytest.raises(WorkerError):
            saving.check()
        if completes:
            workers.complete()
        saving.settle()
    assert checkpoints.steps() == [1] and not list(checkpoints.directory.glob(".writing-*"))


def test_a_writer_that_was_given_up_does_not_reach_the_next_checkpoint_of_its_step(checkpoints: Checkpoints) -> None:
    """Its disk may have stood still: it goes on to write when the step has been saved again."""
    late, workers = Workers(), Workers()
    begin(checkpoints, late, 1).give_up()
    saving = begin(checkpoints, workers, 1)
    with pytest.raises(FileNotFoundError):
        late.complete()
    workers.complete()
    verify_checkpoint(saving.finish())
    with pytest.raises(FileNotFoundError):
        late.complete()


def test_a_folder_that_cannot_be_deleted_yet_is_no_fault(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps the folder of a file that another process has open."""
    remove = os.rmdir

    def refuse(path: Any, **options: Any) -> None:
        if ".discarded-" in str(path):
            raise OSError(39, "Directory not empty")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    for step in (1, 2, 3):
        workers = Workers()
        workers.on_wait = workers.complete
        begin(checkpoints, workers, step).finish()
    checkpoints.clean()
    assert checkpoints.steps() == [3] and len(list(checkpoints.directory.glob(".discarded-*"))) == 2
    monkeypatch.undo()
    checkpoints.clean()
    assert not list(checkpoints.directory.glob(".discarded-*"))


def test_a_disk_that_is_full_when_the_checkpoint_is_complete_is_said(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "replace_text", refuse)
    workers = Workers()
    workers.on_wait = workers.complete
    with pytest.raises(CheckpointError, match=r"global_step_1 cannot be written: .*No space left on device"):
        begin(checkpoints, workers, 1).finish()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts_and_before_older_ones_go(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file or folder was when it was synced is what it is when its folder gets its name."""
    first, second = Workers(), Workers()
    first.on_wait, second.on_wait = first.complete, second.complete
    begin(checkpoints, first, 1).finish()
    synced: dict[str, int] = {}
    order: list[str] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def fsync(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        synced[path] = os.fstat(handle).st_mtime_ns
        if path == str(checkpoints.directory):
            order.append("sync")
        sync(handle)

    def move(path: Path, target: Path) -> None:
        if target == checkpoints.path(2):
            for one in (path, *path.rglob("*")):
                assert synced.get(str(one)) == one.stat().st_mtime_ns, one
        order.append(Path(path).name)
        rename(path, target)

    def report(path: Path, target: Path) -> None:
        if str(target).endswith(".written"):
            assert str(target).removesuffix(".written") in synced
        replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", move)
    monkeypatch.setattr(os, "replace", report)
    begin(checkpoints, second, 2).finish()
    published = next(place for place, name in enumerate(order) if name.startswith(".writing-"))
    removed = next(place for place, name in enumerate(order) if name in ("actor", "global_step_1"))
    assert "sync" in order[published:removed]


KILLED_ANYWHERE = """
import os, shutil, sys
from pathlib import Path
from rloom.hashed_files import hashed_file, read_report
from rloom.training.checkpoint import LATEST, Checkpoints, Writing, verify_checkpoint

def save(checkpoints, step):
    def write(draft):
        files = [draft / role / "model.safetensors" for role in checkpoints.keep]
        for file in files:
            file.parent.mkdir()
            with hashed_file(file) as opened:
                opened.write(b"numbers")
        return Writing(files)
    checkpoints.save(step, write, {"step": step, "stream": {}})

def kill(event, arguments):
    global left
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir"):
        left -= 1
        if left == 0:
            os._exit(9)

number, status, found = 0, 9, set()
while status == 9:
    number += 1
    checkpoints = Checkpoints(Path(sys.argv[1]) / str(number), keep={"actor": 1, "critic": 1})
    save(checkpoints, 1)
    child = os.fork()
    if child == 0:
        left = number
        sys.addaudithook(kill)
        save(checkpoints, 2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    checkpoints.clean()
    newest = checkpoints.newest()
    verify_checkpoint(newest)
    found.add((newest.name[-1], (checkpoints.directory / LATEST).read_text()))
    save(checkpoints, 3)  # the run that goes on
    assert [path.name for path in checkpoints.directory.iterdir() if path.is_dir()] == ["global_step_3"]
assert status == 0 and number > 50, (status, number)
print(sorted(found))
"""


@pytest.mark.slow
def test_a_kill_between_any_two_changes_of_files_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """And the next run cleans away what is left. The pointer to the latest may be one behind."""
    done = subprocess.run([sys.executable, "-c", KILLED_ANYWHERE, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[('1', '1'), ('2', '1'), ('2', '2')]\n", "")


def test_what_is_being_written_counts_as_growing_in_any_folder_of_a_draft(tmp_path: Path) -> None:
    shards = tmp_path / "actor" / "model_shards"
    shards.mkdir(parents=True)
    (shards / "rank_0.safetensors").write_bytes(NUMBERS)
    assert checkpoint.folder_bytes(tmp_path) == len(NUMBERS)


# The loop.


class SlowDisk(Loop):
    """Workers complete a checkpoint when the test says so."""

    def __init__(self, folder: Path, steps: int, **settings: Any) -> None:
        super().__init__(folder, [0.1] * steps, settings.pop("best", BestSettings()), **settings)
        self.workers = Workers()
        self.write_checkpoint = self.workers.write
        self.workers.on_wait = self.workers.complete  # whoever waits for the disk gets it
        self.sealed_at: list[list[int]] = []  # at the end of each step

    def train_step(self, step: int) -> Any:
        self.sealed_at.append(self.checkpoints.steps())
        return super().train_step(step)


def test_the_next_step_runs_while_a_checkpoint_is_written_and_one_is_on_its_way_at_a_time(tmp_path: Path) -> None:
    loop = SlowDisk(tmp_path, 4, save_every=1)
    loop.run()
    assert loop.sealed_at == [[], [], [1], [1, 2]]  # when step N runs, that of N - 1 is being written
    assert loop.checkpoints.steps() == [1, 2, 3, 4]  # the last one is waited for


def test_ctrl_c_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a large file is synced it does not grow. It is not written again."""
    monkeypatch.setattr(checkpoint, "STALLED_S", 0.0)
    loop, begun = SlowDisk(tmp_path, 4, save_every=1), list[int]()

    def write(folder: Path, background: bool) -> Writing:
        begun.append(loop.state.step)
        if loop.state.step == 2:
            loop.interrupted = True
        return loop.workers.write(folder, background)

    loop.write_checkpoint = write
    with pytest.raises(KeyboardInterrupt, match=r"Stopped after step 2, saved in .*global_step_2"):
        loop.run()
    assert begun == [1, 2] and loop.checkpoints.steps() == [1, 2]


def test_a_full_disk_ends_the_run_in_the_next_step_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    loop = SlowDisk(tmp_path, 4, save_every=1)
    train_step = loop.train_step

    def fill_the_disk(step: int) -> Any:
        if step == 3:
            loop.workers.failure = CheckpointError("cannot be written; is there room on the disk?")
        return train_step(step)

    loop.train_step = fill_the_disk  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="is there room") as caught:
        loop.run()
    assert loop.state.step == 3 and caught.value.__notes__ == [
        f"The last good checkpoint is {loop.checkpoints.path(1)}; the same command goes on from it."
    ]
    assert loop.checkpoints.steps() == [1]


def test_a_save_that_has_failed_ends_the_run_before_another_step_begins(tmp_path: Path) -> None:
    loop = SlowDisk(tmp_path, 4, save_every=1)
    after_step = loop.after_step

    def fill_the_disk(*given: Any) -> bool:
        loop.workers.failure = CheckpointError("cannot be written")
        return after_step(*given)

    loop.after_step = fill_the_disk
    with pytest.raises(CheckpointError):
        loop.run()
    assert loop.state.step == 1 == len(loop.sealed_at)


def test_the_best_checkpoint_is_pointed_to_when_it_is_complete(tmp_path: Path) -> None:
    loop = SlowDisk(tmp_path, 3, best=BestSettings(keep=True))
    loop.accuracies = [0.2, 0.5, 0.4]
    pointed: list[str | None] = []
    validate = loop.validate

    def look(step: int) -> dict[str, float]:
        pointed.append(best_of(tmp_path) if (tmp_path / checkpoint.BEST).exists() else None)
        return validate(step)

    loop.validate = look  # type: ignore[method-assign]
    loop.run()
    assert pointed == [None, None, "1"] and best_of(tmp_path) == "2"
    assert loop.checkpoints.steps() == [2, 3]


def test_the_folder_is_described_before_threads_write_into_it(tmp_path: Path) -> None:
    """Describing it syncs all its files: those that are being written would hold up the step, and reports move."""

    class Files:
        def describe(self, folder: Path) -> None:
            assert folder.is_dir() and not list(folder.iterdir())
            (folder / "config.json").touch()

    class Model:
        name = "actor"

        def save(self, folder: Path, contents: frozenset[str], background: bool) -> list[Path]:
            assert background and (folder / "actor" / "config.json").exists()
            return [folder / "actor" / "model.safetensors"]

    config, model = load_config([]), cast(Any, Model())
    checkpoint_keys = config.actor_rollout_ref.actor.checkpoint
    parts = RunParts(config, checkpoint_keys, [model], LocalGroup([Files()]), {})
    assert parts.write_checkpoint(tmp_path, True).files == [tmp_path / "actor" / "model.safetensors"]


def test_each_model_is_asked_for_the_errors_of_its_save() -> None:
    asked: list[tuple[str, bool]] = []

    class Model:
        def __init__(self, name: str) -> None:
            self.name = name

        def check_save(self, wait: bool) -> None:
            asked.append((self.name, wait))

    config, models = load_config([]), cast(Any, [Model("actor"), Model("critic")])
    RunParts(config, config.actor_rollout_ref.actor.checkpoint, models, LocalGroup([]), {}).check_save(True)
    assert asked == [("actor", True), ("critic", True)]


# The writer of an engine.


def test_a_file_is_hashed_and_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rloom.hashed_files.CHUNK", 4)
    with hashed_file(tmp_path / "file") as opened:
        opened.write(b"numbers")
        opened.write(memoryview(b" of one rank"))
    assert (tmp_path / "file").read_bytes() == NUMBERS
    assert read_report(tmp_path / "file") == {"bytes": 19, "sha256": hashlib.sha256(NUMBERS).hexdigest()}


def test_an_earlier_report_does_not_speak_for_a_file_that_is_written_again(tmp_path: Path) -> None:
    for wants_report in (True, False):
        with suppress(ZeroDivisionError), hashed_file(tmp_path / "file") as opened:
            opened.write(NUMBERS)
            assert wants_report or 1 / 0
        assert (read_report(tmp_path / "file") is not None) == wants_report


def test_all_tensors_are_made_where_a_file_cannot_be_written(tmp_path: Path) -> None:
    """To make one may be collective: the other ranks would wait for this one."""
    made: list[str] = []
    header = {name: ((1,), torch.float32) for name in "abc"}
    tensors = ((made.append(name) or name, torch.zeros(1)) for name in "abc")
    file = TensorFile(tmp_path / "nowhere" / "model.safetensors", header, tensors)
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointWriter().write(tmp_path, [file], background=False)
    assert made == ["a", "b", "c"]


def test_what_is_written_is_what_was_there_when_the_save_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), TensorFile.write
    monkeypatch.setattr(TensorFile, "write", lambda file: (gate.wait(60), write(file))[1])
    weights, writer = {"w": torch.arange(4.0)}, CheckpointWriter()
    writer.write(tmp_path, [whole_file(tmp_path, "model", weights)], background=True)
    weights["w"].zero_()  # the next step
    writer.check(wait=False)
    gate.set()
    writer.check(wait=True)
    numbers = (tmp_path / "model.safetensors").read_bytes()[-16:]
    assert numbers == torch.arange(4.0).numpy().tobytes()


def test_a_thread_that_cannot_write_says_so_when_it_is_asked(tmp_path: Path) -> None:
    writer, nowhere = CheckpointWriter(), tmp_path / "nowhere"
    writer.write(nowhere, [whole_file(nowhere, "model", {"w": torch.zeros(1)})], background=True)
    with pytest.raises(CheckpointError, match=r"nowhere cannot be written: .*is there room on the disk\?"):
        writer.check(wait=True)
    writer.check(wait=True)  # once


KILLED = """
import sys, time
from pathlib import Path
import torch
from safetensors.torch import load_file
from rloom.engines.storage import CheckpointWriter, TensorFile, whole_file
from rloom.training.checkpoint import Checkpoints, Writing

checkpoints, writer = Checkpoints(Path(sys.argv[1]), keep={"actor": 1}), CheckpointWriter()

def write(draft):
    (draft / "actor").mkdir()
    file = whole_file(draft / "actor", "model", {"w": torch.ones(1000)})
    writer.write(draft, [file], background=True)
    return Writing([file.file], lambda wait: writer.check(wait=wait))

checkpoints.save(1, write, {"step": 1, "stream": {}})
whole = TensorFile.write
TensorFile.write = lambda file: (whole(file), file.file.with_name("model.safetensors.written").unlink())
checkpoints.begin(2, write, {"step": 2, "stream": {}})
time.sleep(600)
"""


@pytest.mark.slow
def test_a_kill_before_the_seal_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    drafts = ".writing-global_step_2.*/actor/model.safetensors"
    wait_until(lambda: any(one.stat().st_size > 4000 for one in tmp_path.glob(drafts)), 120)  # whole, but not reported
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    checkpoints = Checkpoints(tmp_path, keep={"actor": 1})
    checkpoints.clean()
    assert checkpoints.newest() == checkpoints.path(1) and not list(tmp_path.glob(drafts))


def test_copies_of_the_next_save_are_in_the_memory_of_the_last_one(tmp_path: Path) -> None:
    """To map new memory takes longer than the copy. What is trained meanwhile does not change what is written."""
    writer, tensors = CheckpointWriter(), {"weight": torch.full((2, 3), 1.0), "weight/step": torch.tensor(1.0)}
    places, saved = [], []
    for step in (1, 2):
        folder = tmp_path / str(step)
        folder.mkdir()
        for tensor in tensors.values():
            tensor.fill_(float(step))
        file = whole_file(folder, "model", tensors)
        writer.write(folder, [file], background=True)
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        writer.check(wait=True)
        places.append({name: copy.data_ptr() for name, copy in writer.copies.items()})
        saved.append(load_file(file.file))
    assert places[0] == places[1] and places[0].keys() == tensors.keys()
    for step, found in enumerate(saved, start=1):
        assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {
            "weight": [float(step)],
            "weight/step": [float(step)],
        }
