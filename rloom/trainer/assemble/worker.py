"""One worker: the roles of its seat, built from the configuration. One process is one; with Ray there are many.

Roles by name: actor, critic, ref (engines), rollout, publish (weights from actor to rollout), files (the policy as a
Hugging Face folder).
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rloom.config.schema import Config
from rloom.data.chat import stop_token_ids
from rloom.engines.distributed import Broadcast, join
from rloom.engines.weight_sync import WeightSync
from rloom.models.load import load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.save import save_description, save_pretrained
from rloom.runtime.placement import ACTOR, CRITIC, REFERENCE, ROLLOUT, WorkerLayout, WorkerSlot
from rloom.trainer.assemble.inputs import policy_source
from rloom.trainer.assemble.models import (
    AnyEngine,
    critic_engine,
    has_reference_model,
    needs_critic,
    pick_device,
    placement,
    policy_engine,
    policy_network,
    reference_engine,
    rollout_engine,
)

PUBLISH, FILES = "publish", "files"


class Rendezvous(dict[str, str]):
    """host:port by what meets there: the name of a pool, or `publish`."""


class Worker:
    def __init__(self, config: Config, layout: WorkerLayout, slot: WorkerSlot) -> None:
        self.config, self.layout, self.slot = config, layout, slot
        self.device = pick_device(config)
        self.roles: dict[str, Any] = {}

    @property
    def shares_gpu(self) -> bool:
        return self.layout.gpus_per_worker < 1

    def build(self, rendezvous: Rendezvous) -> dict[str, int]:
        """Load the models; ranks of one pool do it together. Parameters by role."""
        pool, config = self.slot.pool, self.config
        # what is drawn (LoRA) is drawn as in one process: by the first rank, and by whoever generates beside
        torch.manual_seed(config.data.seed)
        learns = ACTOR in pool.roles or CRITIC in pool.roles or REFERENCE in pool.roles
        tokenizer = load_tokenizer(policy_source(config))  # before anyone waits: is the model on this machine at all?
        if pool.size > 1 and learns:
            join(self.slot.rank, pool.size, address=rendezvous[pool.name], device=self.device, shared=self.shares_gpu)
        empty = self.slot.rank > 0  # the first rank reads the model and hands out its weights
        network = policy_network(config, empty=empty) if ACTOR in pool.roles else None
        if REFERENCE in pool.roles and has_reference_model(config):
            self.roles[REFERENCE] = reference_engine(config, ranks=pool.size, empty=empty)
        if network is not None:
            frozen = self.roles.get(REFERENCE)
            self.roles[ACTOR] = policy_engine(config, network, reference=frozen, ranks=pool.size)
        if CRITIC in pool.roles and needs_critic(config):
            self.roles[CRITIC] = critic_engine(config, ranks=pool.size, empty=empty)
        if ROLLOUT in pool.roles:
            self.add_rollout(network, tokenizer)
        self.connect(rendezvous)
        return {name: self.roles[name].size for name in (ACTOR, CRITIC) if name in self.roles}

    def add_rollout(self, network: PolicyNetwork | None, tokenizer: PreTrainedTokenizerBase) -> None:
        """On the actor's own weights where it has them whole; otherwise on a copy."""
        if network is None or not self.slot.alone:
            dtype = placement(self.config, self.config.actor_rollout_ref.actor.fsdp_config).dtype
            network = policy_network(self.config, dtype=dtype)
            host: Any = GenerationCopy(
                network, dtype, self.config.actor_rollout_ref.actor.use_torch_compile, self.device
            )
        else:
            host = self.roles[ACTOR]
        self.roles[ROLLOUT] = rollout_engine(self.config, network, host, tokenizer)
        self.roles[FILES] = ModelFiles(network, tokenizer)

    def connect(self, rendezvous: Rendezvous) -> None:
        """Weights flow within each worker, or from the actor's first to every worker that generates."""
        actor: AnyEngine | None = self.roles.get(ACTOR)
        generates = ROLLOUT in self.slot.pool.roles
        copy = self.roles[FILES].network.module if generates and (actor is None or not self.slot.alone) else None
        source, rollout = self.layout.pool_of(ACTOR), self.layout.pool_of(ROLLOUT)
        if actor is None and copy is None:
            return
        channel = None
        if source is not rollout and (self.slot.rank == 0 or generates):
            member = 1 + self.slot.rank if generates else 0
            channel = Broadcast(
                member, 1 + rollout.size, address=rendezvous[PUBLISH], device=self.device, shared=self.shares_gpu
            )
        if copy is None and source is rollout:
            self.roles[PUBLISH] = self.roles[ROLLOUT]  # the weights are the actor's own
        else:
            self.roles[PUBLISH] = WeightSync(actor, copy, channel)


class GenerationCopy:
    """What a rollout engine needs of a training engine, for a model that only generates."""

    def __init__(self, network: PolicyNetwork, dtype: torch.dtype, compiled: bool, device: torch.device) -> None:
        network.module.requires_grad_(False)
        network.cast(dtype)  # an adapter is made more precisely than it is asked for
        network.module.to(device)
        if compiled and device.type == "cuda":
            network.compile()
        self.device = device

    def on_device(self) -> nullcontext[None]:
        return nullcontext()


class ModelFiles:
    """The policy as files: what it is, and with its weights."""

    def __init__(self, network: PolicyNetwork, tokenizer: PreTrainedTokenizerBase) -> None:
        self.network, self.tokenizer = network, tokenizer

    def stop_ids(self) -> tuple[int, ...]:
        return stop_token_ids(self.tokenizer, self.network.decoder.base.generation_config.eos_token_id)

    def describe(self, folder: Path) -> None:
        save_description(self.network, self.tokenizer, folder)

    def write_pretrained(self, folder: Path) -> None:
        save_pretrained(self.network, self.tokenizer, folder)
