"""The checks beside a running run: each kind of finding is reported once, when it is certain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloom.diagnosis.checks import diagnose
from rloom.diagnosis.finding import Finding
from rloom.diagnosis.history import History

FIRST_STEPS, LAST_STEPS = 10, 50  # that are kept: trends compare the beginning of a run with its end
CHECK_EVERY = 5  # steps; a check of all kinds takes about two milliseconds
OWN_WARNING = frozenset({"rollout_mismatch"})  # `MismatchMonitor` warns, with the versions of the weights
READ = (  # prefixes of the metrics that checks read; a step has about a hundred
    *("actor/entropy", "actor/grad_norm", "actor/kl_loss", "actor/lr", "actor/nonfinite", "actor/pg_clipfrac"),
    *("actor/ppo_", "actor/reward_kl_penalty", "critic/nonfinite", "critic/score/", "critic/values/mean", "critic/vf_"),
    *("perf/max_memory_allocated_gb", "response_length/", "reward/", "rollout/", "timing_s/", "train/", "val-core/"),
)


class LiveDiagnosis:
    """Example:

    live = LiveDiagnosis({"algorithm.adv_estimator": "grpo"})
    for finding in live.check(8, metrics):  # empty for a healthy run
        print(live_message(finding, run_dir))
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: with dotted keys."""
        self._config = config
        self._records: list[dict[str, float]] = []
        self._reported: set[str] = set(OWN_WARNING)
        self._steps = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings that have become certain with this step."""
        kept = {name: value for name, value in metrics.items() if name.startswith(READ)}
        self._records.append({**kept, "step": step})
        if len(self._records) > FIRST_STEPS + LAST_STEPS:
            del self._records[FIRST_STEPS]
        self._steps += 1
        if self._steps % CHECK_EVERY:
            return []
        found = [f for f in diagnose(History(self._records, self._config)) if f.certain]
        new = [finding for finding in found if finding.kind not in self._reported]
        self._reported |= {finding.kind for finding in new}
        return new


def live_message(finding: Finding, run_dir: Path) -> str:
    """At most three lines."""
    lines = [f"Warning: {finding.title.english}: {finding.evidence[0].english}."]
    if finding.changes:
        tries = " or ".join(change.assignment for change in finding.changes[:2])
        lines.append(f"Try {tries}.")
    return "\n".join([*lines, f"rloom doctor {run_dir} has the evidence, the causes and further keys."])
