"""rloom's own rollout engine: in process, on the actor's own weights; sequences enter and leave as they finish."""

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rloom.errors import ModelError
from rloom.models.head import HAS_TRITON
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Host, Request, Sampling
from rloom.rollout.native.passes import Passes
from rloom.rollout.native.ranges import Ranges
from rloom.rollout.native.sampler import luck_of
from rloom.rollout.native.schedule import Schedule
from rloom.rollout.native.slots import Slots
from rloom.rollout.native.token_cache import ShapeProbe, TokenCache, TokenShape, UnlikeLayers

if TYPE_CHECKING:
    from rloom.rollout.native.resident import Resident

log = logging.getLogger(__name__)
FREE_SHARE = 0.8  # of the free memory: activations and the sampler need some, too
ENOUGH = 0.9  # of the room there is: a few places more are not worth capturing everything anew
STEPS = 8  # between two looks at what is done


class NativeRollout:
    def __init__(
        self,
        network: PolicyNetwork,
        *,
        host: Host,
        max_sequences: int,
        max_prefill_tokens: int,
        memory_share: float,
        free_cache: bool,
        eager: bool = False,  # no captured graphs
        longest_prompt: int = 0,  # known beforehand: the cache need not grow when one comes
    ) -> None:
        self.network, self.host, self.device = network, host, host.device
        self.max_sequences, self.max_prefill_tokens = max_sequences, max_prefill_tokens
        self.memory_share, self.free_cache = memory_share, free_cache
        self.eager, self.longest_prompt = eager, longest_prompt
        self.resident: Resident | None = None
        self.shape: TokenShape | None = None  # known once the weights are on the device
        self.passes = Passes(network, host.device, slots=max_sequences, max_prefill_tokens=max_prefill_tokens)
        self.stays_on_device = host.device.type == "cuda" and HAS_TRITON
        if host.device.type == "cuda" and not HAS_TRITON:
            log.warning("triton is not installed: the native engine decodes step by step from Python, more slowly")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        if not requests:
            return
        self.network.module.eval()
        with self.host.on_device():
            if self.stays_on_device:
                try:
                    yield from self.decode(requests, sampling)
                    return
                except UnlikeLayers as error:  # raised before any answer
                    log.warning(f"{error}: the native engine decodes step by step from Python, more slowly")
                    self.stays_on_device = False
            yield from self.passes.generate(requests, sampling)

    def decode(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Keep the device busy: look at the steps before the last ones while those run."""
        resident = self.resident_for(requests, sampling)
        resident.slots.set_sampling(sampling)
        schedule = Schedule(requests, sampling, resident.slots.count, Ranges(resident.cache.places))
        before = None
        while schedule.waiting or schedule.running:
            while schedule.should_admit() and (entered := schedule.admit(self.max_prefill_tokens)):
                resident.prefill(entered, luck_of([requests[answer.request] for answer in entered], sampling))
            steps = min(STEPS, schedule.steps_left)
            resident.run(schedule.running, steps)
            schedule.step += steps
            now = resident.look(schedule.running)
            for look in (before, now if steps < STEPS else None):  # near the end there is nothing to run meanwhile
                done = look.done() if look is not None else []
                if done:
                    completions = resident.fetch(done)
                    schedule.leave(done)
                    yield from zip((answer.request for answer in done), completions, strict=True)
            before = now

    def resident_for(self, requests: Sequence[Request], sampling: Sampling) -> "Resident":
        """What the last call left, where it is large enough and the weights are where its graphs look for them."""
        slots, answer = min(self.max_sequences, len(requests)), sampling.max_new_tokens
        prompt = max(self.longest_prompt, *(len(request.tokens) for request in requests))
        wanted = slots * answer + min(slots, len({request.tokens for request in requests})) * prompt
        old = self.resident
        if old is not None:
            room = self.room(prompt + answer)
            enough = max(prompt + answer, min(wanted, int(ENOUGH * room)))
            # room shrinks, too: the optimizer's moments come with the first update
            roomy = (
                enough <= old.cache.places <= room and old.slots.count >= slots and old.slots.longest_answer >= answer
            )
            if roomy and old.weights_stayed():
                old.cache.wake()
                return old
            slots, answer = max(slots, old.slots.count), max(answer, old.slots.longest_answer)
            wanted = max(wanted, old.cache.places)
            old.close()
        self.resident = None  # while there is none, its memory counts as free
        self.resident = self.new_resident(slots, answer, min(wanted, self.room(prompt + answer)))
        return self.resident

    def new_resident(self, slots: int, longest_answer: int, places: int) -> "Resident":
        from rloom.rollout.native.resident import Resident  # imports triton

        if places < slots * longest_answer:
            log.info(
                f"the key-value cache has room for {places:,} tokens "
                f"(actor_rollout_ref.rollout.gpu_memory_utilization={self.memory_share}): fewer than "
                f"{slots} sequences run at a time when they are long"
            )
        cache = TokenCache(self.token_shape(), places, self.device)
        cache.wake()
        return Resident(self.network, cache, Slots(slots, longest_answer, self.device), capture=not self.eager)

    @torch.no_grad()
    def token_shape(self) -> TokenShape:
        """From one token that goes through the model, so that it holds for any family."""
        if self.shape is None:
            probe, zero = ShapeProbe(), torch.zeros(1, dtype=torch.long, device=self.device)
            with self.network.decoder.as_written():
                self.network.decoder.packed_hidden(zero, probe, zero)
            self.shape = probe.shape()
        return self.shape

    def room(self, longest: int) -> int:
        """Places that fit the share of the GPU's memory; at least one sequence must."""
        if self.device.type != "cuda":  # nobody else wants a share of the host's
            return sys.maxsize
        each = self.token_shape().bytes
        free, total = torch.cuda.mem_get_info(self.device)
        kept_by_torch = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        ours = self.resident.cache.bytes if self.resident is not None else 0  # kept from the last time
        free += kept_by_torch + ours
        places = int(min(self.memory_share * total, FREE_SHARE * free) // each)
        if places < longest:
            raise ModelError(
                f"actor_rollout_ref.rollout.gpu_memory_utilization={self.memory_share}: not one sequence of {longest} "
                f"tokens ({each * longest / 2**30:.1f} GiB) fits beside what is on the GPU "
                f"({free / 2**30:.1f} GiB free); raise it, shorten the answers, or offload "
                "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=True)"
            )
        return places

    def load_weights(self) -> None:
        """It reads the actor's own weights."""

    def sleep(self) -> None:
        if self.free_cache:
            self.passes.release()
            if self.resident is not None:
                self.resident.cache.sleep()

    def wake(self) -> None:
        """The cache comes back when it is known how much is asked for."""
