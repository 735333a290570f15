"""A critic that does not learn."""

from rloom.doctor.run.finding import Change, Fault, Finding, Severity, Text
from rloom.doctor.run.history import ACTOR, CRITIC, SCORE, History, rounded
from rloom.doctor.run.series import Series

EXPLAINED = 0.05  # of the variance of the returns; below it the critic predicts no more than their mean
WORSE_THAN_MEAN = -0.2
BIAS = 0.5  # standard deviations of the scores between the mean value and the mean score
LONG_RUN = 20  # steps after which a critic that explains nothing is a finding, if the reward does not rise

CRITIC_STUCK = Fault(
    "critic_stuck",
    Severity.WARNING,
    Text("The critic does not learn", "critic 没有学到东西"),
    (
        Text(
            "the critic's learning rate is too low; about ten times the actor's is usual",
            "critic 学习率过低；通常为 actor 的约 10 倍",
        ),
        Text("the policy changes before the critic has learned the rewards", "critic 尚未学会奖励，策略就已变化"),
        Text("rewards are far outside of ± critic.cliprange_value", "奖励远超 ± critic.cliprange_value 的范围"),
        Text("too few answers in a step", "每步回答数太少"),
    ),
    ("critic/vf_loss",),
)


def moves(values: Series, spread: Series) -> bool:
    """A critic begins at 0 and learns the level of the scores first; it may pass it before it settles."""
    trend = values.trend
    return trend is not None and abs(trend.change) >= BIAS * spread.tail.mean


def critic_stuck(history: History) -> Finding | None:
    loss, explained = history.series("critic/vf_loss"), history.series("critic/vf_explained_var")
    trend = loss.trend
    values, score, spread = (history.series(name) for name in ("critic/values/mean", SCORE, "critic/score/std"))
    if trend is None or trend.falls or min(map(len, (explained, values, score, spread))) < 3:
        return None
    known = explained.tail.median
    if known > EXPLAINED:
        return None
    bias = abs(values.tail.mean - score.tail.mean) / max(spread.tail.mean, 1e-9)
    idle = len(loss) >= LONG_RUN and not history.score_rises
    biased = bias >= BIAS and not (len(loss) < LONG_RUN and moves(values, spread))
    if not biased and known > WORSE_THAN_MEAN and not idle:
        return None
    evidence = [
        Text(
            f"critic/vf_loss does not fall: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the "
            "last",
            f"critic/vf_loss 没有下降：前三分之一步平均 {trend.first:.3g}，后三分之一 {trend.last:.3g}",
        ),
        Text(
            f"critic/vf_explained_var: {known:.3g} in the last {len(explained.tail)} steps "
            "(0: no better than the mean)",
            f"critic/vf_explained_var：最后 {len(explained.tail)} 步为 {known:.3g}（0 表示不比均值好）",
        ),
        Text(
            f"values are {values.tail.mean:.3g} on average, scores {score.tail.mean:.3g}",
            f"价值平均 {values.tail.mean:.3g}，得分平均 {score.tail.mean:.3g}",
        ),
    ]
    rate, actor = history.number(f"{CRITIC}.optim.lr", 1e-5), history.number(f"{ACTOR}.optim.lr", 1e-6)
    higher = rounded(max(10 * actor, 2 * rate))
    changes = [
        Change(
            f"{CRITIC}.optim.lr",
            higher,
            Text("ten times the actor's, or twice what it is", "actor 的 10 倍，或当前的 2 倍"),
        ),
        Change("trainer.critic_warmup", 10, Text("train the critic alone at first", "先单独训练 critic"), "higher"),
        Change(
            "data.train_batch_size",
            int(2 * history.number("data.train_batch_size", 256)),
            Text("more answers in a step", "每步更多回答"),
        ),
    ]
    return CRITIC_STUCK.found(loss.span, evidence, changes, certain=bias >= 2 * BIAS and len(loss) >= LONG_RUN)
