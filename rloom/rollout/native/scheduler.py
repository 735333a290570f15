"""Which sequences run and which wait, as the host tracks it: slots, pages of the cache, prompts that answers share.

A running sequence has pages for the tokens that the launched steps can write, not for its limit. If no page is left for
the next steps, the sequences admitted last are preempted: their pages are released, and they wait, before all others,
to be prefilled again with the tokens they have.

The pages of a finished answer stay if it is one of a conversation: the next request prefills only the tokens after
those that it has in common. Pages are released when the conversation ends, or, those that wait longest first, when
other sequences need them. So do those of an interrupted answer that has a number, for the request that goes on with
it. New weights may have come in between; no other request then shares its prompt.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rloom.rollout.base import Request
from rloom.rollout.limits import PAGE_TOKENS, pages_of
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.page_table import PageEntry
from rloom.rollout.native.session import Progress

MAX_PROMPTS = 512  # in one prefill pass: each prompt has a row of logits, whatever its length
TURN_WAIT_STEPS = 24  # the longest wait of a few requests of conversations for others to be prefilled with
MAX_CONTEXT = 1 << 17  # tokens of continued sequences in one prefill pass, which copies their keys and values
MAX_SCORES = 1 << 25  # pairs of new and cached tokens, each head's, in one prefill pass that pads


def should_prefill(waiting: int, running: int, slots: int) -> bool:
    """Prompts enter in groups: a prefill pass for every sequence that finishes would take too much time."""
    return waiting > 0 and (not running or slots - running >= min(waiting, slots // 8 + 1))


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of tokens with which both begin. Slices are compared, which is faster than a loop over tokens."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def is_worth_cutting(cached: int, common: int) -> bool:
    """Whether a kept sequence is cut to the tokens that a request has in common with it.

    An answer that was cut at a stop text, or edited, goes on from there. A request that shares less than half begins a
    branch: the kept sequence stays for the requests that continue it.
    """
    return 2 * common >= cached


def enough_turns(waiting: int, running: int, waited_steps: int) -> bool:
    """Turns of conversations come one by one, and a prefill pass takes as long as several steps: those that are few
    beside the running sequences wait for others, but not for long."""
    return waiting > running // 8 or waited_steps >= TURN_WAIT_STEPS


@dataclass
class PrefillPass:
    """The size of a prefill pass. P sequences, each with new tokens and with a context: those and the tokens in the
    cache."""

    max_tokens: int  # new ones
    pads: bool  # a pass with continued sequences pads all of them to the longest: no kernel for packed ones
    sequences: int = 0
    tokens: int = 0
    reused: int = 0
    longest_new: int = 0
    longest_context: int = 0

    def fits(self, new: int, reused: int) -> bool:
        """Whether one more sequence can be in the pass. The first one always can."""
        if not self.sequences:
            return True
        if self.tokens + new > self.max_tokens or self.reused + reused > MAX_CONTEXT:
            return False
        if not self.pads or not self.reused + reused:
            return True
        padded = (self.sequences + 1) * max(self.longest_context, reused + new)
        return padded <= MAX_CONTEXT and padded * max(self.longest_new, new) <= MAX_SCORES

    def add(self, new: int, reused: int) -> None:
        self.sequences, self.tokens, self.reused = self.sequences + 1, self.tokens + new, self.reused + reused
        self.longest_new, self.longest_context = max(self.longest_new, new), max(self.longest_context, reused + new)


@dataclass
class SharedPrompt:
    """A prompt in the cache, and the number of sequences that still read it."""

    tokens: tuple[int, ...]
    pages: list[int]
    readers: int = 0


@dataclass(eq=False)
class KeptSequence:
    """The cache of an answer that a request may continue. The last token is not in the cache."""

    prompt: SharedPrompt
    own: tuple[int, ...]  # all tokens after the prompt
    pages: list[int]  # of the own tokens

    def common_own(self, tokens: tuple[int, ...]) -> int | None:
        """Own tokens in the cache with which a request goes on after the prompt. None: it does not continue this one.

        The last token of a request is always prefilled: its logits are needed.
        """
        first = len(self.prompt.tokens)
        if len(tokens) <= first or tokens[:first] != self.prompt.tokens:
            return None
        common = common_prefix(self.own[:-1], tokens[first:-1])
        return common if is_worth_cutting(first + len(self.own) - 1, first + common) else None


@dataclass
class RunningSequence:
    """An answer that is being generated."""

    request: int
    slot: int
    prompt: SharedPrompt
    limit: int
    first_step: int  # the scheduler's step when it was admitted
    pages: list[int]  # of its own tokens
    progress: Progress | None = None  # before it was interrupted or preempted
    earlier: tuple[int, ...] = ()  # own tokens before the answer, iff it continues a kept sequence
    reused_tokens: int = 0  # in the cache before its prefill pass, those of the prompt included
    collected: bool = False  # it has ended, was cancelled or was preempted

    @property
    def resumed_tokens(self) -> int:
        return 0 if self.progress is None else len(self.progress.tokens_L)

    @property
    def last_step(self) -> int:
        """By which it has ended. The prefill pass writes a token, too."""
        return self.first_step + self.limit - self.resumed_tokens - 1

    @property
    def prefill_key(self) -> tuple[int, ...] | int:
        """Equal for answers that start from one distribution. A resumed or continued one has a pass of its own."""
        return self.request if self.earlier or self.progress is not None else self.prompt.tokens

    @property
    def prefill_tokens(self) -> list[int]:
        """The input of its prefill pass."""
        resumed = [] if self.progress is None else self.progress.tokens_L.tolist()
        return [*self.prompt.tokens, *self.earlier, *resumed][self.reused_tokens :]

    def cached_tokens(self, step: int) -> int:
        """The most own tokens in the cache once this step has run. A finished sequence writes its last one again."""
        return len(self.earlier) + min(self.limit, self.resumed_tokens + step - self.first_step)


class Scheduler:
    def __init__(
        self,
        slots: int,
        allocator: PageAllocator,
        page_tokens: int = PAGE_TOKENS,
        longest_pages: int | None = None,
        *,
        pads_prefill: bool = False,  # see PrefillPass
    ) -> None:
        self.allocator, self.slots, self.page_tokens, self.pads_prefill = allocator, slots, page_tokens, pads_prefill
        self.longest_pages = allocator.pages if longest_pages is None else longest_pages  # of one sequence
        self.kept: dict[int, list[KeptSequence]] = {}  # by Request.cache_key, the one that waits longest first
        self.requests: dict[int, Request] = {}  # that wait or run
        self.waiting: deque[int] = deque()
        self.progress: dict[int, Progress] = {}  # of waiting requests that were interrupted or preempted
        self.running: list[RunningSequence] = []  # in the order of admission
        self.free_slots = list(range(slots))[::-1]
        self.prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.new_entries: list[PageEntry] = []  # that the device's page table lacks
        self.most_running = slots  # or as many as ran when the cache was full
        self.waits_since = 0  # step since which requests wait
        self.step = 0

    def add(self, number: int, request: Request) -> None:
        """A request that may continue a cache waits before those that have none: fewer caches are evicted."""
        self.requests[number] = request
        first = len(self.waiting)
        if not self.waiting:
            self.waits_since = self.step
        if (progress := Progress.of(request)) is not None:
            self.progress[number] = progress
        if request.cache_key in self.kept:
            ready = [other in self.progress or self.requests[other].cache_key in self.kept for other in self.waiting]
            first = [*ready, False].index(False)
        self.waiting.insert(first, number)

    def cancel(self, *numbers: int) -> None:
        """The tokens before the answer of a continued sequence stay in the cache, if they are worth keeping."""
        cancelled = self.requests.keys() & numbers
        for number in [number for number in self.waiting if number in cancelled]:
            self.progress.pop(number, None)
            del self.requests[number]
        self.waiting = deque(number for number in self.waiting if number not in cancelled)
        stopped = [sequence for sequence in self.running if sequence.request in cancelled]
        for sequence in stopped:
            if sequence.earlier:
                self.keep(sequence, ())
        self.release(stopped)

    @property
    def steps_left(self) -> int:
        """Steps after which every running sequence has reached its limit."""
        return max((sequence.last_step for sequence in self.running), default=self.step) - self.step

    def should_admit(self) -> bool:
        if not should_prefill(len(self.waiting), len(self.running), self.most_running):
            return False
        conversing = self.requests[self.waiting[0]].conversation is not None
        return not conversing or enough_turns(len(self.waiting), len(self.running), self.step - self.waits_since)

    def admit(self, max_tokens: int) -> list[RunningSequence]:
        """Start waiting requests, in order, while slots and pages last; at most `max_tokens` in the prefill pass."""
        admitted: list[RunningSequence] = []
        passes: set[tuple[int, ...] | int] = set()
        size = PrefillPass(max_tokens, self.pads_prefill)
        reserved, self.most_running = sum(map(self.reserve, self.running)), self.slots
        while self.waiting and self.free_slots:
            number = self.waiting[0]
            request, progress = self.requests[number], self.progress.get(number)
            reuses = progress is None or request.answer is not None
            kept, common = self.continued(request) if reuses else (None, 0)
            key = request.tokens if progress is None and kept is None else number
            length = len(request.tokens) + (0 if progress is None else len(progress.tokens_L))
            reused = 0 if kept is None else len(kept.prompt.tokens) + common
            if key not in passes and (len(passes) == MAX_PROMPTS or not size.fits(length - reused, reused)):
                break
            sequence = self.allocate(number, request, progress, kept, common, reserved)
            if sequence is None:
                self.most_running = len(self.running) + len(admitted)
                break
            if key not in passes:
                passes.add(key)
                size.add(length - reused, reused)
            reserved += self.reserve(sequence)
            admitted.append(sequence)
            self.waiting.popleft()
            self.progress.pop(number, None)
        self.running += admitted
        self.waits_since = self.step
        return admitted

    def pages(self, tokens: int) -> int:
        return pages_of(tokens, self.page_tokens)

    def reserve(self, sequence: RunningSequence) -> int:
        """Pages that admission leaves free for a running sequence: its next one, so that preemption is rare."""
        return min(1, self.pages(len(sequence.earlier) + sequence.limit) - len(sequence.pages))

    def allocate(
        self,
        number: int,
        request: Request,
        progress: Progress | None,
        kept: KeptSequence | None,
        common: int,
        reserved: int,
    ) -> RunningSequence | None:
        """A slot, and pages for the prefill pass. None: too few would be left for its next page and for others.

        `common`: the own tokens of the kept sequence that are reused. The pages of the others are used again.
        """
        limit, prompt = request.sampling.max_new_tokens, self.prompts.get(request.tokens)
        earlier: tuple[int, ...] = ()
        held = list[int]()
        if kept is not None:
            prompt, held, earlier = kept.prompt, kept.pages, request.tokens[len(kept.prompt.tokens) :]
        own = self.pages(len(earlier) + (0 if progress is None else len(progress.tokens_L)))
        shared = 0 if prompt is not None else self.pages(len(request.tokens))
        missing = shared + own - len(held)  # negative: the kept sequence frees pages
        if prompt is not None:
            prompt.readers += 1  # before others are evicted: it stays
        if not self.free_pages(missing + min(1, self.pages(len(earlier) + limit) - own) + reserved, kept):
            if prompt is not None:
                self.leave(prompt)
            return None
        if prompt is None:
            prompt = self.prompts[request.tokens] = SharedPrompt(request.tokens, self.allocator.allocate(shared), 1)
        sequence = RunningSequence(number, self.free_slots.pop(), prompt, limit, self.step, [], progress)
        self.new_entries += [PageEntry(sequence.slot, column, page) for column, page in enumerate(prompt.pages)]
        if kept is not None:
            sequence.earlier, sequence.reused_tokens = earlier, len(prompt.tokens) + common
            sequence.pages, kept.pages = kept.pages[:own], kept.pages[own:]
            first = len(prompt.pages)
            self.new_entries += [PageEntry(sequence.slot, first + i, page) for i, page in enumerate(sequence.pages)]
            assert request.cache_key is not None
            self.drop(request.cache_key, kept)
        self.extend(sequence, own - len(sequence.pages))
        return sequence

    def continued(self, request: Request) -> tuple[KeptSequence | None, int]:
        """The kept sequence of which the request reuses most, if its pages can be those of the request.

        With it, the number of its own tokens that are reused.
        """
        kept = [] if request.cache_key is None else self.kept.get(request.cache_key, [])
        found = [(one, common) for one in kept if (common := one.common_own(request.context)) is not None]
        usable = [(one, common) for one, common in found if self.can_continue(one, request)]
        return max(usable, key=lambda pair: len(pair[0].prompt.tokens) + pair[1], default=(None, 0))

    def can_continue(self, kept: KeptSequence, request: Request) -> bool:
        """Own tokens begin in a page of their own, so it may take one page more than the whole request would."""
        own = len(request.tokens) - len(kept.prompt.tokens) + request.sampling.max_new_tokens
        return len(kept.prompt.pages) + self.pages(own) <= self.longest_pages

    def keep(self, sequence: RunningSequence, answer: Sequence[int], *, interrupted: bool = False) -> None:
        """Keep the pages of a finished answer of a conversation, or of an interrupted one with a number; then it is to
        be released."""
        request = self.requests[sequence.request]
        key = request.answer if interrupted else request.conversation
        if key is None:
            return
        own = (*sequence.earlier, *answer)
        used = self.pages(len(own))
        self.allocator.release(sequence.pages[used:])
        sequence.prompt.readers += 1
        kept = KeptSequence(sequence.prompt, own, sequence.pages[:used])
        self.kept[key] = [*self.kept.pop(key, []), kept]  # now the last in the order of age
        sequence.pages = []

    def forget_prompts(self) -> None:
        """The weights have changed: whoever holds a prompt reads it on, and no other sequence shares it."""
        self.prompts = {}

    def end_conversation(self, conversation: int) -> None:
        for kept in self.kept.get(conversation, [])[:]:
            self.drop(conversation, kept)

    def drop(self, key: int, kept: KeptSequence) -> None:
        self.kept[key].remove(kept)
        if not self.kept[key]:
            del self.kept[key]
        self.allocator.release(kept.pages)
        self.leave(kept.prompt)

    def free_pages(self, count: int, used: KeptSequence | None = None) -> bool:
        """Whether so many pages are free, if need be after eviction of kept sequences other than the one in use.

        If eviction does not free enough, nothing is evicted. The conversation that waits longest is evicted first; then
        those whose next request is queued, the one that is admitted last first.
        """
        if count <= len(self.allocator.free) or not self.kept:
            return count <= len(self.allocator.free)
        last = len(self.waiting)
        queued = {self.requests[self.waiting[place]].cache_key: place for place in reversed(range(last))}
        order = sorted(self.kept, key=lambda key: queued.get(key, last), reverse=True)  # stable
        candidates = [(one, kept) for one in order for kept in self.kept[one] if kept is not used]
        if count > len(self.allocator.free) + self.evictable([kept for _, kept in candidates]):
            return False
        for key, kept in candidates:
            if count <= len(self.allocator.free):
                break
            self.drop(key, kept)
        return True

    def evictable(self, candidates: Sequence[KeptSequence]) -> int:
        """Pages that are free once all of these are dropped: a prompt's too, if no other sequence reads it."""
        readers = Counter(id(kept.prompt) for kept in candidates)
        prompts = {
            id(kept.prompt): kept.prompt for kept in candidates if readers[id(kept.prompt)] == kept.prompt.readers
        }
        return sum(len(one.pages) for one in candidates) + sum(len(one.pages) for one in prompts.values())

    def extend(self, sequence: RunningSequence, count: int) -> None:
        first = len(sequence.prompt.pages) + len(sequence.pages)
        pages = self.allocator.allocate(count)
        sequence.pages += pages
        self.new_entries += [PageEntry(sequence.slot, first + i, page) for i, page in enumerate(pages)]

    def missing(self, sequence: RunningSequence, steps: int) -> int:
        """Pages that a sequence lacks for the next steps."""
        return max(0, self.pages(sequence.cached_tokens(self.step + steps)) - len(sequence.pages))

    def grow(self, steps: int) -> bool:
        """Pages for the next steps of all running sequences. False, and none are allocated: too few are free."""
        missing = [self.missing(sequence, steps) for sequence in self.running]
        if not self.free_pages(sum(missing)):
            return False
        for sequence, count in zip(self.running, missing, strict=True):
            if count:
                self.extend(sequence, count)
        return True

    def preempt(self, steps: int) -> list[RunningSequence]:
        """Release the sequences admitted last until the others can grow; in that order. They are then to `resume`.

        Kept sequences are evicted before: nobody waits for their answers.
        """
        preempted = []
        missing = sum(self.missing(sequence, steps) for sequence in self.running)
        while not self.free_pages(missing):
            sequence = self.running[-1]
            missing -= self.missing(sequence, steps)
            self.vacate([sequence])
            preempted.append(sequence)
        self.grow(steps)
        if preempted:
            self.most_running = len(self.running)
        return preempted

    def resume(self, number: int, progress: Progress) -> None:
        """Let a preempted request wait before all others."""
        self.progress[number] = progress
        self.waiting.appendleft(number)

    def release(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            del self.requests[sequence.request]
        self.vacate(sequences)

    def vacate(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            sequence.collected = True
            self.free_slots.append(sequence.slot)
            self.allocator.release(sequence.pages)
            self.leave(sequence.prompt)
        self.running = [sequence for sequence in self.running if not sequence.collected]

    def leave(self, prompt: SharedPrompt) -> None:
        """One sequence no longer reads the prompt."""
        prompt.readers -= 1
        if not prompt.readers:
            self.allocator.release(prompt.pages)
            if self.prompts.get(prompt.tokens) is prompt:
                del self.prompts[prompt.tokens]

    def take_new_entries(self) -> list[PageEntry]:
        entries, self.new_entries = self.new_entries, []
        return entries
