"""rloom: reinforcement-learning post-training of language models. docs/python.md describes the names in `__all__`."""

from rloom import import_path as import_path  # isort: skip  # first: where all other modules are imported from

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloom.api.config import Config, from_trl, load_config
    from rloom.api.custom_loop import (
        ALGORITHMS,
        AdvantageInputs,
        Advantages,
        AdvantageSettings,
        Batch,
        Prompt,
        Run,
        Score,
        TrainBatch,
        Trajectory,
        open_run,
        token_rewards,
    )
    from rloom.api.generation import generate
    from rloom.api.train import Answer, StepReport, StopTraining, TrainResult, train
    from rloom.errors import RloomError

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "AdvantageInputs",
    "AdvantageSettings",
    "Advantages",
    "Answer",
    "Batch",
    "Config",
    "Prompt",
    "RloomError",
    "Run",
    "Score",
    "StepReport",
    "StopTraining",
    "TrainBatch",
    "TrainResult",
    "Trajectory",
    "from_trl",
    "generate",
    "load_config",
    "open_run",
    "token_rewards",
    "train",
]

# Names are imported when they are first used: most import torch, and `import rloom` has to be immediate.
_MODULES = {
    "rloom.api.config": ("Config", "from_trl", "load_config"),
    "rloom.api.generation": ("generate",),
    "rloom.api.custom_loop": (
        *("ALGORITHMS", "AdvantageInputs", "AdvantageSettings", "Advantages", "Batch", "Prompt", "Run", "Score"),
        *("TrainBatch", "Trajectory", "open_run", "token_rewards"),
    ),
    "rloom.api.train": ("Answer", "StepReport", "StopTraining", "TrainResult", "train"),
    "rloom.errors": ("RloomError",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# By default torch's OpenMP threads spin while they wait for each other, which makes a run several times slower as soon
# as another process needs a core. libgomp reads its settings once, when torch loads it, so they are set here: every
# command, Ray worker and reward process imports this package first. What the user has set is left alone.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rloom' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
