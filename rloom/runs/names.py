"""Names of metrics: those of a step's line and of PPO guides, and the metric that each of them is."""

from collections.abc import Mapping
from dataclasses import dataclass

# KL to the reference: subtracted from the reward, added to the loss, or only measured (algorithm.kl_metric).
KL_METRICS = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/kl_divergence")


@dataclass(frozen=True)
class MetricName:
    names: tuple[str, ...]  # all names of one value; the first is its label in a step's line
    metrics: tuple[str, ...]  # the value is that of the first that was measured
    english: str  # what is healthy
    chinese: str
    place: str | None = None  # in a step's line; of the rows of one place, the first that was measured is shown
    written: bool = False  # metrics.jsonl and trackers have the value under each of the names, too

    def value(self, metrics: Mapping[str, float]) -> float | None:
        return next((metrics[name] for name in self.metrics if name in metrics), None)


NAMES = (
    MetricName(("reward_mean",), ("critic/score/mean",), "rises", "应上升", place="reward", written=True),
    MetricName(("reward std",), ("critic/score/std",), "well below the range of the rewards", "明显小于奖励的取值范围"),
    MetricName(
        ("kl", "kl_divergence"),
        KL_METRICS,
        "0.001 to 0.1, grows slowly; only with a reference (KL in the reward or in the loss, or algorithm.kl_metric)",
        "0.001–0.1，缓慢增长；仅在使用参考模型（奖励或损失中的 KL，或 algorithm.kl_metric）时出现",
        place="kl",
        written=True,
    ),
    MetricName(
        ("ppo_kl",),
        ("actor/ppo_kl",),
        "near 0, with either sign: the policy before and after the update",
        "接近 0，可正可负：更新前后的策略之间",
        place="kl",
    ),
    MetricName(
        ("actor_loss", "policy_loss"),
        ("actor/pg_loss",),
        "near 0, with either sign; does not measure progress",
        "接近 0，可正可负；不反映训练进展",
        place="actor_loss",
        written=True,
    ),
    MetricName(
        ("critic_loss", "value_loss"),
        ("critic/vf_loss",),
        "falls, then follows the rewards",
        "下降，之后随奖励变化",
        place="critic_loss",
        written=True,
    ),
    MetricName(
        ("clip_fraction",),
        ("actor/pg_clipfrac",),
        "0 with one update per step; else up to 0.3",
        "每步只更新一次时为 0；否则不超过 0.3",
        place="clip_fraction",
        written=True,
    ),
    MetricName(
        ("ppo_ratio",),
        ("actor/ppo_ratio",),
        "0.8 to 1.2, the mean over tokens",
        "0.8–1.2，按 token 平均",
        written=True,
    ),
    MetricName(
        ("grad_norm",),
        ("actor/grad_norm",),
        "does not grow; the critic's is critic/grad_norm",
        "不应持续增大；critic 的为 critic/grad_norm",
        written=True,
    ),
    MetricName(("entropy",), ("actor/entropy",), "falls slowly", "缓慢下降", place="entropy"),
    MetricName(("len",), ("response_length/mean",), "is stable", "保持稳定", place="len"),
    MetricName(
        ("equal groups",),
        ("rollout/equal_groups",),
        "well below 1: prompts whose answers score the same have no advantage",
        "明显低于 1：回答得分相同的 prompt 没有优势",
    ),
    MetricName(
        ("repetition",),
        ("rollout/repetition",),
        "below 0.5: the share of groups of four tokens that an answer repeats",
        "低于 0.5：同一回答中重复的四 token 片段所占比例",
    ),
    MetricName(("failed",), ("reward/failed",), "absent", "不出现"),
    MetricName(("epoch",), ("training/epoch",), "of the metric: counted from 0", "指标中从 0 开始计数", written=True),
    MetricName(("validation accuracy",), ("val-core/{data_source}/acc/mean@n",), "rises", "应上升"),
    MetricName(("loss",), ("train/loss",), "of supervised fine-tuning: falls", "监督微调的损失：应下降", place="loss"),
    MetricName(("lr",), ("train/lr",), "of supervised fine-tuning: its schedule", "监督微调的学习率", place="lr"),
    MetricName(
        ("grad_norm",),
        ("train/grad_norm",),
        "of supervised fine-tuning: does not grow",
        "监督微调：不应持续增大",
        place="grad_norm",
    ),
    MetricName(
        ("tokens/s",),
        ("train/tokens_per_s",),
        "of supervised fine-tuning: is stable",
        "监督微调的速度：保持稳定",
        place="tokens/s",
    ),
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


def describe_metrics(chinese: bool) -> str:
    """A table: names, metrics, what is healthy; and the names that files and trackers have, too."""
    rows = [("名称", "指标", "正常情况") if chinese else ("name", "metric", "healthy")]
    for row in NAMES:
        first, *others = row.metrics
        rows.append((", ".join(row.names), first, row.chinese if chinese else row.english))
        rows += [("", f"{'或' if chinese else 'or'} {metric}", "") for metric in others]
    lines = [f"  {name:<24}  {metric:<34}  {meaning}".rstrip() for name, metric, meaning in rows]
    written = ", ".join(name for row in NAMES if row.written for name in row.names)
    where = (
        "metrics.jsonl 和跟踪工具中也有这些名称" if chinese else "metrics.jsonl and the trackers also have the names"
    )
    return "\n".join([*lines, "", f"{where}: {written}"])
