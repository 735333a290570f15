"""Time and memory: a stage that takes most of a step, memory that grows from step to step."""

from itertools import pairwise

from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, History
from rloom.rewards.kinds import KINDS
from rloom.rollout.kinds import ROLLOUTS
from rloom.rollout.kinds import SLOW as SLOW_ENGINE

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

SLOW = Fault(
    "slow_stage",
    Severity.NOTE,
    "One stage takes most of the time",
    (),  # by the stage
    ("timing_s/step",),
)
MEMORY = Fault(
    "memory_growth",
    Severity.WARNING,
    "Memory grows from step to step",
    (
        "your reward function or callback keeps what it was given",
        "answers become longer",
        "a leak in rloom: please report it with metrics.jsonl",
    ),
    ("perf/max_memory_allocated_gb",),
)

STAGE_CAUSES = {
    "reward": ("the reward function or the judge is slow, or too few of them run at a time",),
    "update_weights": ("weights are sent to the engines through a slow path",),
    "save_checkpoint": ("checkpoints are saved too often, or to a slow disk",),
    "testing": ("validation is too frequent or has too many prompts",),
    "gen": (
        "a few answers are much longer than the others, or too few run at a time",
        "the rollout engine is slow: hf, or without CUDA graphs",
    ),
    "gen_greedy": ("remax generates one greedy answer more for each prompt",),
}


def slow_stage(history: History) -> Finding | None:
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
    if shares[stage] <= LARGEST_SHARE[stage]:
        return None
    mean, whole = seconds[stage] / count, total / count
    evidence = [
        (
            f"timing_s/{stage}: {shares[stage]:.0%} of the time, {mean:.3g} of {whole:.3g} s a step "
            f"(up to {LARGEST_SHARE[stage]:.0%} is usual)"
        )
    ]
    return SLOW.found(
        (steps.steps[1], steps.steps[-1]),
        evidence,
        stage_changes(history, stage),
        certain=len(steps) >= FEWEST_CERTAIN and shares[stage] > (1 + LARGEST_SHARE[stage]) / 2,
        causes=STAGE_CAUSES[stage],
    )


def stage_changes(history: History, stage: str) -> list[Change]:
    workers = int(history.number("reward_model.num_workers", 8))
    tests = int(history.number("trainer.test_freq", 5))
    if stage == "reward":
        why = "more requests at a time"
        found = [Change("reward_model.num_workers", 4 * workers, "more reward processes")]
        calls = [kind.calls for kind in KINDS.values() if kind.calls and history.config.get(kind.switch)]
        return [*(Change(keys.concurrency, 64, why, "higher") for keys in calls), *found]
    if stage == "testing":
        rarer = Change("trainer.test_freq", 5 * max(tests, 1), "validate less often")
        samples = history.number("data.val_max_samples", -1)  # -1: all
        fewer = Change("data.val_max_samples", 512, "fewer prompts")
        return [rarer, *([fewer] if samples < 0 or samples > 512 else [])]
    if stage == "save_checkpoint":
        saves = int(history.number("trainer.save_freq", 1))
        return [Change("trainer.save_freq", 10 * max(saves, 1), "save less often")]
    if stage == "gen":
        longest = "data.max_response_length"
        faster = Change(f"{ROLLOUT}.name", "native", "faster than hf")
        return [
            *([faster] if is_slow(str(history.config.get(f"{ROLLOUT}.name"))) else []),
            Change(f"{ROLLOUT}.max_num_seqs", 1024, "more sequences at a time", "higher"),
            Change(longest, max(1, int(history.number(longest, 512) / 2)), "shorter answers"),
        ]
    if stage == "gen_greedy":
        return [Change("algorithm.adv_estimator", "rloo", "needs no greedy answers")]
    return [Change(f"{ROLLOUT}.name", "native", "reads the actor's own weights")]


def is_slow(engine: str) -> bool:
    return engine in ROLLOUTS and ROLLOUTS[engine].speed == SLOW_ENGINE


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
        (
            f"perf/max_memory_allocated_gb: {later[0]:.3g} in step {start}, {later[-1]:.3g} in step {end}, "
            f"{a_step:.3g} MB more in each step"
        )
    ]
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu"
    changes = [Change(tokens, int(history.number(tokens, 16384) / 2), "smaller passes")]
    return MEMORY.found((start, end), evidence, changes, certain=growth > 2 * MEMORY_GROWTH)
