"""Names of metrics: those of a step's line, those that PPO guides use, and the metric that each of them is."""

from dataclasses import dataclass

# The values of a step's line. Of the (label, metric) pairs of an entry, the first whose metric was measured is shown:
# `kl` is the KL to the reference; without a reference there is only `ppo_kl`, between the policy before and after.
SHOWN = (
    (("reward_mean", "critic/score/mean"),),
    (("kl", "actor/reward_kl_penalty"), ("kl", "actor/kl_loss"), ("ppo_kl", "actor/ppo_kl")),
    (("actor_loss", "actor/pg_loss"),),
    (("critic_loss", "critic/vf_loss"),),
    (("clip_fraction", "actor/pg_clipfrac"),),
    (("entropy", "actor/entropy"),),
    (("len", "response_length/mean"),),
    (("loss", "train/loss"),),  # of supervised fine-tuning, as the three below
    (("lr", "train/lr"),),
    (("grad_norm", "train/grad_norm"),),
    (("tokens/s", "train/tokens_per_s"),),
)


@dataclass(frozen=True)
class MetricName:
    name: str  # with other names of the same value
    metric: str
    english: str  # what is healthy
    chinese: str


NAMES = (
    MetricName("reward_mean", "critic/score/mean", "rises", "应上升"),
    MetricName("reward std", "critic/score/std", "well below the range of the rewards", "明显小于奖励的取值范围"),
    MetricName(
        "kl, kl_divergence",
        "actor/reward_kl_penalty or actor/kl_loss",
        "0.001 to 0.1, grows slowly; only with a reference (KL in the reward or in the loss)",
        "0.001–0.1，缓慢增长；仅在使用参考模型（奖励或损失中的 KL）时出现",
    ),
    MetricName(
        "ppo_kl",
        "actor/ppo_kl",
        "near 0, with either sign: the policy before and after the update",
        "接近 0，可正可负：更新前后的策略之间",
    ),
    MetricName(
        "actor_loss, policy_loss",
        "actor/pg_loss",
        "near 0, with either sign; does not measure progress",
        "接近 0，可正可负；不反映训练进展",
    ),
    MetricName("critic_loss, value_loss", "critic/vf_loss", "falls, then follows the rewards", "下降，之后随奖励变化"),
    MetricName(
        "clip_fraction",
        "actor/pg_clipfrac",
        "0 with one update per step; else up to 0.3",
        "每步只更新一次时为 0；否则不超过 0.3",
    ),
    MetricName("ppo_ratio", "actor/ppo_ratio", "0.8 to 1.2, the mean over tokens", "0.8–1.2，按 token 平均"),
    MetricName("grad_norm", "actor/grad_norm, critic/grad_norm", "does not grow", "不应持续增大"),
    MetricName("loss", "train/loss", "of supervised fine-tuning: falls", "监督微调的损失：应下降"),
    MetricName("lr", "train/lr", "of supervised fine-tuning: its schedule", "监督微调的学习率"),
    MetricName("tokens/s", "train/tokens_per_s", "of supervised fine-tuning: is stable", "监督微调的速度：保持稳定"),
    MetricName("entropy", "actor/entropy", "falls slowly", "缓慢下降"),
    MetricName("len", "response_length/mean", "is stable", "保持稳定"),
    MetricName(
        "equal groups",
        "rollout/equal_groups",
        "well below 1: prompts whose answers score the same have no advantage",
        "明显低于 1：回答得分相同的 prompt 没有优势",
    ),
    MetricName(
        "repetition",
        "rollout/repetition",
        "below 0.5: the share of groups of four tokens that an answer repeats",
        "低于 0.5：同一回答中重复的四 token 片段所占比例",
    ),
    MetricName("failed", "reward/failed", "absent", "不出现"),
    MetricName("epoch", "training/epoch", "of the metric: counted from 0", "指标中从 0 开始计数"),
    MetricName(
        "validation accuracy", "val-core/{data_source}/acc/mean@n", "rises", "应上升"
    ),
)  # fmt: skip


def describe_metrics(chinese: bool) -> str:
    """A table: name, metric, what is healthy."""
    head = ("名称", "metrics.jsonl 中的指标", "正常情况") if chinese else ("name", "metric in metrics.jsonl", "healthy")
    rows = [head, *((row.name, row.metric, row.chinese if chinese else row.english) for row in NAMES)]
    return "\n".join(f"  {name:<24}  {metric:<40}  {meaning}" for name, metric, meaning in rows)
