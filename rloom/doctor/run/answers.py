"""Answers that are cut off, repeat themselves, or change in length."""

from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, RESPONSE_LENGTH, SCORE, History
from rloom.doctor.run.numerics import lower_learning_rate
from rloom.doctor.run.series import Series, Trend, correlation_of_changes

CUT_SHARE, CUT_CERTAIN = 0.25, 0.5
CUT_ALMOST_ALL = 0.9  # no answer can be complete: it explains a reward of 0
REPEATED, REPEATED_CERTAIN = 0.5, 0.65  # share of the groups of four tokens that occurred before in the same answer
DRIFT = 1.5  # times the length at first
DRIFT_CERTAIN = 2.0
FOLLOWS = 0.8  # correlation of the changes of reward and length from step to step: the reward depends on the length

CUT = Fault(
    "answers_cut",
    Severity.WARNING,
    "Answers are cut off at the length limit",
    (
        "data.max_response_length is too small for this task",
        "the model does not end its answers: a base model, a wrong chat template or ignore_eos",
        "the policy has learned to write on: the reward pays for length or does not ask for an end",
    ),
    ("response_length/clip_ratio",),
)
DAMAGED = "the model is damaged, or its chat template is wrong: `rloom chat MODEL` shows it"
REPETITION = Fault(
    "repetition",
    Severity.WARNING,
    "Answers repeat themselves",
    (
        "the reward pays for repeated text (length, a counted phrase)",
        "updates are too large: the policy has degenerated",
        "the temperature is too low for this model",
        DAMAGED,
    ),
    ("rollout/repetition",),
)
LENGTH = Fault(
    "length_drift",
    Severity.WARNING,
    "The length of the answers drifts, and no accuracy rises",
    (
        "the reward pays for length, in itself or through a judge that prefers it",
        "the loss gives long and short answers different weight (loss_agg_mode)",
        "a wrong short answer has a higher reward than a wrong long one",
    ),
    (RESPONSE_LENGTH,),
)


def answers_cut(history: History) -> Finding | None:
    cut = history.series("response_length/clip_ratio")
    if len(cut) < FEWEST_STEPS or cut.tail.mean <= CUT_SHARE:
        return None
    longest = "data.max_response_length"
    limit = int(history.number(longest, 512))
    evidence = [
        (
            f"response_length/clip_ratio: {cut.tail.mean:.0%} of the answers of the last {len(cut.tail)} steps reach "
            f"{longest}={limit}; {cut.values[0]:.0%} in step {cut.steps[0]}"
        )
    ]
    from_the_start = cut.head.mean > CUT_SHARE
    changes = [Change(longest, 2 * limit, "room for whole answers")]
    if history.config.get("actor_rollout_ref.rollout.ignore_eos") is True:
        why = "it is True: answers never end"
        changes.insert(0, Change("actor_rollout_ref.rollout.ignore_eos", False, why))
    elif not from_the_start:
        why = "a penalty on answers near the limit"
        changes.insert(0, Change("reward_model.overlong_buffer.enable", True, why))
    return CUT.found(
        (cut.span if from_the_start else cut.tail.span),
        evidence,
        changes,
        certain=len(cut) >= FEWEST_CERTAIN and cut.tail.mean > CUT_CERTAIN,
        causes=CUT.causes if from_the_start else (CUT.causes[2], *CUT.causes[:2]),
        severity=Severity.ERROR if min(cut.head.mean, cut.tail.mean) > CUT_ALMOST_ALL else None,
    )


def repetition(history: History) -> Finding | None:
    repeated = history.series("rollout/repetition")
    if len(repeated) < FEWEST_STEPS or repeated.tail.mean <= REPEATED:
        return None
    evidence = [
        (
            f"rollout/repetition: {repeated.tail.mean:.0%} of the groups of four tokens occurred before in the same "
            f"answer in the last {len(repeated.tail)} steps; {repeated.values[0]:.0%} in step {repeated.steps[0]}"
        )
    ]
    changes = [
        Change("trainer.log_val_generations", 5, "look at the answers", "higher"),
        lower_learning_rate(history),
        Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference"),
    ]
    certain = len(repeated) >= FEWEST_CERTAIN and repeated.tail.mean > REPEATED_CERTAIN
    from_the_start = repeated.head.mean > REPEATED
    return REPETITION.found(
        repeated.span if from_the_start else repeated.tail.span,
        evidence,
        changes,
        certain=certain,
        causes=(DAMAGED, *REPETITION.causes[:-1]) if from_the_start else None,
        severity=Severity.ERROR if from_the_start else None,
    )


def length_drift(history: History) -> Finding | None:
    length = history.series(RESPONSE_LENGTH)
    trend = length.trend
    if trend is None or not (trend.rises or trend.falls):
        return None
    factor = max(trend.last, 1e-9) / max(trend.first, 1e-9)
    if 1 / DRIFT < factor < DRIFT:
        return None
    quality = no_better(history, length)
    if quality is None:
        return None
    evidence = [
        (f"{RESPONSE_LENGTH}: {trend.first:.0f} tokens in the first third of the steps, {trend.last:.0f} in the last"),
        quality,
    ]
    grows = factor > 1
    changes = (
        [
            Change(
                "reward_model.overlong_buffer.enable",
                True,
                "a penalty on answers near the limit",
            ),
        ]
        if grows
        else [
            Change(f"{ACTOR}.loss_agg_mode", "token-mean", "the same weight for each token"),
        ]
    )
    changes.append(Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference"))
    certain = max(factor, 1 / factor) > DRIFT_CERTAIN
    return LENGTH.found(length.span, evidence, changes, certain=certain)


def no_better(history: History, length: Series) -> str | None:
    """Evidence that the answers become no better; None: they do, or it is not known.

    A reward that rises without an accuracy says nothing, unless it changes with the length in each step: then the
    reward is what changes the length.
    """
    accuracy, score = accuracy_of(history), history.series(SCORE).trend
    if accuracy is not None:
        name, trend = accuracy
        return None if trend.rises else f"{name}: {trend.first:.3g} at first, {trend.last:.3g} at last"
    if score is None or not score.rises:
        return "no accuracy is measured, and the reward does not rise"
    follows = correlation_of_changes(history.series(SCORE), length)
    grows = length.tail.mean > length.head.mean
    if (follows if grows else -follows) < FOLLOWS:
        return None
    return f"no accuracy is measured, and {SCORE} changes with the length from step to step (correlation {follows:.2f})"


def accuracy_of(history: History) -> tuple[str, Trend] | None:
    """Of validation, else of training."""
    validation = history.validation
    if len(validation) >= 2:
        return "validation accuracy", Trend(validation.values[0], max(validation.values[1:]), 0.0)
    trend = history.series("reward/acc").trend
    return None if trend is None else ("reward/acc", trend)
