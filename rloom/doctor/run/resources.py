"""Time and memory: a stage that takes most of a step, memory that grows from step to step."""

from itertools import pairwise

from rloom.doctor.run.finding import Change, Fault, Finding, Severity, Text
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, History
from rloom.rewards.kinds import KINDS
from rloom.rollout.kinds import ROLLOUTS
from rloom.rollout.kinds import SLOW as SLOW_ENGINE

# Largest healthy share of a run's time by stage. Generation is about half of a step, updates are the rest
# (docs/speed.md); rewards are computed during generation, so that this stage only waits for the last ones.
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
    Text("One stage takes most of the time", "某一阶段占用了大部分时间"),
    (),  # by the stage
    ("timing_s/step",),
)
MEMORY = Fault(
    "memory_growth",
    Severity.WARNING,
    Text("Memory grows from step to step", "内存逐步增长"),
    (
        Text("your reward function or callback keeps what it was given", "自定义奖励函数或回调保留了传入的数据"),
        Text("answers become longer", "回答越来越长"),
        Text("a leak in rloom: please report it with metrics.jsonl", "rloom 内存泄漏：请附上 metrics.jsonl 反馈"),
    ),
    ("perf/max_memory_allocated_gb",),
)

STAGE_CAUSES = {
    "reward": (
        Text(
            "the reward function or the judge is slow, or too few of them run at a time",
            "奖励函数或评分模型慢，或并行数不足",
        ),
    ),
    "update_weights": (Text("weights are sent to the engines through a slow path", "权重同步到推理引擎的通道过慢"),),
    "save_checkpoint": (Text("checkpoints are saved too often, or to a slow disk", "保存检查点过于频繁，或磁盘过慢"),),
    "testing": (Text("validation is too frequent or has too many prompts", "验证过于频繁或验证集过大"),),
    "gen": (
        Text(
            "a few answers are much longer than the others, or too few run at a time",
            "少数回答远长于其他回答，或并发序列过少",
        ),
        Text("the rollout engine is slow: hf, or without CUDA graphs", "推理引擎慢：hf，或未启用 CUDA graph"),
    ),
    "gen_greedy": (
        Text("remax generates one greedy answer more for each prompt", "remax 需要为每个 prompt 多生成一个贪心回答"),
    ),
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
        Text(
            f"timing_s/{stage}: {shares[stage]:.0%} of the time, {mean:.3g} of {whole:.3g} s a step "
            f"(up to {LARGEST_SHARE[stage]:.0%} is usual)",
            f"timing_s/{stage}：占时间的 {shares[stage]:.0%}，每步 {mean:.3g} / {whole:.3g} 秒"
            f"（通常不超过 {LARGEST_SHARE[stage]:.0%}）",
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
        why = Text("more requests at a time", "增加并发请求")
        found = [Change("reward_model.num_workers", 4 * workers, Text("more reward processes", "增加奖励进程数"))]
        calls = [kind.calls for kind in KINDS.values() if kind.calls and history.config.get(kind.switch)]
        return [*(Change(keys.concurrency, 64, why, "higher") for keys in calls), *found]
    if stage == "testing":
        rarer = Change("trainer.test_freq", 5 * max(tests, 1), Text("validate less often", "降低验证频率"))
        samples = history.number("data.val_max_samples", -1)  # -1: all
        fewer = Change("data.val_max_samples", 512, Text("fewer prompts", "减少验证样本"))
        return [rarer, *([fewer] if samples < 0 or samples > 512 else [])]
    if stage == "save_checkpoint":
        saves = int(history.number("trainer.save_freq", 1))
        return [Change("trainer.save_freq", 10 * max(saves, 1), Text("save less often", "降低保存频率"))]
    if stage == "gen":
        longest = "data.max_response_length"
        faster = Change(f"{ROLLOUT}.name", "native", Text("faster than hf", "比 hf 快"))
        return [
            *([faster] if is_slow(str(history.config.get(f"{ROLLOUT}.name"))) else []),
            Change(f"{ROLLOUT}.max_num_seqs", 1024, Text("more sequences at a time", "增加并发序列"), "higher"),
            Change(longest, max(1, int(history.number(longest, 512) / 2)), Text("shorter answers", "缩短回答")),
        ]
    if stage == "gen_greedy":
        return [Change("algorithm.adv_estimator", "rloo", Text("needs no greedy answers", "不需要贪心回答"))]
    return [Change(f"{ROLLOUT}.name", "native", Text("reads the actor's own weights", "直接使用 actor 的权重"))]


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
        Text(
            f"perf/max_memory_allocated_gb: {later[0]:.3g} in step {start}, {later[-1]:.3g} in step {end}, "
            f"{a_step:.3g} MB more in each step",
            f"perf/max_memory_allocated_gb：第 {start} 步 {later[0]:.3g}，第 {end} 步 {later[-1]:.3g}，"
            f"每步增加 {a_step:.3g} MB",
        )
    ]
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu"
    changes = [
        Change(tokens, int(history.number(tokens, 16384) / 2), Text("smaller passes", "减小每次前向的 token 数"))
    ]
    return MEMORY.found((start, end), evidence, changes, certain=growth > 2 * MEMORY_GROWTH)
