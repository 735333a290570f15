"""How far the policy moves: KL, clip fraction, entropy, and the mismatch with the rollout engine."""

import math

from rloom.algos.needs import LOSS_KEY
from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, SCORE, History, figures, rounded
from rloom.doctor.run.numerics import learning_rate_key, lower_learning_rate
from rloom.doctor.run.series import FEWEST_OF_A_TREND
from rloom.runs.mismatch import CORRECTION, FIGURE, THRESHOLD_KEY, causes
from rloom.runs.names import KL_METRICS

KL_HIGH, KL_CERTAIN = 0.1, 0.2  # the documents: 0.001 to 0.1, never above 0.1 to 0.2
CLIP_HIGH = 0.3  # the documents: at most 0.3
RATIO_LOW, RATIO_HIGH = 0.8, 1.2
PPO_KL_HIGH = 0.1
LARGE_SHARE = 0.2  # of the steps, and two of them: a single one may be chance
PPO_KL_STATIC = 1e-6  # between the policies before and after several updates
KL_STATIC = 1e-6  # to the reference: a thousandth of the documents' range
COLLAPSED = 0.1  # of the entropy at first
ENTROPY_NONE = 1e-3  # nats: almost every token has one choice
ENTROPY_RISE, ENTROPY_RISE_NATS = 3.0, 1.0
MISMATCH_DEFAULT = 0.01

TOO_FAST = "the learning rate is too high"
KL_FAULT = Fault(
    "kl_high",
    Severity.WARNING,
    "The policy is far from the reference (KL)",
    (
        TOO_FAST,
        "the KL coefficient is too small",
        "the reward pays for answers that the reference would never give",
    ),
    KL_METRICS,
)
CLIP = Fault(
    "clip_high",
    Severity.WARNING,
    "Updates change the policy too much",
    (
        "too many updates on one batch",
        TOO_FAST,
        "the clip range is too narrow for this loss",
    ),
    ("actor/pg_clipfrac", "actor/ppo_ratio"),
)
STATIC = Fault(
    "policy_static",
    Severity.WARNING,
    "The policy does not move",
    (
        "the learning rate is far too low",
        "the KL coefficient is so large that it outweighs the reward",
        "weights in bfloat16 without float32 masters lose small updates",
    ),
    ("actor/ppo_kl", *KL_METRICS),
)
ENTROPY_LOW = Fault(
    "entropy_collapse",
    Severity.WARNING,
    "The entropy has collapsed: the policy no longer explores",
    (
        "sampling leaves no choice (temperature near 0)",
        TOO_FAST,
        "the reward pays for one answer, whatever the prompt is",
        "no term of the loss keeps the entropy up",
    ),
    ("actor/entropy",),
)
ENTROPY_HIGH = Fault(
    "entropy_explosion",
    Severity.WARNING,
    "The entropy grows: answers become random",
    (
        "the entropy bonus is too large",
        TOO_FAST,
        "advantages are noise",
    ),
    ("actor/entropy",),
)
MISMATCH = Fault(
    "rollout_mismatch",
    Severity.ERROR,
    "Rollout engine and trainer disagree",
    (),  # those of the warning
    (FIGURE,),
)


def kl_high(history: History) -> Finding | None:
    kl = history.series(*KL_METRICS)
    if len(kl) < FEWEST_STEPS or kl.tail.mean <= KL_HIGH:
        return None
    evidence = [
        (
            f"KL to the reference: {kl.tail.mean:.3g} on average over the last {len(kl.tail)} steps "
            f"(0.001 to 0.1 is healthy): {figures(kl)}"
        )
    ]
    in_loss = history.config.get(f"{ACTOR}.use_kl_loss") is True
    key, least = (f"{ACTOR}.kl_loss_coef", 0.01) if in_loss else ("algorithm.kl_ctrl.kl_coef", 0.005)
    stronger = Change(key, max(least, rounded(5 * history.number(key, 0.001))), "a stronger KL")
    if history.config.get("algorithm.kl_metric") is True:  # no KL in reward and loss: it is only measured
        stronger = Change(f"{ACTOR}.use_kl_loss", True, "stay closer to the reference")
    changes = [
        lower_learning_rate(history),
        stronger,
        Change(f"{ACTOR}.clip_ratio", 0.1, "smaller updates", "lower"),
    ]
    certain = len(kl) >= FEWEST_CERTAIN and min(kl.tail.values) > KL_CERTAIN
    return KL_FAULT.found(kl.tail.span, evidence, changes, certain=certain)


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
        pairs = list(zip(series.steps, series.values, strict=True))
        outside = [(step, value) for step, value in pairs if not low <= value <= high]
        if len(series) < FEWEST_STEPS or len(outside) < max(2, LARGE_SHARE * len(series)):
            continue
        bad |= {step for step, _ in outside}
        step, worst = max(outside, key=lambda pair: abs(pair[1]))
        evidence.append(
            f"{name} is out of range in {len(outside)} of {len(series)} steps, {worst:.3g} in step {step} ({healthy})"
        )
    if not evidence:
        return None
    epochs = Change(f"{ACTOR}.ppo_epochs", 1, "one pass over each batch")
    repeated = history.number(f"{ACTOR}.ppo_epochs", 1) > 1
    changes = [*([epochs] if repeated else []), lower_learning_rate(history)]
    certain = len(bad) >= max(FEWEST_CERTAIN, measured / 2)
    return CLIP.found((min(bad), max(bad)), evidence, changes, certain=certain)


def policy_static(history: History) -> Finding | None:
    """With one update a step, ratio and ppo_kl are 1 and 0 by definition: then only a KL to the reference can tell."""
    moved, kl = history.series("actor/ppo_kl"), history.series(*KL_METRICS)
    measured = []
    if len(history.steps) < FEWEST_OF_A_TREND:  # whether the reward rises is not known yet
        return None
    if history.updates_per_step > 1 and len(moved):
        measured.append(("actor/ppo_kl", moved, PPO_KL_STATIC))
    if len(kl) > 1:  # before the first update policy and reference are equal
        measured.append(
            (next(name for name in KL_METRICS if name in history.columns), kl.after(kl.steps[0]), KL_STATIC)
        )
    if not measured or any(max(map(abs, series.tail.values)) > limit for _, series, limit in measured):
        return None
    if any(history.series("actor/pg_clipfrac").values) or history.score_rises:
        return None
    evidence = [f"{name} stays below {limit:g}: {figures(series)}" for name, series, limit in measured]
    key = learning_rate_key(history)
    rate = history.number(key, 1e-6)
    evidence.append(f"{key} is {rate:g}")
    higher = max(1e-6, rounded(10 * rate))
    changes = [Change(key, higher, "a higher learning rate")]
    steps = measured[0][1]
    return STATIC.found(steps.span, evidence, changes, certain=len(steps) >= 2 * FEWEST_CERTAIN)


def entropy_collapse(history: History) -> Finding | None:
    entropy, high = history.series("actor/entropy"), history.series("critic/score/max")
    if len(entropy) < FEWEST_STEPS:
        return None
    first, last = entropy.values[0], entropy.tail.mean
    none_at_all = max(entropy.values) < ENTROPY_NONE
    score = history.series(SCORE)
    solved = len(score) > 0 and score.tail.mean >= 0.9 * max(high.values, default=0.0) > 0
    if not none_at_all and (last > COLLAPSED * first or solved or history.score_rises):
        return None
    evidence = [
        f"actor/entropy: {first:.3g} in step {entropy.steps[0]}, {last:.3g} in the last {len(entropy.tail)} steps"
    ]
    temperature = history.number(f"{ROLLOUT}.temperature", 1.0)
    changes = [
        *([Change(f"{ROLLOUT}.temperature", 1.0, f"it is {temperature:g}")] if temperature < 1 else []),
        Change(f"{ACTOR}.entropy_coeff", 0.001, "an entropy bonus", "higher"),
        Change(
            f"{ACTOR}.clip_ratio_high",
            0.28,
            "rare tokens may grow (DAPO)",
            "higher",
        ),
        lower_learning_rate(history),
    ]
    return ENTROPY_LOW.found(entropy.span, evidence, changes, certain=len(entropy) >= FEWEST_CERTAIN)


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
    bonus = history.number(f"{ACTOR}.entropy_coeff", 0.0)
    changes = [
        *([Change(f"{ACTOR}.entropy_coeff", 0.0, f"it is {bonus:g}")] if bonus > 0 else []),
        lower_learning_rate(history),
    ]
    return ENTROPY_HIGH.found(entropy.span, evidence, changes, certain=len(entropy) >= FEWEST_CERTAIN)


def rollout_mismatch(history: History) -> Finding | None:
    if THRESHOLD_KEY in history.config and history.config[THRESHOLD_KEY] is None:  # switched off
        return None
    figure, threshold = history.series(FIGURE), history.number(THRESHOLD_KEY, MISMATCH_DEFAULT)
    above = [(step, value) for step, value in zip(figure.steps, figure.values, strict=True) if value > threshold]
    if len(above) < FEWEST_STEPS:  # a single step may have a rare token
        return None
    since_first = 2 * len(above) >= len(figure.after(above[0][0] - 1))
    lately = sum(value > threshold for value in figure.values[-2 * FEWEST_STEPS :]) >= FEWEST_STEPS
    if not (since_first or lately):
        return None
    largest = max(value for _, value in above)
    evidence = [f"{FIGURE} is above {threshold:g} in {len(above)} of {len(figure)} steps, at most {largest:.3g}"]
    changes = [
        Change(f"{ROLLOUT}.enforce_eager", True, "the engine's plain kernels"),
        Change(
            f"{CORRECTION}.rollout_is",
            "token",
            "weight the loss until the cause is found",
        ),
    ]
    known = causes("compare the versions in the run's warning")
    certain = len(above) >= FEWEST_CERTAIN
    return MISMATCH.found((above[0][0], above[-1][0]), evidence, changes, certain=certain, causes=known)
