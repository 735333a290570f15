"""Updates that are not finite, gradients that grow, a learning rate of 0, a run that ended, time and memory."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, History, figures, rounded
from rloom.rewards.kinds import KINDS
from rloom.rollout.kinds import ROLLOUTS
from rloom.rollout.kinds import SLOW as SLOW_ENGINE

NOT_FINITE, OUT_OF_MEMORY = "not finite", "ran out of memory"  # in the message of a TrainingError
GROWTH = 10.0  # times the gradient norm of the first steps
FAR_ABOVE_CLIP = 10.0  # times grad_clip
ALWAYS_LARGE = 100.0  # times grad_clip, or its usual 1, whatever it was at first
HEALTHY_NORM = 10.0  # whatever grad_clip is
LARGE_REWARD, TINY_REWARD = 10.0, 1e-3
LR_ZERO = 1e-12
RARE = 0.01  # of the steps: one update that is skipped among hundreds costs nothing
LATELY = 100  # steps; more than one skipped update in them is not rare
PPO_KL_HIGH = 0.1
MANY_UPDATES = 8  # in a step

LOWER_LR = "half the learning rate"


def learning_rate_key(history: History) -> str:
    return "optim.lr" if history.is_supervised else f"{ACTOR}.optim.lr"


def grad_clip_key(history: History) -> str:
    return "optim.clip_grad" if history.is_supervised else f"{ACTOR}.grad_clip"


def dtype_key(history: History) -> str:
    return "engine.dtype" if history.is_supervised else f"{ACTOR}.fsdp_config.dtype"


def lower_learning_rate(history: History, factor: float = 2.0) -> Change:
    key = learning_rate_key(history)
    why = LOWER_LR if factor == 2.0 else f"a learning rate {factor:g} times lower"
    return Change(key, rounded(history.number(key, 1e-6) / factor), why)


def half_rate(history: History) -> list[Advice]:
    return [lower_learning_rate(history)]


def large_update(history: History) -> Support:
    """The direct evidence of a learning rate that is too high: how far one step moves the policy."""
    largest = history.largest("actor/ppo_kl")
    if largest is None:
        return True
    step, value = largest
    if abs(value) > PPO_KL_HIGH:
        first = next(s for s, v in history.series("actor/ppo_kl").pairs if abs(v) > PPO_KL_HIGH)
        return f"actor/ppo_kl is {value:.3g} in step {step} (near 0 is healthy), first beyond 0.1 in step {first}"
    # with one update in a step it is 0 by definition
    return abs(value) > PPO_KL_HIGH / 10 or history.updates_per_step <= 1 or len(history.steps) < FEWEST_STEPS


def many_updates(history: History) -> Support:
    updates = history.updates_per_step
    return f"{updates} updates of the policy in each step" if updates > MANY_UPDATES else False


def one_epoch(history: History) -> list[Advice]:
    return [Change(f"{ACTOR}.ppo_epochs", 1, "one pass over each batch"), lower_learning_rate(history)]


def large_rewards(history: History) -> Support:
    extremes = [abs(v) for name in ("max", "min") for v in history.series(f"critic/score/{name}").values]
    largest = max(extremes, default=0.0)
    return f"scores reach {largest:.3g}" if largest > LARGE_REWARD else False


def tiny_rewards(history: History) -> Support:
    extremes = [abs(v) for name in ("max", "min") for v in history.series(f"critic/score/{name}").values]
    largest = max(extremes, default=1.0)
    return f"scores reach only {largest:.3g}" if 0 < largest < TINY_REWARD else False


def normalised(history: History) -> list[Advice]:
    return [Change("reward_model.normalize", True, "divide rewards by their own spread")]


TOO_FAST = Cause("the learning rate is too high", large_update, half_rate)
MAYBE_TOO_FAST = Cause(TOO_FAST.text, lambda history: large_update(history) or True, half_rate)
TOO_MANY = Cause("too many updates on one batch", many_updates, one_epoch)


def rate_of_nan(history: History) -> Support:
    """Excluded if the updates before the first one that was skipped were small."""
    norm = history.series("actor/grad_norm", "train/grad_norm")
    if not len(norm):
        return True
    moved = history.largest("actor/ppo_kl")
    healthy = max(norm.values) < HEALTHY_NORM and (moved is None or abs(moved[1]) < PPO_KL_HIGH / 10)
    return False if healthy else large_update(history) or True


NONFINITE = Fault(
    "nonfinite",
    Severity.ERROR,
    "Updates are not finite (NaN)",
    (
        Cause("the learning rate is too high", rate_of_nan, half_rate),
        Cause(
            "rewards, or your own loss or estimator, divide by 0 or take the log of 0",
            advice=lambda history: ["look for NaN in what your reward, loss and estimator compute for these steps"],
        ),
        Cause(
            "activations overflow in the model's data type",
            lambda history: "32" not in str(history.config.get(f"{ACTOR}.fsdp_config.dtype", "")),
            lambda history: [
                Change(dtype_key(history), "float32", "a wider range of numbers"),
                Change(grad_clip_key(history), 1.0, "clip gradients", "lower"),
            ],
        ),
        Cause("the weights of the model contain NaN: `rloom chat MODEL` shows it"),
    ),
    ("actor/nonfinite_updates", "train/nonfinite_updates"),
)
FAILED = Fault(
    "run_failed",
    Severity.ERROR,
    "The run ended with an error",
    (Cause("the message names it; docs/troubleshooting.md has the known ones"),),
    (),
)


def smaller_passes(history: History) -> list[Advice]:
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu"
    return [Change(tokens, int(history.number(tokens, 16384) / 2), "smaller passes")]


def smaller_memory(history: History) -> list[Advice]:
    share = f"{ROLLOUT}.gpu_memory_utilization"
    return [
        *smaller_passes(history),
        Change(share, rounded(history.number(share, 0.5) * 0.8), "a smaller cache"),
        Change(f"{ACTOR}.fsdp_config.optimizer_offload", True, "moments on the host"),
    ]


MEMORY_ERROR = Fault(
    "out_of_memory",
    Severity.ERROR,
    "The GPU ran out of memory",
    (
        Cause("a micro-batch has too many tokens", advice=smaller_memory),
        Cause("the rollout engine's cache is too large beside the models"),
        Cause("the models are too large for these GPUs: `rloom plan` counts each part"),
    ),
    (),
)
GRADIENT = Fault(
    "gradient_explosion",
    Severity.WARNING,
    "The gradient norm is far too large",
    (
        Cause("rewards are far outside of -1 to 1, and the advantages are not normalised", large_rewards, normalised),
        MAYBE_TOO_FAST,
        TOO_MANY,
        Cause("some rows are damaged or very long: `rloom data check FILE`", lambda history: history.is_supervised),
        Cause("the weights of the model are damaged", lambda history: history.is_supervised),
    ),
    ("actor/grad_norm", "train/grad_norm"),
)


def usual_rate(history: History) -> list[Advice]:
    key = learning_rate_key(history)
    usual = 1e-5 if history.is_supervised else 1e-6
    schedule = f"{key.removesuffix('lr')}lr_scheduler_type"
    rate = Change(key, usual, "the usual rate for all weights", "higher")
    return [Change(schedule, "constant", "no decay to 0"), rate]


LEARNING_RATE = Fault(
    "learning_rate_zero",
    Severity.ERROR,
    "The learning rate is 0",
    (Cause("the schedule ends at 0 before the run ends, or the warm-up is longer than the run", advice=usual_rate),),
    ("actor/lr", "train/lr"),
)


def nonfinite(history: History) -> Finding | None:
    evidence: list[str] = []
    steps: list[int] = []
    for name, series in history.matching("", "/nonfinite_updates").items():
        wrong = [(step, int(value)) for step, value in series.pairs if value > 0]
        if wrong:
            steps += [step for step, _ in wrong]
            total, first = sum(number for _, number in wrong), wrong[0][0]
            evidence.append(f"{name}: {total} updates in {len(wrong)} steps were skipped, the first in step {first}")
    ended = is_error_about(history, NOT_FINITE)
    if ended:
        last = max(history.steps, default=0) + 1
        steps.append(last)
        evidence.append(ending(history, last))
    if not evidence:
        return None
    rare = not ended and is_rare(set(steps), history)
    return NONFINITE.found(
        history,
        (min(steps), max(steps)),
        evidence,
        certain=ended or (not rare and len(set(steps)) > 1),
        severity=Severity.WARNING if rare else None,
    )


def is_rare(steps: set[int], history: History) -> bool:
    """By the numbers of the steps: a running run keeps only some of them."""
    first, last = history.steps[0], history.steps[-1]
    lately = [step for step in steps if step > last - LATELY]
    return len(steps) <= RARE * (last - first + 1) and len(lately) <= 1


def run_failed(history: History) -> Finding | None:
    end = history.end
    if end is None or end.get("status") in ("finished", "interrupted"):
        return None
    known = is_error_about(history, NOT_FINITE) or is_error_about(history, OUT_OF_MEMORY)
    if known or end.get("status") == "RewardError":
        return None  # findings of their own
    last = max(history.steps, default=0)
    return FAILED.found(history, (last, last), [ending(history, last)], certain=True)


def out_of_memory(history: History) -> Finding | None:
    if not is_error_about(history, OUT_OF_MEMORY):
        return None
    last = max(history.steps, default=0) + 1
    return MEMORY_ERROR.found(history, (last, last), [ending(history, last)], certain=True)


def is_error_about(history: History, words: str) -> bool:
    end = history.end
    return end is not None and words in str(end.get("message", ""))


def ending(history: History, step: int) -> str:
    assert history.end is not None  # the caller has looked
    error = f"{history.end.get('status')}: {history.end.get('message', '')}".strip(": ")
    return f"after step {step}: {error}"


def gradient_explosion(history: History) -> Finding | None:
    """A norm below 100 that has not grown is healthy, however small `grad_clip` is."""
    norm = history.series(*GRADIENT.metrics)
    if len(norm) < FEWEST_STEPS:
        return None
    name = next(name for name in GRADIENT.metrics if name in history.columns)
    clip = history.number(grad_clip_key(history), 1.0)
    first, last = norm.head.median, norm.tail.median
    grown = last > GROWTH * first and last > FAR_ABOVE_CLIP * clip and last > HEALTHY_NORM / 10
    if not grown and last <= ALWAYS_LARGE * max(clip, 1.0):
        return None
    span = (norm.head if grown else norm.tail).span[0], norm.span[1]
    limit = grad_clip_key(history).rpartition(".")[2]
    evidence = [f"{name} before clipping: median {first:.3g} at first, {last:.3g} at last; {limit} is {clip:g}"]
    return GRADIENT.found(history, span, evidence, certain=len(norm) >= FEWEST_CERTAIN)


def learning_rate_zero(history: History) -> Finding | None:
    rate = history.series("actor/lr", "train/lr")
    zero = [step for step, value in rate.pairs if value <= LR_ZERO]
    if len(rate) < FEWEST_STEPS or len(zero) <= len(rate) / 2:
        return None
    evidence = [f"the learning rate is 0 in {len(zero)} of {len(rate)} steps: {figures(rate)}"]
    return LEARNING_RATE.found(history, (zero[0], zero[-1]), evidence, certain=len(zero) >= FEWEST_CERTAIN)


def loss_rises(history: History) -> Support:
    trend = history.series("train/loss").trend
    return loss_jumped(history) or (trend is not None and trend.rises)


def loss_jumped(history: History) -> bool:
    """It is still far above its first value, which is that of the model before training."""
    loss = history.series("train/loss")
    return len(loss) > 0 and loss.tail.mean > max(2 * loss.values[0], loss.values[0] + LOSS_JUMP)


def rate_times(factor: float, why: str) -> Cause:
    def other(history: History) -> list[Advice]:
        key = learning_rate_key(history)
        return [Change(key, rounded(history.number(key, 1e-5) * factor), why)]

    return Cause(
        "the learning rate is so high that the loss jumps" if factor < 1 else "the learning rate is too low",
        loss_rises if factor < 1 else lambda history: not loss_rises(history),
        other,
    )


SFT_LOSS = Fault(
    "loss_not_falling",
    Severity.WARNING,
    "The loss of supervised fine-tuning does not fall",
    (
        rate_times(0.2, "a learning rate five times lower"),
        rate_times(5.0, "a learning rate five times higher"),
        Cause("the answers in the data cannot be predicted from the prompts"),
    ),
    ("train/loss",),
)
FEWEST_OF_SFT = 20  # batches differ, so that a few steps say nothing
LOSS_ERRORS = 5.0  # standard errors: a running run repeats the comparison every few steps
LOSS_RISE = 0.05  # of the loss at first
LOSS_JUMP = 0.2  # nats


def loss_not_falling(history: History) -> Finding | None:
    loss = history.series("train/loss")
    trend = loss.trend
    if len(loss) < FEWEST_OF_SFT or trend is None or (trend.change < 0 and not loss_jumped(history)):
        return None
    evidence = [f"train/loss: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last"]
    if loss_jumped(history):
        evidence.append(f"train/loss was {loss.values[0]:.3g} in step {loss.steps[0]}, before the first update")
    certain = loss_jumped(history) or trend.change > max(LOSS_ERRORS * trend.error, LOSS_RISE * abs(trend.first))
    return SFT_LOSS.found(history, loss.span, evidence, certain=certain, begin_again=loss_jumped(history))


# Time and memory

# Largest healthy share of a run's time by stage. Generation is about half of a step, updates are the rest
# (docs/plan.md); rewards are computed during generation, so that this stage only waits for the last ones.
LARGEST_SHARE = {
    "reward": 0.3,
    "update_weights": 0.3,
    "save_checkpoint": 0.3,
    "testing": 0.5,
    "gen": 0.85,
    "gen_greedy": 0.5,
}
SHORTEST_S = 0.1  # a step: below it, shares are those of fixed costs
MEMORY_GROWTH = 0.05  # of the memory after the first third of the steps
MEMORY_STEPS = 12
RISING_SHARE = 0.6  # of the steps: a longer batch raises a peak once, a leak in every step
REWARD_LIMIT = "reward_model.timeout_s"
FEWEST_WAITS = 3  # steps
PROGRAM_LIMIT = "reward_model.sandbox.cpu_s"
OUT_OF_TIME = "reward/out_of_time"  # share of the answers
RULE_PART = "rule_score"
MOST_ROWS = 5  # that are named


def slowest_stage(history: History) -> tuple[str, float, float, float] | None:
    """The stage that is furthest above its healthy share: its name, share, seconds a step and seconds of a step."""
    steps = history.series("timing_s/step")
    if len(steps) < FEWEST_STEPS:
        return None
    first = steps.steps[0]  # it compiles
    timings = {name.removeprefix("timing_s/"): series for name, series in history.matching("timing_s/").items()}
    seconds = {name: sum(series.after(first).values) for name, series in timings.items()}
    beside = seconds.get("testing", 0.0) + seconds.get("save_checkpoint", 0.0)  # not part of `step`
    total, count = seconds.get("step", 0.0) + beside, len(steps) - 1
    if total / count < SHORTEST_S:
        return None
    shares = {name: seconds.get(name, 0.0) / total for name in LARGEST_SHARE}
    stage = max(shares, key=lambda name: shares[name] / LARGEST_SHARE[name])
    return stage, shares[stage], seconds.get(stage, 0.0) / count, total / count


def is_stage(*names: str) -> Callable[[History], Support]:
    def test(history: History) -> Support:
        found = slowest_stage(history)
        return found is not None and found[0] in names

    return test


def waits_for_the_limit(history: History) -> Support:
    """Steps with a failed reward wait as long as the time limit: a few answers hang, the others are fast."""
    limit = history.number(REWARD_LIMIT, 10.0)
    failed, seconds = history.series("reward/failed"), history.series("timing_s/reward")
    waits = [s for s, f in zip(seconds.values, failed.values, strict=False) if f > 0]
    others = [s for s, f in zip(seconds.values, failed.values, strict=False) if f == 0]
    if len(waits) < FEWEST_WAITS or min(waits) < 0.8 * limit or max(others, default=0.0) > 0.5 * limit:
        return False
    return (
        f"the reward stage takes {min(waits):.3g} s or more in steps with a failed reward; {REWARD_LIMIT} is {limit:g}"
    )


def programs_reach_the_limit(history: History) -> Support:
    """Steps in which a program ran into its time limit wait for it, the others do not."""
    share = history.series(OUT_OF_TIME, f"reward/{RULE_PART}/{OUT_OF_TIME.removeprefix('reward/')}")
    seconds = dict(history.series("timing_s/reward").pairs)
    pairs = [(seconds[step], value) for step, value in share.pairs if step in seconds]
    waits, others = [s for s, value in pairs if value > 0], [s for s, value in pairs if value == 0]
    limit_s = program_limit_s(history)
    if len(waits) < FEWEST_WAITS or median(waits) < max(limit_s / 2, 2 * median(others or [0.0])):
        return False
    rows = ", ".join(f"{row} ({test})" for _, row, test in history.samples.time_limits[:MOST_ROWS])
    return (
        f"in {len(waits)} of {len(pairs)} steps a program ran into its time limit of up to {limit_s:g} s, and the step "
        f"waited {median(waits):.3g} s; row of the data (test): {rows or '?'}"
    )


def program_limit_s(history: History) -> float:
    """The longest that an answer ran into; a row may have less than the key."""
    return next((limit_s for limit_s, _, _ in history.samples.time_limits), history.number(PROGRAM_LIMIT, 10.0))


def shorter_programs(history: History) -> list[Advice]:
    limit_s = program_limit_s(history)
    lower = Change(PROGRAM_LIMIT, max(1, round(limit_s / 5)), "programs that do not end are ended sooner", "lower")
    rows = "give rows without one a reference solution (extra_info.answer), or time_limit_s in their ground truth"
    return [lower, rows] if limit_s > 1 else []


def waits_for_a_limit(history: History) -> bool:
    return bool(waits_for_the_limit(history) or programs_reach_the_limit(history))


def more_workers(history: History) -> list[Advice]:
    if waits_for_a_limit(history):
        return []
    calls = [kind.calls for kind in KINDS.values() if kind.calls and history.config.get(kind.switch)]
    workers = int(history.number("reward_model.num_workers", 8))
    return [
        *(Change(keys.concurrency, 64, "more requests at a time", "higher") for keys in calls),
        Change("reward_model.num_workers", 4 * workers, "more reward processes"),
    ]


def rarer_validation(history: History) -> list[Advice]:
    tests, samples = int(history.number("trainer.test_freq", 5)), history.number("data.val_max_samples", -1)  # -1: all
    rarer = Change("trainer.test_freq", 5 * max(tests, 1), "validate less often")
    return [rarer, *([Change("data.val_max_samples", 512, "fewer prompts")] if samples < 0 or samples > 512 else [])]


def rarer_checkpoints(history: History) -> list[Advice]:
    return [Change("trainer.save_freq", 10 * max(int(history.number("trainer.save_freq", 1)), 1), "save less often")]


def faster_generation(history: History) -> list[Advice]:
    longest, engine = "data.max_response_length", ROLLOUTS.get(str(history.config.get(f"{ROLLOUT}.name")))
    faster = Change(f"{ROLLOUT}.name", "native", "faster than hf")
    return [
        *([faster] if engine is not None and engine.speed == SLOW_ENGINE else []),
        Change(f"{ROLLOUT}.max_num_seqs", 1024, "more sequences at a time", "higher"),
        Change(longest, max(1, int(history.number(longest, 512) / 2)), "shorter answers"),
    ]


HANGS = Cause(
    "a few answers take as long as the time limit of a reward, and the step waits for them",
    waits_for_the_limit,
    lambda history: [
        Change(REWARD_LIMIT, rounded(history.number(REWARD_LIMIT, 10.0) / 5), "wait less for answers that hang")
    ],
)
SLOW = Fault(
    "slow_stage",
    Severity.NOTE,
    "One stage takes most of the time",
    (
        HANGS,
        Cause(
            "programs of a few answers run into their time limit, and the step waits for them",
            programs_reach_the_limit,
            shorter_programs,
        ),
        Cause(
            "the reward function or the judge is slow, or too few of them run at a time",
            lambda history: is_stage("reward")(history) and not waits_for_a_limit(history),
            more_workers,
        ),
        Cause(
            "weights are sent to the engines through a slow path",
            is_stage("update_weights"),
            lambda history: [Change(f"{ROLLOUT}.name", "native", "reads the actor's own weights")],
        ),
        Cause("checkpoints are saved too often, or to a slow disk", is_stage("save_checkpoint"), rarer_checkpoints),
        Cause("validation is too frequent or has too many prompts", is_stage("testing"), rarer_validation),
        Cause(
            "a few answers are much longer than the others, or too few run at a time",
            is_stage("gen"),
            faster_generation,
        ),
        Cause("the rollout engine is slow: hf, or without CUDA graphs", is_stage("gen")),
        Cause(
            "remax generates one greedy answer more for each prompt",
            is_stage("gen_greedy"),
            lambda history: [Change("algorithm.adv_estimator", "rloo", "needs no greedy answers")],
        ),
    ),
    ("timing_s/step",),
)


def longer_answers(history: History) -> Support:
    trend = history.series("response_length/mean").trend
    return trend is None or trend.rises


MEMORY = Fault(
    "memory_growth",
    Severity.WARNING,
    "Memory grows from step to step",
    (
        Cause(
            "your reward function or callback keeps what it was given",
            advice=lambda history: ["free what your reward function or callback keeps between its calls"],
        ),
        Cause("answers become longer", longer_answers, smaller_passes),
        Cause("a leak in rloom: please report it with metrics.jsonl"),
    ),
    ("perf/max_memory_allocated_gb",),
)


def slow_stage(history: History) -> Finding | None:
    found = slowest_stage(history)
    if found is None or found[1] <= LARGEST_SHARE[found[0]]:
        return None
    stage, share, mean, whole = found
    steps = history.series("timing_s/step")
    evidence = [
        f"timing_s/{stage}: {share:.0%} of the time, {mean:.3g} of {whole:.3g} s a step "
        f"(up to {LARGEST_SHARE[stage]:.0%} is usual)"
    ]
    certain = len(steps) >= FEWEST_CERTAIN and share > (1 + LARGEST_SHARE[stage]) / 2
    return SLOW.found(history, (steps.steps[1], steps.steps[-1]), evidence, certain=certain)


def memory_growth(history: History) -> Finding | None:
    """A peak never falls. So ask for growth that goes on: in most of the steps after the first third."""
    memory = history.series("perf/max_memory_allocated_gb")
    if len(memory) < MEMORY_STEPS or min(memory.values) <= 0:
        return None
    later = memory.values[memory.third :]
    rises = [after > before for before, after in pairwise(later)]
    half = len(rises) // 2
    goes_on = all(sum(part) > RISING_SHARE * len(part) for part in (rises[:half], rises[half:]))
    growth = later[-1] / later[0] - 1
    if not goes_on or growth <= MEMORY_GROWTH:
        return None
    start, end = memory.steps[memory.third], memory.steps[-1]
    a_step = 1024 * (later[-1] - later[0]) / max(end - start, 1)
    evidence = [
        f"perf/max_memory_allocated_gb: {later[0]:.3g} in step {start}, {later[-1]:.3g} in step {end}, "
        f"{a_step:.3g} MB more in each step"
    ]
    return MEMORY.found(history, (start, end), evidence, certain=growth > 2 * MEMORY_GROWTH)
