"""The learning rate as a function of the step, without state to save."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    peak: float
    warmup_steps: int = 0
    total_steps: int = 1
    kind: str = "constant"
    floor: float = 0.0  # final rate as a share of the peak

    def at(self, step: int) -> float:
        """The rate of steps 1, 2, ... total_steps. The last step of the warm-up is the first at the peak."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        start = max(self.warmup_steps, 1)
        done = min((step - start) / max(self.total_steps - start + 1, 1), 1.0)  # above the floor at the last step
        decay = done if self.kind == "linear" else 0.5 * (1 - math.cos(math.pi * done))
        return self.peak * (1 - (1 - self.floor) * decay)
