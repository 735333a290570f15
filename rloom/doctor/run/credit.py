"""Advantages that carry no information, or that do not reach the first tokens of an answer."""

from rloom.algos.needs import SMALLEST_WEIGHT, reach
from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import FEWEST_CERTAIN, FEWEST_STEPS, RESPONSE_LENGTH, ROLLOUT, SCORE, History
from rloom.doctor.run.series import FEWEST_OF_A_TREND, Series

EQUAL_SHARE = 0.9  # of the prompts: fewer than one in ten has anything to learn from
EQUAL_AT_FIRST = 0.75
EQUAL_CERTAIN = 0.97
WEIGHT_CERTAIN = 0.001

EQUAL_GROUPS = Fault(
    "equal_groups",
    Severity.ERROR,
    "The answers to a prompt all have the same score: no advantage",
    (),  # by the mean score
    ("rollout/equal_groups",),
)
TOO_HARD = "the prompts are too hard: almost no answer scores"
TOO_EASY = "the prompts are too easy: almost every answer scores"
SAME_ANSWERS = "the answers are the same: temperature, top_p or top_k leave no choice"
FEW_ANSWERS = "too few answers to a prompt"
COARSE = "the reward has too few levels"
CREDIT = Fault(
    "credit_decay",
    Severity.WARNING,
    "The reward does not reach the first tokens of an answer",
    (
        (
            "gamma × lam per token is too small for answers of this length (measured on GSM8K, answers of 300 tokens: "
            "lam=0.95 gained nothing in 12 steps, lam=1.0 took 61.2 % to 70.9 % in 30)"
        ),
    ),
    (RESPONSE_LENGTH,),
)


def equal_groups(history: History) -> Finding | None:
    share = history.series("rollout/equal_groups")
    if not history.compares_answers or len(share) < FEWEST_STEPS:
        return None
    # equal only at the end: it has learned the task, or it has collapsed, which other checks find
    if share.head.mean < EQUAL_AT_FIRST or share.tail.mean < EQUAL_SHARE or history.score_rises:
        return None
    equal, score = share.tail.mean, history.series(SCORE)
    evidence = [
        (
            f"rollout/equal_groups: {equal:.0%} of the prompts of the last {len(share.tail)} steps have answers with "
            "equal scores, whose advantage is 0"
        )
    ]
    if len(score):
        evidence.append(f"{SCORE}: {score.tail.mean:.3g} in these steps")
    n = int(history.number(f"{ROLLOUT}.n", 4))
    changes = [
        Change(
            "algorithm.filter_groups.enable",
            True,
            "generate until enough prompts differ",
        ),
        Change(f"{ROLLOUT}.n", 2 * max(n, 4), "more answers to a prompt"),
        Change(f"{ROLLOUT}.temperature", 1.0, "answers that differ", "higher"),
    ]
    certain = len(share) >= FEWEST_CERTAIN and equal >= EQUAL_CERTAIN
    return EQUAL_GROUPS.found(share.tail.span, evidence, changes, certain=certain, causes=equal_causes(history))


def equal_causes(history: History) -> list[str]:
    high, low = history.series("critic/score/max"), history.series("critic/score/min")
    score, entropy = history.series(SCORE), history.series("actor/entropy")
    place = 0.5  # of the mean score between the lowest and the highest
    if len(score) and len(high) and len(low) and max(high.values) > min(low.values):
        place = (score.tail.mean - min(low.values)) / (max(high.values) - min(low.values))
    causes = [TOO_HARD] if place < 0.1 else [TOO_EASY] if place > 0.9 else []
    if len(entropy) and entropy.tail.mean < 0.01:
        causes.insert(0, SAME_ANSWERS)
    return [*causes, *(cause for cause in (SAME_ANSWERS, FEW_ANSWERS, COARSE) if cause not in causes)]


def credit_decay(history: History) -> Finding | None:
    gamma, lam = history.number("algorithm.gamma", 1.0), history.number("algorithm.lam", 1.0)
    needs, length = history.estimator_needs, history.series(RESPONSE_LENGTH)
    decay = needs.discount(gamma, lam)
    if decay >= 1 or len(length) < FEWEST_OF_A_TREND:
        return None
    weight = decay**length.mean
    if weight >= SMALLEST_WEIGHT or history.score_rises:
        return None
    read = [key for key in ("algorithm.gamma", "algorithm.lam") if key.rpartition(".")[2] in needs.reads]
    name = " × ".join(read)
    evidence = [
        (
            f"{name} = {decay:.4g}, answers of {length.mean:.0f} tokens: the first token gets {weight:.1g} of the "
            f"final reward; it reaches {reach(decay)} tokens back (5 %)"
        ),
        *flat_score(history.series(SCORE)),
    ]
    changes = [
        Change(key, 1.0, "every token gets the whole reward") for key in reversed(read) if history.number(key, 1.0) < 1
    ]
    certain = weight < WEIGHT_CERTAIN and history.has_first_step
    return CREDIT.found(length.span, evidence, changes, certain=certain)


def flat_score(score: Series) -> list[str]:
    trend = score.trend
    if trend is None:
        return []
    return [f"{SCORE} does not rise: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last"]
