"""Names of metrics: those of a step's line and of PPO guides, and the metric that each of them is."""

from collections.abc import Mapping
from dataclasses import dataclass

from rloom.language import translate

# KL to the reference: subtracted from the reward, added to the loss, or only measured (algorithm.kl_metric).
KL_METRICS = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/kl_divergence")


@dataclass(frozen=True)
class MetricName:
    names: tuple[str, ...]  # all names of one value; the first is its label in a step's line
    metrics: tuple[str, ...]  # the value is that of the first that was measured
    healthy: str
    place: str | None = None  # in a step's line; of the rows of one place, the first that was measured is shown
    written: bool = False  # metrics.jsonl and trackers have the value under each of the names, too

    def value(self, metrics: Mapping[str, float]) -> float | None:
        return next((metrics[name] for name in self.metrics if name in metrics), None)


NAMES = (
    MetricName(("reward_mean",), ("critic/score/mean",), "rises", place="reward", written=True),
    MetricName(("reward std",), ("critic/score/std",), "well below the range of the rewards"),
    MetricName(
        ("kl", "kl_divergence"),
        KL_METRICS,
        "0.001 to 0.1, grows slowly; only with a reference (KL in the reward or in the loss, or algorithm.kl_metric)",
        place="kl",
        written=True,
    ),
    MetricName(
        ("ppo_kl",), ("actor/ppo_kl",), "near 0, with either sign: the policy before and after the update", place="kl"
    ),
    MetricName(
        ("actor_loss", "policy_loss"),
        ("actor/pg_loss",),
        "near 0, with either sign; does not measure progress",
        place="actor_loss",
        written=True,
    ),
    MetricName(
        ("critic_loss", "value_loss"),
        ("critic/vf_loss",),
        "falls, then follows the rewards",
        place="critic_loss",
        written=True,
    ),
    MetricName(
        ("clip_fraction",),
        ("actor/pg_clipfrac",),
        "0 with one update per step; else up to 0.3",
        place="clip_fraction",
        written=True,
    ),
    MetricName(("ppo_ratio",), ("actor/ppo_ratio",), "0.8 to 1.2, the mean over tokens", written=True),
    MetricName(("grad_norm",), ("actor/grad_norm",), "does not grow; the critic's is critic/grad_norm", written=True),
    MetricName(("entropy",), ("actor/entropy",), "falls slowly", place="entropy"),
    MetricName(("len",), ("response_length/mean",), "is stable", place="len"),
    MetricName(("turns",), ("episode/turns/mean",), "of answers of several turns: is stable", place="turns"),
    MetricName(
        ("tool calls",),
        ("tool/calls",),
        "an episode: above 0 where the task needs a tool; tool/errors and tool/timeouts are shares of the calls",
    ),
    MetricName(
        ("ended",),
        ("episode/ended/done",),
        "near 1: the share of episodes that did not end at a limit or with a failure",
    ),
    MetricName(
        ("equal groups",),
        ("rollout/equal_groups",),
        "well below 1: prompts whose answers score the same have no advantage",
    ),
    MetricName(
        ("trained answers",),
        ("actor/trained_answers",),
        "above 0: with skip_zero_advantages, the share of answers that have an advantage",
    ),
    MetricName(
        ("repetition",), ("rollout/repetition",), "below 0.5: the share of groups of four tokens that an answer repeats"
    ),
    MetricName(("failed",), ("reward/failed",), "absent"),
    MetricName(("epoch",), ("training/epoch",), "of the metric: counted from 0", written=True),
    MetricName(
        ("validation",),
        ("val-core/{data_source}/acc/mean@n",),
        "rises: the accuracy, or the mean score of a reward that does not return acc",
    ),
    MetricName(("loss",), ("train/loss",), "of supervised fine-tuning: falls", place="loss"),
    MetricName(("lr",), ("train/lr",), "of supervised fine-tuning: its schedule", place="lr"),
    MetricName(("grad_norm",), ("train/grad_norm",), "of supervised fine-tuning: does not grow", place="grad_norm"),
    MetricName(("tokens/s",), ("train/tokens_per_s",), "of supervised fine-tuning: is stable", place="tokens/s"),
)


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and those of a guide under its names: {"actor/pg_loss": 0.1} -> also actor_loss, policy_loss."""
    found = ((row.names, row.value(metrics)) for row in NAMES if row.written)
    return {**metrics, **{name: value for names, value in found if value is not None for name in names}}


def step_line(metrics: Mapping[str, float]) -> dict[str, float]:
    """The values of a step's line, by label. Without a reference, `ppo_kl` takes the place of `kl`."""
    shown: dict[str, tuple[str, float]] = {}
    for row in NAMES:
        value = row.value(metrics)
        if row.place is not None and value is not None:
            shown.setdefault(row.place, (row.names[0], value))
    return dict(shown.values())


def describe_metrics() -> str:
    """A table: names, metrics, what is healthy; and the names that files and trackers have, too."""
    rows = [(translate("name"), translate("metric"), translate("healthy"))]
    for row in NAMES:
        first, *others = row.metrics
        rows.append((", ".join(row.names), first, translate(row.healthy)))
        rows += [("", translate(f"or {metric}"), "") for metric in others]
    lines = [f"  {name:<24}  {metric:<34}  {meaning}".rstrip() for name, metric, meaning in rows]
    written = ", ".join(name for row in NAMES if row.written for name in row.names)
    where = translate(f"metrics.jsonl and the trackers also have the names: {written}")
    return "\n".join([*lines, "", where])
