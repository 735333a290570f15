"""Whether the run learns: a reward that collapses, falls or stays where it was, a validation that does not follow."""

import math
from statistics import fmean

from rloom.algos.ranges import SMALL, model_path, parameters
from rloom.doctor.run.answers import CLOSER
from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, SCORE, History, Series, rounded
from rloom.doctor.run.numerics import MAYBE_TOO_FAST, TOO_MANY, large_update, learning_rate_key, lower_learning_rate
from rloom.doctor.run.policy import TINY_REWARDS, few_answers, flat_score
from rloom.doctor.run.reward import RISE, extremes

COLLAPSED = 0.25  # of the height above the lowest score that the first steps had
COLLAPSE_ERRORS = 2.5  # standard errors of the mean score of one step
PEAK_ERRORS = 4.0  # standard errors from peak to end: the highest of many means is high by chance
PEAK_SHARE = 0.2  # of the peak's height above the lowest score
OUTLIERS = 20  # one step in this many may have a score that is far below all others

COLLAPSE = Fault(
    "reward_collapse",
    Severity.ERROR,
    "The reward has collapsed",
    (
        TOO_MANY,
        Cause(
            "the learning rate is too high: after a few large updates the policy no longer solves the task",
            lambda history: large_update(history) or True,
            lambda history: [lower_learning_rate(history, 10.0)],
        ),
        Cause(
            "a resumed run has other data, another reward or a damaged model",
            lambda history: not history.has_first_step,
        ),
    ),
    (SCORE,),
)


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
    left = fmean(late) - lowest
    if max(late) - lowest > 2 * COLLAPSED * (best - lowest) or left > COLLAPSED * (best - lowest):
        return None
    if best - fmean(late) <= COLLAPSE_ERRORS * error or best <= lowest:
        return None
    step, last = score.steps[place], score.steps[-1]
    if better_in_validation(history, step):
        return None
    limit = lowest + COLLAPSED * (best - lowest)
    begin = next(s for s, v in score.pairs if s > step and v <= limit)
    evidence = [
        f"{SCORE}: {best:.3g} in step {step}, {score.values[score.steps.index(begin)]:.3g} in step {begin}, "
        f"{fmean(late):.3g} on average from step {score.steps[len(score) // 2]} on"
    ]
    certain = len(score) >= FEWEST_CERTAIN
    return COLLAPSE.found(history, (begin, last), evidence, certain=certain, begin_again=True, more=[CLOSER])


def no_kl(history: History) -> Support:
    return not (
        history.config.get("actor_rollout_ref.actor.use_kl_loss") or history.config.get("algorithm.use_kl_in_reward")
    )


def more_answers(history: History) -> list[Advice]:
    n = int(history.number(f"{ROLLOUT}.n", 4))
    return [Change(f"{ROLLOUT}.n", max(8, 2 * n), "less noise in the advantages")]


FALLS = Fault(
    "reward_falls",
    Severity.WARNING,
    "The reward has fallen since its peak",
    (
        MAYBE_TOO_FAST,
        Cause("the policy is too far from the reference: no KL term, or a small one", no_kl, lambda history: [CLOSER]),
        Cause("advantages are noisy: few answers in a step", few_answers, more_answers),
    ),
    (SCORE, "val-core"),
)


def keep_the_peak(history: History) -> list[Advice]:
    saves = history.number("trainer.save_freq", -1)  # -1: at the end
    save = Change("trainer.save_freq", 10, "keep the checkpoint of the peak")
    return [save] if saves <= 0 or saves > save.value else []


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
    if better_in_validation(history, at):
        return None
    validation, best = history.validation, at_its_best(history, at)
    evidence = f"{SCORE}, mean of {width} steps: {peak:.3g} at step {at}, {last:.3g} at step {means.steps[-1]}"
    waits = len(validation) > 0 and validation.steps[-1] <= at  # for the next validation
    certain = drop > 2 * PEAK_SHARE * height and drop > 6 * error and not best and not waits
    more = keep_the_peak(history)
    return FALLS.found(history, (at, means.steps[-1]), [evidence], certain=certain, more=more)


def at_its_best(history: History, step: int) -> bool:
    """Whether the last validation is after this step, and as good as any."""
    validation = history.validation
    if not len(validation.after(step)):
        return False
    return validation.values[-1] >= max(validation.values) - max(RISE / 2, chance(history))


def better_in_validation(history: History, step: int) -> bool:
    """The prompts become harder, the policy better."""
    validation = history.validation
    return at_its_best(history, step) and validation.values[-1] > validation.values[0] + chance(history)


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
    if peak - last <= max(RISE, PEAK_SHARE * abs(peak), 3 * chance(history)):
        return None
    trend = history.series(SCORE).trend
    if max(accuracy.values[-2:]) - last > RISE or (
        trend is not None and trend.change > 0 and last > accuracy.values[0]
    ):
        return None  # one validation is chance, or the training goes on
    at = accuracy.steps[accuracy.values.index(peak)]
    evidence = f"validation accuracy: {peak:.3g} at step {at}, {last:.3g} at step {accuracy.steps[-1]}"
    more = keep_the_peak(history)
    return FALLS.found(history, (at, accuracy.steps[-1]), [evidence], certain=False, more=more)


def chance(history: History) -> float:
    """Standard error of one validation of rows that are right or wrong."""
    rows = history.number("data.val_max_samples", -1)
    return 0.5 / math.sqrt(rows) if rows > 0 else 0.01


# Validation beside training

APART_AT_FIRST = 0.15  # between the first validation and the first steps: other problems


def other_problems(history: History) -> Support:
    first, score = history.validation.values[0], history.series(SCORE).head.mean
    if abs(score - first) < APART_AT_FIRST:
        return False
    return f"training begins at {score:.3g}, validation at {first:.3g}: its problems are not those of training"


def several_epochs(history: History) -> Support:
    epoch = history.series("training/epoch")
    if not len(epoch) or epoch.values[-1] == 0:
        return True
    return f"epoch {epoch.values[-1] + 1:.0f}: the prompts were seen before"


APART = Fault(
    "validation_apart",
    Severity.WARNING,
    "The training accuracy rises, the validation accuracy does not",
    (
        Cause(
            "training and validation have different problems (another distribution)",
            other_problems,
            lambda history: ["validate on rows like those of training: `rloom data show` prints both files"],
        ),
        Cause(
            "the policy overfits the training prompts",
            lambda history: several_epochs(history) if not other_problems(history) else False,
            lambda history: ["train on more different prompts", CLOSER],
        ),
    ),
    (SCORE,),
)


def validation_apart(history: History) -> Finding | None:
    score, validation = history.series(SCORE), history.validation
    trend, found = score.trend, extremes(history)
    if trend is None or found is None or len(validation) < 3 or not history.scores_are_accuracies:
        return None
    width = max(found[1].values) - min(found[0].values)
    gain = max(validation.values[1:]) - validation.values[0]
    apart = abs(score.head.mean - validation.values[0]) > 2 * APART_AT_FIRST * width and max(validation.values) < RISE
    errors = 1.5 if apart else 2 if other_problems(history) else 3
    enough = trend.change > max(1.5 * RISE * width, errors * trend.error)
    if not enough or gain > max(0.2 * trend.change, 0.01) or validation.values[0] > 1 - RISE:
        return None
    evidence = [
        f"{SCORE}: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last",
        f"validation: {validation.values[0]:.3g} at step {validation.steps[0]}, at most "
        f"{max(validation.values[1:]):.3g} later, in {len(validation)} validations",
    ]
    return APART.found(history, score.span, evidence, certain=len(validation) >= 5)


# No progress

# steps; models of a billion weights learn in smaller ones
FEWEST_EXPLAINED, FEWEST_FLAT, FEWEST_FLAT_LARGE = 12, 20, 40
AT_THE_TOP = 0.9
WARMUP = "trainer.critic_warmup"  # as long as the run: the policy is never trained


def same_validations(history: History) -> Support:
    values = history.validation.values
    return len(values) >= 3 and len(set(values)) == 1


def higher_rate(history: History) -> list[Advice]:
    key = learning_rate_key(history)
    return [Change(key, rounded(3 * history.number(key, 1e-6)), "a learning rate 3 times higher")]


def never_trained(history: History) -> Support:
    last, end = max(history.steps, default=0), history.end or {}
    if end.get("status") != "finished" or not history.warmup >= last > 0:
        return False
    return f"{WARMUP} is {history.warmup}, and the run has {last} steps"


NO_PROGRESS = Fault(
    "no_progress",
    Severity.WARNING,
    "The run does not learn",
    (
        Cause(
            "only the critic was trained: its warm-up is as long as the run",
            never_trained,
            lambda history: [Change(WARMUP, 0, "train the policy from the first step on")],
        ),
        TINY_REWARDS,
        Cause(
            "the learning rate is too low",
            lambda history: same_validations(history) or large_update(history) is False,
            higher_rate,
        ),
        Cause("the reward does not say which answers are better", lambda history: history.has_own_reward),
        Cause("advantages are noisy: few answers in a step", few_answers, more_answers),
    ),
    (SCORE,),
)


def no_progress(history: History) -> Finding | None:
    """Reward and validation are flat, and not at the top. Fewer steps are enough if the value of a key explains it."""
    score, validation = history.series(SCORE), history.validation
    trend, place = score.trend, history.score_place
    unusual = [value.key for value in history.unusual if "no_progress" in value.explains]
    explained = bool(unusual or never_trained(history))
    counted = len(score if WARMUP in unusual or never_trained(history) else score.after(history.warmup))
    size = parameters(model_path(history.config))
    fewest = FEWEST_FLAT if size is not None and size < SMALL else FEWEST_FLAT_LARGE
    fewest = FEWEST_EXPLAINED if explained else fewest
    if trend is None or place is None or not history.has_first_step or counted < fewest:
        return None
    if history.score_rises or place > AT_THE_TOP or not is_flat(validation, history):
        return None
    if not explained and len(validation) < 3:
        return None
    evidence = flat_score(score)
    if len(validation):
        evidence.append(
            f"validation: {validation.values[0]:.3g} at step {validation.steps[0]}, {validation.values[-1]:.3g} at "
            f"step {validation.steps[-1]}"
        )
    return NO_PROGRESS.found(
        history, score.span, evidence, certain=counted >= 2 * fewest or explained, begin_again=True
    )


def is_flat(validation: Series, history: History) -> bool:
    if len(validation) < 2:
        return True
    gain = fmean(validation.values[1:]) - validation.values[0]
    return gain < chance(history) and validation.values[0] < AT_THE_TOP


# Values of keys that no other finding explains

UNUSUAL = Fault("unusual_keys", Severity.WARNING, "Keys have values outside of the range that is known to work", (), ())


def unusual_keys(history: History, named: frozenset[str]) -> Finding | None:
    """`named`: keys of other findings. A note if the run learns in spite of them."""
    found = [value for value in history.unusual if value.key not in named]
    if not found:
        return None
    last = max(history.steps, default=0)
    place, validation = history.score_place, history.validation
    gains = len(validation) > 1 and max(validation.values[1:]) > validation.values[0] + 2 * chance(history)
    score, loss = history.series(SCORE).trend, history.series("train/loss").trend
    falls = score is not None and score.falls
    learns = (
        history.score_rises or (place or 0.0) > AT_THE_TOP or (gains and not falls) or (loss is not None and loss.falls)
    )
    return Finding(
        UNUSUAL.kind,
        UNUSUAL.title,
        Severity.NOTE if learns else Severity.WARNING,
        (min(1, last), last),
        tuple(value.sentence for value in found),
        (),
        tuple(Change(value.key, value.usual, f"it is {value.value}") for value in found),
        certain=False,  # the start of the run has said so
        keys=tuple(value.key for value in found),
    )
