"""rloom's own rollout engine: in process, on the actor's own weights, with continuous batching."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rloom.errors import ModelError
from rloom.models.head import HAS_TRITON
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Rollout, WeightOwner, copy_weights
from rloom.rollout.limits import PAGE_TOKENS, cache_capacity, wanted_cache_tokens, with_queued
from rloom.rollout.native.eager import EagerSession
from rloom.rollout.native.session import Finished, Progress, Session
from rloom.rollout.native.slot_cache import SlotCache
from rloom.rollout.native.slots import Slots
from rloom.rollout.native.token_cache import MixedLayerShapes, ShapeProbe, TokenCache, TokenShape
from rloom.transfer import tensors_of

if TYPE_CHECKING:
    from rloom.rollout.native.graph_decoder import GraphDecoder

log = logging.getLogger(__name__)
LARGE_ENOUGH = 0.9  # of the largest cache that fits: a slightly larger one is not worth capturing all graphs again


class Expected(NamedTuple):
    """Conversations that were announced: see Rollout.expect."""

    sequences: int
    prompts: int
    tokens: int


class NativeRollout(Rollout):
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
        longest_prompt: int = 0,  # known beforehand, so that the cache need not grow later
        records_routing: bool = False,  # completions have the experts that the model's routers chose
        keeps_cache: bool = False,  # of interrupted answers, whatever happens to the weights until they go on
    ) -> None:
        self.network, self.owner, self.device = network, owner, owner.device
        self.max_sequences, self.max_prefill_tokens = max_sequences, max_prefill_tokens
        self.memory_share, self.free_cache, self.keeps_cache = memory_share, free_cache and not keeps_cache, keeps_cache
        self.eager, self.longest_prompt, self.page_tokens = eager, longest_prompt, PAGE_TOKENS
        self.routing_shape = network.decoder.install_replay() if records_routing else None
        self.ids, self.version = count(), 0
        self.unfinished: set[int] = set()  # requests that `poll` has to report
        self.waiting: dict[int, Request] = {}  # for a session that they fit
        self.expected = Expected(0, 0, 0)
        self.session: Session | None = None
        self.on_device = ExitStack()  # holds the weights on the device during a session
        self.decoder: GraphDecoder | None = None
        self.slot_cache: SlotCache | None = None
        self.shape: TokenShape | None = None  # known once the weights are on the device
        self.uses_graphs = self.device.type == "cuda" and HAS_TRITON
        if self.device.type == "cuda" and not HAS_TRITON:
            log.warning("triton is not installed: the native engine decodes step by step from Python, more slowly")

    def submit(self, request: Request) -> int:
        assert request.begun is None or len(request.begun.tokens) < request.sampling.max_new_tokens
        assert request.begun is None or self.routing_shape is None, "the routing of begun tokens is not recorded"
        number = next(self.ids)
        self.waiting[number] = request
        self.unfinished.add(number)
        return number

    def expect(self, sequences: int, prompts: int, tokens: int) -> None:
        self.expected = Expected(sequences, prompts, tokens)

    def end_conversation(self, conversation: int) -> None:
        if self.session is not None:
            self.session.end_conversation(conversation)
            self.end_if_idle(self.session)

    def max_unfinished(self) -> int:
        return with_queued(self.max_sequences)

    def cancel(self, request: int) -> None:
        self.unfinished.discard(request)
        self.waiting.pop(request, None)
        if self.session is not None:
            self.session.cancel(request)
            self.end_if_idle(self.session)

    def interrupt(self, request: int) -> Completion:
        [completion] = self.interrupt_all([request])
        return completion

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        waiting = {number: self.waiting.pop(number) for number in requests if number in self.waiting}
        found = {number: Finished.waiting(number, Progress.of(request)) for number, request in waiting.items()}
        if self.session is not None:
            try:
                finished = self.session.interrupt([number for number in requests if number not in waiting])
                self.end_if_idle(self.session)
            except BaseException:
                self.abort()
                raise
            found |= {one.request: one for one in finished}
        self.unfinished.difference_update(requests)
        return [self.completion(found[number]) for number in requests]

    def tokens_so_far(self, request: int) -> Tensor:
        return super().tokens_so_far(request) if self.session is None else self.session.tokens_so_far(request)

    def poll(self) -> list[Completion]:
        if self.session is None and not self.waiting:
            return []
        try:
            if self.session is not None and self.session.idle and not self.waiting:
                return []  # it keeps conversations
            session = self.session = self.session or self.open_session()
            for number, request in list(self.waiting.items()):
                if session.fits(request):
                    session.add(number, self.waiting.pop(number))
                elif request.conversation is not None:
                    break  # later turns would keep this session open: it gets one of its own before them
            finished = session.advance()
            self.end_if_idle(session)
        except BaseException:
            self.abort()
            raise
        self.unfinished.difference_update(one.request for one in finished)
        return [self.completion(one) for one in finished]

    def completion(self, one: Finished) -> Completion:
        return Completion(
            one.request,
            one.tokens_L,
            one.logprobs_L,
            one.stopped,
            self.version,
            one.experts_LMK,
            one.reused_tokens,
            one.interrupted,
        )

    def open_session(self) -> Session:
        """For the first request that waits, with memory for all that can join it."""
        first = next(iter(self.waiting.values()))
        kind = first.sampling.without_limit
        requests = [request for request in self.waiting.values() if request.sampling.without_limit == kind]
        self.load_model()
        if self.uses_graphs:
            try:
                from rloom.rollout.native.graph_session import GraphSession  # imports triton

                return GraphSession(self.decoder_for(requests), first, self.max_prefill_tokens)
            except MixedLayerShapes as error:
                log.warning(f"{error}: the native engine decodes step by step from Python, more slowly")
                self.uses_graphs = False
        cache, longest = self.slot_cache_for(requests), self.longest_answer(requests)
        return EagerSession(self.network, cache, first, longest, self.max_prefill_tokens, self.device)

    def load_model(self) -> None:
        self.network.module.eval()
        self.on_device.enter_context(self.owner.on_device())
        if self.uses_graphs:
            self.network.decoder.join_products()

    def end_if_idle(self, session: Session) -> None:
        """A session that keeps caches goes on, with another sampling if need be, unless the next request is too large
        for it."""
        waits = next(iter(self.waiting.values()), None)
        if session.idle and (not session.keeps_conversations or (waits is not None and not session.fits(waits))):
            self.end_session()

    def end_session(self) -> None:
        self.session = None
        self.on_device.close()

    def abort(self) -> None:
        """After an error: no request is left."""
        self.waiting.clear()
        self.unfinished.clear()
        self.end_session()

    def longest_answer(self, requests: Sequence[Request]) -> int:
        """Of one request, and of all tokens that a conversation adds."""
        return max(self.expected.tokens, *(request.sampling.max_new_tokens for request in requests))

    def longest_request(self, requests: Sequence[Request]) -> int:
        """Tokens before the longest answer. A late turn begins with earlier answers, which are part of the tokens that
        the conversation was expected to add: a session that is opened for it is no larger than the first one."""
        if not self.expected.sequences:
            return max(len(request.tokens) for request in requests)
        ends = [len(request.tokens) + request.sampling.max_new_tokens for request in requests]
        return max(ends) - self.longest_answer(requests)

    def slot_cache_for(self, requests: Sequence[Request]) -> SlotCache:
        known = self.longest_prompt if self.expected.sequences else 0  # the prompts of conversations come one by one
        length = max(known, self.longest_request(requests)) + self.longest_answer(requests)
        slots = min(self.max_sequences, max(self.expected.sequences, len(requests)))
        if self.slot_cache is None or (self.slot_cache.slots, self.slot_cache.length) != (slots, length):
            self.slot_cache = SlotCache(slots, length, self.routing_shape)
        return self.slot_cache

    def decoder_for(self, requests: Sequence[Request]) -> "GraphDecoder":
        """The decoder of the last session if its slots and cache are large enough, else a new one.

        Capturing graphs takes seconds, so a decoder is kept as long as possible. A new one is at least as large as the
        one it replaces, and at most as large as memory allows. Graphs hold addresses: once parameter offloading has
        moved the weights, they are captured again.
        """
        slots = min(self.max_sequences, max(self.expected.sequences, len(requests)))
        prompts = max(self.expected.prompts, len({request.tokens for request in requests}))
        answer = self.longest_answer(requests)
        prompt = max(self.longest_prompt, self.longest_request(requests))
        if self.expected.sequences:
            prompt += self.page_tokens  # a late turn divides the same tokens at another place, and fills one page more
        wanted = wanted_cache_tokens(slots, prompts, prompt, answer, self.page_tokens)
        longest = wanted_cache_tokens(1, 1, prompt, answer, self.page_tokens)
        old = self.decoder
        if old is not None:
            capacity = self.capacity(longest)  # shrinks too: the first update allocates the optimizer's moments
            needed = max(longest, min(wanted, int(LARGE_ENOUGH * capacity)))
            fits = needed <= old.cache.capacity_tokens <= capacity and longest <= old.longest_pages * self.page_tokens
            if fits and old.slots.count >= slots and old.slots.longest_answer >= answer and old.weights_stayed():
                old.cache.wake()
                return old
            slots, answer = max(slots, old.slots.count), max(answer, old.slots.longest_answer)
            wanted = max(wanted, old.cache.capacity_tokens)
            old.close()
        pages = wanted_cache_tokens(1, 1, prompt, answer, self.page_tokens) // self.page_tokens
        pages = pages if old is None else max(pages, old.longest_pages)
        self.decoder = None  # its memory counts as free from here on
        self.decoder = self.new_decoder(slots, answer, pages, min(wanted, self.capacity(longest)))
        return self.decoder

    def new_decoder(self, slots: int, longest_answer: int, longest_pages: int, capacity_tokens: int) -> "GraphDecoder":
        from rloom.rollout.native.graph_decoder import GraphDecoder  # imports triton

        if capacity_tokens < slots * longest_answer:
            log.info(
                f"the key-value cache has room for {capacity_tokens:,} tokens "
                f"(actor_rollout_ref.rollout.gpu_memory_utilization={self.memory_share}): fewer than "
                f"{slots} sequences run at a time when they are long"
            )
        cache = TokenCache(self.token_shape(), capacity_tokens // self.page_tokens, self.page_tokens, self.device)
        cache.wake()
        states = Slots(slots, longest_answer, self.device)
        return GraphDecoder(self.network, cache, states, longest_pages, capture=not self.eager)

    @torch.no_grad()
    def token_shape(self) -> TokenShape:
        """Measured with one token, so that it holds for any family."""
        if self.shape is None:
            probe, zero = ShapeProbe(), torch.zeros(1, dtype=torch.long, device=self.device)
            with self.network.decoder.uncompiled_layers():
                self.network.decoder.packed_hidden(zero, probe, zero)
            self.shape = probe.shape(self.routing_shape)
        return self.shape

    def capacity(self, longest: int) -> int:
        """Tokens of cache that fit the share of the GPU's memory: at least one sequence, or it is an error."""
        if self.device.type != "cuda":
            return sys.maxsize
        each = self.token_shape().bytes
        free, total = torch.cuda.mem_get_info(self.device)
        kept_by_torch = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        ours = self.decoder.cache.bytes if self.decoder is not None else 0
        free += kept_by_torch + ours
        capacity_tokens = cache_capacity(
            each, memory_share=self.memory_share, total_bytes=total, free_bytes=free, page_tokens=self.page_tokens
        )
        if capacity_tokens < longest:
            raise ModelError(
                f"actor_rollout_ref.rollout.gpu_memory_utilization={self.memory_share}: not one sequence of {longest} "
                f"tokens ({each * longest / 2**30:.1f} GiB) fits beside what is on the GPU "
                f"({free / 2**30:.1f} GiB free); raise it, shorten the answers, or offload "
                "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=True)"
            )
        return capacity_tokens

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        assert not self.unfinished
        if self.session is not None and self.keeps_cache:
            self.session.weights_changed()
        else:
            self.end_session()
        copy_weights(weights, self.network.module)
        self.version = version

    def held_weights(self) -> Mapping[str, Tensor]:
        return tensors_of(self.network.module)

    def sleep(self) -> None:
        if self.keeps_cache:
            self.on_device.close()
        elif not self.unfinished:
            self.end_session()  # no conversation goes on after it
        if self.free_cache:
            self.slot_cache = None
            if self.decoder is not None:
                self.decoder.cache.sleep()

    def wake(self) -> None:
        """The next session allocates what it needs. One that keeps caches goes on, if its graphs still hold the
        addresses of the weights."""
        if self.keeps_cache and self.session is not None:
            self.on_device.close()
            self.load_model()
            if self.decoder is not None and not self.decoder.weights_stayed():
                self.end_session()
