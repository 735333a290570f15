"""Generation one pass at a time, on any device: sequences enter and leave as they finish, and torch does the rest."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native.sampler import sample_tokens, uniform_draws
from rloom.rollout.native.scheduler import should_prefill
from rloom.rollout.native.slot_cache import DecodeAttention, PrefillAttention, SlotCache


class EagerDecoder:
    def __init__(self, network: PolicyNetwork, device: torch.device, *, slots: int, max_prefill_tokens: int) -> None:
        self.network, self.device = network, device
        self.slots, self.max_prefill_tokens = slots, max_prefill_tokens
        self.cache: SlotCache | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        length = max(len(request.tokens) for request in requests) + sampling.max_new_tokens
        running = RunningBatch(requests, sampling, self.cache_for(min(self.slots, len(requests)), length), self.device)
        while running.waiting or running.count:
            yield from self.advance(running)

    @torch.inference_mode()
    def advance(self, running: "RunningBatch") -> list[tuple[int, Completion]]:
        """One pass through the model, and what it finished."""
        if running.should_admit():
            self.prefill(running)
        else:
            self.decode(running)
        return running.take_finished()

    def prefill(self, running: "RunningBatch") -> None:
        """Prompts enter: each is read once, however many answers start from it."""
        prompts, slot_S, prompt_S = running.admit(self.max_prefill_tokens)
        length_P = torch.tensor([len(prompt) for prompt in prompts])
        tokens_T = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        attend = PrefillAttention(length_P, running.cache, slot_S, prompt_S)
        hidden_TH = self.network.decoder.packed_hidden(tokens_T, attend)
        last_P = (torch.cumsum(length_P, 0) - 1).to(self.device)
        running.write(slot_S, self.network.logits(hidden_TH[last_P])[prompt_S])

    def decode(self, running: "RunningBatch") -> None:
        slots_B = torch.arange(running.count, device=self.device)
        position_B = running.position_S[: running.count]
        attend = DecodeAttention(running.cache, position_B)
        hidden_BH = self.network.decoder.packed_hidden(running.token_S[: running.count], attend, position_B)
        running.write(slots_B, self.network.logits(hidden_BH))

    def cache_for(self, slots: int, length: int) -> SlotCache:
        if self.cache is None or (self.cache.slots, self.cache.length) != (slots, length):
            self.cache = SlotCache(slots, length)
        return self.cache

    def release(self) -> None:
        self.cache = None


class RunningBatch:
    """The sequences under way, in slots 0..count-1, and the requests that wait. S slots, all state on the device."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, cache: SlotCache, device: torch.device) -> None:
        self.requests, self.sampling, self.cache, self.device = requests, sampling, cache, device
        self.waiting = deque(range(len(requests)))
        self.request_of: list[int] = []  # of each running slot
        slots, longest = cache.slots, sampling.max_new_tokens
        self.token_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.position_S = torch.zeros(slots, dtype=torch.long, device=device)  # where token_S stands
        self.written_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.limit_S = torch.zeros(slots, dtype=torch.long, device=device)
        self.done_S = torch.zeros(slots, dtype=torch.bool, device=device)
        self.stopped_S = torch.zeros(slots, dtype=torch.bool, device=device)
        self.uniform = torch.zeros(slots, longest, device=device)
        self.tokens = torch.zeros(slots, longest, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(slots, longest, device=device)
        stop_ids = () if sampling.ignore_eos else sampling.stop_ids
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)

    @property
    def count(self) -> int:
        return len(self.request_of)

    def should_admit(self) -> bool:
        return should_prefill(len(self.waiting), self.count, self.cache.slots)

    def admit(self, max_tokens: int) -> tuple[list[tuple[int, ...]], Tensor, Tensor]:
        """Move waiting requests into free slots: (distinct prompts, slots, which prompt each slot starts from)."""
        prompts: dict[tuple[int, ...], int] = {}
        slots, starts, tokens = [], [], 0
        while self.waiting and self.count < self.cache.slots:
            request = self.requests[self.waiting[0]]
            if request.tokens not in prompts:
                if prompts and tokens + len(request.tokens) > max_tokens:
                    break
                prompts[request.tokens] = len(prompts)
                tokens += len(request.tokens)
            slot = self.count
            slots.append(slot)
            starts.append(prompts[request.tokens])
            self.position_S[slot] = len(request.tokens) - 1
            self.written_S[slot] = 0
            self.limit_S[slot] = request.limit(self.sampling)
            draws = uniform_draws([request], self.sampling)
            if draws is not None:
                self.uniform[slot] = draws[0]
            self.request_of.append(self.waiting.popleft())
        slot_S, prompt_S = torch.tensor([slots, starts], device=self.device)
        return list(prompts), slot_S, prompt_S

    def write(self, slot_S: Tensor, logits_SV: Tensor) -> None:
        """Choose the next token of these slots and note it down."""
        written_S = self.written_S[slot_S]
        token_S, logprob_S = sample_tokens(logits_SV, self.uniform[slot_S, written_S], self.sampling)
        self.tokens[slot_S, written_S] = token_S
        self.logprobs[slot_S, written_S] = logprob_S
        self.token_S[slot_S] = token_S
        self.position_S[slot_S] += 1
        self.written_S[slot_S] = written_S + 1
        self.stopped_S[slot_S] = torch.isin(token_S, self.stop_ids)
        self.done_S[slot_S] = self.stopped_S[slot_S] | (written_S + 1 == self.limit_S[slot_S])

    def take_finished(self) -> list[tuple[int, Completion]]:
        """Finished sequences leave; the last running ones move into the slots they held."""
        done = self.done_S[: self.count].nonzero().squeeze(1).tolist()
        if not done:
            return []
        lengths, stopped = self.written_S[done].tolist(), self.stopped_S[done].tolist()
        tokens, logprobs = self.tokens[done].cpu(), self.logprobs[done].cpu()
        finished = [
            (
                self.request_of[slot],
                Completion(tokens[i, : lengths[i]].clone(), logprobs[i, : lengths[i]].clone(), stopped[i]),
            )
            for i, slot in enumerate(done)
        ]
        self.close_gaps(set(done))
        return finished

    def close_gaps(self, done: set[int]) -> None:
        kept = self.count - len(done)
        target = sorted(slot for slot in done if slot < kept)
        source = [slot for slot in range(kept, self.count) if slot not in done]
        if source:
            source_S, target_S = torch.tensor([source, target], device=self.device)
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
