"""Bytes on one GPU, by what holds them and by the moment of a step. docs/plan.md says what this was held against.

Scoring passes are left out: they hold no gradients and no activations, so an update always takes more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rloom.config.schema import Config
from rloom.plan.batches import Batches, up
from rloom.plan.models import FLOAT32, Role

GIB = 2**30
LOGITS_AT_ONCE = 2**29  # numbers of the fused head's buffer, as in rloom/models/head.py; a test compares them
UNREDUCED_SHARE = 0.25  # of a GPU: what a gradient not yet summed over ranks may take, as in rloom/engines/fsdp.py
FREE_SHARE = 0.8  # of the memory left that the native engine's cache may take; likewise
SEQUENCES, SEQUENCES_HF = 1024, 256  # at a time on a GPU, where max_num_seqs does not say
BESIDE = 2 * GIB  # assumed: the driver's context, captured graphs, torch's fragments

GENERATION, ACTOR_PASSES, ACTOR_STEP = "generation", "actor passes", "actor step"
CRITIC_PASSES, CRITIC_STEP = "critic passes", "critic step"

Held = dict[str, float]  # what -> bytes


@dataclass(frozen=True)
class CachePlan:
    """The key-value cache of one GPU's share of an engine."""

    token_bytes: int
    wanted: int  # tokens, if all sequences that may run at a time are as long as they may be
    room: int  # tokens that fit
    longest: int
    running: int  # sequences that may run at a time

    @property
    def bytes(self) -> int:
        return min(self.wanted, self.room) * self.token_bytes

    @property
    def whole_sequences(self) -> int:
        """Of full length, prompt not shared, that it has room for."""
        return self.room // self.longest


@dataclass(frozen=True)
class Memory:
    gpu_bytes: float
    moments: Mapping[str, Held]  # moment of a step -> what is held then
    cache: CachePlan

    def total(self, moment: str) -> float:
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        return max(self.moments, key=self.total)

    @property
    def peak_bytes(self) -> float:
        return self.total(self.peak)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.gpu_bytes and self.cache.whole_sequences > 0


def resting(role: Role) -> Held:
    """Between uses. Where the engine is one process's: whole weights, and float32 masters beside coarser ones."""
    moments = 2 * FLOAT32 * role.learned
    if role.sharded:
        frozen = role.parameters - role.learned
        weights = (FLOAT32 * role.learned + role.number_bytes * frozen) / role.shards
        held = {"weights": weights, "moments": moments / role.shards}
    else:
        masters = FLOAT32 * role.learned if role.number_bytes < FLOAT32 else 0
        held = {"weights": role.number_bytes * role.parameters, "masters": masters, "moments": moments}
    if role.offload_parameters:
        held["weights"] = held["masters"] = 0
    if role.offload_optimizer or (role.offload_parameters and role.sharded):
        held["moments"] = 0
    return held


def reduces_once(role: Role, gpu_bytes: float) -> bool:
    """Gradients are summed over ranks in the last pass of a mini-batch; where a whole one has no room, in each."""
    return FLOAT32 * role.learned <= UNREDUCED_SHARE * gpu_bytes


def in_passes(role: Role, gpu_bytes: float) -> Held:
    """Forward and backward over a mini-batch, at the end of its last pass but one."""
    held = resting(role)
    if role.sharded:
        held["gathered layers"] = gathered(role)
        whole = FLOAT32 * role.learned if role.updates.passes.count > 1 and reduces_once(role, gpu_bytes) else 0
        shard = 0 if role.offload_parameters else FLOAT32 * role.learned / role.shards
        held["gradients"] = whole + shard
    else:
        held["weights"] = role.number_bytes * role.parameters
        held["gradients"] = FLOAT32 * role.learned
    held["activations"] = activations(role, role.updates.passes.tokens)
    held["head"] = head(role, role.updates.passes.tokens)
    return held


def in_step(role: Role) -> Held:
    """Everything that the optimizer touches meets on the GPU; sharded parameters on the host are updated there."""
    if role.sharded and role.offload_parameters:
        return {}
    here = replace(role, offload_parameters=False, offload_optimizer=False)
    return {**resting(here), "gradients": FLOAT32 * role.learned / (role.shards if role.sharded else 1)}


def gathered(role: Role) -> float:
    """Embeddings and head for a whole pass, and two layers, the one at work and the next. All, where none is shared."""
    if role.shards == 1:
        return role.number_bytes * role.parameters
    return role.number_bytes * (role.outer + 2 * role.layer)


def activations(role: Role, tokens: int) -> float:
    """Without checkpointing, all that layers save; with it, each layer's input and one layer made anew."""
    size = role.architecture
    numbers = size.layers * size.hidden + size.saved_numbers if role.checkpointing else size.layers * size.saved_numbers
    return role.number_bytes * numbers * tokens


def head(role: Role, tokens: int) -> float:
    """A float32 chunk of logits, its gradient in the arithmetic's precision, and the gradient of the head's weight."""
    if not role.vocabulary:
        return 0
    logits = tokens * role.vocabulary
    if not role.fused_head:
        return 2 * FLOAT32 * logits
    weight = role.vocabulary * role.architecture.hidden if role.learns_whole else 0
    return (FLOAT32 + role.number_bytes) * (min(LOGITS_AT_ONCE, logits) + weight)


def reference(config: Config, actor: Role) -> tuple[float, float]:
    """(at rest, in the actor's passes): a frozen copy where KL is used; with LoRA the adapter is switched off."""
    if not config.uses_reference or not actor.learns_whole:
        return 0, 0
    whole = actor.number_bytes * actor.parameters
    here = whole / actor.shards if actor.sharded else whole
    section = config.actor_rollout_ref.actor
    rest = 0 if config.actor_rollout_ref.ref.fsdp_config.param_offload else here
    full = section.use_kl_loss and section.kl_loss_type == "full"
    return rest, ((here + gathered(actor) if actor.sharded else here) if full else rest)


def memory(config: Config, sizes: Batches, actor: Role, critic: Role | None, gpu_bytes: float) -> Memory:
    rest, compared = reference(config, actor)
    tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    common: Held = {"beside torch's allocator": BESIDE}
    if actor.sharded:  # one process generates with the actor's own weights
        common["rollout engine's weights"] = actor.number_bytes * actor.parameters / tensor_parallel
    critic_rest = {"critic at rest": sum(resting(critic).values())} if critic is not None else {}
    actor_rest = {"actor at rest": sum(resting(actor).values())}
    generating = {**resting(actor), "reference": rest, **critic_rest, **common}
    if not actor.sharded:
        generating["weights"] = actor.number_bytes * actor.parameters
    cache = key_value_cache(config, sizes, actor, gpu_bytes, sum(generating.values()))
    moments: dict[str, Held] = {
        GENERATION: {**generating, "key-value cache": cache.bytes},
        ACTOR_PASSES: {**in_passes(actor, gpu_bytes), "reference": compared, **critic_rest, **common},
        ACTOR_STEP: {**in_step(actor), "reference": rest, **critic_rest, **common},
    }
    if critic is not None:
        moments[CRITIC_PASSES] = {**in_passes(critic, gpu_bytes), "reference": rest, **actor_rest, **common}
        moments[CRITIC_STEP] = {**in_step(critic), "reference": rest, **actor_rest, **common}
    if not config.actor_rollout_ref.rollout.free_cache_engine:
        for held in moments.values():
            held["key-value cache"] = cache.bytes
    return Memory(gpu_bytes, moments, cache)


def key_value_cache(config: Config, sizes: Batches, actor: Role, gpu_bytes: float, others: float) -> CachePlan:
    """What the sequences can need, up to the share of the GPU and up to 0.8 of what is left on it."""
    rollout, size = config.actor_rollout_ref.rollout, actor.architecture
    heads = up(size.kv_heads, rollout.tensor_model_parallel_size)
    token_bytes = 2 * size.layers * heads * size.head_size * actor.number_bytes
    most = rollout.max_num_seqs or (SEQUENCES if rollout.name == "native" else SEQUENCES_HF)
    running = min(most, sizes.samples_per_engine)
    prompts = min(running, sizes.prompts_per_engine)  # an engine that reads a prompt once keeps it once
    wanted = running * sizes.answer_tokens + prompts * sizes.prompt_tokens
    room = min(rollout.gpu_memory_utilization * gpu_bytes, FREE_SHARE * max(0.0, gpu_bytes - others)) // token_bytes
    return CachePlan(token_bytes, wanted, int(room), sizes.longest, running)
