"""Prompts and answers: cut off, repeated, random, always equal, almost never right, of changing length."""

import math

from rloom.algos.ranges import model_path
from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import (
    ACTOR,
    FEWEST_CERTAIN,
    FEWEST_STEPS,
    RESPONSE_LENGTH,
    ROLLOUT,
    SCORE,
    History,
    Series,
    Trend,
    context,
    correlation_of_changes,
    rounded,
)
from rloom.doctor.run.numerics import TOO_FAST, lower_learning_rate

CUT_SHARE, CUT_CERTAIN = 0.25, 0.5
CUT_ALMOST_ALL = 0.9  # no answer can be complete: it explains a reward of 0
CUT_IN_THE_END = 0.02  # share that the advised length cuts
REPEATED, REPEATED_CERTAIN = 0.5, 0.65  # share of the groups of four tokens that occurred before in the same answer
DRIFT = 1.5  # times the length at first
DRIFT_CERTAIN = 2.0
SMALLEST_CHANGE = 1e-6  # of the value at first: less is rounding
FEWEST_VALIDATIONS = 3  # of which none is above the first: two differ by chance
FOLLOWS = 0.8  # correlation of the changes of reward and length from step to step: the reward depends on the length
LONGEST, LONGEST_PROMPT, WHOLE = "data.max_response_length", "data.max_prompt_length", "data.max_length"
LOOK = Change("trainer.log_val_generations", 5, "look at the answers", "higher")
CLOSER = Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference")
WARMER = Change(f"{ROLLOUT}.temperature", 1.0, "answers that differ", "higher")
PENALTY = Change("reward_model.overlong_buffer.enable", True, "a penalty on answers near the limit")


# Prompts

FEWEST_ROWS = 16
DIFFERENT = 0.5  # share of the rows with a prompt of their own
CONTRADICTORY = 0.1  # share of the prompts with several ground truths


def several_truths(history: History) -> Support:
    _, prompts, contradictory = history.samples.prompts
    if contradictory < max(1, CONTRADICTORY * prompts):
        return False
    return f"{contradictory} of {prompts} prompts have rows with different ground truths"


REPEATED_PROMPTS = Fault(
    "repeated_prompts",
    Severity.WARNING,
    "Many rows have the same prompt",
    (
        Cause(
            "the prompts lack their question: a wrong column or a wrong template of the data",
            several_truths,
            lambda history: ["write the question into the prompt: `rloom data show FILE` prints rows"],
        ),
        Cause(
            "rows of the training data are repeated",
            lambda history: not several_truths(history),
            lambda history: ["train on different prompts: `rloom data check FILE` counts equal ones"],
        ),
    ),
    (),
)


def repeated_prompts(history: History) -> Finding | None:
    rows, prompts, _ = history.samples.prompts
    if rows < FEWEST_ROWS or prompts > DIFFERENT * rows:
        return None
    steps = sorted({answer.step for answer in history.samples.answers})
    evidence = [f"{rows:,} rows of the training data in {len(steps)} steps, {prompts:,} different prompts"]
    severity = Severity.ERROR if several_truths(history) else None
    return REPEATED_PROMPTS.found(history, (steps[0], steps[-1]), evidence, certain=True, severity=severity)


PROMPTS_CUT = Fault(
    "prompts_cut",
    Severity.ERROR,
    "Prompts are cut off at the length limit",
    (
        Cause(
            "data.max_prompt_length is too small for these prompts",
            advice=lambda history: [
                Change(LONGEST_PROMPT, 8 * int(history.number(LONGEST_PROMPT, 64)), "whole prompts"),
                Change("data.truncation", "error", "name the longest prompt instead of cutting it"),
            ],
        ),
    ),
    ("prompt_length/mean",),
)


def prompts_cut(history: History) -> Finding | None:
    mean, limit = history.series("prompt_length/mean"), history.number("data.max_prompt_length", math.inf)
    cuts = history.config.get("data.truncation", "error") != "error"
    if not cuts or len(mean) < FEWEST_STEPS or mean.mean < 0.95 * limit:
        return None
    evidence = [
        f"prompts have {mean.mean:.0f} tokens on average, and data.max_prompt_length={limit:g} cuts longer ones"
    ]
    return PROMPTS_CUT.found(history, mean.span, evidence, certain=len(mean) >= FEWEST_CERTAIN)


# Answers that are almost never right

LOW, LOW_AT_LAST = 0.06, 0.1  # of the range of the scores
FEWEST_LOW = 20  # steps: some answers score, and a model may learn the format of the answer first
VALIDATED = 0.15  # an accuracy that shows that model, template and rule fit
RANDOM_NATS, RANDOM_CERTAIN = 1.0, 2.0


def low_from_the_start(history: History) -> bool:
    low, high, score = (history.series(f"critic/score/{name}") for name in ("min", "max", "mean"))
    if len(score) < FEWEST_CERTAIN or not len(low) or not len(high):
        return False
    lowest, width = min(low.values), max(high.values) - min(low.values)
    stays = score.tail.mean - lowest < LOW_AT_LAST * width or unlearns(history)
    return width > 0 and score.head.mean - lowest < LOW * width and stays


def other_reward(history: History) -> Support:
    """The built-in rule finds right answers that the run's own reward does not pay."""
    if not history.has_own_reward:
        return False
    right = history.samples.right_by_step.values()
    if not right or not history.samples.by_rule:
        return True
    share = sum(right) / len(right)
    return f"the built-in rule of the data source finds {share:.0%} of the same answers right" if share > LOW else False


def other_rows(history: History) -> Support:
    """The same model and rule are right in validation."""
    validation = history.validation
    if not len(validation):
        return True
    first, score = validation.values[0], history.series(SCORE)
    if first < VALIDATED:
        return False
    evidence = (
        f"validation has {first:.3g} at step {validation.steps[0]}, training {score.head.mean:.3g} in its first steps"
    )
    if (offset := history.samples.offset) is not None and offset[1] > LOW:
        evidence += f"; {offset[1]:.0%} of the answers differ from their ground truth by exactly {offset[0]:+g}"
    return evidence


def other_template(history: History) -> Support:
    if len(history.validation) and history.validation.values[0] >= VALIDATED:
        return False
    return history.samples.example() or True


def look_at_answers(history: History) -> list[Advice]:
    return [
        f"compare the answers of `rloom chat {model_path(history.config) or 'MODEL'}` with what the rule reads",
        LOOK,
    ]


OVERRIDE = "actor_rollout_ref.model.override_config"


def overridden(history: History) -> Support:
    """Entries of the model's config.json that the run replaces: its weights were trained with others."""
    given = [f"{key}={value}" for key, value in history.config.items() if key.startswith(OVERRIDE) and value]
    return given[0] if given else False


NEVER_RIGHT = (
    Cause(
        "entries of the model's config.json are replaced: it computes something else than it was trained for",
        overridden,
        lambda history: [Change(OVERRIDE, "{}", "the model's own entries")],
    ),
    Cause(
        "the reward function finds no answer in the text; check this first, with an answer that is right: "
        "`rloom reward try FILE --source S --ground_truth T`",
        other_reward,
        lambda history: ["correct the reward function: `rloom reward try FILE` shows what it finds in an answer"],
    ),
    Cause(
        "`ground_truth` or the prompts of the training rows are wrong: `rloom data check FILE`",
        other_rows,
        lambda history: ["correct ground_truth and prompts of the training rows: `rloom data show FILE` prints them"],
    ),
    Cause(
        "the chat template or the answer format is not the one that the model has learned, or the model is damaged: "
        "`rloom chat MODEL` shows it",
        other_template,
        look_at_answers,
    ),
    Cause(
        "the model never solves these problems: start from an instruct or SFT model, or with easier ones",
        lambda history: not (len(history.validation) and history.validation.values[0] >= VALIDATED),
    ),
)
LOW_SCORE = Fault("low_score", Severity.ERROR, "Almost no answer scores, from the first step on", NEVER_RIGHT, (SCORE,))


def unlearns(history: History) -> bool:
    """What the training rows teach makes the validation worse."""
    validation = history.validation
    return len(validation) > 2 and isinstance(other_rows(history), str) and validation.values[-1] < validation.values[0]


def low_score(history: History) -> Finding | None:
    if not low_from_the_start(history) or (history.score_rises and not unlearns(history)):
        return None
    score = history.series(SCORE)
    evidence = [f"{SCORE}: {score.head.mean:.3g} in the first third of the steps, {score.tail.mean:.3g} in the last"]
    unusual = any(LOW_SCORE.kind in value.explains for value in history.unusual)
    known = unusual or any(isinstance(of(history), str) for of in (overridden, other_reward, other_rows))
    return LOW_SCORE.found(history, score.span, evidence, certain=known or len(score) >= FEWEST_LOW)


SAMPLING_RANDOM = Fault(
    "sampling_random",
    Severity.ERROR,
    "Sampled answers are random, greedy ones are not",
    (
        Cause(
            "the sampling temperature is too high for this model",
            advice=lambda history: [
                Change(f"{ROLLOUT}.temperature", half_temperature(history), "less random answers", "lower")
            ],
        ),
    ),
    ("actor/entropy",),
)


def half_temperature(history: History) -> float:
    return min(1.0, rounded(history.number(f"{ROLLOUT}.temperature", 1.0) / 2))


def sampling_random(history: History) -> Finding | None:
    entropy, score, validation = history.series("actor/entropy"), history.series(SCORE), history.validation
    if min(len(entropy), len(score)) < FEWEST_STEPS or not len(validation) or validation.values[0] < 0.1:
        return None
    hot = history.number(f"{ROLLOUT}.temperature", 1.0) > 1
    # the answers of the first step are those of the model before training
    if entropy.head.mean < (RANDOM_NATS if hot else RANDOM_CERTAIN) or score.values[0] > validation.values[0] / 3:
        return None
    evidence = [
        f"actor/entropy: {entropy.values[0]:.3g} in step {entropy.steps[0]}, {entropy.tail.mean:.3g} in the last "
        f"{len(entropy.tail)} steps",
        f"sampled answers score {score.values[0]:.3g} in the first step, validation {validation.values[0]:.3g}",
    ]
    return SAMPLING_RANDOM.found(history, entropy.span, evidence, certain=len(entropy) >= FEWEST_CERTAIN)


# Answers to a prompt that are all equal

EQUAL_SHARE = 0.9  # of the prompts: fewer than one in ten has anything to learn from
EQUAL_AT_FIRST = 0.75
EQUAL_CERTAIN = 0.97
FILTER_HELPS = 0.95  # with more equal groups, filtering finds no batch and stops the run


def same_answers(history: History) -> Support:
    same, entropy = history.samples.same_texts, history.series("actor/entropy")
    if same is not None:
        return f"all answers have the same text in {same:.0%} of the groups" if same > DIFFERENT else False
    return not len(entropy) or entropy.tail.mean < 0.01


def free_sampling(history: History) -> list[Advice]:
    nucleus = Change(f"{ROLLOUT}.top_p", 1.0, "answers that differ", "higher")
    return [WARMER, nucleus] if nucleus.key in history.config else [WARMER]


def prompt_alone(history: History) -> Support:
    """The answers of a group differ, and some are right, but their scores are equal."""
    groups = [g for g in history.samples.groups if len({a.right for a in g} - {None}) > 1]
    if history.samples.by_rule and history.has_own_reward:
        equal = [g for g in groups if len({a.score for a in g}) == 1]
        if len(groups) < FEWEST_STEPS or len(equal) < EQUAL_SHARE * len(groups):
            return False
        return f"right and wrong answers have the same score in {len(equal)} of {len(groups)} groups that have both"
    place = history.score_place
    return history.has_own_reward and place is not None and LOW_AT_LAST < place < 1 - LOW_AT_LAST


def too_hard(history: History) -> Support:
    place = history.score_place
    return place is not None and place < LOW_AT_LAST


def too_easy(history: History) -> Support:
    place = history.score_place
    return place is not None and place > 1 - LOW_AT_LAST


def few_answers(history: History) -> Support:
    return history.number(f"{ROLLOUT}.n", 4) <= 8 and same_answers(history) is not True


def more_answers(history: History) -> list[Advice]:
    n, equal = int(history.number(f"{ROLLOUT}.n", 4)), history.series("rollout/equal_groups").tail.mean
    more = Change(f"{ROLLOUT}.n", 2 * max(n, 4), "more answers to a prompt")
    filtered = Change("algorithm.filter_groups.enable", True, "generate until enough prompts differ")
    return [more, *([filtered] if equal < FILTER_HELPS else [])]


EQUAL_GROUPS = Fault(
    "equal_groups",
    Severity.ERROR,
    "The answers to a prompt all have the same score: no advantage",
    (
        Cause("the answers are the same: temperature, top_p or top_k leave no choice", same_answers, free_sampling),
        Cause(
            "the reward depends on the prompt alone, not on the answer",
            prompt_alone,
            lambda history: [
                "score the answer, not the prompt: `rloom reward try FILE` with a right and a wrong answer"
            ],
        ),
        Cause(
            "the prompts are too hard: almost no answer scores",
            too_hard,
            lambda history: ["train on easier prompts, or start from a model that solves some of them"],
        ),
        Cause(
            "the prompts are too easy: almost every answer scores",
            too_easy,
            lambda history: ["train on harder prompts"],
        ),
        Cause("too few answers to a prompt", few_answers, more_answers),
    ),
    ("rollout/equal_groups",),
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
        f"rollout/equal_groups: {equal:.0%} of the prompts of the last {len(share.tail)} steps have answers with "
        "equal scores, whose advantage is 0"
    ]
    if len(score):
        evidence.append(f"{SCORE}: {score.tail.mean:.3g} in these steps")
    certain = len(share) >= FEWEST_CERTAIN and equal >= EQUAL_CERTAIN and not too_easy(history)  # solved is no fault
    return EQUAL_GROUPS.found(history, share.tail.span, evidence, certain=certain)


# Length


def needed_length(history: History) -> int:
    """Tokens with which few answers are cut, if their lengths fall off exponentially; at most eight times as many."""
    (_, limit), share = answer_limit(history), history.series("response_length/clip_ratio").tail.mean
    most = 8 if limit < 256 else 4 if limit < 2048 else 2
    factor = min(most, math.log(CUT_IN_THE_END) / math.log(min(share, 0.99)))
    room = max(context(history) - history.number("data.max_prompt_length", 0), limit)
    return int(min(math.ceil(factor * limit / 8) * 8, room))


def answer_limit(history: History) -> tuple[str, float]:
    """(the key that cuts answers to prompts of mean length, tokens of such an answer)"""
    longest, prompt = history.number(LONGEST, 512), history.series("prompt_length/mean")
    left = history.number(WHOLE, math.inf) - (prompt.tail.mean if len(prompt) else 0)
    return (WHOLE, max(left, 1)) if left < longest else (LONGEST, longest)


def longer(history: History) -> list[Advice]:
    needed, (key, limit) = needed_length(history), answer_limit(history)
    if key == LONGEST:
        return [Change(LONGEST, needed, "room for whole answers")]
    whole = history.number(WHOLE, 0)
    changes = {WHOLE: min(context(history), whole - limit + needed), LONGEST: needed}
    return [Change(name, int(value), "room for whole answers", "higher") for name, value in changes.items()]


def cut_from_the_start(history: History) -> Support:
    return history.series("response_length/clip_ratio").head.mean > CUT_SHARE


CUT = Fault(
    "answers_cut",
    Severity.WARNING,
    "Answers are cut off at the length limit",
    (
        Cause(
            "the policy has learned to write on: the reward pays for length or does not ask for an end",
            lambda history: not cut_from_the_start(history),
            lambda history: [PENALTY],
        ),
        Cause(
            "the length limit is too small for this task",
            advice=longer,
        ),
        Cause("the model does not end its answers: a base model or a wrong chat template", cut_from_the_start),
    ),
    ("response_length/clip_ratio",),
)


def answers_cut(history: History) -> Finding | None:
    cut = history.series("response_length/clip_ratio")
    if len(cut) < FEWEST_STEPS or cut.tail.mean <= CUT_SHARE:
        return None
    if len(history.series("episode/turns/mean")):  # of several turns: `episodes_at_limit` knows which limit it was
        return None
    key, _ = answer_limit(history)
    evidence = [
        f"response_length/clip_ratio: {cut.tail.mean:.0%} of the answers of the last {len(cut.tail)} steps reach "
        f"{key}={int(history.number(key, 512))}; {cut.values[0]:.0%} in step {cut.steps[0]}"
    ]
    all_cut = min(cut.head.mean, cut.tail.mean) > CUT_ALMOST_ALL and not history.score_rises
    return CUT.found(
        history,
        (cut.span if cut_from_the_start(history) else cut.tail.span),
        evidence,
        certain=len(cut) >= FEWEST_CERTAIN and cut.tail.mean > CUT_CERTAIN,
        severity=Severity.ERROR if all_cut else None,
    )


def repeats_from_the_start(history: History) -> Support:
    return history.series("rollout/repetition").head.mean > REPEATED


REPETITION = Fault(
    "repetition",
    Severity.WARNING,
    "Answers repeat themselves",
    (
        Cause(
            "the model is damaged, or its chat template is wrong: `rloom chat MODEL` shows it",
            repeats_from_the_start,
            look_at_answers,
        ),
        Cause(
            "the reward pays for repeated text (length, a counted phrase)",
            lambda history: not repeats_from_the_start(history),
            lambda history: [LOOK],
        ),
        Cause(
            "updates are too large: the policy has degenerated",
            lambda history: TOO_FAST.when(history) if not repeats_from_the_start(history) else False,
            lambda history: [lower_learning_rate(history), CLOSER],
        ),
        Cause(
            "the temperature is too low for this model",
            lambda history: history.number(f"{ROLLOUT}.temperature", 1.0) < 0.7,
            lambda history: [WARMER],
        ),
    ),
    ("rollout/repetition",),
)


def repetition(history: History) -> Finding | None:
    repeated = history.series("rollout/repetition")
    if len(repeated) < FEWEST_STEPS or repeated.tail.mean <= REPEATED:
        return None
    evidence = [
        f"rollout/repetition: {repeated.tail.mean:.0%} of the groups of four tokens occurred before in the same "
        f"answer in the last {len(repeated.tail)} steps; {repeated.values[0]:.0%} in step {repeated.steps[0]}"
    ]
    from_the_start = bool(repeats_from_the_start(history))
    return REPETITION.found(
        history,
        repeated.span if from_the_start else repeated.tail.span,
        evidence,
        certain=len(repeated) >= FEWEST_CERTAIN and repeated.tail.mean > REPEATED_CERTAIN,
        severity=Severity.ERROR if from_the_start else None,
    )


def grows(history: History) -> Support:
    length = history.series(RESPONSE_LENGTH)
    return length.tail.mean > length.head.mean


def shrinks(history: History) -> Support:
    return not grows(history)


LENGTH = Fault(
    "length_drift",
    Severity.WARNING,
    "The length of the answers drifts, and no accuracy rises",
    (
        Cause(
            "the reward pays for length, in itself or through a judge that prefers it",
            lambda history: (bool(grows(history)) and history.has_own_reward) or not history.config,
            lambda history: [PENALTY, CLOSER],
        ),
        Cause(
            "a wrong short answer has a higher reward than a wrong long one",
            shrinks,
            lambda history: ["give wrong answers the same score, however long they are"],
        ),
        Cause(
            "the loss gives long and short answers different weight (loss_agg_mode)",
            advice=lambda history: [
                *([PENALTY] if grows(history) else []),
                Change(f"{ACTOR}.loss_agg_mode", "token-mean", "the same weight for each token"),
                CLOSER,
            ],
        ),
    ),
    (RESPONSE_LENGTH,),
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
    certain = max(factor, 1 / factor) > DRIFT_CERTAIN and not may_improve(history, length)
    return LENGTH.found(history, length.span, evidence, certain=certain)


def no_better(history: History, length: Series) -> str | None:
    """Evidence that the answers become no better; None: they do, or it is not known.

    A reward that rises without an accuracy says nothing, unless it changes with the length in each step: then the
    reward is what changes the length.
    """
    accuracy, score = accuracy_of(history), history.series(SCORE).trend
    if accuracy is not None:
        name, trend = accuracy
        return None if trend.rises else f"{name}: {trend.first:.3g} at first, {trend.last:.3g} at last"
    validation = history.validation
    if len(validation) == 2 and validation.values[1] > validation.values[0]:
        return None
    if score is None or not score.rises:
        few = f"fewer than {FEWEST_VALIDATIONS} validations, and the reward does not rise"
        return few if len(validation) else "no accuracy is measured, and the reward does not rise"
    follows = correlation_of_changes(history.series(SCORE), length)
    if (follows if grows(history) else -follows) < FOLLOWS:
        return None
    return f"no accuracy is measured, and {SCORE} changes with the length from step to step (correlation {follows:.2f})"


def may_improve(history: History, length: Series) -> bool:
    """Score or accuracy are above the first ones, if only by chance: longer reasoning raises them slowly. A score that
    changes with the length in each step does not count."""
    if 0 < len(history.validation) < FEWEST_VALIDATIONS:
        return True  # not known yet
    follows = correlation_of_changes(history.series(SCORE), length) * (1 if grows(history) else -1)
    trends = [history.series(name).trend for name in ("reward/acc", *([SCORE] if follows < FOLLOWS else []))]
    return any(trend is not None and trend.change > SMALLEST_CHANGE * abs(trend.first) for trend in trends)


def accuracy_of(history: History) -> tuple[str, Trend] | None:
    """Of validation, else of training."""
    validation = history.validation
    if len(validation) >= FEWEST_VALIDATIONS:
        return "validation accuracy", Trend(validation.values[0], max(validation.values[1:]), 0.0)
    trend = history.series("reward/acc").trend
    return None if trend is None else ("reward/acc", trend)
