"""Rules over the keys of engines: Megatron, inference servers; and whether a model can be divided as the keys of the
Megatron engine require, by its config.json alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rloom.config.base import ACTOR, CRITIC, REF
from rloom.config.derived import divisors, nearest_divisors
from rloom.config.reward_sections import VARIABLE, is_plain_address
from rloom.config.schema import Actor, Config, Critic
from rloom.config.sections import SIZES, Megatron, ServerSection, transformer_entries
from rloom.engines.kinds import MEGATRON_FAMILIES, StrategyKind
from rloom.rollout.kinds import ROLLOUTS

SHOWN_SPLITS = 6


@dataclass(frozen=True)
class MegatronRole:
    """A role whose model is divided by the sizes of its section `megatron`, and its workers."""

    path: str  # its section
    strategy: str
    section: Megatron
    workers: int

    @property
    def key(self) -> str:
        return f"{self.path}.megatron"


def megatron_roles(config: Config, *, critic: bool) -> Iterator[MegatronRole]:
    """`critic`: whether the algorithm trains one."""
    actor = config.actor_rollout_ref.actor
    if actor.kind.model_parallel:
        yield MegatronRole(ACTOR, actor.strategy, actor.megatron, config.actor_workers)
    if critic and config.critic.kind.model_parallel:
        yield MegatronRole(CRITIC, config.critic.strategy, config.critic.megatron, config.workers_of("critic"))


def divided_strategies(config: Config, *, critic: bool) -> dict[str, StrategyKind]:
    """The strategies of the roles that several workers train: one worker holds a whole model without their packages."""
    roles: list[tuple[Actor | Critic, int]] = [(config.actor_rollout_ref.actor, config.actor_workers)]
    roles += [(config.critic, config.workers_of("critic"))] if critic else []
    return {role.strategy: role.kind for role, workers in roles if workers > 1}


def megatron_faults(config: Config, *, critic: bool) -> Iterator[str]:
    for role in megatron_roles(config, critic=critic):
        yield from worker_faults(role)
        yield from expert_faults(role)
        yield from override_faults(role)
    if config.actor_rollout_ref.actor.kind.model_parallel:
        yield from reference_faults(config)
    yield from actor_faults(config)
    yield from ulysses_faults(ACTOR, config.actor_rollout_ref.actor)
    if critic:
        yield from ulysses_faults(CRITIC, config.critic)
        if config.trainer.pools.critic is None and config.actor_workers > 1:
            yield from shared_worker_faults(config.actor_rollout_ref.actor, config.critic)


def worker_faults(role: MegatronRole) -> Iterator[str]:
    section, workers = role.section, role.workers
    if workers % section.model_ranks:
        sizes = f"{section.tensor_model_parallel_size} × {section.pipeline_model_parallel_size}"
        splits = [(tensor, size // tensor) for size in divisors(workers) for tensor in divisors(size)]
        yield (
            f"{role.key}: tensor_model_parallel_size × pipeline_model_parallel_size = {sizes} = {section.model_ranks} "
            f"does not divide {count(workers)}; TP × PP that do: {shown(splits, section)}; trainer.nnodes × "
            "trainer.n_gpus_per_node is the number of workers"
        )


def expert_faults(role: MegatronRole) -> Iterator[str]:
    section = role.section
    tensor, given = section.tensor_model_parallel_size, section.expert_tensor_parallel_size
    if given not in (None, 1, tensor):
        yield (
            f"{role.key}.expert_tensor_parallel_size={given}: the ranks that divide an expert are one, or those that "
            f"divide the other layers; use 1, or null for tensor_model_parallel_size={tensor}"
        )
    stage, experts = role.workers // section.pipeline_model_parallel_size, section.expert_model_parallel_size
    if role.workers % section.model_ranks == 0 and stage % (experts * section.expert_tensor_ranks):
        among = stage // section.expert_tensor_ranks
        yield (
            f"{role.key}.expert_model_parallel_size={experts} does not divide {among}: "
            f"{count(role.workers)} / pipeline_model_parallel_size {section.pipeline_model_parallel_size} / "
            f"expert_tensor_parallel_size {section.expert_tensor_ranks}; use {nearest_divisors(among, experts)}"
        )


def override_faults(role: MegatronRole) -> Iterator[str]:
    instead = {name: row["instead"] for row in transformer_entries()["other_keys"] for name in row["names"]}
    for name, value in role.section.override_transformer_config.items():
        if name in instead and value:  # null, False and 0 change nothing
            yield f"{role.key}.override_transformer_config.{name}={value}: {instead[name]}"


def reference_faults(config: Config) -> Iterator[str]:
    actor, reference = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    for name in SIZES:
        own, actors = getattr(reference, name), getattr(actor, name)
        if own not in (None, actors):
            value = "null" if actors is None else actors
            yield (
                f"{REF}.megatron.{name}={own}: the reference is divided as the actor is, {ACTOR}.megatron.{name}="
                f"{value}; use that, or remove the key"
            )
    pool = config.trainer.pools.ref
    if pool and pool % actor.model_ranks:
        yield (
            f"trainer.pools.ref={pool}: a copy of the reference is on {actor.model_ranks} workers "
            f"({ACTOR}.megatron: tensor × pipeline parallel size); use a multiple of that"
        )


def actor_faults(config: Config) -> Iterator[str]:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    key = f"{ACTOR}.strategy={actor.strategy}"
    if model.has_lora and not actor.kind.trains_adapters:
        yield f"{key}: {actor.kind.title} trains all weights, not LoRA adapters; use strategy=fsdp, or lora_rank=0"
    if actor.use_kl_loss and actor.kl_loss_type == "full" and not actor.kind.whole_logits:
        yield (
            f"{key}: a KL over the whole vocabulary needs whole logits on each worker; use strategy=fsdp, or another "
            f"{ACTOR}.kl_loss_type"
        )


def ulysses_faults(name: str, role: Actor | Critic) -> Iterator[str]:
    size = role.ulysses_sequence_parallel_size
    if size > 1 and not role.kind.sequence_parallel:
        yield (
            f"{name}.ulysses_sequence_parallel_size={size}: sequences are divided by FSDP's engine only; use 1 and "
            f"{name}.megatron.sequence_parallel=True, or {name}.strategy=fsdp"
        )


def shared_worker_faults(actor: Actor, critic: Critic) -> Iterator[str]:
    """megatron-core has one division of the ranks in a process, for all models."""
    own = "or give the critic workers of its own (trainer.pools.critic)"
    if actor.kind.model_parallel != critic.kind.model_parallel:
        yield (
            f"{ACTOR}.strategy={actor.strategy} and critic.strategy={critic.strategy}: actor and critic share their "
            f"workers, and these have one training engine; use the same strategy, {own}"
        )
    elif critic.kind.model_parallel:
        for name in SIZES:
            value, other = getattr(critic.megatron, name), getattr(actor.megatron, name)
            if value != other:
                yield (
                    f"critic.megatron.{name}={value}: actor and critic share their workers, and "
                    f"{ACTOR}.megatron.{name}={other}; use the same value, {own}"
                )


def replay_faults(config: Config) -> Iterator[str]:
    rollout, mode = config.actor_rollout_ref.rollout, f"{ACTOR}.router_replay.mode"
    switch = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    given = config.actor_rollout_ref.actor.router_replay.mode
    if rollout.enable_rollout_routing_replay and given == "disabled" and config.is_given(mode):
        yield f"{mode}=disabled and {switch} contradict each other; keep one"
    elif config.replays_routing and not rollout.kind.records_routing:
        yield (
            f"{f'{mode}=R3' if given == 'R3' else switch}: actor_rollout_ref.rollout.name={rollout.name} does not "
            "return the experts that its router chose; use name=native, or leave router replay out"
        )


def megatron_notices(config: Config, *, critic: bool) -> Iterator[str]:
    alone = [role for role in megatron_roles(config, critic=critic) if role.workers == 1]
    if alone:
        keys = ", ".join(f"{role.path}.strategy={role.strategy}" for role in alone)
        yield f"{keys}: one worker holds the whole model, so megatron-core is not used"
    roles = {ACTOR: config.actor_rollout_ref.actor.megatron, CRITIC: config.critic.megatron}
    for path, section in roles.items():
        given = section.override_transformer_config
        ignored = [name for name in transformer_entries()["one_implementation"] if name in given]
        if ignored:
            names = ", ".join(f"{name}={given[name]}" for name in ignored)
            yield (
                f"{path}.megatron.override_transformer_config ({names}): no effect in rloom, because its Megatron "
                "engine has one implementation of these"
            )


def shown(splits: list[tuple[int, int]], section: Megatron) -> str:
    """A few splits, TP × PP: those nearest to the given number of ranks first, then those with the nearest TP."""
    wanted, tensor = section.model_ranks, section.tensor_model_parallel_size
    near = sorted(splits, key=lambda split: (abs(split[0] * split[1] - wanted), abs(split[0] - tensor), -split[0]))
    listed = ", ".join(f"{tp} × {pp}" for tp, pp in near[:SHOWN_SPLITS])
    return f"{listed}, ..." if len(near) > SHOWN_SPLITS else listed


def count(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


EXPERTS = ("num_experts", "num_local_experts")  # keys of config.json


@dataclass(frozen=True)
class ModelSizes:
    """Entries of config.json, with their names there."""

    layers: Mapping[str, int]  # what pipeline stages divide
    tensors: Mapping[str, int]  # what tensor parallel ranks divide
    key_value_heads: int  # tensor parallel ranks divide them, or they divide the ranks
    experts: Mapping[str, int]  # what expert parallel ranks divide; empty: no experts
    expert_tensors: Mapping[str, int]  # what the tensor parallel ranks of an expert divide


def model_sizes(fields: Mapping[str, Any]) -> ModelSizes:
    experts = {name: int(fields[name]) for name in EXPERTS if fields.get(name)}
    heads = fields["num_attention_heads"]
    inner = "moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"
    mlp = {inner: int(fields[inner])}
    return ModelSizes(
        layers={"num_hidden_layers": fields["num_hidden_layers"]},
        tensors={"num_attention_heads": heads, **({} if experts else mlp)},
        key_value_heads=fields.get("num_key_value_heads") or heads,
        experts=experts,
        expert_tensors=mlp if experts else {},
    )


def split_faults(role: MegatronRole, fields: Mapping[str, Any], source: str) -> Iterator[str]:
    """`fields`: config.json. `source`: the key and the value that name the model."""
    family = fields.get("model_type")
    if family not in MEGATRON_FAMILIES:
        yield (
            f"{role.path}.strategy={role.strategy}: {source} is of the family {family!r}, and the Megatron engine has "
            f"{', '.join(MEGATRON_FAMILIES.values())}; use {role.path}.strategy=fsdp"
        )
        return
    try:
        sizes = model_sizes(fields)
    except KeyError as error:
        yield f"{source}: its config.json has no {error}, by which the model is divided"
        return
    section = role.section
    fit = f"of {source}; TP × PP that work with it on {count(role.workers)}: {shown(fitting(sizes, role), section)}"
    yield from remainders(role, "tensor_model_parallel_size", section.tensor_model_parallel_size, sizes.tensors, fit)
    tensor = section.tensor_model_parallel_size
    if not shares_heads(sizes, tensor):
        yield (
            f"{role.key}.tensor_model_parallel_size={tensor} neither divides num_key_value_heads="
            f"{sizes.key_value_heads} nor is a multiple of it, {fit}"
        )
    yield from remainders(role, "pipeline_model_parallel_size", section.pipeline_model_parallel_size, sizes.layers, fit)
    experts = section.expert_model_parallel_size
    if experts > 1 and not sizes.experts:
        yield f"{role.key}.expert_model_parallel_size={experts}: {source} has no experts; use 1"
    ranks = role.workers // section.pipeline_model_parallel_size // section.expert_tensor_ranks
    possible = [size for size in divisors(ranks) if all(number % size == 0 for number in sizes.experts.values())]
    way_out = f"of {source}; use {' or '.join(map(str, possible))}"
    yield from remainders(role, "expert_model_parallel_size", experts, sizes.experts, way_out)
    way_out = f"of {source}; use expert_tensor_parallel_size=1"
    yield from remainders(
        role, "expert_tensor_parallel_size", section.expert_tensor_ranks, sizes.expert_tensors, way_out
    )


def shares_heads(sizes: ModelSizes, tensor: int) -> bool:
    return sizes.key_value_heads % tensor == 0 or tensor % sizes.key_value_heads == 0


def remainders(role: MegatronRole, name: str, size: int, numbers: Mapping[str, int], way_out: str) -> Iterator[str]:
    wrong = [f"{entry}={number}" for entry, number in numbers.items() if number % size]
    if wrong:
        yield f"{role.key}.{name}={size} does not divide {' and '.join(wrong)} {way_out}"


def fitting(sizes: ModelSizes, role: MegatronRole) -> list[tuple[int, int]]:
    """(TP, PP) that divide the model and the workers."""
    return [
        (tensor, size // tensor)
        for size in divisors(role.workers)
        for tensor in divisors(size)
        if all(number % tensor == 0 for number in sizes.tensors.values())
        and shares_heads(sizes, tensor)
        and all(number % (size // tensor) == 0 for number in sizes.layers.values())
    ]


def replay_fault(fields: Mapping[str, Any], source: str) -> str | None:
    """Router replay, with a model that has no router."""
    if fields.get("model_type") in MEGATRON_FAMILIES and not any(fields.get(name) for name in EXPERTS):
        return f"actor_rollout_ref.actor.router_replay.mode=R3: {source} has no experts; remove the key"
    return None


SERVER = "actor_rollout_ref.rollout.server"
SERVER_EXAMPLE = "http://127.0.0.1:30000"


def server_faults(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.uses_servers:
        return
    yield from server_address_faults(rollout.server)
    yield from server_placement_faults(config)
    if config.actor_rollout_ref.model.has_lora:
        yield (
            f"actor_rollout_ref.model.lora_rank: rloom sends servers whole weights, not adapters; use "
            f"actor_rollout_ref.rollout.name=native, or vllm without {SERVER}"
        )


def server_notices(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.on_first_gpu and rollout.starts_servers and config.workers > 1:
        servers = [name for name, kind in ROLLOUTS.items() if kind.servers and not kind.servers.takes_handles]
        yield (
            f"actor_rollout_ref.rollout.name={rollout.name}: one server generates all answers, on the GPU of the first "
            f"of {config.workers} workers; {' and '.join(servers)} use all GPUs"
        )


def vllm_faults(config: Config) -> Iterator[str]:
    key, chosen = "actor_rollout_ref.rollout", config.actor_rollout_ref.rollout
    validation, sequences = chosen.val_kwargs, chosen.sequences("cuda")
    if chosen.max_num_batched_tokens < sequences:
        yield (
            f"{key}.max_num_batched_tokens={chosen.max_num_batched_tokens}: a step of vLLM has a token of each of the "
            f"{sequences} sequences of {key}.max_num_seqs; use {sequences} or more, or a lower max_num_seqs"
        )
    if validation.do_sample and validation.temperature > 2 * chosen.temperature:
        yield (
            f"{key}.val_kwargs.temperature={validation.temperature}: vLLM accepts up to twice {key}.temperature="
            f"{chosen.temperature}; use {2 * chosen.temperature} or less"
        )


def trtllm_faults(config: Config) -> Iterator[str]:
    rollout, section = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.server
    handles = "TensorRT-LLM's server takes weights as handles of memory on its own GPU, which is the first worker's"
    size = rollout.tensor_model_parallel_size
    if size > 1:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: {handles}; use 1, or "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if section.count is not None and section.count > 1:
        yield f"{SERVER}.count={section.count}: {handles}; use 1, or actor_rollout_ref.rollout.name=vllm"
    if rollout.temperature != 1.0:
        yield (
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: TensorRT-LLM's log-probs are those before "
            "the temperature, and equal the trainer's at 1.0 only; use 1.0, or another engine"
        )
    if section.weight_transfer == "collective":
        yield f"{SERVER}.weight_transfer=collective: TensorRT-LLM's server takes handles of memory only; use shared"


def server_address_faults(section: ServerSection) -> Iterator[str]:
    for url in section.addresses:
        if not is_plain_address(url):
            yield (
                f"{SERVER}.urls has an entry that is not a URL of the form {SERVER_EXAMPLE}, without user name and "
                f"query; correct it; {SERVER}.key_env names a variable with the servers' key"
            )
    if section.key_env is not None and not VARIABLE.fullmatch(section.key_env):
        yield f"{SERVER}.key_env takes the name of an environment variable, such as SERVER_KEY, and not the key itself"
    if section.addresses and (section.count is not None or section.command is not None):
        yield f"{SERVER}.urls: these servers are running; remove {SERVER}.count and {SERVER}.command, or the URLs"


def server_placement_faults(config: Config) -> Iterator[str]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if trainer.pools.rollout:
        yield (
            f"trainer.pools.rollout={trainer.pools.rollout}: servers are processes of their own, and the actor's first "
            f"worker sends them the requests; remove the key ({SERVER}.count servers take the first GPUs)"
        )
    if rollout.server.addresses:
        return
    if trainer.nnodes > 1:
        yield (
            f"trainer.nnodes={trainer.nnodes}: rloom starts servers on one machine; start them on all and name them in "
            f"{SERVER}.urls"
        )
    size, workers = rollout.tensor_model_parallel_size, config.workers
    if rollout.server.count is None and workers > 1 and workers % size:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide {workers} workers; use a "
            f"number that does, or set {SERVER}.count"
        )


def separate_faults(config: Config) -> Iterator[str]:
    """Generation while a step trains."""
    section, rollout = config.trainer.v1.separate_async, config.actor_rollout_ref.rollout
    if not config.trainer.v1.is_separate:
        return
    key = "trainer.v1.trainer_mode=separate_async"
    if rollout.uses_servers:
        yield (
            f"{key}: the actor's first worker sends the requests to the servers, and trains; use "
            "actor_rollout_ref.rollout.name=native or vllm with trainer.pools.rollout=N, or colocate_async"
        )
    elif not isinstance(config.trainer.pools.rollout, int):
        yield (
            f"{key} needs workers that generate while the others train: set trainer.pools.rollout=N, a number below "
            f"{max(config.workers, 2)}, the workers of the run (trainer.nnodes × trainer.n_gpus_per_node = "
            f"{config.workers}); with fewer than 2 use colocate_async"
        )
    prompts, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    updates = section.parameter_sync_step
    if updates is not None and updates * mini != prompts:
        divided = f", or {ACTOR}.ppo_mini_batch_size={prompts // updates}" if prompts % updates == 0 else ""
        yield (
            f"trainer.v1.separate_async.parameter_sync_step={updates} × {ACTOR}.ppo_mini_batch_size={mini} is "
            f"{updates * mini}, not data.train_batch_size={prompts}, and weights are sent after each step; use "
            f"data.train_batch_size={updates * mini}{divided}, or remove parameter_sync_step"
        )


def kept_cache_faults(config: Config) -> Iterator[str]:
    if not config.trainer.v1.keeps_cache:
        return
    key, rollout = "trainer.v1.kv_on_update=keep", config.actor_rollout_ref.rollout
    if rollout.uses_servers or not rollout.kind.keeps_cache:
        yield (
            f"{key}: {rollout.kind.title} cannot keep the cache of an answer that it has not finished; use "
            "actor_rollout_ref.rollout.name=native, or refill"
        )
    if config.trainer.v1.is_colocated and rollout.free_cache_engine:
        yield (
            f"{key}: actor_rollout_ref.rollout.free_cache_engine=True releases the cache before each update of "
            "trainer.v1.trainer_mode=colocate_async; set it to False, or use separate_async or refill"
        )
    memory = config.actor_rollout_ref.actor.engine_memory
    if config.trainer.v1.is_colocated and config.workers == 1 and memory.param_offload:
        yield (
            f"{key}: param_offload=True of the actor moves the weights in each step, and the engine begins anew; leave "
            "one of the two out"
        )


def repeated_run_faults(config: Config) -> Iterator[str]:
    """What has no schedule, so that nothing can be repeated."""
    replay, rollout = config.trainer.replay, config.actor_rollout_ref.rollout
    if replay is None:
        return
    if not config.generates_ahead:
        yield (
            f"trainer.replay={replay} repeats runs with trainer.v1.trainer_mode=colocate_async or separate_async; "
            "what a synchronous run computes does not depend on time, so its command repeats it: leave the key out"
        )
    elif not rollout.repeats:
        yield (
            f"trainer.replay={replay}: {rollout.kind.title} draws other tokens "
            "when an answer is interrupted, so no run of it is repeated; use actor_rollout_ref.rollout.name=native"
        )
    elif config.algorithm.filter_groups.enable:
        yield (
            f"trainer.replay={replay}: with algorithm.filter_groups.enable=True the time that scores take decides "
            "which prompts are answered, and no schedule is written; leave one of the two out"
        )
    elif config.trainer.v1.keeps_cache:
        yield (
            f"trainer.replay={replay}: with trainer.v1.kv_on_update=keep an answer depends on caches that a resumed "
            "run has lost, and no schedule is written; use refill"
        )
