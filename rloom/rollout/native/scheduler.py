"""Which sequences run and which wait, as the host tracks it: slots, tokens of the cache, prompts that answers share."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rloom.rollout.base import Request
from rloom.rollout.native.allocator import RangeAllocator

MAX_PROMPTS = 512  # in one prefill pass: each prompt has a row of logits, whatever its length


def should_prefill(waiting: int, running: int, slots: int) -> bool:
    """Prompts enter in groups: a prefill pass for every sequence that finishes would take too much time."""
    return waiting > 0 and (not running or slots - running >= min(waiting, slots // 8 + 1))


@dataclass
class SharedPrompt:
    """A prompt in the cache, and the number of answers that still read it."""

    tokens: tuple[int, ...]
    start: int
    readers: int = 0


@dataclass
class RunningSequence:
    """An answer that is being generated."""

    request: int
    slot: int
    prompt: SharedPrompt
    own_start: int
    limit: int
    last_step: int  # by which it has ended
    collected: bool = False


class Scheduler:
    def __init__(self, slots: int, allocator: RangeAllocator) -> None:
        self.allocator, self.slots = allocator, slots
        self.requests: dict[int, Request] = {}  # that wait or run
        self.waiting: deque[int] = deque()
        self.running: list[RunningSequence] = []
        self.free_slots = list(range(slots))[::-1]
        self.prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.step = 0

    def add(self, number: int, request: Request) -> None:
        self.requests[number] = request
        self.waiting.append(number)

    def cancel(self, number: int) -> None:
        if number in self.waiting:
            self.waiting.remove(number)
            del self.requests[number]
        self.release([sequence for sequence in self.running if sequence.request == number])

    @property
    def steps_left(self) -> int:
        """Steps after which every running sequence has reached its limit."""
        return max((sequence.last_step for sequence in self.running), default=self.step) - self.step

    def should_admit(self) -> bool:
        return should_prefill(len(self.waiting), len(self.running), self.slots)

    def admit(self, max_tokens: int) -> list[RunningSequence]:
        """Start waiting requests, in order, while slots and cache last; at most `max_tokens` of prompts."""
        admitted: list[RunningSequence] = []
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        while self.waiting and self.free_slots:
            request = self.requests[self.waiting[0]]
            is_new = request.tokens not in prompts
            full = tokens + len(request.tokens) > max_tokens or len(prompts) == MAX_PROMPTS
            if is_new and prompts and full:
                break
            sequence = self.allocate(self.waiting[0], request)
            if sequence is None:
                break
            if is_new:
                prompts.add(request.tokens)
                tokens += len(request.tokens)
            admitted.append(sequence)
            self.waiting.popleft()
        self.running += admitted
        return admitted

    def allocate(self, number: int, request: Request) -> RunningSequence | None:
        """Cache for an answer, and for its prompt unless another answer has it. None: there is not enough."""
        limit, prompt = request.sampling.max_new_tokens, self.prompts.get(request.tokens)
        own_start = self.allocator.allocate(limit)
        if own_start is None:
            return None
        if prompt is None:
            start = self.allocator.allocate(len(request.tokens))
            if start is None:
                self.allocator.release(own_start, limit)
                return None
            prompt = self.prompts[request.tokens] = SharedPrompt(request.tokens, start)
        prompt.readers += 1
        return RunningSequence(number, self.free_slots.pop(), prompt, own_start, limit, self.step + limit - 1)

    def release(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            sequence.collected = True
            del self.requests[sequence.request]
            self.free_slots.append(sequence.slot)
            self.allocator.release(sequence.own_start, sequence.limit)
            sequence.prompt.readers -= 1
            if not sequence.prompt.readers:
                self.allocator.release(sequence.prompt.start, len(sequence.prompt.tokens))
                del self.prompts[sequence.prompt.tokens]
        self.running = [sequence for sequence in self.running if not sequence.collected]
