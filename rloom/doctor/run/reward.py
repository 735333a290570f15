"""Rewards without information, rewards that fail, rewards that are not the goal."""

import math

from rloom.doctor.run.answers import CLOSER, LOOK, NEVER_RIGHT, look_at_answers, same_answers
from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, SCORE, History, Series, Trend
from rloom.doctor.run.numerics import HANGS, waits_for_the_limit
from rloom.doctor.run.samples import brief
from rloom.rewards.kinds import KINDS, CallKeys

FAILED_SHARE = 0.01  # of all answers; a judge may fail now and then
FAILED_CERTAIN = 0.05
HIGHEST_ACCURACY = 0.95  # that need not rise any more
CLEAR_FALL = 0.02  # of the accuracy between two validations
RISE = 0.05  # of the reward's range: smaller rises say nothing about what it rewards
FOLLOWS = 0.3  # of the rise of the reward: the accuracy rises with it
TRAINING_ACCURACY = "reward/acc"
VALIDATIONS_CERTAIN = 6  # the first of a few is the highest by chance
OPPOSITE = -0.5  # correlation of score and correctness inside groups
NOISY, NOISY_CERTAIN = 0.25, 0.4  # share of the score's variance among answers of the same text
LENGTH_SHARE = 0.2  # share of the score's variance inside groups
LENGTH_CORRELATION = 0.8  # among equally right answers
MISSED, MISSED_CERTAIN = 0.25, 0.4  # share of the right answers
LENGTH_ALONE = 0.9  # correlation with the length where it is not known which answers are right

FIX = "`rloom reward try FILE` scores an answer that is right and one that is wrong"


def extremes(history: History) -> tuple[Series, Series] | None:
    """Lowest and highest score of each step."""
    low, high = history.series("critic/score/min"), history.series("critic/score/max")
    return (low, high) if min(len(low), len(high)) >= FEWEST_STEPS else None


REWARD_ZERO = Fault(
    "reward_zero", Severity.ERROR, "Every reward is 0: nothing to learn from", NEVER_RIGHT, ("critic/score/max",)
)


def reward_zero(history: History) -> Finding | None:
    found = extremes(history)
    if found is None or any(found[0].values) or any(found[1].values):
        return None
    steps = len(found[1])
    evidence = f"critic/score/max is 0 in all {steps} steps"
    if history.answers_per_step is not None:
        evidence += f": none of about {steps * history.answers_per_step:,} answers scored"
    return REWARD_ZERO.found(
        history, found[1].span, [evidence], certain=steps >= FEWEST_CERTAIN, more=look_at_answers(history)[1:]
    )


def right_and_wrong(history: History) -> Support:
    """Right and wrong answers get the same score."""
    right = history.samples.right_by_step.values()
    share = sum(right) / len(right) if right else 0.0
    if not history.samples.by_rule or not 0.05 < share < HIGHEST_ACCURACY:
        return True
    return f"the built-in rule of the data source finds {share:.0%} of the same answers right"


REWARD_CONSTANT = Fault(
    "reward_constant",
    Severity.ERROR,
    "Every answer has the same reward: nothing to learn from",
    (
        Cause(
            "the reward function does not depend on the answer; check this first, with a right and a wrong one: "
            "`rloom reward try FILE --source S --ground_truth T`",
            right_and_wrong,
            lambda history: [f"correct the reward function: {FIX}"],
        ),
        Cause(
            "the answers to a prompt are all the same: sampling without temperature",
            same_answers,
            lambda history: [Change(f"{ROLLOUT}.temperature", 1.0, "answers that differ", "higher")],
        ),
        Cause("the model solves (or misses) all prompts: other data", lambda history: right_and_wrong(history) is True),
    ),
    ("critic/score/max",),
)


def reward_constant(history: History) -> Finding | None:
    found = extremes(history)
    if found is None:
        return None
    low, high = min(found[0].values), max(found[1].values)
    if high == 0 or not math.isclose(low, high, rel_tol=1e-6) or is_top(history, high):
        return None
    evidence = [f"lowest and highest score of all {len(found[1])} steps: {low:.3g} and {high:.3g}"]
    certain = len(found[1]) >= FEWEST_CERTAIN
    return REWARD_CONSTANT.found(history, found[1].span, evidence, certain=certain, more=[LOOK])


def is_top(history: History, score: float) -> bool:
    """Every answer is right. 1 is the highest score of rules and judges; for other rewards an accuracy tells."""
    if isinstance(right_and_wrong(history), str):
        return False
    accuracy = history.series(TRAINING_ACCURACY).values or history.validation.values
    return math.isclose(score, 1.0) or (bool(accuracy) and min(accuracy) >= HIGHEST_ACCURACY)


# Rewards that fail


def judged(history: History) -> Support:
    return any(kind.server for kind in KINDS.values() if history.config.get(kind.switch))


def call_keys(history: History) -> CallKeys | None:
    kinds = [kind for kind in KINDS.values() if history.config.get(kind.switch)]
    return next((kind.calls for kind in kinds if kind.calls), None)


def longer_limit(history: History) -> list[Advice]:
    calls = call_keys(history)
    limit, default_s = (calls.timeout_s, 60.0) if calls else ("reward_model.timeout_s", 10.0)
    return [Change(limit, 3 * history.number(limit, default_s), "a longer time limit")]


def fewer_calls(history: History) -> list[Advice]:
    calls = call_keys(history)
    if calls is None:
        return []
    fewer = Change(calls.concurrency, 8, "fewer requests at a time", "lower")
    return [fewer, Change(calls.max_retries, 10, "more retries", "higher")]


def some_fail(history: History) -> Support:
    """Failures as fast as other rewards are exceptions, not time limits."""
    seconds, limit = history.series("timing_s/reward"), history.number("reward_model.timeout_s", 10.0)
    return len(seconds) > 0 and max(seconds.values) < 0.5 * limit


FAILURES = Fault(
    "reward_failures",
    Severity.WARNING,
    "Rewards fail",
    (
        Cause("the judge or server refuses requests: rate limit, key, budget", judged, fewer_calls),
        Cause("it answers too slowly", judged, longer_limit),
        Cause("its answers cannot be parsed as a score: `rloom judge try`", judged),
        HANGS,
        Cause(
            "the reward function raises an exception for some answers; the console prints the most common reasons",
            advice=lambda history: ["correct the reward function for the answers that the run's warnings name"],
        ),
        Cause(
            "it takes longer than reward_model.timeout_s",
            lambda history: not some_fail(history) and not waits_for_the_limit(history),
            longer_limit,
        ),
        Cause("it returns no number"),
    ),
    ("reward/failed",),
)  # fmt: skip


def reward_failures(history: History) -> Finding | None:
    failed = history.series("reward/failed")
    ended = history.end is not None and history.end.get("status") == "RewardError"
    steps = [step for step, value in failed.pairs if value > 0]
    answers = len(failed) * (history.answers_per_step or 0)
    share = sum(failed.values) / answers if answers else 0.0  # unknown without a config.yaml
    if not ended and (len(failed) < FEWEST_STEPS or share <= FAILED_SHARE):
        return None
    evidence = []
    if steps:
        of_all = f" of {answers:,} rewards ({share:.1%})" if answers else " rewards"
        evidence.append(f"reward/failed: {sum(failed.values):.0f}{of_all}, in {len(steps)} of {len(failed)} steps")
    if ended:
        assert history.end is not None  # ended
        message = str(history.end.get("message", "RewardError"))
        evidence.append(f"the run ended: {message}")
    span = (steps[0], steps[-1]) if steps else (max(history.steps, default=0),) * 2
    return FAILURES.found(
        history,
        span,
        evidence,
        certain=share > FAILED_CERTAIN and len(failed) >= FEWEST_CERTAIN,
        severity=Severity.ERROR if ended else None,
    )


# Rewards that are not the goal

SIGN = Fault(
    "reward_sign",
    Severity.ERROR,
    "Right answers score lower than wrong ones",
    (
        Cause(
            "a sign error in the reward, or its score counts errors",
            advice=lambda history: [f"return the score with the opposite sign: {FIX}"],
        ),
    ),
    (SCORE,),
)


def reward_sign(history: History) -> Finding | None:
    correlation, length = history.samples.score_correctness_correlation, history.samples.length_share
    if correlation is None or correlation > OPPOSITE or (length is not None and abs(length[1]) > LENGTH_ALONE):
        return None
    score, correct = history.series(SCORE), history.correctness
    measure = "the accuracy that the reward returns" if not history.samples.by_rule else "the built-in rule"
    evidence = [
        f"score and correctness of the answers to a prompt have a correlation of {correlation:.2f}, by {measure}"
    ]
    if len(correct) > 1:
        evidence.append(
            f"{SCORE} goes from {score.values[0]:.3g} to {score.values[-1]:.3g}, the share of right answers from "
            f"{correct.values[0]:.3g} to {correct.values[-1]:.3g}"
        )
    return SIGN.found(history, score.span, evidence, certain=True, begin_again=True)


REWARD_NOISE = Fault(
    "reward_noise",
    Severity.WARNING,
    "The same answer gets different rewards",
    (
        Cause(
            "the reward function is random, or scores another answer than it was given",
            lambda history: not judged(history),
            lambda history: [f"make the score depend on prompt and answer alone: {FIX}"],
        ),
        Cause(
            "the judge is unsure: a clearer prompt for it, temperature 0, or the mean of several scores",
            judged,
            lambda history: ["make the judge's prompt clearer: `rloom judge try` scores an answer several times"],
        ),
    ),
    (SCORE,),
)


def reward_noise(history: History) -> Finding | None:
    found = history.samples.noise
    if found is None or found[0] < NOISY:
        return None
    share, count = found
    evidence = [
        f"{share:.0%} of the variance of the scores is between answers of the same text to the same prompt "
        f"({count:,} such answers)"
    ]
    return REWARD_NOISE.found(history, history.series(SCORE).span, evidence, certain=share > NOISY_CERTAIN)


RIGHT_NOT_REWARDED = Fault(
    "right_not_rewarded",
    Severity.WARNING,
    "Right answers get the lowest score",
    (
        Cause(
            "the reward function does not find the answer in all forms in which the policy writes it",
            advice=lambda history: [f"correct the reward function: {FIX}"],
        ),
    ),
    (SCORE,),
)


def right_not_rewarded(history: History) -> Finding | None:
    found = history.samples.right_with_lowest_score
    if found is None or not history.samples.by_rule or not history.has_own_reward or found[0] < MISSED:
        return None
    share, missed = found
    evidence = [
        f"{share:.0%} of the answers that the built-in rule finds right have the lowest score, {missed.score:g}",
        f"an answer of step {missed.step}: {brief(missed.text)}; expected: {brief(str(missed.truth))}",
    ]
    return RIGHT_NOT_REWARDED.found(history, history.series(SCORE).span, evidence, certain=share > MISSED_CERTAIN)


LENGTH_REWARDED = Fault(
    "length_rewarded",
    Severity.WARNING,
    "The reward depends on the length of the answer",
    (
        Cause(
            "the reward has a part for the length, or a judge that prefers long or short answers",
            advice=lambda history: [
                "take the length out of the reward, or give it far less weight than a right answer",
                CLOSER,
            ],
        ),
    ),
    (SCORE,),
)


def length_rewarded(history: History) -> Finding | None:
    found, known = history.samples.length_share, any(a.right is not None for a in history.samples.answers)
    if found is None or not history.has_own_reward:
        return None
    share, correlated = found
    if share < LENGTH_SHARE or abs(correlated) < (LENGTH_CORRELATION if known else LENGTH_ALONE):
        return None
    longer = "longer" if correlated > 0 else "shorter"
    evidence = [
        f"{share:.0%} of the variance of the scores inside groups goes with the length among equally right answers: "
        f"{longer} answers score higher (correlation {correlated:.2f})"
    ]
    return LENGTH_REWARDED.found(history, history.series(SCORE).span, evidence, certain=True)


def rising_parts(history: History) -> list[str]:
    """The parts of the reward that rise, such as one for the format."""
    known = (TRAINING_ACCURACY, "reward/failed", "reward/workers_replaced")
    parts = {name: s.trend for name, s in history.matching("reward/").items() if name not in known}
    rising = {name: trend for name, trend in parts.items() if trend is not None and trend.rises}
    return [f"{name}: {trend.first:.3g} at first, {trend.last:.3g} at last" for name, trend in rising.items()]


def part_rises(history: History) -> Support:
    parts = rising_parts(history)
    return parts[0] if parts else history.has_own_reward and not judged(history)


def prefers_wrong(history: History) -> Support:
    return judged(history) or bool(history.config.get("reward_model.enable")) or not history.has_own_reward


HACKED = Fault(
    "reward_hacked",
    Severity.WARNING,
    "The reward rises, but the accuracy does not",
    (
        Cause(
            "a part of the reward (format, length) is easier than the task, and the policy learns only that",
            part_rises,
            lambda history: ["give the easy part less weight, or only to right answers"],
        ),
        Cause("the judge or reward model prefers answers that are not correct", prefers_wrong, lambda history: [LOOK]),
    ),
    (SCORE,),
)


def accuracies(history: History) -> tuple[str, Trend] | None:
    """How correct answers are, measured apart from the score: in training, else in validation."""
    correct = history.correctness
    if correct.trend is not None:
        by_rule = history.samples.by_rule
        return "right answers by the built-in rule" if by_rule else TRAINING_ACCURACY, correct.trend
    if len(history.validation) < 2 or history.scores_are_accuracies:
        return None
    first, *later = history.validation.values
    if len(later) == 1 and later[0] > first - CLEAR_FALL:  # two validations differ by chance
        return None
    name = next(name for name in sorted(history.columns) if name.startswith("val-core/"))
    return name, Trend(first, max(later), 0.0)


def reward_hacked(history: History) -> Finding | None:
    score, accuracy = history.series(SCORE), accuracies(history)
    trend, found = score.trend, extremes(history)
    if trend is None or found is None or accuracy is None:
        return None
    name, measured = accuracy
    width = max(found[1].values) - min(found[0].values)
    rises = trend.rises and trend.change > RISE * width
    follows = measured.rises or (measured.error > 0 and width * measured.change > FOLLOWS * trend.change)
    if not rises or follows or measured.last >= HIGHEST_ACCURACY:
        return None
    evidence = [
        f"{SCORE}: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last",
        f"{name}: {measured.first:.3g} at first, {measured.last:.3g} at last",
    ]
    often = name == TRAINING_ACCURACY or len(history.validation) >= VALIDATIONS_CERTAIN
    certain = often and trend.change > 4 * trend.error and measured.change <= 0
    return HACKED.found(history, score.span, evidence, certain=certain, more=[LOOK, CLOSER])
