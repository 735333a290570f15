"""The errors that rloom raises for users.

RloomError
├── ConfigError        a key or value, or a combination of keys
├── DataError          a data file or a row of it
├── ModelError         a model folder that cannot be loaded
├── RewardError        a reward function, or too many failed scores
├── CheckpointError    a checkpoint that is damaged, of another run or cannot be written
├── TrainingError      training failed (updates that are not finite, GPU memory)
└── WorkerError        a worker or machine of the run died, failed or did not start

Each message names the field, the value and the way out. Any other exception is a bug in rloom.
"""


class RloomError(Exception):
    """Base class of all errors that a user can correct."""

    worker: str | None = None  # the worker that raised it; its group cannot be used any more


class ConfigError(RloomError):
    pass


class DataError(RloomError):
    pass


class ModelError(RloomError):
    pass


class RewardError(RloomError):
    pass


class CheckpointError(RloomError):
    pass


class TrainingError(RloomError):
    pass


class WorkerError(RloomError):
    def __init__(self, message: str, *, lost: bool = False, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.lost = lost  # a worker or machine is gone: a restart may succeed
        self.out_of_memory = out_of_memory  # on a GPU
