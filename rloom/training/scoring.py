"""Decodes answers and submits them to the reward while others are still being generated."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch

from rloom.batch import Trajectory, Turn
from rloom.episodes.record import EpisodeRecord, episode_sample, episode_trajectories
from rloom.rewards.base import PendingScores, ScoringUnit
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion
from rloom.types import Prompt, Sample, Score

Progress = Callable[[int, int], None]  # (done, total)


class Decode(Protocol):
    def __call__(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several answers."""


class ScoreIndex(NamedTuple):
    """Where the score of an answer is found among those of a submission."""

    scores: PendingScores
    group: int
    member: int


@dataclass(frozen=True)
class PendingAnswer:
    """An answer whose scores may still be pending."""

    prompt: Prompt
    group: int
    answer: Completion | EpisodeRecord
    text: str
    places: Sequence[ScoreIndex]  # one for each part of the reward

    @property
    def may_score(self) -> bool:
        """False: an episode that has no score, whatever the rewards give."""
        return not isinstance(self.answer, EpisodeRecord) or self.answer.no_score is None

    def trajectories(self, score: Score, turn_weight: float) -> list[Trajectory]:
        """One; of an episode whose past was rewritten, several. `turn_weight`: of rewards of turns in the score."""
        if isinstance(self.answer, EpisodeRecord):
            return episode_trajectories(self.answer, self.prompt, self.group, score, turn_weight)
        return [self.trajectory(self.answer, score)]

    def trajectory(self, completion: Completion, score: Score) -> Trajectory:
        prompt = self.prompt
        before, after = len(prompt.tokens), len(completion.tokens_L)
        return Trajectory(
            prompt=prompt,
            group=self.group,
            tokens_L=torch.cat([torch.tensor(prompt.tokens), completion.tokens_L]),
            logprobs_L=torch.cat([torch.zeros(before), completion.logprobs_L]),
            turns=(Turn.of_runs(before, completion.runs or ((after, completion.version),)),),
            finished=completion.finished,
            score=score,
            experts_LMK=completion.experts_LMK,
            text=self.text,
        )


@dataclass(frozen=True)
class PendingTrajectories:
    answers: Sequence[PendingAnswer]
    reward: CompositeReward

    def scored(self, progress: Progress, *, update_moments: bool = False) -> list[Trajectory]:
        """Waits for the scores. `update_moments`: these scores count for the running mean and standard deviation."""
        results: dict[int, list[list[Score]]] = {}  # of each submission
        rows = []
        for done, answer in enumerate(self.answers, start=1):
            for place in answer.places:
                if id(place.scores) not in results:
                    results[id(place.scores)] = place.scores.result()
            rows.append([results[id(place.scores)][place.group][place.member] for place in answer.places])
            progress(done, len(self.answers))
        if update_moments:
            self.reward.update([row for answer, row in zip(self.answers, rows, strict=True) if answer.may_score])
        scores = map(self.reward.combine, rows)
        found = zip(self.answers, scores, strict=True)
        weight = self.reward.turn_weight
        return [trajectory for answer, score in found for trajectory in answer.trajectories(score, weight)]


class Generated(NamedTuple):
    row: int
    group: int
    prompt: Prompt
    answer: Completion | EpisodeRecord


class Decoded(NamedTuple):
    row: int
    group: int
    sample: Sample


@dataclass
class PartScoring:
    """Submits samples to one part of the reward, in its units.

    Units hold the same answers in the same order whenever these arrive, so that scores do not depend on timing.
    """

    part: MixedPart
    answers_per_prompt: int
    on_scores: "Callable[[Future[list[list[Score]]]], object]"
    by_group: bool = False  # the scores of a group do not wait for those of others
    places: dict[int, ScoreIndex] = field(default_factory=dict)  # by row
    incomplete: dict[int, list[Decoded]] = field(default_factory=lambda: defaultdict(list))  # by group

    def add(self, arrived: Sequence[Decoded]) -> None:
        unit = self.part.queue.unit
        if unit is ScoringUnit.ANSWER:
            of_group = (lambda answer: answer.group) if self.by_group else (lambda answer: 0)
            for _, members in groupby(sorted(arrived, key=of_group), key=of_group):
                self.submit([[answer] for answer in members])
            return
        for answer in arrived:
            self.incomplete[answer.group].append(answer)
        if unit is ScoringUnit.PROMPT:
            groups = [*self.incomplete.items()]  # `forget` removes some, on another thread
            for group in [group for group, members in groups if len(members) == self.answers_per_prompt]:
                self.submit_batch([group])

    def is_scored(self, row: int, group: int) -> bool:
        """Whether the answer waits for nothing: a batch is scored when it is taken."""
        if self.part.queue.unit is ScoringUnit.BATCH:
            return any(answer.row == row for answer in self.incomplete.get(group, ()))
        place = self.places.get(row)
        return place is not None and place.scores.done()

    def submit_batch(self, groups: Sequence[int]) -> None:
        """All answers of these groups have arrived. Those that are scored together are submitted now."""
        found = [self.incomplete.pop(group, None) for group in groups]
        self.submit([members for members in found if members is not None])

    def submit(self, groups: Sequence[list[Decoded]]) -> None:
        if not groups:
            return
        ordered = [sorted(members, key=lambda answer: answer.row) for members in groups]
        scores = self.part.queue.submit([tuple(answer.sample for answer in members) for members in ordered])
        scores.add_done_callback(self.on_scores)
        for number, members in enumerate(ordered):
            for member, answer in enumerate(members):
                self.places[answer.row] = ScoreIndex(scores, number, member)


class Scoring:
    """A thread that takes answers as they are generated: the loop's own thread only adds them to a queue.

    While it decodes some answers, further ones arrive; these are decoded together next.
    """

    def __init__(
        self, reward: CompositeReward, decode: Decode, answers_per_prompt: int, *, by_group: bool = False
    ) -> None:
        self.reward, self.decode = reward, decode
        self.parts = [PartScoring(part, answers_per_prompt, self._note_error, by_group) for part in reward.parts]
        self.generated: dict[int, Generated] = {}
        self.texts: dict[int, str] = {}  # by row
        self._arriving: SimpleQueue[Generated | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="decode-answers", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(cancel=error is not None)
        if error is None:
            self.check()

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, cancel: bool) -> None:
        """`cancel`: submit nothing more, since a judge's calls cost money. Else all that has arrived is submitted."""
        self._cancelled = cancel
        self._arriving.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise what decoding or the reward has raised by now: generation may go on for a long time."""
        if self._error is not None:
            raise self._error

    def add(self, row: int, group: int, prompt: Prompt, answer: Completion | EpisodeRecord) -> None:
        self.check()
        found = Generated(row, group, prompt, answer)
        self.generated[row] = found
        self._arriving.put(found)

    def is_scored(self, row: int) -> bool:
        """Whether the answer was decoded, and no score of it is being computed."""
        return row in self.texts and all(part.is_scored(row, self.generated[row].group) for part in self.parts)

    def take(self, rows: Sequence[int]) -> PendingTrajectories:
        """As `find`. They are not kept any longer."""
        groups = sorted({self.generated[row].group for row in rows})
        for part in self.parts:
            part.submit_batch(groups)
        found = self.find(rows)
        self.forget(rows)
        return found

    def find(self, rows: Sequence[int]) -> PendingTrajectories:
        """These answers, which were decoded and submitted, in the order of their rows."""
        found = [(self.generated[row], self.texts[row], row) for row in sorted(rows)]
        answers = [
            PendingAnswer(one.prompt, one.group, one.answer, text, [part.places[row] for part in self.parts])
            for one, text, row in found
        ]
        return PendingTrajectories(answers, self.reward)

    def forget(self, rows: Iterable[int]) -> None:
        """Answers that will not be trained, of whole groups."""
        for row in rows:
            found = self.generated.pop(row, None)
            self.texts.pop(row, None)
            for part in self.parts:
                part.places.pop(row, None)
                if found is not None:
                    part.incomplete.pop(found.group, None)

    def pending(self) -> PendingTrajectories:
        """After the context is closed: all answers."""
        return self.take([*self.generated])

    def _run(self) -> None:
        try:
            while (arrived := self._next()) and not self._cancelled:
                decoded = self._decoded(arrived)
                for part in self.parts:
                    part.add(decoded)
        except BaseException as error:  # raised on the loop's thread
            self._error = error

    def _note_error(self, scores: "Future[list[list[Score]]]") -> None:
        if not scores.cancelled() and (error := scores.exception()) is not None:
            self._error = error

    def _next(self) -> list[Generated]:
        """What has arrived by now; waits for the first. Empty at the end."""
        found: list[Generated] = []
        item = self._arriving.get()
        while item is not None:
            found.append(item)
            try:
                item = self._arriving.get_nowait()
            except Empty:
                return found
        if found:
            self._arriving.put(None)  # the end, for the next call
        return found

    def _decoded(self, arrived: Sequence[Generated]) -> list[Decoded]:
        tokens = [answer_tokens(found.answer) for found in arrived]
        decoded = []
        for found, own, text in zip(arrived, tokens, self.decode(tokens), strict=True):
            if isinstance(found.answer, EpisodeRecord):
                self.texts[found.row] = found.answer.text
                sample = episode_sample(found.prompt, found.answer, text)
            else:
                self.texts[found.row] = text
                sample = sample_of(found.prompt, own, text)
            decoded.append(Decoded(found.row, found.group, sample))
        return decoded


def answer_tokens(answer: Completion | EpisodeRecord) -> tuple[int, ...]:
    return answer.after_prompt if isinstance(answer, EpisodeRecord) else tuple(answer.tokens_L.tolist())


def sample_of(prompt: Prompt, tokens: tuple[int, ...], text: str) -> Sample:
    return Sample(
        data_source=prompt.data_source,
        prompt=prompt.text,
        response=text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        messages=prompt.messages,
        prompt_tokens=prompt.tokens,
        response_tokens=tokens,
        columns=prompt.columns,
    )
