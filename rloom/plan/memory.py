"""Bytes on one GPU, by part and by phase of a step. docs/plan.md compares them with measurements.

Scoring by actor, reference and critic is not a phase here: it holds no gradients and no activations, so an update
always takes more. The reward model has a phase of its own, since no update holds its weights; each worker that scores
holds a whole copy of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloom.config.schema import Config
from rloom.errors import ModelError
from rloom.models.limits import LOGITS_AT_ONCE, UNREDUCED_SHARE
from rloom.models.source import ModelSource, UnknownSize, read_config
from rloom.plan import megatron
from rloom.plan.architecture import FAMILIES, FLOAT32, ModelPlan, architecture, number_bytes
from rloom.plan.batches import Batches, largest_share, plan_passes
from rloom.rollout.limits import PAGE_TOKENS, cache_capacity, wanted_cache_tokens
from rloom.runtime.placement import ACTOR, REWARD, ROLLOUT

DEBERTA = "deberta-v2"
DEFAULT_LABELS = 2  # labels where config.json has no id2label


@dataclass(frozen=True)
class RewardPlan:
    family: str
    parameters: int
    number_bytes: int
    token_numbers: int  # numbers that one layer holds for one token in a forward pass
    tokens: int  # in the largest pass
    offloaded: bool
    own_workers: int | None  # None: it shares the actor's

    @property
    def weights(self) -> float:
        return self.number_bytes * self.parameters

    @property
    def at_rest(self) -> float:
        """Bytes on a GPU that it shares, while it does not score."""
        return 0 if self.offloaded or self.own_workers is not None else self.weights

    @property
    def scoring(self) -> float:
        """Bytes in a forward pass: the weights, and the numbers of one layer; none are saved for a backward pass."""
        return self.weights + self.number_bytes * self.tokens * self.token_numbers


def reward_plan(config: Config, sizes: Batches) -> RewardPlan | None:
    section, own = config.reward_model, config.trainer.pools.own.get("reward")
    path = section.model_path
    if path is None:
        return None
    key = "reward_model.path" if section.path is not None else "reward_model.model.path"
    fsdp, ranks = section.model.fsdp_config, config.workers_of("reward")
    longest = min(sizes.longest, section.max_length or sizes.longest)
    fields = read_config(ModelSource(path, key), download=False)
    family, parameters, token_numbers = size_of(fields, f"{key}={path}", longest)
    passes = plan_passes(largest_share(sizes.samples, ranks), section.batching(ranks), longest)
    return RewardPlan(
        family=family,
        parameters=parameters,
        number_bytes=number_bytes(config, fsdp.dtype),
        token_numbers=token_numbers,
        tokens=passes.tokens,
        offloaded=own is None if fsdp.param_offload is None else fsdp.param_offload,
        own_workers=own,
    )


def size_of(fields: Mapping[str, Any], source: str, longest: int) -> tuple[str, int, int]:
    """(family, parameters, numbers that a layer has of one token)"""
    labels = len(fields["id2label"]) if "id2label" in fields else DEFAULT_LABELS
    family = fields.get("model_type")
    if family not in (*FAMILIES, DEBERTA):
        raise UnknownSize(
            f"{source}: its parameters cannot be counted from config.json (model_type {family!r}); "
            f"the reward models counted are {', '.join([*FAMILIES, DEBERTA])}"
        )
    if family != DEBERTA:
        size = architecture(fields, source)
        return size.family, size.critic_parameters + (labels - 1) * size.hidden, size.saved_numbers
    try:
        # its attention has the scores of all pairs of tokens: of contents, of positions, summed, and as weights
        scores = 4 * fields["num_attention_heads"] * longest
        numbers = 6 * fields["hidden_size"] + 2 * fields["intermediate_size"] + scores
        return DEBERTA, deberta_parameters(fields, labels), numbers
    except KeyError as error:
        raise ModelError(f"{source}: its config.json has no {error}; a {DEBERTA} model's has") from error


def deberta_parameters(fields: Mapping[str, Any], labels: int) -> int:
    """Parameters of DeBERTa v2 and v3 with a pooler and a classifier. The defaults are those of transformers."""
    hidden, inner, norm = fields["hidden_size"], fields["intermediate_size"], 2 * fields["hidden_size"]
    positions = fields.get("max_position_embeddings", 512)
    rows = fields["vocab_size"] + fields.get("type_vocab_size", 0)
    rows += positions if fields.get("position_biased_input", True) else 0
    relative = norm if "layer_norm" in fields.get("norm_rel_ebd", "none") else 0
    projections = 4  # queries, keys, values, output
    if fields.get("relative_attention", False):
        spans = (fields.get("position_buckets", -1), fields.get("max_relative_positions", -1), positions)
        relative += 2 * next(span for span in spans if span > 0) * hidden
        kinds = fields.get("pos_att_type") or ()  # a list, or "p2c|c2p" in older files
        projections += 0 if fields.get("share_att_key", False) else ("c2p" in kinds) + ("p2c" in kinds)
    layer = projections * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 2 * norm
    kernel = fields.get("conv_kernel_size", 0)
    convolution = kernel * hidden * hidden + hidden + norm if kernel > 0 else 0
    head = hidden * hidden + hidden + labels * (hidden + 1)
    return int(rows * hidden + norm + relative + fields["num_hidden_layers"] * layer + convolution + head)


GIB = 2**30
OUTSIDE_ALLOCATOR = 2 * GIB  # assumed: the CUDA context, captured graphs, fragmentation

GENERATION, ACTOR_PASSES, ACTOR_STEP = "generation", "actor passes", "actor step"
CRITIC_PASSES, CRITIC_STEP, REWARD_SCORING, SAVE = "critic passes", "critic step", "reward model", "checkpoint"

ALLOCATOR, CACHE = "beside torch's allocator", "key-value cache"
ESTIMATED = (ALLOCATOR, CACHE)  # parts that are estimates in every phase but the passes; the others are counted

Parts = dict[str, float]  # part -> bytes


@dataclass(frozen=True)
class CachePlan:
    """The key-value cache on one GPU of an engine."""

    token_bytes: int
    wanted: int  # tokens, if all sequences that may run at a time have full length
    room: int  # tokens that fit
    longest: int  # tokens of the longest sequence
    longest_pages: int  # its prompt and its answer begin in a page each
    running: int  # sequences that may run at a time

    @property
    def bytes(self) -> int:
        return min(self.wanted, self.room) * self.token_bytes

    @property
    def whole_sequences(self) -> int:
        """Sequences of full length that fit, if none share a prompt."""
        return self.room // (self.longest_pages * PAGE_TOKENS)

    @property
    def tokens_each(self) -> int:
        """Tokens that each sequence may have if all that may run do, and none share a prompt."""
        pages = self.room // PAGE_TOKENS // self.running
        return min(self.longest, pages * PAGE_TOKENS)


@dataclass(frozen=True)
class Memory:
    gpu_bytes: float
    phases: Mapping[str, Parts]  # phase of a step -> what is held in it
    cache: CachePlan | None  # None: other GPUs generate

    def total(self, phase: str) -> float:
        return held_bytes(self.phases[phase])

    @property
    def peak(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak_bytes(self) -> float:
        return self.total(self.peak)

    @property
    def needs(self) -> str:
        if self.peak_bytes <= self.gpu_bytes and self.cache is not None and not self.cache.whole_sequences:
            return f"a key-value cache with room for one sequence of {self.cache.longest:,} tokens"
        return f"{self.peak_bytes / GIB:.1f} GiB in {self.peak}"

    @property
    def certain_bytes(self) -> float:
        """The weights of all models, gradients and optimizer state, which a step holds whatever the length of the
        answers. The passes hold no more of them than the other phases."""
        held = [self.phases[phase] for phase in (GENERATION, ACTOR_STEP, CRITIC_STEP) if phase in self.phases]
        return max(sum(size for name, size in parts.items() if name not in ESTIMATED) for parts in held)

    @property
    def certainly_too_large(self) -> bool:
        return self.certain_bytes > self.gpu_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.gpu_bytes and (self.cache is None or self.cache.whole_sequences > 0)


@dataclass(frozen=True)
class GpuMemory:
    """The memory of GPUs that hold the same roles."""

    numbers: Sequence[int]  # numbers of the workers
    generates: bool
    scores: bool  # with the reward model
    memory: Memory


def memory_by_gpu(
    config: Config,
    sizes: Batches,
    actor: ModelPlan,
    critic: ModelPlan | None,
    gpu_bytes: float,
    reward: RewardPlan | None,
) -> list[GpuMemory]:
    """The memory of the actor's GPUs. Engines and a critic or reference with GPUs of their own are counted on all of
    these, too."""
    layout, kinds = config.layout(), dict[tuple[bool, bool], list[int]]()
    scores = reward is not None and REWARD not in config.trainer.pools.own
    for number in layout.workers_of(ACTOR):
        held = [role not in layout.placed or number in layout.placed[role] for role in (ROLLOUT, REWARD)]
        kinds.setdefault((held[0], held[1] and scores), []).append(number)
    return [
        GpuMemory(
            numbers,
            generates,
            scores,
            memory(config, sizes, actor, critic, gpu_bytes, reward if scores else None, generates=generates),
        )
        for (generates, scores), numbers in kinds.items()
    ]


def fullest(gpus: Sequence[GpuMemory]) -> GpuMemory:
    """The GPU that decides whether a run fits."""
    return max(gpus, key=lambda gpu: (not gpu.memory.fits, gpu.memory.peak_bytes))


def memory(
    config: Config,
    sizes: Batches,
    actor: ModelPlan,
    critic: ModelPlan | None,
    gpu_bytes: float,
    reward: RewardPlan | None = None,
    *,
    generates: bool = True,
) -> Memory:
    """Memory of a GPU; with a pipeline, in each phase that of the stage that needs most: the first or the last."""
    stages = [0] if actor.megatron is None else sorted({0, actor.megatron.pipeline_model_parallel_size - 1})
    found = [
        memory_of_stage(
            config,
            sizes,
            replace(actor, stage=stage),
            None if critic is None else replace(critic, stage=stage),
            gpu_bytes,
            reward,
            generates=generates,
        )
        for stage in stages
    ]
    phases = {phase: max((each.phases[phase] for each in found), key=held_bytes) for phase in found[0].phases}
    caches = [each.cache for each in found if each.cache is not None]
    return Memory(gpu_bytes, phases, min(caches, key=lambda cache: cache.room, default=None))


def held_bytes(parts: Parts) -> float:
    return sum(parts.values())


def memory_of_stage(
    config: Config,
    sizes: Batches,
    actor: ModelPlan,
    critic: ModelPlan | None,
    gpu_bytes: float,
    reward: RewardPlan | None,
    *,
    generates: bool,
) -> Memory:
    rest, compared = reference(config, actor)
    common: Parts = {ALLOCATOR: OUTSIDE_ALLOCATOR}
    if reward is not None:
        common["reward model"] = reward.at_rest
    copy, rollout = weights_copy(config, actor) if generates else {}, config.actor_rollout_ref.rollout
    sleeps = rollout.kind.own_model and rollout.free_cache_engine  # its weights are on the host while training
    if not sleeps:
        common |= copy
    critic_rest = {"critic at rest": sum(at_rest(critic).values())} if critic is not None else {}
    actor_rest = {"actor at rest": sum(at_rest(actor).values())}
    generating = {**at_rest(actor), "reference": rest, **critic_rest, **common, **copy}
    if generates and not copy:
        generating["weights"] = actor.number_bytes * actor.parameters
    free = gpu_bytes - (0 if rollout.generates_elsewhere else sum(generating.values()))
    cache = key_value_cache(config, sizes, actor, gpu_bytes, free) if generates else None
    cached = {} if cache is None or rollout.generates_elsewhere else {CACHE: cache.bytes}
    phases: dict[str, Parts] = {
        GENERATION: generating | cached,
        ACTOR_PASSES: {**in_passes(actor, gpu_bytes), "reference": compared, **critic_rest, **common},
        ACTOR_STEP: {**in_optimizer_step(actor), "reference": rest, **critic_rest, **common},
    }
    if critic is not None:
        phases[CRITIC_PASSES] = {**in_passes(critic, gpu_bytes), "reference": rest, **actor_rest, **common}
        phases[CRITIC_STEP] = {**in_optimizer_step(critic), "reference": rest, **actor_rest, **common}
    if reward is not None and reward.own_workers is None:
        scoring = {**common, "reward model": reward.scoring}
        phases[REWARD_SCORING] = {**actor_rest, "reference": rest, **critic_rest, **scoring}
    saved = [megatron.in_save(model) for model in (actor, critic) if model is not None and model.megatron is not None]
    if saved:
        others = {"reference": rest, **(actor_rest if actor.megatron is None else {}), **critic_rest}
        largest: Parts = max(saved, key=held_bytes)
        phases[SAVE] = {**largest, **others, **common}
    if not rollout.free_cache_engine:
        for parts in phases.values():
            parts |= cached
    return Memory(gpu_bytes, phases, cache)


def host_at_start(config: Config, actor: ModelPlan, critic: ModelPlan | None, reward: RewardPlan | None) -> float:
    """Bytes of the first machine's host while one of its workers reads a model. One is read after the other, in the
    dtype of its files, and sent to the GPUs that shard it before the next. Each worker reads a whole reward model. The
    ranks of Megatron read a parameter at a time."""
    models = [model for model in (actor, critic) if model is not None and model.megatron is None]
    read = [(model.architecture.stored_bytes if model.trains_all else FLOAT32) * model.parameters for model in models]
    scoring = 0 if reward is None else reward.weights * min(config.gpus_per_node, config.workers_of("reward"))
    return max([*read, scoring])


def weights_copy(config: Config, actor: ModelPlan) -> Parts:
    """Weights of a rollout engine that does not generate with the actor's own: native and hf do in one process."""
    rollout = config.actor_rollout_ref.rollout
    if not actor.sharded and not rollout.kind.own_model:
        return {}
    share = 0 if rollout.generates_elsewhere else 1 / rollout.tensor_model_parallel_size
    return {"rollout engine's weights": actor.number_bytes * actor.parameters * share}


def key_value_cache(config: Config, sizes: Batches, actor: ModelPlan, gpu_bytes: float, free_bytes: float) -> CachePlan:
    rollout, size = config.actor_rollout_ref.rollout, actor.architecture
    heads = math.ceil(size.kv_heads / rollout.tensor_model_parallel_size)
    token_bytes = 2 * size.layers * heads * size.head_size * actor.number_bytes
    running = min(rollout.sequences("cuda"), sizes.samples_per_engine)
    wanted = wanted_cache_tokens(running, sizes.prompts_per_engine, sizes.prompt_tokens, sizes.answer_tokens)
    share = rollout.gpu_memory_utilization
    if rollout.kind.own_model:  # its weights are part of the share
        share = max(0.0, share - sum(weights_copy(config, actor).values()) / gpu_bytes)
    room = cache_capacity(token_bytes, memory_share=share, total_bytes=gpu_bytes, free_bytes=max(0.0, free_bytes))
    longest_pages = wanted_cache_tokens(1, 1, sizes.prompt_tokens, sizes.answer_tokens) // PAGE_TOKENS
    return CachePlan(token_bytes, wanted, room, sizes.longest, longest_pages, running)


def stored(model: ModelPlan) -> Parts:
    """Weights and optimizer state, not offloaded. The local engine has whole weights, and float32 masters beside
    bfloat16 ones; FSDP2 shards what is trainable in float32."""
    moments = 2 * FLOAT32 * model.trainable / model.shards
    if model.sharded:
        frozen = model.parameters - model.trainable
        weights = (FLOAT32 * model.trainable + model.number_bytes * frozen) / model.shards
        return {"weights": weights, "moments": moments}
    masters = FLOAT32 * model.trainable if model.number_bytes < FLOAT32 else 0
    return {"weights": model.number_bytes * model.parameters, "masters": masters, "moments": moments}


def at_rest(model: ModelPlan) -> Parts:
    """What stays on the GPU between uses."""
    if model.megatron is not None:
        return megatron.at_rest(model)
    parts = stored(model)
    if model.keys.param_offload:
        parts["weights"] = parts["masters"] = 0
    if model.keys.optimizer_offload or (model.keys.param_offload and model.sharded):
        parts["moments"] = 0
    return parts


def in_passes(model: ModelPlan, gpu_bytes: float) -> Parts:
    """Forward and backward over a mini-batch, at the end of its last pass but one."""
    if model.megatron is not None:
        return megatron.in_passes(model)
    parts, passes = at_rest(model), model.updates.passes
    if model.sharded:
        parts["gathered layers"] = gathered(model)
        unreduced = FLOAT32 * model.trainable if passes.count > 1 and reduces_once(model, gpu_bytes) else 0
        shard = 0 if model.keys.param_offload else FLOAT32 * model.trainable / model.shards
        parts["gradients"] = unreduced + shard
    else:
        parts["weights"] = model.number_bytes * model.parameters
        parts["gradients"] = FLOAT32 * model.trainable
    parts["activations"] = activations(model, passes.tokens)
    parts["head"] = head(model, passes.tokens)
    return parts


def in_optimizer_step(model: ModelPlan) -> Parts:
    """The optimizer needs all of its state on the GPU; sharded parameters on the host are updated there."""
    if model.megatron is not None:
        return megatron.in_optimizer_step(model)
    if model.sharded and model.keys.param_offload:
        return {}
    return {**stored(model), "gradients": FLOAT32 * model.trainable / model.shards}


def reduces_once(model: ModelPlan, gpu_bytes: float) -> bool:
    """Gradients are summed over ranks in the last pass of a mini-batch; if a whole gradient is too large, in each."""
    return FLOAT32 * model.trainable <= UNREDUCED_SHARE * gpu_bytes


def gathered(model: ModelPlan) -> float:
    """Embeddings and head for a whole pass, the current layer and the next one; all if each rank has a copy."""
    if model.shards == 1:
        return model.number_bytes * model.parameters
    return model.number_bytes * (model.outer + 2 * model.layer)


def activations(model: ModelPlan, tokens: int) -> float:
    """All that layers save; with checkpointing, each layer's input and what one recomputed layer saves."""
    size = model.architecture
    inputs, saved = size.layers * size.hidden, size.saved_numbers
    return model.number_bytes * tokens * (inputs + saved if model.checkpointing else size.layers * saved)


def head(model: ModelPlan, tokens: int) -> float:
    """A float32 chunk of logits, its gradient in the arithmetic's precision, and the gradient of the head's weight."""
    if not model.vocabulary:
        return 0
    logits = tokens * model.vocabulary
    if not model.fused_head:
        return 2 * FLOAT32 * logits
    weight = model.vocabulary * model.architecture.hidden if model.trains_all else 0
    return (FLOAT32 + model.number_bytes) * (min(LOGITS_AT_ONCE, logits) + weight)


def reference(config: Config, actor: ModelPlan) -> tuple[float, float]:
    """(at rest, in the actor's passes): a frozen copy if KL is used. With LoRA there is none: the adapter is off."""
    if not config.uses_reference or not actor.trains_all:
        return 0, 0
    ref = config.actor_rollout_ref.ref
    if actor.megatron is not None:
        rest = 0 if ref.megatron.param_offload else megatron.stored(actor)["weights"]
        return rest, rest
    weights = actor.number_bytes * actor.parameters / actor.shards
    rest = 0 if ref.fsdp_config.param_offload else weights
    section = config.actor_rollout_ref.actor
    if section.use_kl_loss and section.kl_loss_type == "full":
        return rest, weights + (gathered(actor) if actor.sharded else 0)
    return rest, rest
