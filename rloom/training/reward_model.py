"""A reward model on one or more workers as a queue of scores."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import accumulate, chain

from rloom.models.classifier_scorer import ScoredConversations
from rloom.packing import share_rows
from rloom.rewards.base import ScoringUnit
from rloom.runtime.group import Group, Pending
from rloom.types import Sample, SampleGroup, Score

Calls = list[tuple[list[int], Pending]]  # rows of the samples, and the call that scores them


class ModelScores:
    """The scores of some groups. The host reads them at the first `result`."""

    def __init__(
        self, sizes: Sequence[int], calls: Callable[[], Calls], count: Callable[[ScoredConversations], None]
    ) -> None:
        self.sizes, self.calls, self.count = sizes, calls, count  # samples of each group

    def result(self) -> list[list[Score]]:
        return self.scores

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: "Callable[[Future[list[list[Score]]]], object]", /) -> None:
        """Nothing runs beside `result`."""

    @cached_property
    def scores(self) -> list[list[Score]]:
        found: dict[int, Score] = {}
        for rows, pending in self.calls():
            scored: ScoredConversations = pending.wait()[0]
            self.count(scored)
            found |= zip(rows, scored.scores, strict=True)
        ends = accumulate(self.sizes)
        return [[found[row] for row in range(end - size, end)] for size, end in zip(self.sizes, ends, strict=True)]


class ModelQueue:
    """Sends answers to the workers of a reward model.

    During generation, it scores the answers to a prompt as soon as all of them are generated: one worker gets them, the
    one with the fewest tokens so far. Workers that also generate are busy until the last answer is finished, so they
    score all answers of a generation at the end, each worker a share of about equally many tokens. These calls start
    when the scores are requested, after the rollout engines have released their memory.
    """

    def __init__(self, workers: Sequence[Group], *, during_generation: bool) -> None:
        """`workers`: a group of one for each worker that holds the model."""
        self.workers, self.during_generation = workers, during_generation
        self.loads = [0] * len(workers)  # tokens that each worker got during generation
        self.counts = {"tokens": 0.0, "truncated": 0.0}

    @property
    def unit(self) -> ScoringUnit:
        return ScoringUnit.PROMPT if self.during_generation else ScoringUnit.BATCH

    def submit(self, groups: Sequence[SampleGroup]) -> ModelScores:
        samples, sizes = list(chain.from_iterable(groups)), [len(group) for group in groups]
        if not self.during_generation:
            return ModelScores(sizes, lambda: self.start_shares(samples), self.count)
        started = [self.start_on_one(samples)]
        return ModelScores(sizes, lambda: started, self.count)

    def start_shares(self, samples: Sequence[Sample]) -> Calls:
        rows = ordered(samples)
        shares = share_rows([token_count(samples[row]) for row in rows], len(self.workers), balance=True)
        chosen = [[rows[index] for index in share] for share in shares]
        return [self.start(worker, samples, own) for worker, own in zip(self.workers, chosen, strict=True) if own]

    def start_on_one(self, samples: Sequence[Sample]) -> tuple[list[int], Pending]:
        lightest = min(range(len(self.workers)), key=lambda worker: (self.loads[worker], worker))
        self.loads[lightest] += sum(token_count(sample) for sample in samples)
        return self.start(self.workers[lightest], samples, ordered(samples))

    def start(self, worker: Group, samples: Sequence[Sample], rows: list[int]) -> tuple[list[int], Pending]:
        return rows, worker.start("score", [([samples[row] for row in rows],)])

    def count(self, scored: ScoredConversations) -> None:
        self.counts["tokens"] += scored.tokens
        self.counts["truncated"] += scored.truncated

    def metrics(self) -> Mapping[str, float]:
        """Tokens of the conversations and how many were truncated, since the last call."""
        found, self.counts = self.counts, {"tokens": 0.0, "truncated": 0.0}
        return found


def ordered(samples: Sequence[Sample]) -> list[int]:
    """Rows by content: forward passes, and with them the rounding, do not depend on which answer finished first."""
    return sorted(range(len(samples)), key=lambda row: (samples[row].prompt_tokens, samples[row].response_tokens))


def token_count(sample: Sample) -> int:
    """In the policy's tokens: those of the reward model are known on its workers only."""
    return len(sample.prompt_tokens) + len(sample.response_tokens)
