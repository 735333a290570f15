"""An error in a step: what is saved, and what is said of it."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rloom.algos.kl import KlControl
from rloom.algos.objectives import Metrics
from rloom.config.keys import all_keys
from rloom.data.stream import EndOfData
from rloom.errors import CheckpointError, ModelError, RewardError, RloomError, TrainingError, WorkerError
from rloom.rewards.composite import CompositeReward
from rloom.runs.display import Display
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog
from rloom.runtime.group import LocalGroup
from rloom.runtime.process_stats import PEAK
from rloom.training.best import BestSettings
from rloom.training.checkpoint import Checkpoints
from rloom.training.loop import State, StepResult, Training
from rloom.training.memory import STAGE_KEYS
from rloom.training.steps import worker_metrics


class Planted(Training):
    """Step 1 completes; what step 2 does is up to the test."""

    act: Callable[[], None]
    cannot_save: Exception | None = None

    def step(self, step: int) -> StepResult:
        cast(Any, self.roles.policy).updates += step == 1
        if step > 1:
            self.act()
        self.state, self.updates_at_state = State(step, self.state.kl, {}, {}), self.updates
        return cast(Any, SimpleNamespace(trajectories=[]))

    def record(self, step: int, result: StepResult) -> Metrics:
        return {}


@pytest.fixture
def training(tmp_path: Path) -> Planted:
    policy = SimpleNamespace(updates=0)

    def write(folder: Path, background: bool) -> None:
        if training.cannot_save is not None:
            raise training.cannot_save
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text("numbers")

    training = Planted(
        cast(
            Any,
            SimpleNamespace(
                total_steps=5,
                validate_every=None,
                save_every=None,
                validate_first=False,
                best=BestSettings(),
                mismatch_warning=None,
            ),
        ),
        cast(
            Any,
            SimpleNamespace(
                policy=policy,
                critic=None,
                ahead=None,
                sampler=SimpleNamespace(reward=CompositeReward([]), rows=list, episodes=None),
            ),
        ),
        cast(Any, SimpleNamespace(state=dict)),
        KlControl(0.0),
        RunLog(tmp_path, trackers=[], display=Display(total_steps=5, quiet=True)),
        Checkpoints(tmp_path, keep={"actor": None}),
        write,
        lambda folder: None,
    )
    return training


def fails_with(training: Planted, error: Exception, act: Callable[[], None] | None = None) -> list[str]:
    """The notes of the error with which the run ends."""

    def raise_it() -> None:
        if act is not None:
            act()
        raise error

    training.act = raise_it
    with pytest.raises(type(error)) as caught:
        training.run()
    assert caught.value is error
    return caught.value.__notes__


def saved(training: Planted) -> list[int]:
    return training.checkpoints.steps()


@pytest.mark.parametrize("error", [KeyError("x"), RewardError("3 of 4 rewards failed"), torch.OutOfMemoryError("CUDA")])
def test_any_error_between_updates_saves_the_last_completed_step(training: Planted, error: Exception) -> None:
    [note] = fails_with(training, error)
    assert saved(training) == [1]
    assert note == (
        f"Stopped after step 1, saved in {training.checkpoints.path(1)}. The same command goes on from there."
    )


def failed_worker(error: RloomError) -> RloomError:
    error.worker = "worker 1"
    return error


@pytest.mark.parametrize(
    "error",
    [WorkerError("worker 1 failed: KeyError: 'x'"), WorkerError("worker 1 died", lost=True),
     failed_worker(ModelError("worker 1: no such folder"))],
)  # fmt: skip
def test_after_a_failed_worker_nothing_is_saved_and_the_last_checkpoint_is_named(
    training: Planted, error: Exception
) -> None:
    training.cannot_save = AssertionError("saving was tried")
    assert fails_with(training, error) == [
        "A worker failed, so nothing was saved after it. No checkpoint was saved yet."
    ]


def test_the_checkpoint_that_a_failed_worker_leaves_is_named(training: Planted) -> None:
    [note] = fails_with(training, WorkerError("worker 1 failed"), act=lambda: training.save() and None)
    assert note.endswith(
        f"The last good checkpoint is {training.checkpoints.path(1)}; the same command goes on from it."
    )


def test_sigterm_ends_a_step_before_its_update_at_once_and_saves_the_one_before(training: Planted) -> None:
    def generate() -> None:
        with training.stage("gen"):
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("generation went on")

    training.act = generate
    with pytest.raises(KeyboardInterrupt) as caught:
        training.run()
    assert caught.value.args == (
        f"Stopped after step 1, saved in {training.checkpoints.path(1)}. The same command goes on from there.",
    )
    assert saved(training) == [1]


def test_sigterm_in_an_update_completes_and_saves_the_step_but_begins_no_validation(
    training: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast(Any, training.settings).validate_every = 1
    validated: list[int] = []

    def validate(step: int) -> Metrics:
        with training.stage("testing"):
            validated.append(step)
        return {}

    def update() -> None:
        with training.stage("update_actor"):
            signal.raise_signal(signal.SIGTERM)
            cast(Any, training.roles.policy).updates += 1

    monkeypatch.setattr(training, "validate", validate)
    training.act = update
    with pytest.raises(KeyboardInterrupt, match="Stopped after step 2, saved in "):
        training.run()
    assert (saved(training), validated) == ([2], [1])


def test_weights_between_two_steps_are_not_saved(training: Planted) -> None:
    def update() -> None:
        cast(Any, training.roles.policy).updates += 1

    assert fails_with(training, TrainingError("not finite"), act=update) == [
        "Stopped in the middle of an update. No checkpoint was saved yet."
    ]
    assert saved(training) == []


def test_an_error_of_saving_comes_after_the_error_that_came_first(training: Planted) -> None:
    training.cannot_save = OSError(28, "No space left on device")
    [note] = fails_with(training, KeyError("x"))
    assert note.startswith("Saving failed as well: CheckpointError: ") and "No space left on device" in note
    assert saved(training) == []


def test_a_checkpoint_that_cannot_be_written_is_not_tried_again(training: Planted) -> None:
    training.cannot_save = AssertionError("saving was tried again")
    assert fails_with(training, CheckpointError("cannot be written")) == ["No checkpoint was saved yet."]


def test_memory_that_runs_out_names_the_keys_of_its_stage(training: Planted) -> None:
    torchs = "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try"
    for stage, key, other in (
        ("gen", "actor_rollout_ref.rollout.gpu_memory_utilization", "ppo_max_token_len_per_gpu"),
        ("update_actor", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "gpu_memory_utilization"),
        ("ref", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "gpu_memory_utilization"),
    ):
        with pytest.raises(TrainingError) as caught, training.stage(stage):
            raise torch.OutOfMemoryError(torchs)
        said = str(caught.value)
        assert said.startswith("the GPU ran out of memory in ") and "Tried to allocate 2.00 GiB.\n" in said
        assert key in said and other not in said


def test_memory_that_runs_out_on_a_worker_names_them_too(training: Planted) -> None:
    with pytest.raises(WorkerError) as caught, training.stage("update_critic"):
        raise WorkerError("worker 1 failed: OutOfMemoryError: CUDA out of memory.", out_of_memory=True)
    assert "critic.ppo_max_token_len_per_gpu lower" in caught.value.__notes__[0]
    with pytest.raises(WorkerError) as other, training.stage("update_critic"):
        raise WorkerError("worker 1 failed: KeyError")
    assert "__notes__" not in vars(other.value)


def test_every_key_that_an_error_names_exists() -> None:
    named = re.findall(r"(?:actor_rollout_ref|critic|trainer)(?:\.\w+)+", str(STAGE_KEYS))
    assert len(named) > 20 and set(named) <= all_keys().keys()


def test_data_that_end_within_a_step_end_the_run_after_the_step_before(training: Planted) -> None:
    def end() -> None:
        raise EndOfData

    training.act = end
    training.run()
    assert saved(training) == [1] and training.ended and not training.stopped
    training.state = State(0, training.state.kl, {}, {})  # as if step 1 had not been filled
    with pytest.raises(TrainingError, match="ended before one step was filled") as caught:
        training.end_with_the_data()
    assert "groups that algorithm.filter_groups keeps" in str(caught.value)


def test_of_the_workers_the_largest_peak_of_memory_counts() -> None:
    stats = [{"perf/worker_0/resident_gb": 1.0, PEAK: 2.0}, {"perf/worker_1/resident_gb": 4.0, PEAK: 3.0}]
    workers = LocalGroup([SimpleNamespace(stats=lambda found=found: found) for found in stats])
    assert worker_metrics(workers) == {
        "perf/worker_0/resident_gb": 1.0,
        "perf/worker_1/resident_gb": 4.0,
        "perf/max_memory_allocated_gb": 3.0,
    }


def test_a_check_of_the_run_that_fails_is_reported_once_and_the_run_goes_on(training: Planted) -> None:
    class Broken:
        def check(self, step: int, metrics: Metrics) -> list[Any]:
            raise ZeroDivisionError("no steps")

    training.diagnosis, training.act = cast(Any, Broken()), lambda: None
    training.run()
    assert training.state.step == 5
    events = RunFolder(training.log.run_dir).events
    assert [event["message"] for event in events if event["event"] == "warning"] == [
        "The checks of this run are off: ZeroDivisionError: no steps"
    ]
