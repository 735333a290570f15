"""Seconds of a step, estimated: arithmetic at the rates measured on one H200, counted bytes over links of data sheets.

`step_time` is the one formula; the command and the table in docs/plan.md both call it. It assumes that every answer has
full length, that ranks have equal shares, and that no transfer overlaps with arithmetic.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rloom.config.base import PassSection
from rloom.config.derived import Needs, needs_old_logprobs
from rloom.config.schema import Config
from rloom.plan import megatron
from rloom.plan.architecture import FLOAT32, ModelPlan
from rloom.plan.batches import Batches, PassPlan
from rloom.plan.disk import dumped_share
from rloom.plan.memory import Memory, reduces_once

# Measured on one H200 (docs/measurements/).
MEMORY_BANDWIDTH = 4.3e12  # bytes/s
MATRIX_RATE = 700e12  # FLOP/s of large matrix products
PEAK = 989e12  # FLOP/s, dense bfloat16, by the data sheet; a test compares it with rloom/runs/metrics.py
TRAINING_SHARES = ((494e6, 0.452), (1544e6, 0.530))  # (parameters, share of the peak that an update reaches)
# Fitted to four measured generations (0.5B, 0.5B, 1.5B, 7B), each met within 12 %; docs/plan.md: beside newer ones.
FLOOR_SHARE, DECODE_STEP_S = 0.8, 1.6e-3

# By data sheets, one way, not measured.
NVLINK = 450e9  # bytes/s of a GPU: NVLink 4
INFINIBAND = 50e9  # bytes/s of a GPU: 400 Gb/s
PCIE = 64e9  # bytes/s of a GPU: PCIe 5, 16 lanes
DRIVER = 50e9  # bytes/s in and out of the driver's machine: one InfiniBand port

# Bytes of a token that pass through the driver; a test compares them with rloom/batch.py.
TOKEN, MASK, NUMBER = 8, 1, 4  # int64, bool, float32
COMPLETION = TOKEN + NUMBER  # with its log-prob
PUT = TOKEN // 2 + MASK + NUMBER  # a Batch where the workers read it, with int32 tokens
# The driver's CPU, measured on a loaded one with 64 workers (docs/measurements/workers.md): answers that arrive, then
# advantages (GAE) and metrics; copying, pickling and page faults of the batch and of results
DRIVER_TOKEN_S = 80e-9 + 200e-9
DRIVER_COPIES = 0.6e9  # bytes/s

GENERATION, OLD_LOGPROBS, ACTOR_UPDATE = "generation", "old log-probs", "actor update"  # names of stages
TO_ENGINE, THROUGH_DRIVER = "weights to the engine", "samples through the driver"


@dataclass(frozen=True)
class Stage:
    name: str
    compute_s: float = 0.0
    wire_s: float = 0.0
    wire_bytes: float = 0.0  # bytes that reach one GPU, or pass through the driver

    @property
    def seconds(self) -> float:
        return self.compute_s + self.wire_s


@dataclass(frozen=True)
class StepTime:
    stages: Sequence[Stage]
    tokens: int  # in prompts and answers

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def wire_share(self) -> float:
        return sum(stage.wire_s for stage in self.stages) / self.seconds

    def of(self, name: str) -> float:
        return sum(stage.seconds for stage in self.stages if stage.name == name)


@dataclass(frozen=True)
class Links:
    ranks: int
    per_node: int

    def gather(self, whole: float, ranks: int) -> tuple[float, float]:
        """(seconds, bytes that reach one GPU) of an all-gather, or a reduce-scatter, of `whole` bytes over `ranks`.

        Every GPU receives all but its own part. Every machine receives all but its own part, through all of its ports
        at once. The slower of the two counts.
        """
        received, nodes = whole * (ranks - 1) / ranks, max(1, ranks // self.per_node)
        between_s = whole * (nodes - 1) / nodes / (self.per_node * INFINIBAND)
        return max(received / NVLINK, between_s), received

    def all_reduce(self, part: float, replicas: int) -> tuple[float, float]:
        """(seconds, bytes) of summing `part` over the replicas; between machines each GPU has a port."""
        moved = 2 * part * (replicas - 1) / replicas
        return moved / (NVLINK if self.ranks <= self.per_node else INFINIBAND), moved

    def transfer(self, transfers: Iterable[megatron.Transfer]) -> tuple[float, float]:
        """(seconds, bytes) of transfers after each other: over NVLink if they stay within a machine."""
        seconds = moved = 0.0
        for each in transfers:
            seconds += each.received / (NVLINK if each.span <= self.per_node else INFINIBAND)
            moved += each.received
        return seconds, moved


def step_time(
    config: Config, needs: Needs, sizes: Batches, actor: ModelPlan, critic: ModelPlan | None, memory: Memory
) -> StepTime:
    links, section = Links(sizes.ranks, config.gpus_per_node), config.actor_rollout_ref
    shared = sizes.ranks // sizes.shares

    def scored(name: str, model: ModelPlan, keys: PassSection) -> Stage:
        passes = sizes.scoring_passes(keys.batching(sizes.ranks, model_ranks=shared))
        return scoring(name, sizes, model, passes, links)

    scorings = [scored(OLD_LOGPROBS, actor, section.rollout)] if needs_old_logprobs(config, needs.loss) else []
    scorings += [scored("reference", actor, section.ref)] if config.scores_reference else []
    updates = [update(ACTOR_UPDATE, sizes, actor, links, memory)]
    if critic is not None:
        scorings.append(scored("values", critic, config.critic))
        updates.insert(0, update("critic update", sizes, critic, links, memory))
    stages = [generation(config, needs, sizes, actor, memory), *scorings, *updates]
    if sizes.ranks > 1:
        seconds, moved = links.gather(actor.number_bytes * actor.parameters, actor.shards)
        stages.append(Stage(TO_ENGINE, wire_s=seconds, wire_bytes=moved))
        stages.append(through_driver(config, sizes, len(scorings)))
    return StepTime(stages, sizes.tokens)


def generation(
    config: Config,
    needs: Needs,
    sizes: Batches,
    actor: ModelPlan,
    memory: Memory,
    decode_steps: float | None = None,
) -> Stage:
    """A share of the floor, and a time for each decode step. `decode_steps`: None: those of answers of one length.

    The floor: every step reads the weights and the cached keys and values, every token is multiplied with every matrix,
    every prompt is read once. Sequences that do not fit into the cache run in further rounds.
    """
    size, parallel = actor.architecture, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    samples, answer, prompt = sizes.samples_per_engine, sizes.answer_tokens, sizes.prompt_tokens
    if needs.estimator.needs_greedy:
        samples += sizes.prompts_per_engine
    cache = memory.cache
    assert cache is not None  # a GPU that generates has one
    running = max(1, min(cache.running, cache.whole_sequences))
    steps = math.ceil(samples / running) * answer if decode_steps is None else decode_steps
    weights = actor.number_bytes * size.matrix_parameters
    cached = samples * (answer * prompt + answer * (answer - 1) // 2) * cache.token_bytes
    flops = 2.0 * size.matrix_parameters * (samples * answer + sizes.prompts_per_engine * prompt)
    floor_s = (steps * weights / parallel + cached) / MEMORY_BANDWIDTH + flops / parallel / MATRIX_RATE
    # tensor parallelism: two all-reduces a layer, for every token
    moved = 4.0 * size.layers * size.hidden * actor.number_bytes * (parallel - 1) / parallel * samples * answer
    link = NVLINK if parallel <= config.gpus_per_node else INFINIBAND
    return Stage(GENERATION, FLOOR_SHARE * floor_s + steps * DECODE_STEP_S, moved / link, moved)


def forward_s(model: ModelPlan, tokens: float, longest: int) -> float:
    """A forward pass: 2 operations for each parameter and token, and attention over half the sample on average."""
    size = model.architecture
    flops = tokens * (2.0 * model.parameters + 2.0 * size.layers * size.query_size * longest)
    return flops / (training_share(model.parameters) * PEAK)


def training_share(parameters: int) -> float:
    """Interpolated between the measured models on a logarithmic scale; beyond them, that of the nearest."""
    (low, least), (high, most) = TRAINING_SHARES
    place = (math.log(parameters) - math.log(low)) / (math.log(high) - math.log(low))
    return least + (most - least) * min(1.0, max(0.0, place))


def scoring(name: str, sizes: Batches, model: ModelPlan, passes: PassPlan, links: Links) -> Stage:
    """A forward pass over all samples. Each micro-batch gathers every layer; embeddings and head are gathered once."""
    compute_s = forward_s(model, sizes.tokens / sizes.ranks, sizes.longest)
    if model.megatron is not None:
        transfers = megatron.between_layers(model, sizes.tokens / sizes.shares, forwards=1, backwards=0)
        seconds, moved = links.transfer(transfers)
        return Stage(name, compute_s * megatron.bubble(model, passes.count), seconds, moved)
    layers = model.parameters - model.outer
    seconds, moved = links.gather(model.number_bytes * (passes.count * layers + model.outer), model.shards)
    return Stage(name, compute_s, seconds, moved)


def update(name: str, sizes: Batches, model: ModelPlan, links: Links, memory: Memory) -> Stage:
    """Forward and backward take the time of three forward passes, four with checkpointing.

    Transfers: each pass gathers every layer twice, embeddings and head once. Float32 gradients are summed over shards,
    then over replicas, once a mini-batch or in each pass (`reduces_once`). Offloaded bytes go to the GPU and back.
    """
    if model.megatron is not None:
        return megatron_update(name, sizes, model, links)
    updates, gradient = model.updates, FLOAT32 * model.trainable
    passes = updates.passes.count * updates.count
    tokens = sizes.tokens / sizes.ranks * updates.epochs
    compute_s = (4 if model.checkpointing else 3) * forward_s(model, tokens, sizes.longest)
    compute_s += updates.count * optimizer_bytes(model) / MEMORY_BANDWIDTH
    weights = model.number_bytes * (2 * (model.parameters - model.outer) + model.outer)
    gathering = links.gather(passes * weights, model.shards)
    sums = updates.count if reduces_once(model, memory.gpu_bytes) else passes
    reducing = links.gather(sums * gradient, model.shards)
    replicas = links.all_reduce(sums * gradient / model.shards, sizes.ranks // model.shards)
    offloaded = offloaded_bytes(model, passes, sums)
    moved = gathering[1] + reducing[1] + replicas[1] + offloaded
    return Stage(name, compute_s, gathering[0] + reducing[0] + replicas[0] + offloaded / PCIE, moved)


def megatron_update(name: str, sizes: Batches, model: ModelPlan, links: Links) -> Stage:
    """The stages of a pipeline are idle at its beginning and end, in each mini-batch."""
    updates, forwards = model.updates, 2 if model.checkpointing else 1
    compute_s = (forwards + 2) * forward_s(model, sizes.tokens / sizes.ranks * updates.epochs, sizes.longest)
    compute_s *= megatron.bubble(model, updates.passes.count)
    compute_s += updates.count * optimizer_bytes(model) / MEMORY_BANDWIDTH
    tokens = sizes.tokens / sizes.shares * updates.epochs
    steps = [megatron.between_copies(model)] * updates.count
    seconds, moved = links.transfer([*megatron.between_layers(model, tokens, forwards, backwards=1), *steps])
    offloaded = updates.count * megatron.offloaded_bytes(model)
    return Stage(name, compute_s, seconds + offloaded / PCIE, moved + offloaded)


def optimizer_bytes(model: ModelPlan) -> float:
    """Gradient read; master and both moments read and written; the weight of the arithmetic written."""
    parameters = model.trainable / model.shards
    if model.megatron is not None:
        parameters = megatron.rank_parameters(model) / model.copies
    return (7 * FLOAT32 + model.number_bytes) * parameters


def offloaded_bytes(model: ModelPlan, passes: int, sums: int) -> float:
    """Over PCIe in a step. Moments go to the GPU and back at each update. In one process so do the weights, once for
    the passes and once, with their masters, for the optimizer. Sharded weights go to the GPU twice a pass, and
    gradients to the host as often as they are summed."""
    moved = 0.0
    if model.keys.optimizer_offload and not (model.sharded and model.keys.param_offload):
        moved += model.updates.count * 2 * 2 * FLOAT32 * model.trainable / model.shards
    if model.keys.param_offload and model.sharded:
        moved += FLOAT32 * (2 * passes * model.parameters + sums * model.trainable) / model.shards
    elif model.keys.param_offload:
        masters = FLOAT32 * model.trainable if model.number_bytes < FLOAT32 else 0
        moved += model.updates.count * (4 * model.number_bytes * model.parameters + 2 * masters)
    return moved


def through_driver(config: Config, sizes: Batches, scorings: int) -> Stage:
    """Answers arrive there; the batch leaves from there once, then advantages, and returns for a critic. A number a
    token returns from every scoring, and two from every epoch of the actor for each answer that is dumped."""
    recorded = 2 * NUMBER * sizes.actor.epochs * dumped_share(config)
    copied = PUT + NUMBER * (1 if sizes.critic is None else 2) + NUMBER * scorings + recorded
    moved = float((COMPLETION + copied) * sizes.tokens)
    seconds = sizes.tokens * (DRIVER_TOKEN_S + copied / DRIVER_COPIES)
    return Stage(THROUGH_DRIVER, seconds, moved / DRIVER, moved)
