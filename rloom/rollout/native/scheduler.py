"""Who runs and who waits, as the host sees it: slots, places of the cache, and prompts that several answers share."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rloom.rollout.base import Request, Sampling
from rloom.rollout.native.allocator import RangeAllocator

MAX_PROMPTS = 512  # read at a time: each has a row of logits, whatever its length


def should_prefill(waiting: int, running: int, slots: int) -> bool:
    """Prompts enter in handfuls: a prefill pass for every sequence that leaves would cost more than it brings."""
    return waiting > 0 and (not running or slots - running >= min(waiting, slots // 8 + 1))


@dataclass
class SharedPrompt:
    """A prompt in the cache, and how many answers still read it."""

    tokens: tuple[int, ...]
    start: int
    readers: int = 0


@dataclass
class RunningSequence:
    """One that is being written."""

    request: int
    slot: int
    prompt: SharedPrompt
    own_start: int
    limit: int
    last_step: int  # by which it must have ended
    collected: bool = False


class Scheduler:
    def __init__(self, requests: Sequence[Request], sampling: Sampling, slots: int, allocator: RangeAllocator) -> None:
        self.requests, self.sampling, self.allocator, self.slots = requests, sampling, allocator, slots
        self.waiting = deque(range(len(requests)))
        self.running: list[RunningSequence] = []
        self.free_slots = list(range(slots))[::-1]
        self.prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.step = 0

    @property
    def steps_left(self) -> int:
        """After so many all that run have ended, if none ends before."""
        return max((answer.last_step for answer in self.running), default=self.step) - self.step

    def should_admit(self) -> bool:
        return should_prefill(len(self.waiting), len(self.running), self.slots)

    def admit(self, max_tokens: int) -> list[RunningSequence]:
        """Let waiting requests in, in their order, as far as slots and places go: `max_tokens` of prompts at most."""
        entered: list[RunningSequence] = []
        read: set[tuple[int, ...]] = set()
        tokens = 0
        while self.waiting and self.free_slots:
            request = self.requests[self.waiting[0]]
            fresh = request.tokens not in read
            over = tokens + len(request.tokens) > max_tokens or len(read) == MAX_PROMPTS
            if fresh and read and over:
                break
            answer = self.place(self.waiting[0], request)
            if answer is None:
                break
            if fresh:
                read.add(request.tokens)
                tokens += len(request.tokens)
            entered.append(answer)
            self.waiting.popleft()
        self.running += entered
        return entered

    def place(self, index: int, request: Request) -> RunningSequence | None:
        """Find room for an answer, and for its prompt where no other answer brought it in."""
        limit, prompt = request.limit(self.sampling), self.prompts.get(request.tokens)
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
        return RunningSequence(index, self.free_slots.pop(), prompt, own_start, limit, self.step + limit - 1)

    def release(self, gone: Sequence[RunningSequence]) -> None:
        for answer in gone:
            answer.collected = True
            self.free_slots.append(answer.slot)
            self.allocator.release(answer.own_start, answer.limit)
            answer.prompt.readers -= 1
            if not answer.prompt.readers:
                self.allocator.release(answer.prompt.start, len(answer.prompt.tokens))
                del self.prompts[answer.prompt.tokens]
        self.running = [answer for answer in self.running if not answer.collected]
