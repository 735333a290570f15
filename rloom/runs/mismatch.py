"""The warning about a mismatch between the log-probs of rollout engine and trainer.

The figure is `rollout_corr/k3_kl`, an estimate of KL(rollout || trainer) per token. docs/reading_a_run.md has measured
values and the reason for the default threshold.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

FIGURE = "rollout_corr/k3_kl"
MUCH_WORSE = 10.0  # a second warning needs a figure this many times that of the last one
THRESHOLD_KEY = "trainer.rollout_mismatch_warning"
ROLLOUT, ACTOR, CORRECTION = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "algorithm.rollout_correction"

WAY_OUT = (
    f"Until the cause is found, {CORRECTION}.rollout_is=token weights the loss, and {CORRECTION}.rollout_rs=sequence "
    f"with rollout_rs_threshold=2 rejects answers. {THRESHOLD_KEY}=null switches this warning off."
)


def causes(versions: str) -> tuple[str, ...]:
    """Known causes, the most common first. `versions`: of the weights, or where to find them."""
    return (
        f"data types differ: compare {ACTOR}.fsdp_config.dtype with the data type of the engine "
        f"({ROLLOUT}.engine_kwargs; native and hf use the trainer's)",
        "the engine computes attention, norms or MoE routing with other kernels: compare with "
        f"{ROLLOUT}.name=native or {ROLLOUT}.enforce_eager=True",
        f"the engine generates with other weights: {versions}",
        f"the engine's log-probs are not those of {ROLLOUT}.temperature over the whole vocabulary, before top_p and "
        "top_k",
        f"the engine or its KV cache is quantised (fp8): {ROLLOUT}.engine_kwargs",
        "a LoRA adapter is not in the engine, or was merged in another data type: actor_rollout_ref.model.lora_rank",
    )


@dataclass(frozen=True)
class MismatchWarning:
    figure: float
    threshold: float
    logprobs_difference: float  # mean, absolute
    engine_versions: tuple[int, ...]  # versions of the weights that generated the answers
    trainer_version: int

    @property
    def message(self) -> str:
        engine = ", ".join(map(str, self.engine_versions))
        versions = f"its answers have version {engine}, the trainer's weights version {self.trainer_version}"
        return "\n".join(
            [
                f"Warning: rollout engine and trainer differ: {FIGURE} {self.figure:.3g} is above "
                f"{THRESHOLD_KEY}={self.threshold:g}; log-probs differ by {self.logprobs_difference:.3g} on average. "
                "Known causes:",
                *(f"  {number}. {cause}" for number, cause in enumerate(causes(versions), start=1)),
                WAY_OUT,
            ]
        )

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the `warning` event."""
        return {
            "kind": "rollout_mismatch",
            "metric": FIGURE,
            "value": self.figure,
            "threshold": self.threshold,
            "engine_versions": list(self.engine_versions),
            "trainer_version": self.trainer_version,
            "message": self.message,
        }


class MismatchMonitor:
    """Warns once in a run, and again only if the mismatch becomes ten times larger."""

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold
        self._reported = 0.0  # the figure of the last warning

    def check(
        self, metrics: Mapping[str, float], *, engine_versions: Collection[int], trainer_version: int
    ) -> MismatchWarning | None:
        figure = metrics.get(FIGURE)
        if self.threshold is None or figure is None:
            return None
        if not figure > self.threshold or figure < MUCH_WORSE * self._reported:
            return None
        self._reported = figure
        return MismatchWarning(
            figure,
            self.threshold,
            metrics.get("training/rollout_logprobs_diff_mean", 0.0),
            tuple(sorted(set(engine_versions))),
            trainer_version,
        )
