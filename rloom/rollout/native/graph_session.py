"""Generation that stays on the device: the host launches several decode steps and reads their result later."""

from rloom.rollout.base import Request
from rloom.rollout.native.allocator import RangeAllocator
from rloom.rollout.native.graph_decoder import DoneSnapshot, GraphDecoder
from rloom.rollout.native.sampler import uniform_draws
from rloom.rollout.native.scheduler import Scheduler
from rloom.rollout.native.session import Finished

STEPS = 8  # launched between two reads of what is done


class GraphSession:
    def __init__(self, decoder: GraphDecoder, request: Request, max_prefill_tokens: int) -> None:
        self.decoder, self.max_prefill_tokens = decoder, max_prefill_tokens
        self.sampling = request.sampling.without_limit
        self.scheduler = Scheduler(decoder.slots.count, RangeAllocator(decoder.cache.capacity_tokens))
        self.previous: DoneSnapshot | None = None
        decoder.slots.set_sampling(self.sampling)

    @property
    def idle(self) -> bool:
        return not self.scheduler.requests

    def fits(self, request: Request) -> bool:
        sampling, decoder = request.sampling, self.decoder
        length = len(request.tokens) + sampling.max_new_tokens
        alike = sampling.without_limit == self.sampling
        return (
            alike
            and length <= decoder.cache.capacity_tokens
            and sampling.max_new_tokens <= decoder.slots.longest_answer
        )

    def add(self, number: int, request: Request) -> None:
        self.scheduler.add(number, request)

    def cancel(self, number: int) -> None:
        # steps in flight still write to its slot and cache; whatever reuses them is launched after those steps
        self.scheduler.cancel(number)

    def advance(self) -> list[Finished]:
        """Launch some steps, then read the result of those before them while the new ones run."""
        decoder, scheduler = self.decoder, self.scheduler
        while scheduler.should_admit() and (admitted := scheduler.admit(self.max_prefill_tokens)):
            requests = [scheduler.requests[sequence.request] for sequence in admitted]
            decoder.prefill(admitted, uniform_draws(requests))
        steps = min(STEPS, scheduler.steps_left)
        decoder.run(scheduler.running, steps)
        scheduler.step += steps
        now = decoder.snapshot_done(scheduler.running)
        finished: list[Finished] = []
        for snapshot in (
            self.previous,
            now if steps < STEPS else None,
        ):  # near the end, no steps are left to overlap with
            done = snapshot.done() if snapshot is not None else []
            if done:
                finished += decoder.read_finished(done)
                scheduler.release(done)
        self.previous = now
        return finished
