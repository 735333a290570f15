"""Generation driven from Python, one forward pass at a time, on any device. S slots, all state on the device.

The slot of a finished answer keeps its keys and values for the next request of its conversation, until the slot is
needed. The request reuses those of the tokens that it has in common.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.models.network import PolicyNetwork
from rloom.models.routing import routed, with_last_token
from rloom.rollout.base import Request
from rloom.rollout.native.sampler import sample_tokens, uniform_draws
from rloom.rollout.native.scheduler import (
    PrefillPass,
    common_prefix,
    enough_turns,
    is_worth_cutting,
    should_prefill,
)
from rloom.rollout.native.session import Finished, Progress
from rloom.rollout.native.slot_cache import DecodeAttention, PrefillAttention, SlotCache


@dataclass(eq=False)
class KeptSlot:
    """An answer that a request may continue, in a slot that no sequence runs in. Its last token is not in the cache."""

    slot: int
    key: int  # of the request
    tokens: tuple[int, ...]  # of the request and the answer

    def common(self, tokens: tuple[int, ...]) -> int:
        """Tokens in the cache with which a request begins, which are reused: 0 if they are too few.

        The last token of a request is always prefilled: its logits are needed.
        """
        common = common_prefix(self.tokens[:-1], tokens[:-1])
        return common if is_worth_cutting(len(self.tokens) - 1, common) else 0


class EagerSession:
    """Requests of one kind of sampling. Running sequences are in slots 0..count-1."""

    def __init__(
        self,
        network: PolicyNetwork,
        cache: SlotCache,
        request: Request,
        longest_answer: int,
        max_prefill_tokens: int,
        device: torch.device,
    ) -> None:
        self.network, self.cache, self.device = network, cache, device
        self.max_prefill_tokens, self.longest = max_prefill_tokens, longest_answer
        self.requests: dict[int, Request] = {}  # that wait or run
        self.waiting: deque[int] = deque()
        self.request_of: list[int] = []  # of each running slot
        self.reused: dict[int, int] = {}  # tokens of running requests that were in the cache
        self.kept: list[KeptSlot] = []  # the one that waits longest first
        self.waited = 0  # passes since requests wait
        slots, longest = cache.slots, self.longest
        self.token_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.position_S = torch.zeros(slots, dtype=torch.long, device=device)  # of token_S
        self.written_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.limit_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.done_S = torch.zeros(slots, dtype=torch.bool, device=device)
        self.stopped_S = torch.zeros(slots, dtype=torch.bool, device=device)
        self.uniform = torch.zeros(slots, longest, device=device)
        self.tokens = torch.zeros(slots, longest, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(slots, longest, device=device)
        self.set_sampling(request)

    def set_sampling(self, request: Request) -> None:
        self.sampling = request.sampling.without_limit
        stop_ids = () if self.sampling.ignore_eos else self.sampling.stop_ids
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=self.device)

    @property
    def count(self) -> int:
        return len(self.request_of)

    @property
    def idle(self) -> bool:
        return not self.requests

    def fits(self, request: Request) -> bool:
        sampling, length = request.sampling, len(request.tokens) + request.sampling.max_new_tokens
        alike = self.idle or sampling.without_limit == self.sampling
        return alike and length <= self.cache.length and sampling.max_new_tokens <= self.longest

    def add(self, number: int, request: Request) -> None:
        """A request that may continue a cache waits before those that have none: fewer caches are dropped."""
        if self.idle:
            self.set_sampling(request)
        self.requests[number] = request
        first, kept = len(self.waiting), {one.key for one in self.kept}
        if request.cache_key in kept:
            first = [*(self.requests[other].cache_key in kept for other in self.waiting), False].index(False)
        self.waiting.insert(first, number)

    @torch.inference_mode()
    def cancel(self, *numbers: int) -> None:
        cancelled = {number: self.requests.pop(number) for number in numbers if number in self.requests}
        if not cancelled:
            return
        self.waiting = deque(number for number in self.waiting if number not in cancelled)
        slots = {slot: number for slot, number in enumerate(self.request_of) if number in cancelled}
        for slot, number in slots.items():
            request = cancelled[number]
            if self.reused.pop(number) and request.conversation is not None:  # its next request may continue it
                self.kept.append(KeptSlot(slot, request.conversation, request.tokens))
        self.close_gaps(set(slots))

    def interrupt(self, numbers: Sequence[int]) -> list[Finished]:
        slot_of = {number: slot for slot, number in enumerate(self.request_of)}
        waiting = set(self.waiting)
        found = [
            Finished.waiting(number, Progress.of(self.requests[number]))
            if number in waiting
            else self.read_answer(slot_of[number])
            for number in numbers
        ]
        for one in found:
            request = self.requests[one.request]
            if request.answer is not None and one.request in slot_of:
                tokens = (*request.tokens, *one.tokens_L.tolist())
                self.kept.append(KeptSlot(slot_of[one.request], request.answer, tokens))
        self.cancel(*numbers)
        return found

    def read_answer(self, slot: int) -> Finished:
        """What a running sequence has: those that have ended were taken out."""
        request, length = self.request_of[slot], int(self.written_S[slot])
        answer = self.tokens[slot, :length].cpu().clone(), self.logprobs[slot, :length].cpu().clone()
        return Finished(request, *answer, False, self.reused[request], interrupted=True)

    @property
    def keeps_conversations(self) -> bool:
        return bool(self.kept)

    def end_conversation(self, conversation: int) -> None:
        self.kept = [kept for kept in self.kept if kept.key != conversation]

    def weights_changed(self) -> None:
        """A prompt is shared by the answers of one prefill pass."""

    def tokens_so_far(self, number: int) -> Tensor:
        if number not in self.request_of:
            return torch.empty(0, dtype=torch.long)
        slot = self.request_of.index(number)
        return self.tokens[slot, : int(self.written_S[slot])].cpu()

    @torch.inference_mode()
    def advance(self) -> list[Finished]:
        """One pass through the model."""
        if self.should_admit():
            self.prefill()
            self.waited = 0
        elif self.count:
            self.decode()
            self.waited += bool(self.waiting)
        return self.take_finished()

    def should_admit(self) -> bool:
        if not should_prefill(len(self.waiting), self.count, self.cache.slots):
            return False
        conversing = self.requests[self.waiting[0]].conversation is not None
        return not conversing or enough_turns(len(self.waiting), self.count, self.waited)

    def prefill(self) -> None:
        """Each prompt is computed once, whatever the number of its answers."""
        prompts, reused, slot_S, prompt_S = self.admit()
        length_P, reused_P = torch.tensor([len(prompt) for prompt in prompts]), torch.tensor(reused)
        tokens_T = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        attend = PrefillAttention(length_P, reused_P, self.cache, slot_S, prompt_S)
        record = self.cache.new_record(len(tokens_T), self.device)
        with routed(record):
            hidden_TH = self.network.decoder.packed_hidden(tokens_T, attend)
        if record is not None:
            attend.write_experts(record.experts_TMK)
        last_P = (torch.cumsum(length_P, 0) - 1).to(self.device)
        self.write(slot_S, self.network.logits(hidden_TH[last_P])[prompt_S])

    def decode(self) -> None:
        slots_B = torch.arange(self.count, device=self.device)
        position_B = self.position_S[: self.count]
        attend = DecodeAttention(self.cache, position_B)
        record = self.cache.new_record(self.count, self.device)
        with routed(record):
            hidden_BH = self.network.decoder.packed_hidden(self.token_S[: self.count], attend, position_B)
        if record is not None:
            attend.write_experts(record.experts_TMK)
        self.write(slots_B, self.network.logits(hidden_BH))

    def admit(self) -> tuple[list[tuple[int, ...]], list[int], Tensor, Tensor]:
        """Move waiting requests into free slots.

        Returns the distinct prompts without their tokens in the cache, the number of those tokens, the slots, and the
        index of the prompt of each slot.
        """
        index_of: dict[tuple[int, ...] | int, int] = {}  # of a prompt, or of a continued request by its number
        prompts = list[tuple[int, ...]]()
        reused, slots, starts = list[int](), list[int](), list[int]()
        size = PrefillPass(self.max_prefill_tokens, pads=True)
        while self.waiting and self.count < self.cache.slots:
            number, slot = self.waiting[0], self.count
            request = self.requests[number]
            kept = self.continued(request)
            context = request.context
            key = context if kept is None else number
            if key not in index_of:
                cached = 0 if kept is None else kept.common(context)
                if not size.fits(len(context) - cached, cached):
                    break
                index_of[key] = len(prompts)
                prompts.append(context[cached:])
                reused.append(cached)
                size.add(len(context) - cached, cached)
            starts.append(index_of[key])
            slots.append(slot)
            self.reused[number] = reused[starts[-1]]
            if kept is None:
                self.clear_slot(slot)
            else:
                self.take_over(kept, slot)
            self.begin(slot, request)
            self.request_of.append(self.waiting.popleft())
        slot_S, prompt_S = torch.tensor([slots, starts], device=self.device)
        return prompts, reused, slot_S, prompt_S

    def begin(self, slot: int, request: Request) -> None:
        self.position_S[slot] = len(request.context) - 1
        self.written_S[slot] = 0
        self.limit_S[slot] = request.sampling.max_new_tokens
        if (progress := Progress.of(request)) is not None:
            begun = self.written_S[slot] = len(progress.tokens_L)
            self.tokens[slot, :begun], self.logprobs[slot, :begun] = progress
        draws = uniform_draws([request])
        if draws is not None:
            self.uniform[slot, : draws.shape[1]] = draws[0]

    def continued(self, request: Request) -> KeptSlot | None:
        """The kept sequence of which the request reuses most."""
        context = request.context
        kept = [one for one in self.kept if one.key == request.cache_key and one.common(context)]
        return max(kept, key=lambda one: one.common(context), default=None)

    def clear_slot(self, slot: int) -> None:
        """Move what is kept in a slot to another one. If none is free, the sequence that waits longest is dropped."""
        held = self.kept_in(slot)
        if held is not None:
            others = set(range(slot + 1, self.cache.slots)) - {kept.slot for kept in self.kept}
            target = others.pop() if others else self.kept.pop(0).slot
            if target != slot:
                self.cache.copy(slot, target, len(held.tokens) - 1)
                held.slot = target

    def take_over(self, continued: KeptSlot, slot: int) -> None:
        """Move a kept sequence to the slot in which it goes on, and what is kept there to the slot that it leaves."""
        held = self.kept_in(slot)
        self.kept.remove(continued)
        if held is None:
            self.cache.copy(continued.slot, slot, len(continued.tokens) - 1)
        elif held is not continued:
            self.move([continued.slot, slot], [slot, continued.slot])
            held.slot = continued.slot

    def kept_in(self, slot: int) -> KeptSlot | None:
        return next((kept for kept in self.kept if kept.slot == slot), None)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.cache.move(*torch.tensor([source, target], device=self.device))

    def write(self, slot_S: Tensor, logits_SV: Tensor) -> None:
        """Sample the next token of these slots and record it."""
        written_S = self.written_S[slot_S]
        token_S, logprob_S = sample_tokens(logits_SV, self.uniform[slot_S, written_S], self.sampling)
        self.tokens[slot_S, written_S] = token_S
        self.logprobs[slot_S, written_S] = logprob_S
        self.token_S[slot_S] = token_S
        self.position_S[slot_S] += 1
        self.written_S[slot_S] = written_S + 1
        self.stopped_S[slot_S] = torch.isin(token_S, self.stop_ids)
        self.done_S[slot_S] = self.stopped_S[slot_S] | (written_S + 1 >= self.limit_S[slot_S])

    def take_finished(self) -> list[Finished]:
        """Remove finished sequences; the last running ones move into their slots."""
        done = self.done_S[: self.count].nonzero().squeeze(1).tolist()
        if not done:
            return []
        lengths, stopped = self.written_S[done].tolist(), self.stopped_S[done].tolist()
        tokens, logprobs = self.tokens[done].cpu(), self.logprobs[done].cpu()
        finished = []
        for i, slot in enumerate(done):
            request, length = self.request_of[slot], lengths[i]
            answer = tokens[i, :length].clone(), logprobs[i, :length].clone(), stopped[i], self.reused.pop(request)
            asked = self.requests.pop(request)
            finished.append(Finished(request, *answer, self.experts_of(slot, len(asked.tokens) + length)))
            if asked.conversation is not None:
                whole = (*asked.tokens, *tokens[i, :length].tolist())
                self.kept.append(KeptSlot(slot, asked.conversation, whole))
        self.close_gaps(set(done))
        return finished

    def experts_of(self, slot: int, tokens: int) -> Tensor | None:
        """Of a finished sequence with so many tokens. The last one was never the model's input."""
        experts = self.cache.experts
        return None if experts is None else with_last_token(experts[slot, : tokens - 1].cpu())

    def close_gaps(self, done: set[int]) -> None:
        kept = self.count - len(done)
        target = sorted(slot for slot in done if slot < kept)
        source = [slot for slot in range(kept, self.count) if slot not in done]
        if source:
            source_S, target_S = torch.tensor([source, target], device=self.device)
            if self.kept:  # what the gaps hold may be kept: the slots are exchanged
                self.move([*source, *target], [*target, *source])
                exchanged = dict(zip(target, source, strict=True))
                for one in self.kept:
                    one.slot = exchanged.get(one.slot, one.slot)
            else:
                self.cache.move(source_S, target_S)
            for state in self.state():
                state[target_S] = state[source_S]
            for old, new in zip(source, target, strict=True):
                self.request_of[new] = self.request_of[old]
        del self.request_of[kept:]
        self.done_S[:kept] = False

    def state(self) -> tuple[Tensor, ...]:
        return (
            self.token_S, self.position_S, self.written_S, self.limit_S, self.uniform, self.tokens, self.logprobs
        )  # fmt: skip
