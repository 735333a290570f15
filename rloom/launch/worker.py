"""One worker: the roles of its slot, built from the configuration. A run has one in its own process, or several.

Roles by name: actor, critic, ref (training engines), rollout, reward (the reward model), weight_sync (weights from
actor to rollout), files (the policy as a Hugging Face folder).
"""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rloom.batch import Batch
from rloom.config.schema import Actor, Config, Critic, SftConfig
from rloom.data.chat import stop_token_ids
from rloom.engines.base import Engine, Placement
from rloom.engines.distributed import Broadcast, all_gather_objects, as_whole_group, join
from rloom.engines.weight_sync import WeightSync
from rloom.launch.engines import model_work, rank_of, reads_own_part
from rloom.launch.model_sources import policy_source
from rloom.launch.models import (
    check_rollout,
    critic_engine,
    critic_network,
    needs_critic,
    pick_device,
    placement,
    policy_engine,
    policy_network,
    reference_engine,
    rollout_engine,
)
from rloom.launch.rewards import has_reward_model, reward_scorer
from rloom.launch.servers import gpus_of_workers
from rloom.models.checkpoint_format import save_description, save_pretrained
from rloom.models.load import allocate, load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Rollout, WeightOwner, report_interval_s
from rloom.rollout.kinds import KEY as ROLLOUT_KEY
from rloom.runs.metrics import ModelWork
from rloom.runtime.placement import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, WorkerLayout, WorkerSlot
from rloom.training.probe import ProbeRequests, check_first, compared

log = logging.getLogger("rloom.calls")  # in the log file of a worker's process
WEIGHT_SYNC, FILES = "weight_sync", "files"


class Rendezvous(dict[str, str]):
    """host:port of each process group: by the name of its pool, or `weight_sync`."""


C = TypeVar("C", Config, SftConfig)


class BaseWorker(Generic[C]):
    """What the worker of any kind of training has."""

    def __init__(self, config: C, layout: WorkerLayout, slot: WorkerSlot) -> None:
        self.config: C = config
        self.layout, self.slot = layout, slot
        self.device = pick_device(config)
        self.roles: dict[str, Any] = {}

    @property
    def shares_gpu(self) -> bool:
        return self.layout.gpus_per_worker < 1

    def build(self, rendezvous: Rendezvous) -> dict[str, ModelWork]:
        """Load the models, all ranks of a pool together. Returns their work by role, where it is known."""
        raise NotImplementedError

    def join_pool(self, rendezvous: Rendezvous, rank: int) -> None:
        pool = self.slot.pool
        join(rank, pool.size, address=rendezvous[pool.name], device=self.device, shared=self.shares_gpu)

    def add_files(self, network: PolicyNetwork, tokenizer: PreTrainedTokenizerBase) -> None:
        """The actor's ranks, which have all weights together, write files."""
        self.roles[FILES] = (
            ModelFiles(network, tokenizer)
            if self.slot.alone
            else GatheredFiles(network, tokenizer, self.roles[ACTOR], writes=self.slot.rank == 0)
        )


class Worker(BaseWorker[Config]):
    @property
    def trained_role(self) -> Actor | Critic:
        """The section that divides the ranks of the pool. Roles that share workers are divided in one way."""
        return self.config.critic if self.slot.pool.roles == (CRITIC,) else self.config.actor_rollout_ref.actor

    def build(self, rendezvous: Rendezvous) -> dict[str, ModelWork]:
        pool, config, roles = self.slot.pool, self.config, self.layout.roles_of(self.slot)
        # seed before LoRA weights are created, so that every world size starts from the same adapter
        torch.manual_seed(config.data.seed)
        learns = ACTOR in roles or CRITIC in roles or REFERENCE in roles
        tokenizer = load_tokenizer(policy_source(config))  # first: fails at once if this machine has no such model
        if ROLLOUT in roles:
            check_rollout(config)
        divides_engine = ROLLOUT in roles and config.actor_rollout_ref.rollout.workers_per_engine > 1
        if pool.size > 1 and (learns or divides_engine):
            self.join_pool(rendezvous, rank_of(self.trained_role, self.slot.rank, pool.size))
        empty = self.slot.rank > 0  # rank 0 reads the model and broadcasts its weights
        described = empty or reads_own_part(config.actor_rollout_ref.actor, pool.size)
        if REFERENCE in roles and config.has_reference_model:
            # divided before the policy is read: the host holds one whole copy at a time
            self.roles[REFERENCE] = reference_engine(config, ranks=pool.size, empty=empty)
        network = policy_network(config, empty=described) if ACTOR in roles else None
        work = {ACTOR: None if network is None else model_work(network)}  # before an engine divides it
        if network is not None:
            frozen = self.roles.get(REFERENCE)
            self.roles[ACTOR] = policy_engine(config, network, reference=frozen, ranks=pool.size)
        if CRITIC in roles and needs_critic(config):
            critic = critic_network(config, empty=empty or reads_own_part(config.critic, pool.size))
            work[CRITIC] = model_work(critic)
            self.roles[CRITIC] = critic_engine(config, critic, ranks=pool.size)
        if REWARD in roles and has_reward_model(config):
            self.roles[REWARD] = reward_scorer(config, self.layout)
        if config.actor_rollout_ref.rollout.kind.own_model:
            self.add_own_rollout(network, tokenizer)
        elif ROLLOUT in roles:
            self.add_rollout(network, tokenizer)
        self.set_report_interval()
        self.connect(rendezvous)
        self.start_rollout()
        for name in (ACTOR, CRITIC, REFERENCE, REWARD):
            if name in self.roles and self.slot.number == self.layout.workers_of(name)[0]:
                log.info(f"{name}: {self.roles[name].size:,} parameters, {self.roles[name].description}")
        return {name: found for name, found in work.items() if found is not None}

    def set_report_interval(self) -> None:
        if ROLLOUT in self.roles and not self.config.actor_rollout_ref.rollout.uses_servers:  # those have one client
            self.roles[ROLLOUT].report_every_s = report_interval_s(len(self.layout.workers_of(ROLLOUT)))

    def add_rollout(self, network: PolicyNetwork | None, tokenizer: PreTrainedTokenizerBase) -> None:
        """On the actor's own parameters if this worker holds all of them; otherwise on a copy."""
        if network is None or not self.slot.alone:
            network = policy_network(self.config, empty=True)
            where = placement(self.config, self.config.actor_rollout_ref.actor.engine_memory)
            compiled = self.config.actor_rollout_ref.actor.use_torch_compile
            owner: WeightOwner = GenerationCopy(network, where, compiled=compiled)
        else:
            owner = self.roles[ACTOR]
        self.roles[ROLLOUT] = rollout_engine(self.config, network, owner, tokenizer)
        self.roles[FILES] = ModelFiles(network, tokenizer)

    def add_own_rollout(self, network: PolicyNetwork | None, tokenizer: PreTrainedTokenizerBase) -> None:
        """An engine that reads the model itself."""
        if network is not None:
            self.add_files(network, tokenizer)
        # only the first worker calls servers: the model is in processes of their own
        one_client = self.config.actor_rollout_ref.rollout.uses_servers
        gpus = gpus_of_workers(alone=self.slot.alone) if one_client else ()
        if ROLLOUT in self.layout.roles_of(self.slot) and (self.slot.rank == 0 or not one_client):
            described = network or policy_network(self.config, empty=True)  # for the configuration of its adapter
            owner = self.roles.get(ACTOR) if self.slot.alone else None
            ranks = self.ranks_of_engine()
            with as_whole_group(ranks) if len(ranks) > 1 else nullcontext():
                self.roles[ROLLOUT] = rollout_engine(self.config, described, owner, tokenizer, gpus)

    def ranks_of_engine(self) -> list[int]:
        """The ranks, in the process group of the pool, of the workers that divide an engine with this one."""
        pool, size = self.slot.pool, self.config.actor_rollout_ref.rollout.workers_per_engine
        numbers = self.layout.workers_of(ROLLOUT)
        first = numbers.index(self.slot.number) // size * size
        return sorted(
            rank_of(self.trained_role, number - pool.first, pool.size) for number in numbers[first : first + size]
        )

    def start_rollout(self) -> None:
        """Send the actor's weights. An engine that reads the model itself has what is frozen; where it shares workers
        with the actor, compare what both compute."""
        own_model = self.config.actor_rollout_ref.rollout.kind.own_model
        if WEIGHT_SYNC in self.roles:
            self.roles[WEIGHT_SYNC].sync(0, frozen=not own_model)
        shared = own_model and {ACTOR, ROLLOUT} <= {*self.slot.pool.roles}
        if shared and (self.slot.alone or not self.config.actor_rollout_ref.rollout.uses_servers):
            section, rollout = self.config.actor_rollout_ref.rollout, self.roles.get(ROLLOUT)
            longest = self.config.data.longest_sample
            check_agreement(
                rollout, self.roles[ACTOR], section.name, longest, section.temperature, alone=self.slot.alone
            )

    def connect(self, rendezvous: Rendezvous) -> None:
        """Weights go from the actor to the rollout engine of the same worker, or from its rank 0 to other workers."""
        actor: Engine | None = self.roles.get(ACTOR)
        rollout: Rollout | None = self.roles.get(ROLLOUT)
        if actor is None and rollout is None:
            return
        source, target = self.layout.pool_of(ACTOR), self.layout.pool_of(ROLLOUT)
        section = self.config.actor_rollout_ref.rollout
        checks: dict[str, Any] = {"compares": not section.kind.own_model, "setting": f"{ROLLOUT_KEY}={section.name}"}
        if source is target:
            shares_memory = self.slot.alone and not section.kind.own_model
            self.roles[WEIGHT_SYNC] = WeightSync(None if shares_memory else actor, rollout, **checks)
            return
        channel = None
        if self.slot.rank == 0 or rollout is not None:
            member = 1 + self.slot.rank if rollout is not None else 0
            channel = Broadcast(
                member, 1 + target.size, address=rendezvous[WEIGHT_SYNC], device=self.device, shared=self.shares_gpu
            )
        self.roles[WEIGHT_SYNC] = WeightSync(actor, rollout, channel, **checks)


class GenerationCopy:
    """A copy of the policy that only generates. The first sync fills it: the host never holds its weights."""

    def __init__(self, network: PolicyNetwork, where: Placement, *, compiled: bool) -> None:
        self.device = where.device
        network.module.requires_grad_(False)
        allocate(network.module, where.device, where.dtype)
        network.module.to(where.device)  # buffers
        if compiled and where.device.type == "cuda":
            network.compile()

    def on_device(self) -> nullcontext[None]:
        return nullcontext()


class ModelFiles:
    """Writes the policy as files: its configuration and tokenizer, or with its weights."""

    def __init__(self, network: PolicyNetwork, tokenizer: PreTrainedTokenizerBase) -> None:
        self.network, self.tokenizer = network, tokenizer

    def stop_ids(self) -> tuple[int, ...]:
        return stop_token_ids(self.tokenizer, self.network.decoder.base.generation_config.eos_token_id)

    def describe(self, folder: Path) -> None:
        save_description(self.network, self.tokenizer, folder)

    def write_pretrained(self, folder: Path) -> None:
        save_pretrained(self.network, self.tokenizer, folder)


class GatheredFiles(ModelFiles):
    """The same where the ranks of the actor shard the weights: all call it together, and rank 0 writes."""

    def __init__(
        self, network: PolicyNetwork, tokenizer: PreTrainedTokenizerBase, engine: Engine, *, writes: bool
    ) -> None:
        super().__init__(network, tokenizer)
        self.engine, self.writes = engine, writes

    def describe(self, folder: Path) -> None:
        if self.writes:
            super().describe(folder)

    def write_pretrained(self, folder: Path) -> None:
        gathered = ((name, tensor.cpu()) for name, tensor in self.engine.weights())
        weights = {name: tensor for name, tensor in gathered if self.writes}
        if self.writes:
            save_pretrained(self.network, self.tokenizer, folder, weights)


def check_agreement(
    rollout: Rollout | None, actor: Engine, name: str, longest: int, temperature: float, *, alone: bool = True
) -> None:
    """All ranks of the actor call it together, those without a rollout engine too. `alone`: there is one rank."""
    probe = ProbeRequests(longest, temperature)
    own = None if rollout is None else rollout.generate_all(probe.all())
    completions = next(found for found in ([own] if alone else all_gather_objects(own)) if found is not None)
    trajectories = probe.trajectories(completions)
    check_first(compared(trajectories, actor.score(Batch.pack(trajectories))), f"{ROLLOUT_KEY}={name}")
