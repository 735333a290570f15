"""A crash at any instant leaves the last good checkpoint, and what is damaged is found and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloom.errors import CheckpointError
from rloom.training.checkpoint import (
    LATEST,
    SEAL,
    STATE,
    Checkpoints,
    discard,
    find_fault,
    read_state,
    verify_checkpoint,
)


def write(folder: Path) -> None:
    """Two roles, one of them with a folder inside."""
    for name in ("actor/model.bin", "actor/huggingface/config.json", "critic/model.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 20)
    (folder / "config.yaml").write_text("a: 1\n")


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "kl_coefficient": 0.25, "stream": {"epoch": 0, "row": 4}, "reward": {}}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run", keep={"actor": None, "critic": None})


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, write, state_of(step))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_checkpoint_holds_what_was_written_its_state_and_its_seals(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(20, write, state_of(20))
    assert path == checkpoints.directory / "global_step_20" == checkpoints.newest()
    assert sorted(contents(path)) == [
        "actor/huggingface/config.json",
        "actor/model.bin",
        "actor/seal.json",
        "config.yaml",
        "critic/model.bin",
        "critic/seal.json",
        "seal.json",
        "trainer_state.json",
    ]
    verify_checkpoint(path)
    assert read_state(path) == {"format": 2, **state_of(20)}
    assert (checkpoints.directory / LATEST).read_text() == "20"


def test_every_file_is_sealed_once_by_the_folder_of_its_role(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    sealed = {name: sorted(json.loads((checkpoints.path(1) / name / SEAL).read_text())) for name in ("", "actor")}
    assert sealed == {"": ["config.yaml", STATE], "actor": ["huggingface/config.json", "model.bin"]}


def test_steps_are_numbers_and_not_names(checkpoints: Checkpoints) -> None:
    save(checkpoints, 9, 10)
    (checkpoints.directory / "global_step_best").mkdir()
    (checkpoints.directory / "global_step_99").write_text("a file")
    assert checkpoints.steps() == [9, 10]
    assert checkpoints.newest() == checkpoints.path(10)


def test_a_directory_that_is_not_there_yet_has_no_checkpoints(checkpoints: Checkpoints) -> None:
    assert checkpoints.steps() == [] and checkpoints.newest() is None


class PowerCut(BaseException):
    """Nothing of ours catches it."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("torn"), PowerCut()])
def test_a_write_that_fails_midway_leaves_nothing_new_and_everything_old(
    checkpoints: Checkpoints, error: BaseException
) -> None:
    save(checkpoints, 1)
    before = contents(checkpoints.directory)

    def half(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises((CheckpointError, RuntimeError, PowerCut)) as caught:
        checkpoints.save(2, half, {"step": 2})
    assert contents(checkpoints.directory) == before  # no draft that takes up the room, either
    assert checkpoints.newest() == checkpoints.path(1)
    if isinstance(error, OSError):
        assert str(caught.value) == (
            f"{checkpoints.path(2)} cannot be written: [Errno 28] No space left on device; "
            "the checkpoints before it are complete"
        )


def test_after_a_failed_write_the_same_step_can_be_saved_again(checkpoints: Checkpoints) -> None:
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(2, lambda folder: (write(folder), 1 / 0)[0], {"step": 2})
    save(checkpoints, 2)
    assert checkpoints.newest() == checkpoints.path(2)


def test_what_crashes_left_behind_is_cleaned_away(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    before = contents(checkpoints.directory)
    write(checkpoints.directory / ".writing-global_step_3")
    write(checkpoints.directory / ".discarded-global_step_0")
    write(checkpoints.path(1) / ".discarded-critic")
    checkpoints.clean()
    assert contents(checkpoints.directory) == before
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["global_step_1", "global_step_2", LATEST]


def test_half_a_deletion_does_not_make_the_rest_of_a_checkpoint_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    (checkpoints.path(1) / "critic").rename(checkpoints.path(1) / ".discarded-critic")
    (checkpoints.path(1) / ".discarded-critic" / SEAL).unlink()
    assert find_fault(checkpoints.path(1)) is None


def test_a_half_deleted_folder_is_no_obstacle_to_the_next_deletion(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    write(checkpoints.directory / ".discarded-global_step_1")
    discard(checkpoints.path(1))
    checkpoints.clean()
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == [LATEST]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


DAMAGE: list[tuple[Callable[[Path], None], str, str]] = [
    (truncate, "actor/model.bin", "{file} has 299 bytes instead of 300"),
    (flip, "actor/model.bin", "{file} does not match its checksum"),
    (flip, "actor/huggingface/config.json", "{file} does not match its checksum"),
    (flip, STATE, "{file} does not match its checksum"),
    (Path.unlink, "critic/model.bin", "{file} is missing"),
    (Path.unlink, STATE, "{file} is missing"),
    (Path.unlink, "critic/seal.json", "{file} cannot be read"),
    (Path.unlink, SEAL, "{file} cannot be read"),
    (truncate, SEAL, "{file} cannot be read"),
]


@pytest.mark.parametrize(("hurt", "name", "says"), DAMAGE)
def test_damage_is_found_named_and_answered_with_the_newest_good_one(
    checkpoints: Checkpoints, hurt: Callable[[Path], None], name: str, says: str
) -> None:
    save(checkpoints, 1, 2, 3, 4)
    (checkpoints.path(3) / SEAL).unlink()  # the one before is no good either
    hurt(checkpoints.path(4) / name)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.newest()
    message = str(caught.value)
    assert message.startswith(f"{checkpoints.path(4)} is damaged: {says.format(file=checkpoints.path(4) / name)}")
    assert message.endswith(
        f"the newest good one is {checkpoints.path(2)}: resume from it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={checkpoints.path(2)}"
    )


def test_a_checkpoint_that_lost_a_role_is_not_offered(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2, 3)
    discard(checkpoints.path(2) / "actor")  # as pruning does; what is left is sound, but no run goes on from it
    truncate(checkpoints.path(3) / "actor" / "model.bin")
    with pytest.raises(CheckpointError, match=rf"the newest good one is {checkpoints.path(1)}:"):
        checkpoints.newest()


def test_the_newest_without_one_of_its_roles_is_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    shutil.rmtree(checkpoints.path(2) / "actor")
    with pytest.raises(
        CheckpointError, match=rf"{checkpoints.path(2) / 'actor'} is missing .*; the newest good one is"
    ):
        checkpoints.newest()


def test_damage_without_another_checkpoint_says_how_to_start_anew(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    flip(checkpoints.path(1) / "actor" / "model.bin")
    with pytest.raises(CheckpointError, match=r"there is no other; start anew with trainer\.resume_mode=disable"):
        checkpoints.newest()


def test_checking_a_damaged_checkpoint_names_the_file(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    flip(checkpoints.path(1) / "critic" / "model.bin")
    with pytest.raises(CheckpointError, match=r"global_step_1 is damaged: .*critic/model\.bin does not match"):
        verify_checkpoint(checkpoints.path(1))


@pytest.mark.parametrize("name", ["folder", "nowhere"])
def test_a_foreign_folder_is_no_checkpoint_of_ours(tmp_path: Path, name: str) -> None:
    write(tmp_path / "folder")
    with pytest.raises(CheckpointError, match=rf"{name} is not a checkpoint of rloom: it has no {STATE}; use a"):
        verify_checkpoint(tmp_path / name)


def roles_of(checkpoints: Checkpoints) -> dict[int, list[str]]:
    return {
        step: sorted(path.name for path in checkpoints.path(step).iterdir() if path.is_dir())
        for step in checkpoints.steps()
    }


def test_each_role_keeps_its_own_number_of_newest_folders(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep={"actor": 2, "critic": 1})
    save(checkpoints, 1, 2, 3, 4)
    assert roles_of(checkpoints) == {3: ["actor"], 4: ["actor", "critic"]}
    assert find_fault(checkpoints.path(3)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "global_step_4", LATEST]


def test_without_a_limit_everything_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep={"actor": None, "critic": 1})
    save(checkpoints, 1, 2, 3)
    assert roles_of(checkpoints) == {1: ["actor"], 2: ["actor"], 3: ["actor", "critic"]}


def test_later_checkpoints_are_set_aside_whole(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2, 3)
    before = {step: contents(checkpoints.path(step)) for step in (2, 3)}
    place = checkpoints.set_aside(after=1)
    assert place is not None and place.name.startswith("superseded-")
    assert checkpoints.steps() == [1]
    assert {step: contents(place / f"global_step_{step}") for step in (2, 3)} == before
    assert checkpoints.newest() == checkpoints.path(1)
    assert (checkpoints.directory / LATEST).read_text() == "1"


def test_when_all_are_set_aside_none_is_the_latest(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    checkpoints.set_aside(after=0)
    assert checkpoints.newest() is None
    assert not (checkpoints.directory / LATEST).exists()
    save(checkpoints, 1)
    assert checkpoints.newest() == checkpoints.path(1)


def test_nothing_later_leaves_everything_where_it_is(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    assert checkpoints.set_aside(after=2) is None
    assert checkpoints.steps() == [1, 2]


def test_setting_aside_twice_within_a_second_loses_nothing(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    first = checkpoints.set_aside(after=0)
    save(checkpoints, 1)
    second = checkpoints.set_aside(after=0)
    assert first is not None and second is not None
    found = sorted(path.parent for path in checkpoints.directory.glob("superseded-*/global_step_1"))
    assert found == sorted([first, second]) and first != second
