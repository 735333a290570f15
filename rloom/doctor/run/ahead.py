"""Generation ahead of training: answers that are too old, a trainer that waits, a queue that grows."""

import math

from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import FEWEST_CERTAIN, FEWEST_OF_A_TREND, FEWEST_STEPS, SCORE, History, Series
from rloom.doctor.run.numerics import FEWEST_WAITS, SHORTEST_S, more_workers

V1 = "trainer.v1"
BOUND, STRATEGY = f"{V1}.sampler.max_off_policy_threshold", f"{V1}.sampler.max_off_policy_strategy"
WEIGHTS, POOL = "algorithm.rollout_correction.rollout_is", "trainer.pools.rollout"
AGE = "training/off_policy/trajectory_staleness_worst"  # of the oldest token
WAIT, IDLE, STEP, REWARD = "training/wait_s", "rollout/idle_s", "timing_s/step", "timing_s/reward"
CARRIED, DROPPED = "rollout/carried_answers", "training/off_policy/dropped_groups"
# Largest healthy values of answers that are some versions old. The KL of runs that learn was 0.0003 to 0.006 with a
# staleness of one and 0.016 with two; of six runs with four it was 0.02 to 0.3, and most of them forgot what they knew.
HARMFUL = {
    "rollout_corr/k3_kl": 0.03,
    "rollout_corr/rollout_is_ratio_fraction_high": 0.05,  # of the tokens: weights that are truncated
    "rollout_corr/rollout_is_oob_ratio": 0.1,
    "rollout_corr/rollout_rs_masked_fraction": 0.2,
}
FRESH = 0.5  # versions, on average: below it a step's answers are those of its own weights
TIMES_FRESH = 3.0  # what old answers measure, of what new ones do; else staleness is not the cause
WAITS = 0.4  # largest healthy share of a step
GROWTH, MANY = 1.5, 0.1  # of the carried answers, and of the answers of a step
OFTEN, LOST = 0.3, 0.01  # of the steps, and of the groups


def is_separate(history: History) -> bool:
    return history.config.get(f"{V1}.trainer_mode") == "separate_async"


def batches_key(history: History) -> str:
    return f"{V1}.{'separate' if is_separate(history) else 'colocate'}_async.num_warmup_batches"


def fewer_batches(history: History) -> Change:
    batches = int(history.number(batches_key(history), 1))
    return Change(batches_key(history), max(0, batches - 1), "fewer answers are begun ahead", "lower")


def more_batches(history: History) -> Change:
    batches = int(history.number(batches_key(history), 1))
    return Change(batches_key(history), batches + 1, "more answers are begun ahead", "higher")


# Staleness that hurts


def newer_answers(history: History) -> list[Advice]:
    oldest = history.series(f"{AGE}/max").tail.mean
    lower = Change(BOUND, max(1, int(oldest / 2)), "answers of newer weights", "lower")
    sequence = history.config.get(WEIGHTS) == "sequence"
    weights = [Change(WEIGHTS, "token", "a weight for each token, by the version that sampled it")] if sequence else []
    return [lower, fewer_batches(history), *weights]


STALENESS = Fault(
    "staleness_hurts",
    Severity.WARNING,
    "Answers are too old for the weights that they train",
    (Cause("the weights change too much between the first token of an answer and its training", advice=newer_answers),),
    (AGE,),
)


def by_age(history: History, name: str) -> tuple[Series, Series]:
    """The metric in steps with answers of their own weights, and in those with older ones."""
    age, value = history.series(f"{AGE}/mean"), history.series(name)
    age_of = dict(age.pairs)
    pairs = [pair for pair in value.pairs if pair[0] in age_of]
    fresh = Series.of(pair for pair in pairs if age_of[pair[0]] < FRESH)
    return fresh, Series.of(pair for pair in pairs if age_of[pair[0]] >= 1)


def staleness_hurts(history: History) -> Finding | None:
    age, oldest, bound = history.series(f"{AGE}/mean"), history.series(f"{AGE}/max"), history.number(BOUND, 8)
    if len(age) < FEWEST_STEPS or not len(oldest) or oldest.tail.mean < 1:
        return None
    evidence = []
    for name, limit in HARMFUL.items():
        fresh, old = by_age(history, name)
        if len(fresh) and len(old) >= FEWEST_STEPS and old.tail.median > max(limit, TIMES_FRESH * fresh.mean):
            evidence.append(
                f"{name}: {old.tail.median:.3g} with answers that are {age.tail.mean:.2g} versions old "
                f"(up to {limit:g} is usual), {fresh.mean:.3g} with new ones"
            )
    certain = bool(evidence) and len(age) >= FEWEST_CERTAIN
    trend = history.series(SCORE).trend
    if trend is not None and trend.falls and bound >= 2 and oldest.tail.mean >= bound - FRESH:
        evidence.append(
            f"{SCORE} falls from {trend.first:.3g} to {trend.last:.3g}, and the oldest answers are {bound:g} versions "
            f"old, which is {BOUND}"
        )
    return STALENESS.found(history, age.span, evidence, certain=certain) if evidence else None


# A trainer that waits


def waiting(history: History) -> tuple[Series, Series]:
    """Seconds of each step, and of these the ones in which the workers that train wait; without the first steps, in
    which the queue is filled. Workers that also generate lose only the time for scores."""
    steps, waits = history.series(STEP), history.series(WAIT if is_separate(history) else REWARD)
    if not len(history.series(WAIT)):  # nothing is generated ahead
        return Series(), Series()
    first = int(history.number(batches_key(history), 1)) + 1
    seconds = dict(waits.pairs)
    kept = Series.of(pair for pair in steps.after(first).pairs if pair[0] in seconds)
    return kept, Series(kept.steps, tuple(seconds[step] for step in kept.steps))


def for_scores(history: History) -> Support:
    _, waits = waiting(history)
    if not is_separate(history):
        return f"{REWARD} is {waits.mean:.3g} s of a step"
    idle = history.series(IDLE).after(waits.steps[0] - 1)
    if not len(idle) or idle.mean < waits.mean / 2:
        return False
    return f"{IDLE} is {idle.mean:.3g} s of a step: meanwhile the engines have nothing to generate"


def faster_scores(history: History) -> list[Advice]:
    return [*more_workers(history), more_batches(history)]


def more_engines(history: History) -> list[Advice]:
    workers = int(history.number("trainer.n_gpus_per_node", 1) * history.number("trainer.nnodes", 1))
    engines = int(history.number(POOL, 1))
    moved = [Change(POOL, engines + 1, "more workers generate", "higher")] if engines + 1 < workers else []
    return [
        *moved,
        "give generation more GPUs, or let all of them generate and train: colocate_async",
        more_batches(history),
    ]


STARVING = Fault(
    "starving_trainer",
    Severity.NOTE,
    "Training waits for answers and scores",
    (
        Cause("scores are late: the reward function or the judge is slow", for_scores, faster_scores),
        Cause(
            "generation is slower than training",
            lambda history: is_separate(history) and for_scores(history) is False,
            more_engines,
        ),
    ),
    (WAIT,),
)


def starving_trainer(history: History) -> Finding | None:
    steps, waits = waiting(history)
    if len(steps) < FEWEST_STEPS or steps.mean < SHORTEST_S:
        return None
    many = sum(wait > WAITS * step for wait, step in zip(waits.values, steps.values, strict=True))
    share = waits.mean / steps.mean
    if share <= WAITS or many < max(FEWEST_WAITS, OFTEN * len(steps)):
        return None
    name = WAIT if is_separate(history) else REWARD
    evidence = [f"{name}: {share:.0%} of the time, and more than {WAITS:.0%} of {many} of {len(steps)} steps"]
    return STARVING.found(history, steps.span, evidence, certain=len(steps) >= FEWEST_CERTAIN)


# A queue that grows


def later_scores(history: History) -> Support:
    """The answers of groups that were dropped were complete."""
    carried, dropped = history.series(CARRIED), history.series(DROPPED)
    complete = len(carried) > 0 and carried.tail.mean < 1 and len(dropped) > 0 and dropped.tail.mean > 0
    return f"{CARRIED} is {carried.tail.mean:.3g}: groups wait for scores, not for answers" if complete else False


def room_for_long(history: History) -> list[Advice]:
    drops = len(history.series(DROPPED)) > 0 and history.series(DROPPED).tail.mean > 0
    bound = int(history.number(BOUND, 8))
    keep: list[Advice] = [
        Change(BOUND, 2 * max(bound, 1), "longer answers may be finished", "higher"),
        Change(STRATEGY, "wait", "a step waits for the groups that would be dropped"),
    ]
    return [*(keep if drops else []), fewer_batches(history)]


QUEUE = Fault(
    "queue_grows",
    Severity.WARNING,
    "Answers that were begun ahead become more, or are dropped",
    (
        Cause("scores are so late that groups become too old", later_scores, more_workers),
        Cause(
            "long answers are not complete before they are too old",
            lambda history: later_scores(history) is False,
            room_for_long,
        ),
    ),
    (CARRIED, DROPPED),
)


def queue_grows(history: History) -> Finding | None:
    """Severity: a note if answers become more, and no group is lost."""
    carried, dropped, evidence = history.series(CARRIED), history.series(DROPPED), []
    carried = carried.after(int(history.number(batches_key(history), 1)) + 2)  # the queue is filled
    answers, trend = history.answers_per_step, carried.trend
    middle = Series(carried.steps[carried.third : -carried.third], carried.values[carried.third : -carried.third])
    many = trend is not None and trend.rises and trend.last > max(GROWTH * trend.first, MANY * (answers or math.inf))
    if trend is not None and many and len(middle) and trend.last > middle.mean > trend.first:
        evidence.append(
            f"{CARRIED}: {trend.first:.3g} in the first third of the steps, {middle.mean:.3g} then, "
            f"{trend.last:.3g} in the last"
        )
    groups, steps = history.number("data.train_batch_size", 0), [x > 0 for x in dropped.tail.values]
    lost = dropped.tail.mean / groups if groups and len(dropped) >= FEWEST_OF_A_TREND else 0.0
    drops = lost > LOST and sum(steps) > OFTEN * len(steps)
    if drops:
        evidence.append(
            f"{DROPPED}: {dropped.tail.mean:.3g} of {groups:g} a step, in {sum(steps)} of the last {len(steps)} steps"
        )
    if not evidence:
        return None
    span = (dropped if drops else carried).span
    severity = None if drops else Severity.NOTE
    return QUEUE.found(history, span, evidence, certain=drops, severity=severity)
