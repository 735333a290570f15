"""A critic that does not learn."""

from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import ACTOR, CRITIC, SCORE, History, rounded
from rloom.doctor.run.series import Series

EXPLAINED = 0.05  # of the variance of the returns; below it the critic predicts no more than their mean
WORSE_THAN_MEAN = -0.2
BIAS = 0.5  # standard deviations of the scores between the mean value and the mean score
LONG_RUN = 20  # steps after which a critic that explains nothing is a finding, if the reward does not rise

CRITIC_STUCK = Fault(
    "critic_stuck",
    Severity.WARNING,
    "The critic does not learn",
    (
        "the critic's learning rate is too low; about ten times the actor's is usual",
        "the policy changes before the critic has learned the rewards",
        "rewards are far outside of ± critic.cliprange_value",
        "too few answers in a step",
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
        (
            f"critic/vf_loss does not fall: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the "
            "last"
        ),
        (f"critic/vf_explained_var: {known:.3g} in the last {len(explained.tail)} steps (0: no better than the mean)"),
        f"values are {values.tail.mean:.3g} on average, scores {score.tail.mean:.3g}",
    ]
    rate, actor = history.number(f"{CRITIC}.optim.lr", 1e-5), history.number(f"{ACTOR}.optim.lr", 1e-6)
    higher = rounded(max(10 * actor, 2 * rate))
    changes = [
        Change(
            f"{CRITIC}.optim.lr",
            higher,
            "ten times the actor's, or twice what it is",
        ),
        Change("trainer.critic_warmup", 10, "train the critic alone at first", "higher"),
        Change(
            "data.train_batch_size",
            int(2 * history.number("data.train_batch_size", 256)),
            "more answers in a step",
        ),
    ]
    return CRITIC_STUCK.found(loss.span, evidence, changes, certain=bias >= 2 * BIAS and len(loss) >= LONG_RUN)
