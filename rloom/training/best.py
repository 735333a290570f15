"""The best validation of a run: which metric decides, which step has it, and when to stop waiting for a better one."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from rloom.errors import CheckpointError, TrainingError
from rloom.runs.measures import validation_accuracies

LOSS = "val/loss"  # of supervised fine-tuning
MEAN = "the mean validation score"


@dataclass(frozen=True)
class BestSettings:
    keep: bool = False  # the checkpoint of the best validation
    metric: str | None = None  # None: the mean over the data sources, or the loss
    lower: bool | None = None  # whether a lower value is better. None: for a loss
    patience: int | None = None  # stop after this many validations without a better one

    @property
    def is_on(self) -> bool:
        return self.keep or self.patience is not None

    def value(self, metrics: Mapping[str, float], earlier: Set[str] = frozenset()) -> float | None:
        """The number that decides; None: this validation has none, since every score failed, or every one of a data
        source. `earlier`: the names of the metrics that validations before this one had."""
        name = self.metric or (LOSS if LOSS in metrics else None)
        if name is not None and name not in metrics:
            if name in earlier:
                return None
            raise TrainingError(
                f"trainer.best_metric_key={name}: a validation of this run has no such metric; it has "
                f"{', '.join(sorted(metrics)) or 'none'}"
            )
        found = validation_accuracies(metrics)
        if name is None and validation_accuracies(dict.fromkeys(earlier, 0.0)).keys() - found.keys():
            return None  # a mean over fewer data sources is another number
        values = list(found.values()) if name is None else [metrics[name]]
        return sum(values) / len(values) if values and all(map(math.isfinite, values)) else None

    def is_better(self, value: float, than: float, metrics: Mapping[str, float]) -> bool:
        name = self.metric or (LOSS if LOSS in metrics else "")
        lower = name.endswith(("loss", "perplexity")) if self.lower is None else self.lower
        return value < than if lower else value > than


@dataclass(frozen=True)
class Best:
    """The best validation so far."""

    step: int
    value: float
    validations_since: int = 0

    def saved(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "validations_since": self.validations_since}


def read_best(state: Mapping[str, Any], checkpoint: Any) -> Best | None:
    """Of the state in a checkpoint; None: that run had not chosen one."""
    saved = state.get("best")
    if saved is None:
        return None
    try:
        found = Best(int(saved["step"]), float(saved["value"]), int(saved["validations_since"]))
        if found.step < 0 or not math.isfinite(found.value) or found.validations_since < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"{checkpoint}: its best validation cannot be read ({saved!r}); take another") from None
    return found
