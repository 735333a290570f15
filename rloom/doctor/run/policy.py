"""How the policy moves: KL, clip fraction, entropy, the mismatch with the rollout engine; critic and credit."""

import math

from rloom.algos.needs import LOSS_KEY, SMALLEST_WEIGHT, reach
from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import (
    ACTOR,
    CRITIC,
    FEWEST_CERTAIN,
    FEWEST_OF_A_TREND,
    FEWEST_STEPS,
    RESPONSE_LENGTH,
    ROLLOUT,
    SCORE,
    History,
    Series,
    figures,
    rounded,
)
from rloom.doctor.run.numerics import (
    PPO_KL_HIGH,
    TOO_FAST,
    TOO_MANY,
    large_update,
    learning_rate_key,
    lower_learning_rate,
    tiny_rewards,
)
from rloom.runs.mismatch import CORRECTION, FIGURE, THRESHOLD_KEY, causes
from rloom.runs.names import KL_METRICS

KL_HIGH, KL_CERTAIN = 0.1, 0.2  # the documents: 0.001 to 0.1, never above 0.1 to 0.2
CLIP_HIGH = 0.3  # the documents: at most 0.3
RATIO_LOW, RATIO_HIGH = 0.8, 1.2
LARGE_SHARE = 0.2  # of the steps, and two of them: a single one may be chance
PPO_KL_STATIC = 1e-6  # between the policies before and after several updates
KL_STATIC = 1e-6  # to the reference: a thousandth of the documents' range
COLLAPSED = 0.1  # of the entropy at first
ENTROPY_NONE = 1e-3  # nats: almost every token has one choice
COLD = 0.5  # temperature
ENTROPY_RISE, ENTROPY_RISE_NATS = 3.0, 1.0
MISMATCH_DEFAULT = 0.01


SMALLER_UPDATES = Change(f"{ACTOR}.clip_ratio", 0.1, "smaller updates", "lower")


def stronger_kl(history: History) -> list[Advice]:
    if history.config.get("algorithm.kl_metric") is True:  # no KL in reward and loss: it is only measured
        return [Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference")]
    in_loss = history.config.get(f"{ACTOR}.use_kl_loss") is True
    key, least = (f"{ACTOR}.kl_loss_coef", 0.01) if in_loss else ("algorithm.kl_ctrl.kl_coef", 0.005)
    return [Change(key, max(least, rounded(5 * history.number(key, 0.001))), "a stronger KL")]


def weak_kl(history: History) -> Support:
    in_loss = history.config.get(f"{ACTOR}.use_kl_loss") is True
    key = f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    return f"{key} is 0" if history.number(key, 0.001) == 0 else True


KL_FAULT = Fault(
    "kl_high",
    Severity.WARNING,
    "The policy is far from the reference (KL)",
    (
        Cause(
            "the learning rate is too high",
            large_update,
            lambda history: [lower_learning_rate(history), SMALLER_UPDATES],
        ),
        Cause("the KL coefficient is too small", weak_kl, stronger_kl),
        Cause("the reward pays for answers that the reference would never give"),
    ),
    KL_METRICS,
)


def narrow_clip(history: History) -> Support:
    clipped = history.series("actor/pg_clipfrac")
    return len(clipped) > 0 and clipped.mean > CLIP_HIGH and large_update(history) is not True


CLIP = Fault(
    "clip_high",
    Severity.WARNING,
    "Updates change the policy too much",
    (TOO_MANY, TOO_FAST, Cause("the clip range is too narrow for this loss", narrow_clip)),
    ("actor/pg_clipfrac", "actor/ppo_ratio"),
)


def higher_rate(history: History) -> list[Advice]:
    key = learning_rate_key(history)
    return [Change(key, max(1e-6, rounded(10 * history.number(key, 1e-6))), "a higher learning rate")]


TINY_REWARDS = Cause(
    "rewards are tiny, and the advantages are not normalised",
    tiny_rewards,
    lambda history: ["return scores of about 0 to 1 from the reward function"],
)
STATIC = Fault(
    "policy_static",
    Severity.WARNING,
    "The policy does not move",
    (
        TINY_REWARDS,
        Cause("the learning rate is far too low", advice=higher_rate),
        Cause(
            "weights in bfloat16 without float32 masters lose small updates",
            lambda history: "bf" in str(history.config.get(f"{ACTOR}.fsdp_config.dtype", "bf")),
        ),
    ),
    ("actor/ppo_kl", *KL_METRICS),
)


def warmer(history: History) -> list[Advice]:
    temperature = history.number(f"{ROLLOUT}.temperature", 1.0)
    return [Change(f"{ROLLOUT}.temperature", 1.0, f"it is {temperature:g}")] if temperature < 1 else []


def never_entropy(history: History) -> Support:
    entropy = history.series("actor/entropy")
    return len(entropy) > 0 and max(entropy.values) < ENTROPY_NONE


ENTROPY_LOW = Fault(
    "entropy_collapse",
    Severity.WARNING,
    "The entropy has collapsed: the policy no longer explores",
    (
        Cause(
            "sampling leaves no choice (temperature near 0)",
            lambda history: never_entropy(history) and history.number(f"{ROLLOUT}.temperature", 0.0) < COLD,
            warmer,
        ),
        TOO_FAST,
        Cause("the reward pays for one answer, whatever the prompt is", lambda history: not never_entropy(history)),
        Cause(
            "no term of the loss keeps the entropy up",
            advice=lambda history: [
                Change(f"{ACTOR}.entropy_coeff", 0.001, "an entropy bonus", "higher"),
                Change(f"{ACTOR}.clip_ratio_high", 0.28, "rare tokens may grow (DAPO)", "higher"),
            ],
        ),
    ),
    ("actor/entropy",),
)


def entropy_bonus(history: History) -> Support:
    bonus = history.number(f"{ACTOR}.entropy_coeff", 0.0)
    return f"{ACTOR}.entropy_coeff is {bonus:g}" if bonus > 0 else False


ENTROPY_HIGH = Fault(
    "entropy_explosion",
    Severity.WARNING,
    "The entropy grows: answers become random",
    (
        Cause(
            "the entropy bonus is too large",
            entropy_bonus,
            lambda history: [Change(f"{ACTOR}.entropy_coeff", 0.0, "no entropy bonus")],
        ),
        TOO_FAST,
        Cause("advantages are noise"),
    ),
    ("actor/entropy",),
)
MISMATCH = Fault(
    "rollout_mismatch",
    Severity.ERROR,
    "Rollout engine and trainer disagree",
    tuple(Cause(text) for text in causes("compare the versions in the run's warning")),
    (FIGURE,),
)


def kl_high(history: History) -> Finding | None:
    kl = history.series(*KL_METRICS)
    if len(kl) < FEWEST_STEPS or kl.tail.mean <= KL_HIGH:
        return None
    evidence = [
        f"KL to the reference: {kl.tail.mean:.3g} on average over the last {len(kl.tail)} steps "
        f"(0.001 to 0.1 is healthy): {figures(kl)}"
    ]
    certain = len(kl) >= FEWEST_CERTAIN and min(kl.tail.values) > KL_CERTAIN
    return KL_FAULT.found(history, kl.tail.span, evidence, certain=certain)


def clip_high(history: History) -> Finding | None:
    """Of all steps: one update that is far too large can end all learning, and those after it are small."""
    limits = {
        "actor/pg_clipfrac": (-math.inf, CLIP_HIGH, "at most 0.3 is healthy"),
        "actor/ppo_ratio": (RATIO_LOW, RATIO_HIGH, "0.8 to 1.2 is healthy"),
        "actor/ppo_kl": (-PPO_KL_HIGH, PPO_KL_HIGH, "near 0 is healthy"),
    }
    if history.config.get(LOSS_KEY) == "gspo":
        del limits["actor/pg_clipfrac"]  # its clip range is 0.0003, not 0.2: many answers are outside of it
    evidence, bad, measured = [], set[int](), 0
    for name, (low, high, healthy) in limits.items():
        series = history.series(name)
        measured = max(measured, len(series))
        outside = [(step, value) for step, value in series.pairs if not low <= value <= high]
        if len(series) < FEWEST_STEPS or len(outside) < max(2, LARGE_SHARE * len(series)):
            continue
        bad |= {step for step, _ in outside}
        step, worst = max(outside, key=lambda pair: abs(pair[1]))
        evidence.append(
            f"{name} is out of range in {len(outside)} of {len(series)} steps, {worst:.3g} in step {step} ({healthy})"
        )
    if not evidence:
        return None
    certain = len(bad) >= max(FEWEST_CERTAIN, measured / 2)
    return CLIP.found(history, (min(bad), max(bad)), evidence, certain=certain)


def policy_static(history: History) -> Finding | None:
    """With one update a step, ratio and ppo_kl are 1 and 0 by definition: then only a KL to the reference can tell."""
    moved, kl = history.series("actor/ppo_kl"), history.series(*KL_METRICS)
    measured = []
    if len(history.steps) < FEWEST_OF_A_TREND:  # whether the reward rises is not known yet
        return None
    if history.updates_per_step > 1 and len(moved):
        measured.append(("actor/ppo_kl", moved, PPO_KL_STATIC))
    # before the first update policy and reference are equal
    kl = kl.after(max(kl.steps[0], history.warmup + 1)) if len(kl) else kl
    if len(kl):
        measured.append((next(name for name in KL_METRICS if name in history.columns), kl, KL_STATIC))
    if not measured or any(max(map(abs, series.tail.values)) > limit for _, series, limit in measured):
        return None
    if any(history.series("actor/pg_clipfrac").values) or history.score_rises:
        return None
    evidence = [f"{name} stays below {limit:g}: {figures(series)}" for name, series, limit in measured]
    key = learning_rate_key(history)
    evidence.append(f"{key} is {history.number(key, 1e-6):g}")
    steps = measured[0][1]
    return STATIC.found(history, steps.span, evidence, certain=len(steps) >= 2 * FEWEST_CERTAIN)


def entropy_collapse(history: History) -> Finding | None:
    entropy, high = history.series("actor/entropy"), history.series("critic/score/max")
    if len(entropy) < FEWEST_STEPS:
        return None
    first, last = entropy.values[0], entropy.tail.mean
    score = history.series(SCORE)
    at_top = len(score) > 0 and score.tail.mean >= 0.9 * max(high.values, default=0.0) > 0
    solved = at_top or (history.score_place or 0.0) >= 0.9  # between the lowest and the highest score, such as -1 and 1
    if solved or (not never_entropy(history) and (last > COLLAPSED * first or history.score_rises)):
        return None
    evidence = [
        f"actor/entropy: {first:.3g} in step {entropy.steps[0]}, {last:.3g} in the last {len(entropy.tail)} steps"
    ]
    return ENTROPY_LOW.found(history, entropy.span, evidence, certain=len(entropy) >= FEWEST_CERTAIN)


def entropy_explosion(history: History) -> Finding | None:
    entropy = history.series("actor/entropy")
    if len(entropy) < FEWEST_STEPS:
        return None
    first, last = entropy.values[0], entropy.tail.mean
    if last < ENTROPY_RISE * first or last < first + ENTROPY_RISE_NATS or history.score_rises:
        return None
    evidence = [
        f"actor/entropy: {first:.3g} in step {entropy.steps[0]}, {last:.3g} in the last {len(entropy.tail)} steps"
    ]
    return ENTROPY_HIGH.found(history, entropy.span, evidence, certain=len(entropy) >= FEWEST_CERTAIN)


MISMATCH_ADVICE = (
    Change(f"{ROLLOUT}.enforce_eager", True, "the engine's plain kernels"),
    Change(f"{CORRECTION}.rollout_is", "token", "weight the loss until the cause is found"),
)


def rollout_mismatch(history: History) -> Finding | None:
    if THRESHOLD_KEY in history.config and history.config[THRESHOLD_KEY] is None:  # switched off
        return None
    figure, threshold = history.series(FIGURE), history.number(THRESHOLD_KEY, MISMATCH_DEFAULT)
    ages = history.series("training/off_policy/trajectory_staleness_worst/max")
    older = {step for step, age in ages.pairs if age > 0}  # than the trainer's weights
    figure = Series.of(pair for pair in figure.pairs if pair[0] not in older)
    above = [(step, value) for step, value in figure.pairs if value > threshold]
    if len(above) < FEWEST_STEPS:  # a single step may have a rare token
        return None
    since_first = 2 * len(above) >= len(figure.after(above[0][0] - 1))
    lately = sum(value > threshold for value in figure.values[-2 * FEWEST_STEPS :]) >= FEWEST_STEPS
    if not (since_first or lately):
        return None
    largest = max(value for _, value in above)
    evidence = [f"{FIGURE} is above {threshold:g} in {len(above)} of {len(figure)} steps, at most {largest:.3g}"]
    certain = len(above) >= FEWEST_CERTAIN
    return MISMATCH.found(history, (above[0][0], above[-1][0]), evidence, certain=certain, more=MISMATCH_ADVICE)


# Credit: advantages that do not reach the first tokens of an answer

WEIGHT_CERTAIN = 0.001


def undiscounted(history: History) -> list[Advice]:
    reads = history.estimator_needs.reads
    keys = [f"algorithm.{name}" for name in ("lam", "gamma") if name in reads]
    return [Change(key, 1.0, "every token gets the whole reward") for key in keys if history.number(key, 1.0) < 1]


CREDIT = Fault(
    "credit_decay",
    Severity.WARNING,
    "The reward does not reach the first tokens of an answer",
    (
        Cause(
            "gamma × lam per token is too small for answers of this length (measured on GSM8K, answers of 300 tokens: "
            "lam=0.95 gained nothing in 12 steps, lam=1.0 took 61.2 % to 70.9 % in 30)",
            advice=undiscounted,
        ),
    ),
    (RESPONSE_LENGTH,),
)


def credit_decay(history: History) -> Finding | None:
    gamma, lam = history.number("algorithm.gamma", 1.0), history.number("algorithm.lam", 1.0)
    needs, length = history.estimator_needs, history.series(RESPONSE_LENGTH).after(history.warmup)
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
    certain = weight < WEIGHT_CERTAIN and history.has_first_step
    return CREDIT.found(history, length.span, evidence, certain=certain, begin_again=True)


def flat_score(score: Series) -> list[str]:
    trend = score.trend
    if trend is None:
        return []
    return [f"{SCORE} does not rise: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last"]


# The critic

EXPLAINED = 0.05  # of the variance of the returns; below it the critic predicts no more than their mean
WORSE_THAN_MEAN = -0.2
BIAS = 0.5  # standard deviations of the scores between the mean value and the mean score
LONG_RUN = 20  # steps after which a critic that explains nothing is a finding, if the reward does not rise


def higher_critic_rate(history: History) -> list[Advice]:
    rate, actor = history.number(f"{CRITIC}.optim.lr", 1e-5), history.number(f"{ACTOR}.optim.lr", 1e-6)
    higher = rounded(max(10 * actor, 2 * rate))
    return [Change(f"{CRITIC}.optim.lr", higher, "ten times the actor's, or twice what it is")]


def beyond_clip(history: History) -> Support:
    clip, score = history.number(f"{CRITIC}.cliprange_value", 0.5), history.series(SCORE)
    if not len(score) or abs(score.mean) <= 4 * clip:
        return False
    return f"scores are {score.mean:.3g} on average, and {CRITIC}.cliprange_value is {clip:g}"


def smaller_scores(history: History) -> list[Advice]:
    mean = abs(history.series(SCORE).mean)
    return [
        "return scores of about 0 to 1 from the reward function",
        Change(f"{CRITIC}.cliprange_value", rounded(mean), "the range of the scores", "higher"),
    ]


def few_answers(history: History) -> Support:
    return (history.answers_per_step or 0) < 256


def larger_batch(history: History) -> list[Advice]:
    size = int(2 * history.number("data.train_batch_size", 256))
    return [Change("data.train_batch_size", size, "more answers in a step")]


CRITIC_STUCK = Fault(
    "critic_stuck",
    Severity.WARNING,
    "The critic does not learn",
    (
        Cause("rewards are far outside of ± critic.cliprange_value", beyond_clip, smaller_scores),
        Cause("the critic's learning rate is too low; about ten times the actor's is usual", advice=higher_critic_rate),
        Cause(
            "the policy changes before the critic has learned the rewards",
            advice=lambda history: [Change("trainer.critic_warmup", 10, "train the critic alone at first", "higher")],
        ),
        Cause("too few answers in a step", few_answers, larger_batch),
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
    idle = len(loss.after(history.warmup)) >= LONG_RUN and not history.score_rises
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
    certain = bias >= 2 * BIAS and len(loss) >= LONG_RUN
    return CRITIC_STUCK.found(history, loss.span, evidence, certain=certain, begin_again=not history.score_rises)
