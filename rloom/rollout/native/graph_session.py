"""Generation that stays on the device: the host launches several decode steps and reads their result later."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from rloom.rollout.base import Request
from rloom.rollout.limits import pages_of
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.graph_decoder import DoneSnapshot, GraphDecoder
from rloom.rollout.native.sampler import uniform_draws
from rloom.rollout.native.scheduler import Scheduler
from rloom.rollout.native.session import Finished, Progress

log = logging.getLogger(__name__)
STEPS = 8  # launched between two reads of what is done


class GraphSession:
    def __init__(self, decoder: GraphDecoder, request: Request, max_prefill_tokens: int) -> None:
        self.decoder, self.max_prefill_tokens = decoder, max_prefill_tokens
        cache = decoder.cache
        self.longest_pages = min(cache.pages, decoder.table.width)
        self.scheduler = Scheduler(
            decoder.slots.count,
            PageAllocator(cache.pages),
            cache.page_tokens,
            self.longest_pages,
            pads_prefill=cache.shape.pads_prefill,
        )
        self.previous: DoneSnapshot | None = None
        self.preempted = 0  # sequences, counted each time
        self.set_sampling(request)

    def set_sampling(self, request: Request) -> None:
        self.sampling = request.sampling.without_limit
        self.decoder.slots.set_sampling(self.sampling)

    @property
    def idle(self) -> bool:
        return not self.scheduler.requests

    def fits(self, request: Request) -> bool:
        sampling, decoder = request.sampling, self.decoder
        parts = len(request.tokens), sampling.max_new_tokens
        pages = sum(pages_of(tokens, decoder.cache.page_tokens) for tokens in parts)
        return (
            (self.idle or sampling.without_limit == self.sampling)
            and pages <= self.longest_pages
            and sampling.max_new_tokens <= decoder.slots.longest_answer
        )

    def add(self, number: int, request: Request) -> None:
        if self.idle:
            self.set_sampling(request)
        self.scheduler.add(number, request)

    def cancel(self, *numbers: int) -> None:
        # steps in flight still write to its slot and cache; whatever reuses them is launched after those steps
        self.scheduler.cancel(*numbers)

    def interrupt(self, numbers: Sequence[int]) -> list[Finished]:
        """Waits for the steps in flight: a sequence that ends in them has finished."""
        decoder, scheduler, wanted = self.decoder, self.scheduler, set(numbers)
        found = {
            number: Finished.waiting(number, scheduler.progress.get(number))
            for number in scheduler.waiting
            if number in wanted
        }
        running = [sequence for sequence in scheduler.running if sequence.request in wanted]
        if running:
            found |= {one.request: one for one in self.collect(decoder.snapshot_done(running))}
        stopped = [sequence for sequence in running if not sequence.collected]
        if stopped:
            answers = decoder.read_answers(stopped)
            found |= {one.request: one._replace(interrupted=True) for one in answers}
            for sequence, one in zip(stopped, answers, strict=True):
                scheduler.keep(sequence, one.tokens_L.tolist(), interrupted=True)
        scheduler.cancel(*numbers)
        return [found[number] for number in numbers]

    @property
    def keeps_conversations(self) -> bool:
        return bool(self.scheduler.kept)

    def end_conversation(self, conversation: int) -> None:
        self.scheduler.end_conversation(conversation)

    def weights_changed(self) -> None:
        self.scheduler.forget_prompts()

    def tokens_so_far(self, number: int) -> Tensor:
        """Waits for the steps in flight."""
        running = [sequence for sequence in self.scheduler.running if sequence.request == number]
        if not running:
            return torch.empty(0, dtype=torch.long)
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)
        return self.decoder.read_answers(running)[0].tokens_L

    def advance(self) -> list[Finished]:
        """Launch some steps, then read the result of those before them while the new ones run."""
        decoder, scheduler = self.decoder, self.scheduler
        while scheduler.should_admit() and (admitted := scheduler.admit(self.max_prefill_tokens)):
            requests = [scheduler.requests[sequence.request] for sequence in admitted]
            decoder.table.write(scheduler.take_new_entries())
            decoder.prefill(admitted, uniform_draws(requests))
        finished = [] if scheduler.grow(STEPS) else self.preempt()
        decoder.table.write(scheduler.take_new_entries())
        steps = min(STEPS, scheduler.steps_left)
        decoder.run(scheduler.running, steps)
        scheduler.step += steps
        now = decoder.snapshot_done(scheduler.running)
        if self.previous is not None:
            finished += self.collect(self.previous)
        if steps < STEPS:  # near the end, no steps are left to overlap with
            finished += self.collect(now)
        self.previous = now
        return finished

    def collect(self, snapshot: DoneSnapshot) -> list[Finished]:
        done = snapshot.done()
        if not done:
            return []
        answers = zip(done, self.decoder.read_answers(done), strict=True)
        finished = []
        for sequence, answer in answers:
            finished.append(self.decoder.read_experts(sequence, answer))
            self.scheduler.keep(sequence, answer.tokens_L.tolist())
        self.scheduler.release(done)
        return finished

    def preempt(self) -> list[Finished]:
        """Free pages for the next steps: release what has finished, then preempt. Waits for the steps in flight."""
        decoder, scheduler = self.decoder, self.scheduler
        finished = self.collect(decoder.snapshot_done(scheduler.running))
        preempted = scheduler.preempt(STEPS)
        if preempted:
            for answer in decoder.read_answers(preempted):
                scheduler.resume(answer.request, Progress(answer.tokens_L, answer.logprobs_L))
            if not self.preempted:
                log.info(
                    f"the key-value cache is full: {len(scheduler.running)} sequences run, others wait and continue "
                    "later; actor_rollout_ref.rollout.gpu_memory_utilization gives it more memory"
                )
            self.preempted += len(preempted)
        return finished
