"""Rules of the Megatron engine over several keys. megatron_split.py has those over the sizes of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from rloom.config.divisors import divisors, nearest_divisors
from rloom.config.megatron_section import ONE_IMPLEMENTATION, SIZES, Megatron
from rloom.config.schema import Actor, Config, Critic

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
SHOWN_SPLITS = 6

# entries of TransformerConfig that other keys or config.json define -> what to use instead
OTHER_KEYS = {
    **{name: f"set megatron.{name}" for name in (*SIZES, "sequence_parallel")},
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "set megatron.dtype"),
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("kv_channels", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "layernorm_epsilon"),
        ),
        "the model's config.json defines it; model.override_config replaces its entries",
    ),
    **dict.fromkeys(
        (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            "pipeline_model_parallel_layout",
        ),
        "stages have equal numbers of layers; remove it, and use a pipeline_model_parallel_size that divides them",
    ),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout"),
        "rloom trains without dropout, so that log-probs are deterministic; remove it",
    ),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff"),
        "rloom's losses have no term for the load of experts; remove it",
    ),
}


@dataclass(frozen=True)
class MegatronRole:
    """A role that Megatron trains, and its workers."""

    path: str  # its section
    section: Megatron
    workers: int
    model: str  # section of its model

    @property
    def key(self) -> str:
        return f"{self.path}.megatron"


def megatron_roles(config: Config, *, critic: bool) -> Iterator[MegatronRole]:
    """`critic`: whether the algorithm trains one."""
    if config.actor_rollout_ref.actor.strategy == "megatron":
        section = config.actor_rollout_ref.actor.megatron
        yield MegatronRole(ACTOR, section, config.actor_workers, "actor_rollout_ref.model")
    if critic and config.critic.strategy == "megatron":
        yield MegatronRole(CRITIC, config.critic.megatron, config.workers_of("critic"), "critic.model")


def uses_megatron(config: Config, *, critic: bool) -> bool:
    """Whether a process of the run imports megatron-core: one worker holds a whole model without it."""
    return any(role.workers > 1 for role in megatron_roles(config, critic=critic))


def megatron_faults(config: Config, *, critic: bool) -> Iterator[str]:
    for role in megatron_roles(config, critic=critic):
        yield from worker_faults(role)
        yield from expert_faults(role)
        yield from override_faults(role)
    if config.actor_rollout_ref.actor.strategy == "megatron":
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
    for name, value in role.section.override_transformer_config.items():
        if name in OTHER_KEYS and value:  # null, False and 0 change nothing
            yield f"{role.key}.override_transformer_config.{name}={value}: {OTHER_KEYS[name]}"


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
    key = f"{ACTOR}.strategy=megatron"
    if model.has_lora:
        yield f"{key}: the Megatron engine trains all weights, not LoRA adapters; use strategy=fsdp, or lora_rank=0"
    if actor.use_kl_loss and actor.kl_loss_type == "full":
        yield (
            f"{key}: a KL over the whole vocabulary needs whole logits on each worker; use strategy=fsdp, or another "
            f"{ACTOR}.kl_loss_type"
        )


def ulysses_faults(name: str, role: Actor | Critic) -> Iterator[str]:
    size = role.ulysses_sequence_parallel_size
    if role.strategy == "megatron" and size > 1:
        yield (
            f"{name}.ulysses_sequence_parallel_size={size}: sequences are divided by FSDP's engine only; use 1 and "
            f"{name}.megatron.sequence_parallel=True, or {name}.strategy=fsdp"
        )


def shared_worker_faults(actor: Actor, critic: Critic) -> Iterator[str]:
    """megatron-core has one division of the ranks in a process, for all models."""
    own = "or give the critic workers of its own (trainer.pools.critic)"
    if (actor.strategy == "megatron") != (critic.strategy == "megatron"):
        yield (
            f"{ACTOR}.strategy={actor.strategy} and critic.strategy={critic.strategy}: actor and critic share their "
            f"workers, and these have one training engine; use the same strategy, {own}"
        )
    elif critic.strategy == "megatron":
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
    elif config.replays_routing and rollout.name != "native":
        yield (
            f"{f'{mode}=R3' if given == 'R3' else switch}: actor_rollout_ref.rollout.name={rollout.name} does not "
            "return the experts that its router chose; use name=native, or leave router replay out"
        )


def megatron_notices(config: Config, *, critic: bool) -> Iterator[str]:
    alone = [f"{role.path}.strategy=megatron" for role in megatron_roles(config, critic=critic) if role.workers == 1]
    if alone:
        yield f"{', '.join(alone)}: one worker holds the whole model, so megatron-core is not used"
    roles = {ACTOR: config.actor_rollout_ref.actor.megatron, CRITIC: config.critic.megatron}
    for path, section in roles.items():
        ignored = sorted(ONE_IMPLEMENTATION.intersection(section.override_transformer_config))
        if ignored:
            names = ", ".join(f"{name}={section.override_transformer_config[name]}" for name in ignored)
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
