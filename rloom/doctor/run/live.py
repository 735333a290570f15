"""The checks beside a running run: each kind of finding is reported once, when it is certain."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.finding import Finding
from rloom.doctor.run.history import History
from rloom.doctor.run.samples import Samples

# Steps that are kept. Trends compare the first third with the last: it must hold none of the last steps.
FIRST_STEPS, LAST_STEPS = 20, 40
CHECK_EVERY = 5  # steps; a check of all kinds takes about two milliseconds
DUMPED_STEPS = 4  # whose answers are read
OWN_WARNING = frozenset({"rollout_mismatch"})  # `MismatchMonitor` warns, with the versions of the weights
VALIDATION = "val-core/"
READ = (  # prefixes of the metrics that checks read; a step has about a hundred
    *("actor/entropy", "actor/grad_norm", "actor/kl_", "actor/lr", "actor/nonfinite", "actor/pg_clipfrac"),
    *("actor/ppo_", "actor/reward_kl_penalty", "critic/nonfinite", "critic/score/", "critic/values/mean", "critic/vf_"),
    *("perf/max_memory_allocated_gb", "prompt_length/", "response_length/", "reward/", "rollout/", "rollout_corr/"),
    *("timing_s/", "train/", "training/epoch", "training/off_policy/", "training/wait_s", VALIDATION),
)


class LiveDiagnosis:
    """Example:

    live = LiveDiagnosis({"algorithm.adv_estimator": "grpo"})
    for finding in live.check(8, metrics):  # empty for a healthy run
        print(live_message(finding, run_dir))
    """

    def __init__(self, config: Mapping[str, Any], run_dir: Path | None = None) -> None:
        """`config`: with dotted keys. `run_dir`: with the dumped answers; None: they are not read."""
        self._config, self._run_dir = config, run_dir
        self._records: list[dict[str, float]] = []
        self._validations: list[dict[str, float]] = []  # of step 0 and of steps that are no longer kept
        self._reported: set[str] = set(OWN_WARNING)
        self._checked_from = 1  # the step
        self._steps = 0

    def add_history(self, records: Iterable[Mapping[str, float]]) -> None:
        """What was measured before: the validation before training, and the steps of a run that resumes.

        Without them a run that has learned and now stays at its level looks like one that never learned. Findings whose
        evidence ends before the first step to check are not reported: the resumed run may have other keys.
        """
        for record in records:
            self._add(int(record["step"]), record)
            self._checked_from = int(record["step"]) + 1

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings that have become certain with this step."""
        self._add(step, metrics)
        self._steps += 1
        if self._steps % CHECK_EVERY:
            return []
        records = sorted([*self._validations, *self._records], key=itemgetter("step"))
        samples = Samples if self._run_dir is None else partial(Samples.of, self._run_dir, DUMPED_STEPS)
        history = History(records, self._config, read_samples=samples)
        found = [f for f in diagnose(history) if f.certain and f.steps[1] >= self._checked_from]
        new = [finding for finding in found if finding.kind not in self._reported]
        self._reported |= {finding.kind for finding in new}
        return new

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            self._keep_validation({**metrics, "step": 0})
            return
        kept = {name: value for name, value in metrics.items() if name.startswith(READ)}
        self._records.append({**kept, "step": step})
        if len(self._records) > FIRST_STEPS + LAST_STEPS:
            self._keep_validation(self._records.pop(FIRST_STEPS))

    def _keep_validation(self, record: Mapping[str, float]) -> None:
        """An accuracy is compared with the first and the best one; both may be many steps ago."""
        accuracies = {name: value for name, value in record.items() if name.startswith(VALIDATION)}
        if accuracies:
            self._validations.append({**accuracies, "step": record["step"]})


def live_message(finding: Finding, run_dir: Path, to: Callable[[str], str] = str) -> str:
    """At most four lines: evidence, the first cause, its first advice. `to`: translates; each part apart, because a
    sentence of several parts may look like another one."""
    lines = [to("Warning: {}: {}.").format(to(finding.title), to(finding.evidence[0]))]
    if finding.causes:
        lines.append(to("Likely cause: {}").format(to(finding.causes[0])))
    if finding.advice:
        first = finding.advice[0]
        advice = to(first) if isinstance(first, str) else first.assignment
        lines.append(to("Begin again with: {}." if finding.begin_again else "Try: {}.").format(advice))
    lines.append(to("rloom doctor {} has the evidence, the causes and further keys.").format(run_dir))
    return "\n".join(lines)
