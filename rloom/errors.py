"""Every error that rloom raises for its user.

RloomError
├── ConfigError        a key, a value, or two of them that do not fit together
├── DataError          a data file or a row of it
├── ModelError         a model folder that cannot be loaded
├── RewardError        a reward function, or too many failed scores
├── CheckpointError    a checkpoint that is damaged, foreign or cannot be written
├── TrainingError      the run itself went wrong (updates that are not finite)
└── WorkerError        a worker or a machine of the run died, failed or never came

Each message names the field, the value and the way out. Anything else that escapes is a bug of ours.
"""


class RloomError(Exception):
    """Base of everything a user can mend."""

    worker: str | None = None  # the Ray worker that raised it: its group cannot be used any more


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
        self.lost = lost  # something is gone that may come back: worth beginning again
        self.out_of_memory = out_of_memory  # of a GPU
