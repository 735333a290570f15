"""Trackers of a run's metrics: metrics.jsonl always, others by `trainer.logger`. One file a tracker."""

from collections.abc import Callable, Sequence

from rloom.errors import ConfigError
from rloom.runs.trackers import mlflow, swanlab, tensorboard, trackio, wandb
from rloom.runs.trackers.base import FileTracker, GuardedTracker, Start, Tracker, cell, first_line

TRACKERS: dict[str, Callable[[Start], Tracker]] = {
    "tensorboard": tensorboard.start,
    "wandb": wandb.WandbTracker,
    "swanlab": swanlab.SwanlabTracker,
    "mlflow": mlflow.MlflowTracker,
    "trackio": trackio.TrackioTracker,
}
LOGGERS = ("console", "file", *TRACKERS)

__all__ = ["LOGGERS", "TRACKERS", "Start", "Tracker", "cell", "make_trackers"]


def make_trackers(names: Sequence[str], given: Start) -> list[Tracker]:
    """The trackers of `trainer.logger`, and always metrics.jsonl, which the learning curve reads."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"trainer.logger={list(names)}: there is no logger {name!r}; use any of {list(LOGGERS)}")
    trackers: list[Tracker] = [FileTracker(given.run_dir)]
    for name, start in TRACKERS.items():
        if name in names:
            trackers += started(name, start, given)
    return trackers


def started(name: str, start: Callable[[Start], Tracker], given: Start) -> list[Tracker]:
    """None where the library fails: a run does not depend on its trackers."""
    try:
        return [GuardedTracker(name, start(given), given.report)]
    except ConfigError:  # it is not installed
        raise
    except Exception as error:
        given.report(
            f"{name}: it cannot start ({type(error).__name__}: {first_line(error)}); the run goes on without it"
        )
        return []
