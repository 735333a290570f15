"""The rollout protocol: requests in, completions out as they finish."""

import hashlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rloom.errors import ModelError
from rloom.transfer import tensors_of

REPORT_EVERY_S = 0.1  # completions are sent together: a message costs the driver about 2 ms
REPORT_PER_SHARE_S = 0.005  # so that the messages of many shares take less than half of the driver's thread
TURN_REPORT_S = 0.01  # in conversations, where new requests follow from completions
UNKNOWN_VERSION = -1  # of an answer without a token


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. `temperature=0` is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # generate up to max_new_tokens, stop tokens included
    max_length: int | None = None  # of prompt and answer together; a request has its own max_new_tokens instead

    def after(self, prompt: Sequence[int]) -> "Sampling":
        if self.max_length is None:
            return self
        left = max(1, self.max_length - len(prompt))
        return replace(self, max_new_tokens=min(self.max_new_tokens, left), max_length=None)

    @property
    def without_limit(self) -> "Sampling":
        """Equal for requests that can be in one batch."""
        return replace(self, max_new_tokens=0)


@dataclass(frozen=True)
class Begun:
    """An answer that was interrupted: what was sampled of it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]  # the prompt
    sampling: Sampling  # of the whole answer, the begun tokens included
    seed: (
        int  # determines this completion, whatever else is in the batch (hf: the first seed of a batch is used for all)
    )
    conversation: int | None = None  # episode, numbered until `sleep`: a later request may begin with this one's answer
    begun: Begun | None = None  # the answer goes on behind these tokens, with the weights of now
    # numbered over the run: the cache of this answer, interrupted, stays for the request that goes on with it
    answer: int | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the first one that is to be sampled."""
        return self.tokens if self.begun is None else (*self.tokens, *self.begun.tokens)

    @property
    def cache_key(self) -> int | None:
        """Equal for requests of which a later one may continue the cache of an earlier one."""
        return self.conversation if self.answer is None else self.answer

    @property
    def without_begun(self) -> "Request":
        """For an engine that generates whole answers only: the begun tokens are the end of the prompt, and the limit is
        what is left of it. Its generator starts anew, so the seed is another one: draws are not repeated."""
        if self.begun is None or not self.begun.tokens:
            return self
        left = self.sampling.max_new_tokens - len(self.begun.tokens)
        assert left > 0  # an answer that has reached its limit is reported as finished, not as interrupted
        digest = hashlib.blake2b(f"{self.seed}/{len(self.begun.tokens)}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest) >> 1  # torch takes 63 bits
        return Request(self.context, replace(self.sampling, max_new_tokens=left), seed, self.conversation)


@dataclass(frozen=True)
class EndedConversation:
    """In place of a request: the conversation has ended. Its requests are cancelled, and its cache is released.

    Or an interrupted answer that does not go on, by its number.
    """

    conversation: int

    def drops(self, index: int, request: Request) -> bool:
        return request.conversation == self.conversation


@dataclass(frozen=True)
class CancelledRequest:
    """In place of a request: nobody waits for the answer to this one. It may have finished already."""

    index: int  # of the request, as counted in this stream

    def drops(self, index: int, request: Request) -> bool:
        return index == self.index


@dataclass(frozen=True)
class InterruptAll:
    """In place of a request: all unfinished requests end here, and are reported with what they have."""


@dataclass(frozen=True)
class WaitIfIdle:
    """In place of a request: none is left for this engine now, and some may come while others generate."""

    def drops(self, index: int, request: Request) -> bool:
        return False


@dataclass(frozen=True)
class PollUntil:
    """In place of a request: poll so often, counted from the start of the stream. From now on time decides nothing."""

    polls: int


StreamItem = Request | EndedConversation | CancelledRequest | InterruptAll | WaitIfIdle | PollUntil


@dataclass(frozen=True)
class Completion:
    """The generated tokens, the stop token included.

    A log-prob is that of the token under the whole distribution at the sampling temperature, before top-k and top-p:
    the number that the trainer computes for the same token.
    """

    request: int  # the id that `submit` returned
    tokens_L: Tensor  # int64
    logprobs_L: Tensor  # float32
    finished: bool  # ended with a stop token
    version: int  # of the weights; of a begun answer, of those that sampled the tokens after the begun ones
    experts_LMK: Tensor | None = (
        None  # iff the engine records routing: of the prompt's tokens, then of these; see Batch
    )
    reused_tokens: int = 0  # of the request: their keys and values were in the cache before
    interrupted: bool = False  # stopped before its end: it has what was sampled by then, maybe no token
    # of an answer that was interrupted, once it is whole: (tokens, version of the weights that sampled them), in order
    runs: tuple[tuple[int, int], ...] = ()
    polls: tuple[int, int] = (0, 0)  # of its stream: before it was submitted, and when it was reported

    def behind(self, begun: Begun | None) -> "Completion":
        """The whole answer, of the begun tokens and of these."""
        if begun is None:
            return self
        return replace(
            self,
            tokens_L=torch.cat([torch.tensor(begun.tokens, dtype=torch.long), self.tokens_L]),
            logprobs_L=torch.cat([torch.tensor(begun.logprobs, dtype=torch.float32), self.logprobs_L]),
        )

    @classmethod
    def without_tokens(cls, request: int, version: int) -> "Completion":
        """An interrupted request of which nothing was sampled, or of which the engine cannot say what was."""
        return cls(request, torch.empty(0, dtype=torch.long), torch.empty(0), False, version, interrupted=True)


class WeightOwner(Protocol):
    """What holds the weights that a rollout engine reads: a training engine, or a copy for generation."""

    @property
    def device(self) -> torch.device: ...

    def on_device(self) -> AbstractContextManager[Any]:
        """Holds offloaded parameters on the device while it is open."""


class Rollout(Protocol):
    # of generate_stream, in place of a time: ranks that share an engine have to poll equally often
    polls_per_report: int | None = None
    report_every_s: float = REPORT_EVERY_S  # of generate_stream

    def submit(self, request: Request) -> int:
        """Queue a request. Returns its id, with which `poll` reports it."""

    def poll(self) -> list[Completion]:
        """Generate for a moment; returns the completions that finished since the last call, maybe none."""

    def expect(self, sequences: int, prompts: int, tokens: int) -> None:
        """So many conversations follow, which begin with so many different prompts and add at most so many tokens each.

        An engine that allocates memory when the first request arrives allocates for all of them.
        """
        return

    def end_conversation(self, conversation: int) -> None:
        """No request continues it: its cache is released."""
        return

    def tokens_so_far(self, request: int) -> Tensor:
        """The tokens of a request that is being generated. None, if the engine only reports whole answers."""
        return torch.empty(0, dtype=torch.long)

    def cancel(self, request: int) -> None:
        """Drop a request that is queued or being generated: `poll` will not report it."""

    def interrupt(self, request: int) -> Completion:
        """Cancel an unfinished request, and return what it has: `interrupted`, unless it has ended in the meantime.

        An engine that only reports whole answers returns no further token than those that the request began with.
        """
        self.cancel(request)
        return Completion.without_tokens(request, UNKNOWN_VERSION)

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        """In their order. An engine may read all of them together."""
        return [self.interrupt(request) for request in requests]

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights of these parameters. Called while no request is queued or being generated.

        What older weights have computed may only be reused by requests that go on with an interrupted `answer`.
        """

    def held_weights(self) -> Mapping[str, Tensor] | None:
        """The tensors that it computes with, by the trainer's names. None: in a layout of its own, or elsewhere."""
        return None

    def sleep(self) -> None:
        """Release memory before training."""

    def wake(self) -> None: ...

    def close(self) -> None:
        """End what the engine has started. It is not used afterwards."""
        return

    def max_unfinished(self) -> int | None:
        """Requests to send to this engine before it has finished some. None: all of a step, when a step begins."""
        return None

    def generate_stream(
        self, report_every_s: float | None = None
    ) -> Generator[list[tuple[int, Completion]], Sequence[StreamItem], None]:
        """Send it requests, maybe none; it yields what finished in the next `report_every_s`, or earlier if all has.

        The answer of a conversation is yielded at once, since the next turn waits for it. Each completion has the index
        of its request among all that were sent. After InterruptAll it yields one for every unfinished request, in the
        order of the indices. Start it with `next`. Closed, it cancels the rest.
        """
        report_every_s = self.report_every_s if report_every_s is None else report_every_s
        stream, finished = StreamedRequests(self), list[tuple[int, Completion]]()
        try:
            while True:
                items = yield finished
                finished, polls = [one for item in items for one in stream.take(item)], stream.polls
                conversing = stream.conversing
                until = time.monotonic() + (min(report_every_s, TURN_REPORT_S) if conversing else report_every_s)
                most_polls = 1 if conversing else self.polls_per_report
                waits = all(isinstance(item, WaitIfIdle) for item in items)  # no item: episodes wait for environments
                if waits and (conversing or items) and not stream.polls_freely:
                    time.sleep(TURN_REPORT_S)
                while stream.polls_freely and not (conversing and finished):
                    finished += stream.poll()
                    made = stream.polls - polls
                    if time.monotonic() >= until if self.polls_per_report is None else made == most_polls:
                        break
        finally:
            for request in stream.unfinished:
                self.cancel(request)

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Submit all; yield (index of the request, completion) as they finish. Closed early, it cancels the rest."""
        left = len(requests)
        with closing(self.generate_stream(report_every_s=0.0)) as stream:
            next(stream)
            while left:
                finished = stream.send(requests)
                left, requests = left - len(finished), ()
                yield from finished

    def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions, in the order of the requests."""
        return [completion for _, completion in sorted(self.generate(requests), key=itemgetter(0))]


def report_interval_s(shares: int) -> float:
    """For each of so many engines that send completions to one driver."""
    return max(REPORT_EVERY_S, shares * REPORT_PER_SHARE_S)


class StreamedRequests:
    """The requests of one stream, and how often the engine was polled for them."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.unfinished: dict[int, tuple[int, Request]] = {}  # (index, request) by id
        self.submitted: list[int] = []  # polls before each request, by index
        self.polls = 0
        self.conversing = False
        self.prescribed = False  # the sender decides how often the engine is polled

    @property
    def polls_freely(self) -> bool:
        return bool(self.unfinished) and not self.prescribed

    def take(self, item: StreamItem) -> list[tuple[int, Completion]]:
        """What is reported because of the item."""
        found: list[tuple[int, Completion]] = []
        if isinstance(item, Request):
            self.unfinished[self.rollout.submit(item)] = len(self.submitted), item
            self.submitted.append(self.polls)
            self.conversing = self.conversing or item.conversation is not None
        elif isinstance(item, PollUntil):
            self.prescribed = True
            while self.unfinished and self.polls < item.polls:
                found += self.poll()
        elif isinstance(item, InterruptAll):
            found = [self.counted(*one) for one in interrupted(self.rollout, self.unfinished)]
            self.unfinished.clear()
        else:
            for number in [number for number, one in self.unfinished.items() if item.drops(*one)]:
                self.rollout.cancel(number)
                del self.unfinished[number]
            if isinstance(item, EndedConversation):
                self.rollout.end_conversation(item.conversation)
        return found

    def poll(self) -> list[tuple[int, Completion]]:
        completions = self.rollout.poll()
        self.polls += 1
        return [self.counted(self.unfinished.pop(one.request)[0], one) for one in completions]

    def counted(self, index: int, completion: Completion) -> tuple[int, Completion]:
        return index, replace(completion, polls=(self.submitted[index], self.polls))


def interrupted(rollout: Rollout, unfinished: Mapping[int, tuple[int, Request]]) -> list[tuple[int, Completion]]:
    """`unfinished`: (index, request) by id. An engine that does not know begun tokens returns without them."""
    completions = zip(unfinished.values(), rollout.interrupt_all(list(unfinished)), strict=True)
    return [
        (index, one.behind(request.begun) if one.interrupted and not len(one.tokens_L) else one)
        for (index, request), one in completions
    ]


@torch.no_grad()
def copy_weights(weights: Iterator[tuple[str, Tensor]], module: nn.Module) -> None:
    """In place: captured CUDA graphs hold the addresses of the parameters."""
    own = tensors_of(module)
    for name, tensor in weights:
        if name not in own:
            raise ModelError(f"the rollout engine's model has no parameter {name}, which the trainer sent")
        own[name].copy_(tensor)
