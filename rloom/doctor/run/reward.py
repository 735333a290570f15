"""Rewards without information, rewards that fail, rewards that are not the goal, rewards that fall again."""

import math
from statistics import fmean

from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, SCORE, History
from rloom.doctor.run.numerics import lower_learning_rate
from rloom.doctor.run.series import Series, Trend
from rloom.rewards.kinds import KINDS, CallKeys

FAILED_SHARE = 0.01  # of all answers; a judge may fail now and then
FAILED_CERTAIN = 0.05
HIGHEST_ACCURACY = 0.95  # that need not rise any more
CLEAR_FALL = 0.02  # of the accuracy between two validations
RISE = 0.05  # of the reward's range: smaller rises say nothing about what it rewards
TRAINING_ACCURACY = "reward/acc"
COLLAPSED = 0.25  # of the height above the lowest score that the first steps had
COLLAPSE_ERRORS = 2.5  # standard errors of the mean score of one step
PEAK_ERRORS = 4.0  # standard errors from peak to end: the highest of many means is high by chance
PEAK_SHARE = 0.2  # of the peak's height above the lowest score
OUTLIERS = 20  # one step in this many may have a score that is far below all others
VALIDATIONS_CERTAIN = 6  # the first of a few is the highest by chance

SHOW = Change("trainer.log_val_generations", 5, "print answers beside what was expected", "higher")
REWARD_ZERO = Fault(
    "reward_zero",
    Severity.ERROR,
    "Every reward is 0: nothing to learn from",
    (
        (
            "the reward function finds no answer in the text; check this first, with an answer that is right: "
            "`rloom reward try FILE --source S --ground_truth T`"
        ),
        "the prompts do not ask for the format that the rule reads (#### or \\boxed{})",
        "`ground_truth` is wrong or unreadable: `rloom data check FILE`",
        "the model never solves these problems: start from an instruct or SFT model, or with easier ones",
    ),
    ("critic/score/max",),
)
REWARD_CONSTANT = Fault(
    "reward_constant",
    Severity.ERROR,
    "Every answer has the same reward: nothing to learn from",
    (
        (
            "the reward function does not depend on the answer; check this first, with a right and a wrong one: "
            "`rloom reward try FILE --source S --ground_truth T`"
        ),
        "the model solves (or misses) all prompts: other data",
        "the answers to a prompt are all the same: sampling without temperature",
    ),
    ("critic/score/max",),
)
FAILURES = Fault(
    "reward_failures",
    Severity.WARNING,
    "Rewards fail",
    (
        "the reward function raises an exception for some answers; the console prints the most common reasons",
        "it takes longer than reward_model.timeout_s",
        "it returns no number",
    ),
    ("reward/failed",),
)
JUDGE_CAUSES = (
    "the judge or server refuses requests: rate limit, key, budget",
    "it answers too slowly",
    "its answers cannot be parsed as a score: `rloom judge try`",
)
HACKED = Fault(
    "reward_hacked",
    Severity.WARNING,
    "The reward rises, but the accuracy does not",
    (
        "a part of the reward (format, length) is easier than the task, and the policy learns only that",
        "the judge or reward model prefers answers that are not correct",
        "the policy overfits the training prompts",
    ),
    (SCORE,),
)
FALLS = Fault(
    "reward_falls",
    Severity.WARNING,
    "The reward has fallen since its peak",
    (
        "the learning rate is too high",
        "the policy is too far from the reference: no KL term, or a small one",
        "advantages are noisy: few answers in a step",
    ),
    (SCORE, "val-core"),
)
COLLAPSE = Fault(
    "reward_collapse",
    Severity.ERROR,
    "The reward has collapsed",
    (
        "the learning rate is too high: after a few large updates the policy no longer solves the task",
        "too many updates on one batch",
        "a resumed run has other data, another reward or a damaged model",
    ),
    (SCORE,),
)


def extremes(history: History) -> tuple[Series, Series] | None:
    """Lowest and highest score of each step."""
    low, high = history.series("critic/score/min"), history.series("critic/score/max")
    return (low, high) if min(len(low), len(high)) >= FEWEST_STEPS else None


def reward_zero(history: History) -> Finding | None:
    found = extremes(history)
    if found is None or any(found[0].values) or any(found[1].values):
        return None
    steps = len(found[1])
    evidence = f"critic/score/max is 0 in all {steps} steps"
    if history.answers_per_step is not None:
        evidence += f": none of about {steps * history.answers_per_step:,} answers scored"
    longest = "data.max_response_length"
    changes = [
        SHOW,
        Change(longest, int(2 * history.number(longest, 512)), "if answers are cut off"),
    ]
    return REWARD_ZERO.found(found[1].span, [evidence], changes, certain=steps >= FEWEST_CERTAIN)


def reward_constant(history: History) -> Finding | None:
    found = extremes(history)
    if found is None:
        return None
    low, high = min(found[0].values), max(found[1].values)
    if high == 0 or not math.isclose(low, high, rel_tol=1e-6) or is_top(history, high):
        return None
    evidence = [f"lowest and highest score of all {len(found[1])} steps: {low:.3g} and {high:.3g}"]
    changes = [SHOW, Change(f"{ROLLOUT}.temperature", 1.0, "answers that differ", "higher")]
    return REWARD_CONSTANT.found(found[1].span, evidence, changes, certain=len(found[1]) >= FEWEST_CERTAIN)


def is_top(history: History, score: float) -> bool:
    """Every answer is right. 1 is the highest score of rules and judges; for other rewards an accuracy tells."""
    accuracy = history.series(TRAINING_ACCURACY).values or history.validation.values
    return math.isclose(score, 1.0) or (bool(accuracy) and min(accuracy) >= HIGHEST_ACCURACY)


def reward_failures(history: History) -> Finding | None:
    failed = history.series("reward/failed")
    ended = history.end is not None and history.end.get("status") == "RewardError"
    steps = [step for step, value in zip(failed.steps, failed.values, strict=True) if value > 0]
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
    kinds = [kind for kind in KINDS.values() if history.config.get(kind.switch)]
    span = (steps[0], steps[-1]) if steps else (max(history.steps, default=0),) * 2
    return FAILURES.found(
        span,
        evidence,
        failure_changes(history, next((kind.calls for kind in kinds if kind.calls), None)),
        certain=share > FAILED_CERTAIN and len(failed) >= FEWEST_CERTAIN,
        causes=(*JUDGE_CAUSES, *FAILURES.causes) if any(kind.server for kind in kinds) else None,
        severity=Severity.ERROR if ended else None,
    )


def failure_changes(history: History, calls: CallKeys | None) -> list[Change]:
    limit, default_s = (calls.timeout_s, 60.0) if calls else ("reward_model.timeout_s", 10.0)
    slower = Change(limit, 3 * history.number(limit, default_s), "a longer time limit")
    if calls is None:
        return [slower]
    fewer = Change(calls.concurrency, 8, "fewer requests at a time", "lower")
    return [fewer, Change(calls.max_retries, 10, "more retries", "higher"), slower]


def accuracies(history: History) -> tuple[str, Trend] | None:
    """How correct answers are, measured apart from the score: in training, else in validation."""
    acc, score = history.series(TRAINING_ACCURACY), history.series(SCORE)
    if acc.trend is not None and acc.values != score.values:
        return TRAINING_ACCURACY, acc.trend
    if len(history.validation) < 2:
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
    if not rises or measured.rises or measured.last >= HIGHEST_ACCURACY:
        return None
    evidence = [
        f"{SCORE}: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last",
        f"{name}: {measured.first:.3g} at first, {measured.last:.3g} at last",
        *rising_parts(history),
    ]
    changes = [
        SHOW,
        Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference"),
    ]
    often = name == TRAINING_ACCURACY or len(history.validation) >= VALIDATIONS_CERTAIN
    certain = often and trend.change > 4 * trend.error and measured.change <= 0
    return HACKED.found(score.span, evidence, changes, certain=certain)


def rising_parts(history: History) -> list[str]:
    """The parts of the reward that rise, such as one for the format."""
    known = (TRAINING_ACCURACY, "reward/failed", "reward/workers_replaced")
    parts = {name: s.trend for name, s in history.matching("reward/").items() if name not in known}
    return [
        f"{name}: {t.first:.3g} at first, {t.last:.3g} at last"
        for name, t in parts.items()
        if t is not None and t.rises
    ]


def reward_collapse(history: History) -> Finding | None:
    """In the second half of the run every step is far below the best of the first steps, and near the lowest score."""
    score, spread = history.series(SCORE), history.series("critic/score/std")
    found, answers = extremes(history), history.answers_per_step
    if found is None or answers is None or len(score) < FEWEST_STEPS or len(spread) != len(score):
        return None
    lowest, early, late = min(found[0].values), score.head, score.values[len(score) // 2 :]
    best = max(early.values)
    place = early.values.index(best)
    error = spread.values[place] / math.sqrt(answers)
    left = max(late) - lowest
    if left > COLLAPSED * (best - lowest) or best - fmean(late) <= COLLAPSE_ERRORS * error or best <= lowest:
        return None
    step, last = score.steps[place], score.steps[-1]
    evidence = (
        f"{SCORE}: {best:.3g} in step {step}, {fmean(late):.3g} on average from step {score.steps[len(score) // 2]} on"
    )
    changes = [lower_learning_rate(history, 10.0), *fall_changes(history)[1:]]
    return COLLAPSE.found((step, last), [evidence], changes, certain=len(score) >= FEWEST_CERTAIN)


def reward_falls(history: History) -> Finding | None:
    return falls_in_training(history) or falls_in_validation(history)


def falls_in_training(history: History) -> Finding | None:
    score = history.series(SCORE)
    if len(score) < 12:
        return None
    width = score.third if score.third < 10 else 10
    means = score.smoothed(width)
    peak, last = max(means.values), means.values[-1]
    drop, error = peak - last, score.scatter * math.sqrt(2 / width)
    height = height_above_lowest(history, peak)
    if drop <= PEAK_ERRORS * error or drop <= PEAK_SHARE * height:
        return None
    at = means.steps[means.values.index(peak)]
    evidence = f"{SCORE}, mean of {width} steps: {peak:.3g} at step {at}, {last:.3g} at step {means.steps[-1]}"
    certain = drop > 2 * PEAK_SHARE * height and drop > 6 * error
    return FALLS.found((at, means.steps[-1]), [evidence], fall_changes(history), certain=certain)


def height_above_lowest(history: History, score: float) -> float:
    """The scale of a fall. The scores of a reward model are around 0, so that a share of the score itself is noise."""
    lowest = sorted(history.series("critic/score/min").values)
    if not lowest:
        return abs(score)
    return score - lowest[len(lowest) // OUTLIERS]


def falls_in_validation(history: History) -> Finding | None:
    accuracy = history.validation
    if len(accuracy) < 3:
        return None
    peak, last = max(accuracy.values), accuracy.values[-1]
    if peak - last <= max(RISE, PEAK_SHARE * peak):
        return None
    at = accuracy.steps[accuracy.values.index(peak)]
    evidence = f"validation accuracy: {peak:.3g} at step {at}, {last:.3g} at step {accuracy.steps[-1]}"
    return FALLS.found((at, accuracy.steps[-1]), [evidence], fall_changes(history), certain=False)


def fall_changes(history: History) -> list[Change]:
    n, saves = int(history.number(f"{ROLLOUT}.n", 4)), history.number("trainer.save_freq", -1)  # -1: at the end
    save = Change("trainer.save_freq", 10, "keep the checkpoint of the peak")
    return [
        lower_learning_rate(history),
        Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference"),
        Change(f"{ROLLOUT}.n", max(8, 2 * n), "less noise in the advantages"),
        *([save] if saves <= 0 or saves > save.value else []),
    ]
