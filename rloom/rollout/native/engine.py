"""rloom's own rollout engine: in process, on the actor's own weights; sequences enter and leave as they finish."""

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rloom.errors import ModelError
from rloom.models.head import HAS_TRITON
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling, WeightOwner
from rloom.rollout.limits import cache_capacity, wanted_cache_tokens
from rloom.rollout.native.allocator import RangeAllocator
from rloom.rollout.native.eager import EagerDecoder
from rloom.rollout.native.sampler import uniform_draws
from rloom.rollout.native.scheduler import Scheduler
from rloom.rollout.native.slots import Slots
from rloom.rollout.native.token_cache import MixedLayerShapes, ShapeProbe, TokenCache, TokenShape

if TYPE_CHECKING:
    from rloom.rollout.native.graph_decoder import GraphDecoder

log = logging.getLogger(__name__)
ENOUGH = 0.9  # of the room there is: a few places more are not worth capturing everything anew
STEPS = 8  # between two looks at what is done


class NativeRollout:
    def __init__(
        self,
        network: PolicyNetwork,
        *,
        owner: WeightOwner,
        max_sequences: int,
        max_prefill_tokens: int,
        memory_share: float,
        free_cache: bool,
        eager: bool = False,  # no captured graphs
        longest_prompt: int = 0,  # known beforehand: the cache need not grow when one comes
    ) -> None:
        self.network, self.owner, self.device = network, owner, owner.device
        self.max_sequences, self.max_prefill_tokens = max_sequences, max_prefill_tokens
        self.memory_share, self.free_cache = memory_share, free_cache
        self.eager, self.longest_prompt = eager, longest_prompt
        self.decoder: GraphDecoder | None = None
        self.shape: TokenShape | None = None  # known once the weights are on the device
        self.eager_decoder = EagerDecoder(
            network, owner.device, slots=max_sequences, max_prefill_tokens=max_prefill_tokens
        )
        self.stays_on_device = owner.device.type == "cuda" and HAS_TRITON
        if owner.device.type == "cuda" and not HAS_TRITON:
            log.warning("triton is not installed: the native engine decodes step by step from Python, more slowly")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        if not requests:
            return
        self.network.module.eval()
        with self.owner.on_device():
            if self.stays_on_device:
                try:
                    yield from self.decode(requests, sampling)
                    return
                except MixedLayerShapes as error:  # raised before any answer
                    log.warning(f"{error}: the native engine decodes step by step from Python, more slowly")
                    self.stays_on_device = False
            yield from self.eager_decoder.generate(requests, sampling)

    def decode(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Keep the device busy: look at the steps before the last ones while those run."""
        decoder = self.decoder_for(requests, sampling)
        decoder.slots.set_sampling(sampling)
        scheduler = Scheduler(requests, sampling, decoder.slots.count, RangeAllocator(decoder.cache.capacity_tokens))
        before = None
        while scheduler.waiting or scheduler.running:
            while scheduler.should_admit() and (entered := scheduler.admit(self.max_prefill_tokens)):
                decoder.prefill(entered, uniform_draws([requests[answer.request] for answer in entered], sampling))
            steps = min(STEPS, scheduler.steps_left)
            decoder.run(scheduler.running, steps)
            scheduler.step += steps
            now = decoder.snapshot_done(scheduler.running)
            for snapshot in (
                before,
                now if steps < STEPS else None,
            ):  # near the end there is nothing to run meanwhile
                done = snapshot.done() if snapshot is not None else []
                if done:
                    completions = decoder.read_completions(done)
                    scheduler.release(done)
                    yield from zip((answer.request for answer in done), completions, strict=True)
            before = now

    def decoder_for(self, requests: Sequence[Request], sampling: Sampling) -> "GraphDecoder":
        """What the last call left, where it is large enough and the weights are where its graphs look for them."""
        slots, answer = min(self.max_sequences, len(requests)), sampling.max_new_tokens
        prompt = max(self.longest_prompt, *(len(request.tokens) for request in requests))
        wanted = wanted_cache_tokens(slots, len({request.tokens for request in requests}), prompt, answer)
        old = self.decoder
        if old is not None:
            capacity = self.capacity(prompt + answer)
            enough = max(prompt + answer, min(wanted, int(ENOUGH * capacity)))
            # room shrinks, too: the optimizer's moments come with the first update
            roomy = (
                enough <= old.cache.capacity_tokens <= capacity
                and old.slots.count >= slots
                and old.slots.longest_answer >= answer
            )
            if roomy and old.weights_stayed():
                old.cache.wake()
                return old
            slots, answer = max(slots, old.slots.count), max(answer, old.slots.longest_answer)
            wanted = max(wanted, old.cache.capacity_tokens)
            old.close()
        self.decoder = None  # while there is none, its memory counts as free
        self.decoder = self.new_decoder(slots, answer, min(wanted, self.capacity(prompt + answer)))
        return self.decoder

    def new_decoder(self, slots: int, longest_answer: int, capacity_tokens: int) -> "GraphDecoder":
        from rloom.rollout.native.graph_decoder import GraphDecoder  # imports triton

        if capacity_tokens < slots * longest_answer:
            log.info(
                f"the key-value cache has room for {capacity_tokens:,} tokens "
                f"(actor_rollout_ref.rollout.gpu_memory_utilization={self.memory_share}): fewer than "
                f"{slots} sequences run at a time when they are long"
            )
        cache = TokenCache(self.token_shape(), capacity_tokens, self.device)
        cache.wake()
        return GraphDecoder(self.network, cache, Slots(slots, longest_answer, self.device), capture=not self.eager)

    @torch.no_grad()
    def token_shape(self) -> TokenShape:
        """From one token that goes through the model, so that it holds for any family."""
        if self.shape is None:
            probe, zero = ShapeProbe(), torch.zeros(1, dtype=torch.long, device=self.device)
            with self.network.decoder.uncompiled_layers():
                self.network.decoder.packed_hidden(zero, probe, zero)
            self.shape = probe.shape()
        return self.shape

    def capacity(self, longest: int) -> int:
        """Places that fit the share of the GPU's memory; at least one sequence must."""
        if self.device.type != "cuda":  # nobody else wants a share of the host's
            return sys.maxsize
        each = self.token_shape().bytes
        free, total = torch.cuda.mem_get_info(self.device)
        kept_by_torch = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        ours = self.decoder.cache.bytes if self.decoder is not None else 0  # kept from the last time
        free += kept_by_torch + ours
        capacity_tokens = cache_capacity(each, memory_share=self.memory_share, total_bytes=total, free_bytes=free)
        if capacity_tokens < longest:
            raise ModelError(
                f"actor_rollout_ref.rollout.gpu_memory_utilization={self.memory_share}: not one sequence of {longest} "
                f"tokens ({each * longest / 2**30:.1f} GiB) fits beside what is on the GPU "
                f"({free / 2**30:.1f} GiB free); raise it, shorten the answers, or offload "
                "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=True)"
            )
        return capacity_tokens

    def load_weights(self) -> None:
        """It reads the actor's own weights."""

    def sleep(self) -> None:
        if self.free_cache:
            self.eager_decoder.release()
            if self.decoder is not None:
                self.decoder.cache.sleep()

    def wake(self) -> None:
        """The cache comes back when it is known how much is asked for."""
