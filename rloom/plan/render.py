"""A plan as text for a terminal."""

from collections.abc import Iterator, Sequence

from rloom.config.derived import turns_text
from rloom.config.schema import Actor, Critic, Fsdp
from rloom.language import translate
from rloom.plan.architecture import FLOAT32, ModelPlan, divided_by_megatron, shards_of
from rloom.plan.batches import Batches, Updates, scoring_passes
from rloom.plan.disk import DiskPlan, roles_text, size_text
from rloom.plan.make import SHOWN, Costs, Plan, PlannedGpus
from rloom.plan.megatron import description
from rloom.plan.memory import GIB, GpuMemory, RewardPlan
from rloom.plan.modes import LEAST_GAIN, ModeTime
from rloom.plan.timing import THROUGH_DRIVER, Stage, StepTime
from rloom.runtime.placement import named_workers
from rloom.terminal import padded

ASSUMED = (
    "Every answer as long as it may be; arithmetic at rates measured on one H200, links by their data sheets",
    "(NVLink 450 GB/s, InfiniBand 50 GB/s a GPU), none of it overlapped. Not measured: docs/plan.md.",
)
LENGTHS = (
    "Answers of log-uniform lengths, 1/64 to all of data.max_response_length; scores take no time. A model, no promise."
)
ENVIRONMENT_BYTES = 4 << 20  # of a forked process with an environment of rloom, measured without shared memory
LABEL = 28  # columns of a line's label
POOL_NAMES = {"ref": "reference", "critic": "critic", "rollout": "rollout engines", "reward": "reward model"}


def render(plan: Plan) -> str:
    config = plan.config
    lines = [
        translate(
            f"Plan of {config.algorithm.adv_estimator} on {config.actor_rollout_ref.model.path}. Nothing was started."
        ),
        *section("Batches, a step", batch_lines(plan)),
        *section("Placement", placement_lines(plan)),
    ]
    if plan.costs is not None:
        lines += section("Memory a GPU, GiB", memory_lines(plan, plan.costs))
        if plan.costs.time is not None:
            lines += section("Time a step, estimated", time_lines(plan.costs.time))
            lines += section("Trainer modes, s a step, estimated", mode_lines(plan.costs.modes))
    if plan.disk is not None:
        lines += section("Disk", disk_lines(plan.disk, config.trainer.save_freq))
    return "\n".join([*lines, *(["", *map(translate, plan.notes)] if plan.notes else [])])


def section(title: str, lines: Iterator[str]) -> list[str]:
    return ["", translate(title), *(f"  {line}" for line in lines)]


def line(label: str, text: str) -> str:
    return f"{padded(translate(label), LABEL - 1)} {translate(text)}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def batch_lines(plan: Plan) -> Iterator[str]:
    sizes = plan.batches
    yield line(
        "prompts × answers", f"{sizes.prompts:,} × {sizes.answers_per_prompt} = {count(sizes.samples, 'sample')}"
    )
    exact = "" if sizes.prompts % sizes.engines == 0 else "at most "
    each = f"{exact}{count(sizes.prompts_per_engine, 'prompt')}, {count(sizes.samples_per_engine, 'sample')}"
    gpus = sizes.engines * sizes.tensor_parallel
    yield line(
        "rollout engines", f"{gpus} / TP {sizes.tensor_parallel} = {count(sizes.engines, 'engine')}: {each} each"
    )
    yield from scoring_lines(plan)
    longest = f"{sizes.prompt_tokens:,} + {sizes.answer_tokens:,} = {sizes.longest:,} tokens"
    yield line("longest sample", f"{longest}; at most {sizes.tokens:,} a step")
    yield from turn_lines(plan)
    yield from update_lines("actor", sizes, sizes.actor)
    if sizes.critic is not None:
        yield from update_lines("critic", sizes, sizes.critic)


def turn_lines(plan: Plan) -> Iterator[str]:
    """Of answers of several turns. An episode is as long as a sample; each rewritten past is one more sample."""
    text, sizes, keys = turns_text(plan.config), plan.batches, plan.config.actor_rollout_ref.rollout.multi_turn
    if text is None:
        return
    yield line("several turns", text)
    if keys.max_assistant_turns is not None:
        requests = sizes.samples * keys.max_assistant_turns
        each = sizes.answer_tokens // keys.max_assistant_turns
        yield line("requests", f"at most {requests:,} a step; {each:,} tokens a turn and what follows, if all are used")
    processes = min(keys.max_environments, sizes.samples)
    host = size_text(processes * ENVIRONMENT_BYTES)
    yield line("environment processes", f"{processes:,} at a time; about {host} of the host, and what your code takes")


def scoring_lines(plan: Plan) -> Iterator[str]:
    samples = count(plan.batches.samples, "sample")
    for name, (ranks, passes) in scoring_passes(plan.config, plan.needs, plan.batches).items():
        each = f"{passes.samples_each:,} a pass{'' if passes.budget is None else ' at full length'}"
        yield line(name, f"{samples} / {count(ranks, 'rank')} = {passes.samples:,} a rank, {each}")


def update_lines(name: str, sizes: Batches, updates: Updates) -> Iterator[str]:
    passes = updates.passes
    mini = f"{count(updates.prompts, 'prompt')} × {sizes.answers_per_prompt} = {count(updates.samples, 'sample')}"
    yield line(f"{name} mini-batch", f"{mini}; {passes.samples:,} a rank")
    accumulation = f"{count(passes.count, 'accumulation step')} a mini-batch"
    if passes.budget is None:
        shape = f"{passes.samples} / {passes.samples_each} a pass = {accumulation}"
    else:
        shape = f"up to {passes.budget:,} tokens a pass; at full length {passes.samples_each}, {accumulation}"
    yield line(f"{name} micro-batches", shape)
    steps = f"{sizes.samples:,} / {updates.samples:,} = {updates.per_epoch} a PPO epoch"
    yield line(f"{name} optimizer steps", f"{steps} × {count(updates.epochs, 'epoch')} = {updates.count} a step")


def placement_lines(plan: Plan) -> Iterator[str]:
    config, ranks = plan.config, plan.batches.ranks
    trainer = config.trainer
    several = f"{'Ray workers' if config.uses_ray else 'processes, without Ray'}, {pools(plan)}"
    how = "one process, without Ray" if config.workers == 1 else several
    nodes, gpus = count(trainer.nnodes, "node"), count(config.gpus_per_node, "GPU")
    yield line("workers", f"{nodes} × {gpus} = {config.workers}: {how}")
    if plan.machine.gpus_from:
        yield line("", plan.machine.gpus_from)
    yield line("roles", ", ".join(role_names(plan)))
    actor, critic = config.actor_rollout_ref.actor, config.critic
    yield line("actor's weights", division(actor, actor.fsdp_config, ranks))
    if plan.needs.estimator.needs_critic:
        yield line("critic's weights", division(critic, critic.model.fsdp_config, ranks))


def pools(plan: Plan) -> str:
    config, own, placed = plan.config, plan.config.trainer.pools.own, plan.config.trainer.pools.placed
    if not own and not placed:
        return "all roles on every GPU"
    used = {"critic": plan.needs.estimator.needs_critic, "ref": config.uses_reference, "rollout": True}
    used["reward"] = config.reward_model.model_path is not None
    everywhere = [role for role, is_used in used.items() if is_used and role not in own and role not in placed]
    shared = " + ".join(["actor", *(POOL_NAMES[role] for role in everywhere)])
    some = [f"{POOL_NAMES[role]} on {named_workers(numbers, 'GPU')} of these" for role, numbers in placed.items()]
    apart = [f"{POOL_NAMES[role]} on {size}" for role, size in own.items() if role != "actor"]
    return ", ".join([f"{shared} on {plan.batches.ranks}", *some, *apart])


def role_names(plan: Plan) -> Iterator[str]:
    config = plan.config
    yield "actor"
    if plan.needs.estimator.needs_critic:
        yield f"critic ({config.algorithm.adv_estimator} needs one)"
    if config.uses_reference:
        lora = config.actor_rollout_ref.model.has_lora
        kl = "KL is measured" if config.kl_only_measured else "KL is on"
        yield f"reference ({'the actor with its adapter off' if lora else kl})"
    if config.reward_model.model_path is not None:
        yield "reward model"
    engines = plan.batches.engines
    yield f"{config.actor_rollout_ref.rollout.name} rollout engine" + (f" × {engines}" if engines > 1 else "")


def division(role: Actor | Critic, fsdp: Fsdp, ranks: int) -> str:
    if ranks == 1:
        return "whole on its GPU"
    megatron = divided_by_megatron(role, ranks)
    if megatron is not None:
        return description(megatron, ranks)
    shards = shards_of(fsdp.fsdp_size, ranks)
    copies = ranks // shards
    return f"FSDP2: one copy over {shards} ranks" + (f", {copies} copies" if copies > 1 else "")


def memory_lines(plan: Plan, costs: Costs) -> Iterator[str]:
    memory, phases = costs.memory, costs.memory.phases
    yield line("actor", model_line(costs.actor))
    if costs.critic is not None:
        yield line("critic", model_line(costs.critic))
    if costs.reward is not None:
        yield line("reward model", reward_line(costs.reward))
    several = len(costs.gpus) > 1
    for gpu in costs.gpus if several else ():
        most = f"{gib(gpu.memory.peak_bytes)} in {gpu.memory.peak}"
        yield line(named_workers(gpu.numbers, "GPU"), f"{' + '.join(held_roles(plan, gpu))}: at most {most}")
    label = f"on {named_workers(costs.fullest.numbers, 'GPU')}" if several else ""
    yield line(label, "".join(padded(translate(phase), -15) for phase in phases))
    for name in dict.fromkeys(name for parts in phases.values() for name in parts):
        sizes = [parts.get(name, 0.0) for parts in phases.values()]
        if any(sizes):
            yield line(name, "".join(f"{gib(size):>15}" for size in sizes))
    yield line("together", "".join(f"{gib(memory.total(phase)):>15}" for phase in phases))
    yield from cache_lines(costs)
    if costs.host_bytes:
        yield line("host, at the start", f"{size_text(costs.host_bytes)} of the first machine while it reads a model")
    yield line("does it fit?", verdict(costs, plan.machine))


def gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else "–"


def model_line(model: ModelPlan) -> str:
    trainable = "all learn" if model.trains_all else f"{model.trainable / 1e6:,.1f} M learn"
    dtype = "float32" if model.number_bytes == FLOAT32 else "bfloat16"
    checkpointing = "on" if model.checkpointing else "off"
    parameters = f"{model.parameters:,} parameters ({model.architecture.family}), {trainable}"
    return f"{parameters}; {dtype}; gradient checkpointing {checkpointing}"


def reward_line(model: RewardPlan) -> str:
    dtype = "float32" if model.number_bytes == FLOAT32 else "bfloat16"
    parameters = f"{model.parameters:,} parameters ({model.family}), whole on each of its GPUs; {dtype}"
    if model.own_workers is not None:
        return f"{parameters}; {count(model.own_workers, 'GPU')} of its own, {gib(model.scoring)} GiB each"
    return f"{parameters}; {'on the host while others work' if model.offloaded else 'always on the GPU'}"


def held_roles(plan: Plan, gpu: GpuMemory) -> Iterator[str]:
    yield "actor"
    if plan.needs.estimator.needs_critic:
        yield POOL_NAMES["critic"]
    if plan.config.uses_reference:
        yield POOL_NAMES["ref"]
    if gpu.generates:
        yield POOL_NAMES["rollout"]
    if gpu.scores:
        yield POOL_NAMES["reward"]


def cache_lines(costs: Costs) -> Iterator[str]:
    cache = costs.cache
    yield line("cache has room for", f"{cache.room:,} tokens of {cache.token_bytes / 1024:,.1f} KiB")
    room = min(cache.whole_sequences, cache.running)
    shorter = f"; all of them at {cache.tokens_each:,} tokens each" if room < cache.running else ""
    yield line("at a time", f"{room:,} of the {count(cache.running, 'sequence')} that may run, at full length{shorter}")


def verdict(costs: Costs, machine: PlannedGpus) -> str:
    memory = costs.memory
    size = f"{memory.gpu_bytes / GIB:.0f} GiB" + (f" ({machine.memory_from})" if machine.memory_from else "")
    if memory.fits:
        return f"yes: at most {memory.needs}, of {size}"
    ways = " or ".join(map(str, costs.ways_out[:SHOWN])) or "a smaller model, or more machines (trainer.nnodes)"
    return f"NO: {memory.needs}, of {size}; it fits with {ways}"


def time_lines(time: StepTime) -> Iterator[str]:
    yield line("", "".join(padded(translate(title), -15) for title in ("arithmetic s", "on the wire s", "GB a GPU")))
    for stage in (*time.stages, together(time.stages)):
        yield line(stage.name, f"{stage.compute_s:>15.2f}{stage.wire_s:>15.2f}{stage.wire_bytes / 1e9:>15.1f}")
    rate = f"{time.seconds:.1f} s a step; {time.tokens_per_s:,.0f} tokens/s, prompts included"
    yield translate(f"{rate}; {time.wire_share:.0%} of it on the wire")
    yield from map(translate, ASSUMED)


def mode_lines(modes: Sequence[ModeTime]) -> Iterator[str]:
    sync = modes[0].seconds
    for time in modes:
        pool = "" if time.engines is None else f", with trainer.pools.rollout={time.engines}"
        if time.seconds is None:
            yield f"{line(time.mode, 'not possible')}: {translate(time.fault)}"
        elif time is modes[0] or sync is None:
            yield line(time.mode, f"{time.seconds:.3g}{pool}")
        elif time.seconds < (1 - LEAST_GAIN) * sync:
            yield line(time.mode, f"{time.seconds:.3g}, {1 - time.seconds / sync:.0%} less: it pays{pool}")
        else:
            yield line(time.mode, f"{time.seconds:.3g}, it does not pay{pool}")
    yield translate(LENGTHS)


def disk_lines(disk: DiskPlan, save_freq: int) -> Iterator[str]:
    yield line("a checkpoint", roles_text(disk))
    if disk.copied_bytes:
        yield line("its copy", f"{size_text(disk.copied_bytes)} of each machine's host memory from the first save on")
    if disk.saves is None:
        yield line("checkpoints", f"one every {count(save_freq, 'step')}; the data decide how many steps there are")
    else:
        number = count(disk.saves, "checkpoint")
        yield line("the whole run", f"{number}, with the answers of all steps at most {size_text(disk.all_bytes)}")
    if disk.free_bytes is not None:
        short = ", which is not enough" if disk.holds_not_all else ""
        yield line("free", f"{size_text(disk.free_bytes)} at {disk.folder}{short}")


def together(stages: Sequence[Stage]) -> Stage:
    """What passes through the driver is not counted as bytes of a GPU."""
    return Stage(
        "together",
        sum(stage.compute_s for stage in stages),
        sum(stage.wire_s for stage in stages),
        sum(stage.wire_bytes for stage in stages if stage.name != THROUGH_DRIVER),
    )
