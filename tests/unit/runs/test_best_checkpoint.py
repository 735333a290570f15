"""The best validation: its checkpoint is kept, and a run that gets no better stops; also after a resume."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rloom.config.frontends.openrlhf import translate
from rloom.config.load import load_config, load_sft_config
from rloom.errors import CheckpointError, ConfigError, TrainingError
from rloom.launch.early_checks import check_keys
from rloom.launch.job import continue_from, train_to_end
from rloom.training.best import Best, BestSettings, read_best
from rloom.training.checkpoint import Checkpoints, read_state
from rloom.training.steps import CompletedStep, StepLoop

ACCURACY = "val-core/sums/acc/mean@1"


class State:
    def __init__(self, step: int) -> None:
        self.step = step


class Settings:
    def __init__(self, best: BestSettings, save_every: int | None, total: int) -> None:
        self.total_steps, self.save_every, self.validate_every, self.validate_first = total, save_every, 1, False
        self.best = best


class Log:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.messages = run_dir, list[str]()

    def message(self, text: str) -> None:
        self.messages.append(text)

    def begin_step(self, step: int) -> None: ...

    def truncate_after(self, step: int) -> None: ...

    def span(self, name: str) -> Any:
        from contextlib import nullcontext

        return nullcontext()


class Loop(StepLoop):
    """Step N has the Nth validation of `accuracies`."""

    def __init__(
        self,
        folder: Path,
        accuracies: Sequence[float],
        best: BestSettings,
        *,
        save_every: int | None = None,
        keep: int | None = None,
    ) -> None:
        checkpoints = Checkpoints(folder, keep={"actor": keep})
        settings: Any = Settings(best, save_every, len(accuracies))
        log: Any = Log(folder)
        super().__init__(settings, State(0), log, checkpoints, lambda draft, background: (draft / "actor").mkdir())
        self.accuracies = accuracies
        self.further: dict[int, dict[str, float]] = {}  # step -> metrics beside the accuracy

    updates = 0

    def train_step(self, step: int) -> CompletedStep:
        self.state = State(step)
        return CompletedStep({})

    def validate(self, step: int) -> dict[str, float]:
        return {ACCURACY: self.accuracies[step - 1], **self.further.get(step, {})}

    def saved_state(self) -> dict[str, Any]:
        return {"step": self.state.step, "stream": {}}

    def resume(self, checkpoint: Path, *, keep_position: bool = True) -> None:
        self.state = State(read_state(checkpoint)["step"])


def best_of(folder: Path) -> str:
    return (folder / "best_checkpointed_iteration.txt").read_text()


@pytest.mark.parametrize(
    ("save_every", "keep", "kept"),
    [
        (None, None, [3, 5]),  # the best and the last
        (2, None, [2, 3, 4, 5]),  # those that were due, too
        (2, 1, [3, 5]),  # one of the newest beside the best
    ],
)
def test_the_best_checkpoint_is_kept_beside_the_newest(
    tmp_path: Path, save_every: int | None, keep: int | None, kept: list[int]
) -> None:
    loop = Loop(tmp_path, [0.2, 0.5, 0.9, 0.6, 0.9], BestSettings(keep=True), save_every=save_every, keep=keep)
    loop.run()
    assert loop.checkpoints.steps() == kept and best_of(tmp_path) == "3"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert loop.best == Best(3, 0.9, validations_since=2)


def test_without_the_keys_a_checkpoint_has_no_best_and_no_file_is_written(tmp_path: Path) -> None:
    loop = Loop(tmp_path, [0.2, 0.1], BestSettings())
    loop.run()
    assert loop.checkpoints.steps() == [2] and "best" not in read_state(tmp_path / "global_step_2")
    assert not (tmp_path / "best_checkpointed_iteration.txt").exists()


def test_a_run_stops_after_validations_without_a_better_one_and_stays_stopped(tmp_path: Path) -> None:
    accuracies = [0.2, 0.5, 0.5, 0.4, 0.9, 1.0]
    loop = Loop(tmp_path, accuracies, BestSettings(patience=2))
    loop.run()
    assert loop.state.step == 4 and loop.stopped and not loop.ended
    log: Any = loop.log
    assert log.messages == [
        "Stopping early: the mean validation score is 0.4 and was 0.5 at step 2; 2 validations without a better one "
        "(trainer.early_stopping_patience)"
    ]
    again = resumed(tmp_path, accuracies, BestSettings(patience=2))
    outcome = train_to_end(again, again.log, tmp_path / "global_step_4", opening="", summary=str)
    assert outcome.stopped_early and again.state.step == 4
    more = resumed(tmp_path, accuracies, BestSettings(patience=3))
    more.run()
    assert more.state.step == 6 and more.best == Best(6, 1.0)


def resumed(folder: Path, accuracies: Sequence[float], best: BestSettings) -> Loop:
    loop = Loop(folder, accuracies, best)
    how: Any = type("How", (), {"keeps_position": True, "notice": None})
    newest = loop.checkpoints.newest()
    continue_from(loop, loop.log, newest, how)
    return loop


def test_a_resumed_run_knows_the_best_of_its_checkpoint(tmp_path: Path) -> None:
    accuracies = [0.2, 0.9, 0.5, 0.8, 0.95]
    first = Loop(tmp_path, accuracies[:3], BestSettings(keep=True))
    first.run()
    loop = resumed(tmp_path, accuracies, BestSettings(keep=True))
    assert loop.best == Best(2, 0.9, validations_since=1)
    loop.take_step(4)
    assert best_of(tmp_path) == "2"
    loop.take_step(5)
    assert best_of(tmp_path) == "5" and loop.checkpoints.steps() == [3, 5]


def test_a_validation_that_lacks_a_data_source_is_not_compared(tmp_path: Path) -> None:
    other = "val-core/other/acc/mean@1"
    loop = Loop(tmp_path, [0.2, 0.9, 0.6], BestSettings(keep=True), save_every=1)
    loop.further = {1: {other: 0.0}, 3: {other: 0.4}}
    loop.run()
    assert loop.best == Best(3, 0.5)
    named = Loop(tmp_path / "named", [0.2, 0.9, 0.6], BestSettings(metric=other, patience=5))
    named.further = loop.further
    named.run()
    assert named.best == Best(3, 0.4)
    again = resumed(tmp_path, [0.2, 0.9, 0.6, 0.9], BestSettings(keep=True))
    again.add_history([{"step": 3, ACCURACY: 0.6, other: 0.4}])
    again.take_step(4)
    assert again.best == Best(3, 0.5)


def test_the_best_of_another_run_is_not_inherited_and_without_keep_nothing_points_to_it(tmp_path: Path) -> None:
    first = Loop(tmp_path / "first", [0.2, 0.9, 0.5], BestSettings(patience=3))
    first.run()
    how: Any = type("How", (), {"keeps_position": True, "notice": None})
    start = tmp_path / "first" / "global_step_3"
    continue_from(first, first.log, start, how)
    assert first.best == Best(2, 0.9, 1) and not list((tmp_path / "first").glob("best*"))
    second = Loop(tmp_path / "second", [0.2, 0.9, 0.5, 0.6], BestSettings(keep=True))
    continue_from(second, second.log, start, how)
    assert second.best is None
    second.take_step(4)
    assert second.best == Best(4, 0.6) and best_of(tmp_path / "second") == "4"


def test_an_earlier_checkpoint_has_the_best_of_its_time(tmp_path: Path) -> None:
    loop = Loop(tmp_path, [0.5, 0.9], BestSettings(keep=True), save_every=1)
    loop.run()
    again = Loop(tmp_path, [0.5, 0.9], BestSettings(keep=True), save_every=1)
    how: Any = type("How", (), {"keeps_position": True, "notice": None})
    continue_from(again, again.log, tmp_path / "global_step_1", how)
    assert again.best == Best(1, 0.5) and best_of(tmp_path) == "1"


@pytest.mark.parametrize(
    ("settings", "metrics", "value"),
    [
        (BestSettings(), {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.1, "val-aux/x": 9.0}, 0.3),
        (BestSettings(), {"val/loss": 2.0, "val/perplexity": 7.4}, 2.0),
        (BestSettings(metric="val-aux/x"), {"val-core/a/acc/mean@1": 0.5, "val-aux/x": 9.0}, 9.0),
        (BestSettings(), {}, None),
        (BestSettings(metric="val-aux/x"), {"val-aux/x": float("nan")}, None),
    ],
)
def test_the_metric_that_decides(settings: BestSettings, metrics: dict[str, float], value: float | None) -> None:
    assert settings.value(metrics) == pytest.approx(value)


def test_the_smallest_loss_is_the_best_unless_a_mode_is_given() -> None:
    loss = {"val/loss": 1.0}
    assert BestSettings().is_better(1.0, 2.0, loss) and not BestSettings().is_better(1.0, 0.5, loss)
    assert BestSettings(lower=False).is_better(2.0, 1.0, loss)
    assert BestSettings(metric="x", lower=True).is_better(1.0, 2.0, {"x": 1.0})


def test_a_metric_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(TrainingError, match=r"best_metric_key=val/acc: .* it has val-core/a/acc/mean@1"):
        BestSettings(metric="val/acc").value({"val-core/a/acc/mean@1": 0.5})


def test_a_damaged_best_is_an_error() -> None:
    assert read_best(json.loads('{"best": {"step": 3, "value": 0.5, "validations_since": 1}}'), "x") == Best(3, 0.5, 1)
    for damaged in ({"step": -1}, {"step": 1, "value": "nan", "validations_since": 0}, 5):
        with pytest.raises(CheckpointError, match="its best validation cannot be read"):
            read_best({"best": damaged}, "x")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["trainer.keep_best_checkpoint=True", "trainer.test_freq=-1"], "keep_best_checkpoint=True needs validations"),
        (
            ["trainer.early_stopping_patience=2", "data.train_files=a.parquet", "trainer.test_freq=1"],
            "needs validation data",
        ),
        (["trainer.best_metric_mode=min"], "best_metric_mode=min: no effect in this run"),
    ],
)
def test_keys_without_validations_are_refused(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_keys(load_config(keys))


def test_supervised_fine_tuning_and_openrlhf_have_the_keys() -> None:
    assert load_sft_config(["trainer.early_stopping_patience=3"]).trainer.early_stopping_patience == 3
    flags = ["--pretrain", "a/model", "--prompt_data", "rows.jsonl", "--eval_dataset", "held_out.jsonl"]
    chosen = translate([*flags, "--best_metric_key", "eval_gsm8k_pass1"]).values
    assert chosen["trainer.keep_best_checkpoint"] is True
    assert chosen["trainer.best_metric_key"] == "val-core/gsm8k/acc/mean@1"
    automatic = translate([*flags, "--ckpt.best_metric_key", ""]).values
    assert automatic["trainer.keep_best_checkpoint"] is True and "trainer.best_metric_key" not in automatic
    assert "trainer.keep_best_checkpoint" not in translate([*flags, "--best_metric_key", "none"]).values
