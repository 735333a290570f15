"""Seconds a step, estimated: arithmetic at the measured rates of one H200, counted bytes over links of data sheets.

`step_time` is the one formula; the command and the table in docs/plan.md both call it. It assumes that every answer is
as long as it may be, that ranks have equal shares, and that nothing on the wire overlaps with arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rloom.config.algorithm_needs import declared_needs, needs_old_logprobs
from rloom.config.schema import Config, Ref, RolloutSection
from rloom.plan.batches import Batches, PassPlan, up
from rloom.plan.memory import Memory, reduces_once
from rloom.plan.models import FLOAT32, Role

# Measured on one H200 (docs/LOG.md).
MEMORY_BANDWIDTH = 4.3e12  # bytes/s
MATRIX_RATE = 700e12  # FLOP/s of large products alone
PEAK = 989e12  # FLOP/s, dense bfloat16; of the data sheet, what the shares below are shares of
TRAINING_SHARES = ((494e6, 0.452), (1544e6, 0.530))  # (parameters, share of the peak an update reaches)
# Two numbers fitted to four measured generations (0.5B, 0.5B, 1.5B, 7B), each met within 12 %.
FLOOR_SHARE, DECODE_STEP_S = 0.8, 1.6e-3

# Of data sheets, not measured, one way.
NVLINK = 450e9  # bytes/s a GPU: NVLink 4
INFINIBAND = 50e9  # bytes/s a GPU: 400 Gb/s
PCIE = 64e9  # bytes/s a GPU: PCIe 5, 16 lanes
DRIVER = 50e9  # bytes/s in and out of the driver's machine: one InfiniBand port

# Bytes a token that pass through the driver: what an engine writes, what a scoring takes and gives back, what a lesson
# is (tokens int64, mask, log-probs, advantages), and each further number a token of a lesson.
WRITTEN, SCORED, TRAINED, FURTHER = 12, 17, 17, 4


@dataclass(frozen=True)
class Stage:
    name: str
    compute_s: float = 0.0
    wire_s: float = 0.0
    wire_bytes: float = 0.0  # that reach one GPU, or pass the driver

    @property
    def seconds(self) -> float:
        return self.compute_s + self.wire_s


@dataclass(frozen=True)
class StepTime:
    stages: Sequence[Stage]
    tokens: int  # of a step, prompts included

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
    """Who shares what over which links."""

    ranks: int
    per_node: int

    def share_s(self, whole: float, ranks: int) -> tuple[float, float]:
        """(seconds, bytes that reach one GPU) until each of `ranks` neighbours has, or has summed, its part of `whole`.

        An all-gather and a reduce-scatter move the same. Every GPU takes in all but its own part; between machines
        every machine takes in all but its own, through all of its ports at once. The slower of the two decides.
        """
        received, nodes = whole * (ranks - 1) / ranks, max(1, ranks // self.per_node)
        between = whole * (nodes - 1) / nodes / (self.per_node * INFINIBAND)
        return max(received / NVLINK, between), received

    def sum_s(self, part: float, replicas: int) -> tuple[float, float]:
        """(seconds, bytes) of summing `part` over the copies that hold it; between machines each GPU has its port."""
        moved = 2 * part * (replicas - 1) / replicas
        return moved / (NVLINK if self.ranks <= self.per_node else INFINIBAND), moved


def step_time(config: Config, sizes: Batches, actor: Role, critic: Role | None, memory: Memory) -> StepTime:
    links = Links(sizes.ranks, config.trainer.n_gpus_per_node)
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    kl_loss = config.actor_rollout_ref.actor.use_kl_loss and config.actor_rollout_ref.actor.kl_loss_type != "full"
    compares = config.kl_in_reward or kl_loss
    stages = [generation(config, sizes, actor, memory)]
    if needs_old_logprobs(config, declared_needs(config).loss):
        stages.append(scoring("old log-probs", sizes, actor, scoring_passes(sizes, rollout), links))
    if compares:
        stages.append(scoring("reference", sizes, actor, scoring_passes(sizes, ref), links))
    if critic is not None:
        section = config.critic
        values = sizes.scoring(
            section.ppo_micro_batch_size_per_gpu,
            section.ppo_micro_batch_size,
            section.use_dynamic_bsz,
            section.ppo_max_token_len_per_gpu,
        )
        stages.append(scoring("values", sizes, critic, values, links))
        stages.append(update("critic update", sizes, critic, links, memory))
    stages.append(update("actor update", sizes, actor, links, memory))
    if sizes.ranks > 1:
        seconds, moved = links.share_s(actor.number_bytes * actor.parameters, actor.shards)
        stages.append(Stage("weights to the engine", wire_s=seconds, wire_bytes=moved))
        stages.append(driver(sizes, scorings=sum(s.name in SCORINGS for s in stages)))
    return StepTime(stages, sizes.tokens)


def scoring_passes(sizes: Batches, section: RolloutSection | Ref) -> PassPlan:
    return sizes.scoring(
        section.log_prob_micro_batch_size_per_gpu,
        section.log_prob_micro_batch_size,
        section.log_prob_use_dynamic_bsz,
        section.log_prob_max_token_len_per_gpu,
    )


SCORINGS = ("old log-probs", "reference", "values")


def generation(config: Config, sizes: Batches, actor: Role, memory: Memory) -> Stage:
    """A share of the floor, and a time for each decode step. The floor: every step reads the weights and the keys and
    values so far, every token is multiplied with every matrix, every prompt is read once. What the cache has no room
    for waits its turn."""
    size, parallel = actor.architecture, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    samples, answer, prompt = sizes.samples_per_engine, sizes.answer_tokens, sizes.prompt_tokens
    if declared_needs(config).estimator.needs_greedy:
        samples += sizes.prompts_per_engine
    running = max(1, min(memory.cache.running, memory.cache.whole_sequences))
    steps = up(samples, running) * answer
    weights = actor.number_bytes * size.matrix_parameters
    cached = samples * (answer * prompt + answer * (answer - 1) // 2) * memory.cache.token_bytes
    flops = 2.0 * size.matrix_parameters * (samples * answer + sizes.prompts_per_engine * prompt)
    floor_s = (steps * weights / parallel + cached) / MEMORY_BANDWIDTH + flops / parallel / MATRIX_RATE
    # two sums over the engine's GPUs a layer, for every token
    moved = 4.0 * size.layers * size.hidden * actor.number_bytes * (parallel - 1) / parallel * samples * answer
    link = NVLINK if parallel <= config.trainer.n_gpus_per_node else INFINIBAND
    return Stage("generation", FLOOR_SHARE * floor_s + steps * DECODE_STEP_S, moved / link, moved)


def forward_s(role: Role, tokens: float, longest: int) -> float:
    """A forward pass: 2 operations a parameter and token, and attention over half the sample on average."""
    size = role.architecture
    flops = tokens * (2.0 * role.parameters + 2.0 * size.layers * size.query_size * longest)
    return flops / (training_share(role.parameters) * PEAK)


def training_share(parameters: int) -> float:
    """Between the measured models on a logarithmic scale; beyond them as the nearest."""
    (low, least), (high, most) = TRAINING_SHARES
    place = (math.log(parameters) - math.log(low)) / (math.log(high) - math.log(low))
    return least + (most - least) * min(1.0, max(0.0, place))


def scoring(name: str, sizes: Batches, role: Role, passes: PassPlan, links: Links) -> Stage:
    """One forward pass; sharded, each pass gathers every layer, and the whole scoring embeddings and head once."""
    compute_s = forward_s(role, sizes.tokens / sizes.ranks, sizes.longest)
    layers = role.parameters - role.outer
    seconds, moved = links.share_s(role.number_bytes * (passes.count * layers + role.outer), role.shards)
    return Stage(name, compute_s, seconds, moved)


def update(name: str, sizes: Batches, role: Role, links: Links, memory: Memory) -> Stage:
    """Forward and backward are three forward passes, four with checkpointing.

    On the wire: each pass gathers every layer twice, embeddings and head once; each mini-batch sums float32 gradients
    once, in its last pass, or in each where it must, over the shards and then over the copies. Offloaded bytes cross to
    the GPU and back.
    """
    updates, learned = role.updates, FLOAT32 * role.learned
    passes = updates.passes.count * updates.count
    tokens = sizes.tokens / sizes.ranks * updates.epochs
    compute_s = (4 if role.checkpointing else 3) * forward_s(role, tokens, sizes.longest)
    compute_s += updates.count * optimizer_bytes(role) / MEMORY_BANDWIDTH
    weights = role.number_bytes * (2 * (role.parameters - role.outer) + role.outer)
    gathering = links.share_s(passes * weights, role.shards)
    sums = updates.count if reduces_once(role, memory.gpu_bytes) else passes
    reducing = links.share_s(sums * learned, role.shards)
    copies = links.sum_s(sums * learned / role.shards, sizes.ranks // role.shards)
    offloaded = offloaded_bytes(role, passes, sums)
    moved = gathering[1] + reducing[1] + copies[1] + offloaded
    return Stage(name, compute_s, gathering[0] + reducing[0] + copies[0] + offloaded / PCIE, moved)


def optimizer_bytes(role: Role) -> float:
    """Gradient read; master and both moments read and written; the coarse weight written."""
    return (7 * FLOAT32 + role.number_bytes) * role.learned / (role.shards if role.sharded else 1)


def offloaded_bytes(role: Role, passes: int, sums: int) -> float:
    """Over PCIe a step. Moments come and go at each update. So do weights, for the passes and again for the optimizer
    with their masters; sharded, they come twice a pass, and gradients go as often as they are summed."""
    share = role.shards if role.sharded else 1
    moved = 0.0
    if role.offload_optimizer and not (role.sharded and role.offload_parameters):
        moved += role.updates.count * 2 * 2 * FLOAT32 * role.learned / share
    if role.offload_parameters:
        masters = FLOAT32 * role.learned if role.number_bytes < FLOAT32 else 0
        alone = role.updates.count * (4 * role.number_bytes * role.parameters + 2 * masters)
        among = FLOAT32 * (2 * passes * role.parameters + sums * role.learned) / share
        moved += among if role.sharded else alone
    return moved


def driver(sizes: Batches, scorings: int) -> Stage:
    """Answers come to it; every scoring and every lesson goes out from it."""
    further = scorings + (1 if sizes.critic is not None else 0)  # old, reference, values; returns
    train_batches = sizes.actor.epochs + (sizes.critic.epochs if sizes.critic is not None else 0)
    each = WRITTEN + SCORED * scorings + (TRAINED + FURTHER * further) * train_batches
    moved = float(each * sizes.tokens)
    return Stage("samples through the driver", wire_s=moved / DRIVER, wire_bytes=moved)
