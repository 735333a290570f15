"""Generation ahead of training, with an engine that samples one token of each running answer in a poll.

Token t of an answer is the number t, and its log-prob is -v if weights of version v sampled it.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloom.batch import Trajectory, Turn
from rloom.data.stream import PromptStream
from rloom.errors import CheckpointError
from rloom.rewards.base import ScoringUnit
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion, Request, Rollout, Sampling
from rloom.runtime.group import LocalGroup
from rloom.training.ahead import (
    AheadSampler,
    AheadSettings,
    Queue,
    QueuedAnswer,
    QueuedGroup,
    can_train_all,
    groups_to_train,
)
from rloom.training.queue_file import QUEUE_FILE, QueueReader, write_queue
from rloom.training.sampling import DynamicSampling, Sampler, draw_seed
from rloom.types import Prompt, SampleGroup, Score
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("time_limit")
PROMPTS = [Prompt(i, ({"role": "user", "content": "?"},), f"prompt {i}", (10 + i,), "a", i) for i in range(4)]
N, STEPS = 2, 6  # groups of a step


def no_progress(done: int, total: int) -> None: ...


class TokenByToken(Rollout):
    """`lengths`: of the answers to each prompt."""

    polls_per_report = 1

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self.lengths, self.version = lengths, 0
        self.running: dict[int, tuple[Request, list[float]]] = {}
        self.requests: list[Request] = []

    def submit(self, request: Request) -> int:
        number = len(self.requests)
        self.requests.append(request)
        self.running[number] = request, list(request.begun.logprobs if request.begun else ())
        return number

    def poll(self) -> list[Completion]:
        for _, logprobs in self.running.values():
            logprobs.append(-float(self.version))
        ended = [number for number, (request, found) in self.running.items() if len(found) == self.length(request)]
        return [self.completion(number) for number in ended]

    def length(self, request: Request) -> int:
        return self.lengths[request.tokens[0] - 10]

    def completion(self, number: int) -> Completion:
        _, logprobs = self.running.pop(number)
        tokens = torch.arange(len(logprobs))
        return Completion(number, tokens, torch.tensor(logprobs), finished=True, version=self.version)

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        return [replace(self.completion(number), finished=False, interrupted=True) for number in requests]

    def cancel(self, request: int) -> None:
        self.running.pop(request, None)

    def wake(self) -> None: ...

    def sleep(self) -> None:
        assert not self.running


class Late:
    """Scores of 1 for each sample. Those of the prompts in `late` wait for `arrive`."""

    unit = ScoringUnit.ANSWER

    def __init__(self, late: Sequence[int] = ()) -> None:
        self.late, self.waiting = late, list[tuple[Future[list[list[Score]]], Sequence[SampleGroup]]]()

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        scores: Future[list[list[Score]]] = Future()
        if groups[0][0].ground_truth in self.late:
            self.waiting.append((scores, groups))
        else:
            self.score(scores, groups)
        return scores

    def score(self, scores: "Future[list[list[Score]]]", groups: Sequence[SampleGroup]) -> None:
        scores.set_result([[Score(1.0) for _ in group] for group in groups])

    def arrive(self) -> None:
        self.late = ()
        for scores, groups in self.waiting:
            self.score(scores, groups)

    def metrics(self) -> dict[str, float]:
        return {}


class Settled(AheadSampler):
    """Looks for scores once the answers that have arrived are decoded, so that a run does not depend on time."""

    def chosen(self, step: int) -> list[int] | None:
        scoring = self.scoring
        wait_until(lambda: all(map(self.is_decoded, [*scoring.generated])))
        return super().chosen(step)

    def is_decoded(self, row: int) -> bool:
        of_batches = [part for part in self.scoring.parts if part.part.queue.unit is ScoringUnit.BATCH]
        waits = all(
            any(one.row == row for found in [*part.incomplete.values()] for one in found) for part in of_batches
        )
        return row in self.scoring.texts and waits and (bool(of_batches) or row in self.scoring.parts[0].places)


class Run:
    """Steps of a run whose weights get the version of each step."""

    def __init__(
        self,
        lengths: Mapping[int, int],
        settings: AheadSettings,
        reward: Late | None = None,
        answers: int = 2,
        engines: Sequence[TokenByToken] = (),
        dynamic: DynamicSampling | None = None,
    ) -> None:
        self.engines = engines or [TokenByToken(lengths)]
        self.engine = self.engines[0]
        self.reward: Any = reward or Late()
        mix = CompositeReward([MixedPart("rule_score", self.reward)])
        decode = lambda answers: [str(len(answer)) for answer in answers]  # noqa: E731
        self.sampler = Sampler(LocalGroup(self.engines), LocalGroup([]), mix, decode, seed=1)
        self.stream = PromptStream(PROMPTS, batch_size=N, shuffle=False, seed=0)
        self.ahead = Settled(self.sampler, self.stream, settings, Sampling(99), answers, STEPS, dynamic)
        self.steps = 0
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> "Run":
        self.ahead.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.ahead.__exit__(None, None, None)

    def step(self) -> list[Trajectory]:
        self.steps += 1
        self.ahead.generate(self.steps, no_progress)
        pending, self.metrics = self.ahead.take(self.steps)
        for engine in self.engines:
            engine.version = self.steps
        return pending.scored(no_progress)

    def prompts(self) -> list[int]:
        """Of the step's groups."""
        return [trajectory.prompt.index for trajectory in self.step()[::2]]


def wait(batches: int = 1, staleness: int = 2) -> AheadSettings:
    return AheadSettings(N, batches_ahead=batches, max_staleness=staleness)


def test_a_long_answer_goes_on_in_the_next_step_with_its_tokens_and_their_log_probs() -> None:
    """Answers to prompt 0 have 5 tokens, the others 2, so a step ends after two polls."""
    with Run({0: 5, 1: 2, 2: 2, 3: 2}, wait()) as run:
        assert run.prompts() == [1, 2], "prompt 3 is complete, too, and of the second batch"
        assert run.metrics["rollout/carried_answers"] == 2.0, "both answers to prompt 0"
        assert run.prompts() == [3, 1], "the first batch of the second epoch has begun; prompt 0 has four tokens"
        of_first = [request for request in run.engine.requests if request.tokens == (10,)]
        begun = [None if request.begun is None else request.begun.tokens for request in of_first]
        assert begun == [None, None, (0, 1), (0, 1), None, None]
        assert {request.sampling for request in of_first} == {Sampling(99)}, "the limit is that of the whole answer"
        assert [request.seed for request in of_first[:2]] == [request.seed for request in of_first[2:4]]
        found = run.step()
        assert [trajectory.prompt.index for trajectory in found] == [0, 0, 2, 2]
        assert [trajectory.group for trajectory in found] == [0, 0, 1, 1]
        assert found[0].tokens_L.tolist() == [10, 0, 1, 2, 3, 4]
        assert found[0].logprobs_L.tolist() == [0.0, 0.0, 0.0, -1.0, -1.0, -2.0]
        assert found[0].turns == (Turn(1, 6, 2, earlier=((3, 0), (5, 1))),)
        names = ("staleness", "staleness_worst", "spans")
        found_metrics = {name: run.metrics[f"training/off_policy/trajectory_{name}/max"] for name in names}
        assert found_metrics == {"staleness": 0.0, "staleness_worst": 2.0, "spans": 3.0}
        assert run.metrics["training/off_policy/trajectory_staleness_worst/mean"] == 1.0


def test_an_answer_that_a_validation_interrupts_has_one_run_of_tokens_for_a_version() -> None:
    answer = QueuedAnswer()
    for tokens, version in ((2, 0), (3, 0), (3, 1), (7, 1), (9, 2)):
        answer = answer.continued(
            Completion(0, torch.zeros(tokens).long(), torch.zeros(tokens), False, version, interrupted=True)
        )
    assert answer.runs == ((3, 0), (4, 1), (2, 2))


def test_a_step_waits_for_the_groups_whose_deadline_it_is() -> None:
    with Run({0: 9, 1: 1, 2: 1, 3: 1}, wait(staleness=1)) as run:
        assert run.prompts() == [1, 2]
        found = run.step()
        assert [trajectory.prompt.index for trajectory in found[::2]] == [0, 3], "1 + 8 tokens, all in two steps"
        assert found[0].logprobs_L.tolist() == [0.0] * 2 + [-1.0] * 8


def test_a_group_that_becomes_too_old_is_dropped_and_replaced_by_another_prompt() -> None:
    settings = replace(wait(staleness=1), drop=True)
    with Run({0: 9, 1: 1, 2: 1, 3: 1}, settings) as run:
        assert run.prompts() == [1, 2]
        assert run.prompts() == [3, 1]
        assert run.metrics["training/off_policy/dropped_groups"] == 0.0
        assert run.prompts() == [2, 3], "two groups of prompt 0 wait, the older one is dropped"
        assert run.metrics["training/off_policy/dropped_groups"] == 1.0
        assert [group.prompt.index for group in run.ahead.groups.values()] == [0]
        counted = Counter(index for _ in range(3, STEPS) for index in run.prompts())
        assert sum(counted.values()) == N * (STEPS - 3), "the run has groups for all of its steps"


def test_without_staleness_a_step_trains_the_answers_to_its_own_prompts() -> None:
    for settings in (wait(batches=0), wait(staleness=0)):
        with Run({0: 9, 1: 1, 2: 1, 3: 4}, settings) as run:
            assert [run.prompts() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
            assert run.metrics["training/off_policy/trajectory_staleness_worst/max"] == 0.0
            seeds = [draw_seed(1, f"train/{step}", row) for step in (1, 2, 3) for row in range(4)]
            assert [request.seed for request in run.engine.requests] == seeds, "as in a synchronous run"


def test_groups_whose_scores_are_late_are_trained_later() -> None:
    reward = Late([0])
    with Run({0: 1, 1: 1, 2: 1, 3: 1}, wait(), reward) as run:
        assert run.prompts() == [1, 2]
        reward.arrive()
        assert run.prompts() == [0, 3]


def test_a_reward_of_whole_batches_gets_the_answers_of_a_step_together() -> None:
    """Such as a reward model on the workers that generate: it scores once nothing is generated."""

    class Together(Late):
        unit = ScoringUnit.BATCH

        def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
            asked.append([(group[0].ground_truth, len(group)) for group in groups])
            return super().submit(groups)

    asked: list[list[tuple[int, int]]] = []
    with Run({0: 5, 1: 2, 2: 2, 3: 2}, wait(), Together()) as run:
        assert [run.prompts() for _ in range(3)] == [[1, 2], [3, 1], [0, 2]]
    assert asked == [[(1, 2), (2, 2)], [(3, 2), (1, 2)], [(0, 2), (2, 2)]]


def test_a_run_of_so_many_steps_begins_no_more_groups_than_it_trains() -> None:
    with Run({0: 5, 1: 2, 2: 3, 3: 1}, wait()) as run:
        trained = Counter(index for _ in range(STEPS) for index in run.prompts())
        assert trained == {0: 3, 1: 3, 2: 3, 3: 3}, "three epochs: no prompt is left out or repeated"
        assert not run.ahead.groups and run.ahead.admitted == N * STEPS


def test_a_run_that_goes_on_with_smaller_steps_begins_the_groups_that_these_still_train() -> None:
    """Two steps of twice as many groups were trained, and one such batch was ahead: all of it was trained since."""
    with Run({0: 5, 1: 2, 2: 3, 3: 1}, wait()) as run:
        run.ahead.load(Queue(admitted=3 * 2 * N), 2)
        run.steps = run.engine.version = 2
        run.ahead.generate(3, no_progress)
        assert len(run.ahead.groups) == 2 * N
        assert [len(run.prompts()) for _ in range(2, STEPS)] == [N] * 4 and not run.ahead.groups


def test_of_a_dropped_group_nothing_is_kept() -> None:
    class Together(Late):
        unit = ScoringUnit.PROMPT

    one = Completion(0, torch.tensor([3]), torch.tensor([-1.0]), True, 0)
    with Run({}, wait(), Together()) as run:
        scoring = run.ahead.scoring
        scoring.add(2, 1, PROMPTS[0], one)
        wait_until(lambda: 2 in scoring.texts and 1 in scoring.parts[0].incomplete)
        scoring.forget([2, 3])
        assert not scoring.generated and not scoring.texts
        assert not scoring.parts[0].incomplete and not scoring.parts[0].places


def test_a_checkpoint_has_the_answers_that_are_being_generated(tmp_path: Path) -> None:
    lengths = {0: 5, 1: 2, 2: 2, 3: 2}
    with Run(lengths, wait()) as run:
        expected = [[(t.logprobs_L.tolist(), t.turns) for t in run.step()] for _ in range(STEPS)]
    with Run(lengths, wait()) as run:
        for _ in range(2):
            run.step()
        write_queue(tmp_path, run.ahead.queue)
        position = run.stream.state()
    with Run(lengths, wait()) as run:
        run.stream.load(position)
        saved = QueueReader(PROMPTS, 2).read(tmp_path)
        assert saved is not None and saved.admitted == 6
        run.ahead.load(saved, 2)
        run.steps = run.engine.version = 2
        assert [[(t.logprobs_L.tolist(), t.turns) for t in run.step()] for _ in range(2, STEPS)] == expected[2:]


def test_complete_answers_of_a_checkpoint_are_scored_again_and_not_generated(tmp_path: Path) -> None:
    lengths = {0: 1, 1: 1, 2: 1, 3: 1}
    with Run(lengths, wait(), Late([0])) as run:
        assert run.prompts() == [1, 2]
        write_queue(tmp_path, run.ahead.queue)
        position = run.stream.state()
    with Run(lengths, wait()) as run:
        run.stream.load(position)
        saved = QueueReader(PROMPTS, 2).read(tmp_path)
        assert saved is not None and [group.complete for group in saved.groups] == [True, True]
        run.ahead.load(saved, 1)
        wait_until(lambda: run.ahead.chosen(2) is not None)
        run.steps = run.engine.version = 1
        found = run.step()
        assert [(one.prompt.index, one.finished) for one in found[::2]] == [(0, True), (3, True)]
        assert not run.engine.requests


def test_a_damaged_queue_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    reader = QueueReader(PROMPTS[:1], 1)
    assert reader.read(tmp_path) is None
    answer = QueuedAnswer().continued(
        Completion(0, torch.tensor([3]), torch.tensor([-1.0]), False, 2, interrupted=True)
    )
    for runs in (((2, 2),), ((1, 2), (0, 3)), ((2, 1), (-1, 2)), ((1, 3), (0, 2))):
        broken = replace(answer, runs=runs)
        write_queue(tmp_path, Queue((QueuedGroup(0, PROMPTS[0], (broken,)),), 1))
        with pytest.raises(CheckpointError, match=QUEUE_FILE):
            reader.read(tmp_path)
    write_queue(tmp_path, Queue((QueuedGroup(0, PROMPTS[1], (answer,)),), 1))
    with pytest.raises(CheckpointError, match="resume from another checkpoint"):
        reader.read(tmp_path)
    (tmp_path / QUEUE_FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=QUEUE_FILE):
        reader.read(tmp_path)


def test_which_groups_a_step_trains_by_hand() -> None:
    settings = AheadSettings(2, batches_ahead=1, max_staleness=1)
    everything_of_0 = {0: 0, 1: 0, 2: 0, 3: 0}
    assert groups_to_train(everything_of_0, [2], 1, settings) is None, "one of two"
    assert groups_to_train(everything_of_0, [3, 2], 1, settings) == [2, 3], "the next step can train the others"
    assert groups_to_train({0: 0, 1: 0, 2: 1, 3: 1}, [2, 3], 2, settings) is None, "it is the last step for 0 and 1"
    assert groups_to_train({0: 0, 1: 0, 2: 1, 3: 1}, [0, 1, 2], 2, settings) == [0, 1]
    assert groups_to_train({0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, [3, 4], 1, settings) is None, "three for one step"
    assert groups_to_train({0: 0, 1: 0, 2: 0, 3: 0}, [3, 2], 1, replace(settings, max_staleness=0)) is None
    late = replace(settings, drop=True)
    assert groups_to_train({0: 0, 1: 0, 2: 1, 3: 1}, [2, 3], 2, late) == [2, 3]
    assert groups_to_train({0: None, 1: None, 2: 1}, [0, 1], 2, settings) == [0, 1], "complete without a token"


def test_the_oldest_token_of_a_group_may_be_in_any_of_its_answers_by_hand() -> None:
    runs = ((), ((2, 4), (1, 5)), ((3, 3), (1, 5)), ((1, 6),))
    group = QueuedGroup(0, PROMPTS[0], tuple(QueuedAnswer(runs=one) for one in runs))
    assert group.oldest == 3
    assert QueuedGroup(0, PROMPTS[0], (QueuedAnswer(),) * 2).oldest is None
    ended = QueuedAnswer(Completion(0, torch.tensor([3]), torch.tensor([-1.0]), True, 4), ((1, 4),))
    assert not replace(group, answers=(ended, QueuedAnswer())).complete, "one of two has ended"


def test_a_queue_of_other_settings_may_be_too_old_by_hand() -> None:
    """Groups of version 0; with a staleness of 1, step 2 is the last that trains them."""

    def groups(begun: int, others: int = 0) -> list[QueuedGroup]:
        answers = [QueuedAnswer(runs=((1, 0),))] * begun + [QueuedAnswer()] * others
        return [QueuedGroup(number, PROMPTS[0], (answer,)) for number, answer in enumerate(answers)]

    settings = AheadSettings(2, batches_ahead=3, max_staleness=1)
    assert can_train_all(groups(2, 2), 2, settings)
    assert not can_train_all(groups(3), 2, settings), "three for step 2"
    assert not can_train_all(groups(2), 3, settings), "none was trained in time"
    assert not can_train_all(groups(2, 3), 2, settings), "three begin now, and step 3 would be the last for them"
    assert can_train_all(groups(3), 3, replace(settings, drop=True))


class Keeping(TokenByToken):
    """Has the caches of interrupted answers, by their numbers."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        super().__init__(lengths)
        self.caches: set[int] = set()
        self.begun = self.refilled = 0
        self.expected: list[tuple[int, int, int]] = []

    def expect(self, sequences: int, prompts: int, tokens: int) -> None:
        self.expected.append((sequences, prompts, tokens))

    def submit(self, request: Request) -> int:
        assert request.answer is not None
        if request.begun is not None:
            self.begun += 1
            self.refilled += request.answer not in self.caches
        self.caches.discard(request.answer)
        return super().submit(request)

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        begun = [request for request, logprobs in (self.running[number] for number in requests) if logprobs]
        self.caches |= {request.answer for request in begun if request.answer is not None}
        return super().interrupt_all(requests)

    def end_conversation(self, conversation: int) -> None:
        self.caches.remove(conversation)


def test_an_answer_goes_on_with_the_engine_that_has_its_cache(tmp_path: Path) -> None:
    lengths, settings = {0: 9, 1: 2, 2: 7, 3: 3}, replace(wait(batches=2, staleness=3), keeps_cache=True)
    engines = [Keeping(lengths), Keeping(lengths)]
    with Run(lengths, settings, engines=engines) as run:
        for step in range(STEPS):
            run.step()
            if step == 1:
                write_queue(tmp_path, run.ahead.queue)
                position = run.stream.state()
        assert run.ahead.share_of == {}
    assert sum(engine.begun for engine in engines) > 8 and not any(engine.refilled for engine in engines)
    assert not any(engine.caches for engine in engines), "complete answers have none"
    assert [engine.expected for engine in engines] == [[(3 * 2, 3, 99)]] * 2, "half of three batches of two groups"
    others = [Keeping(lengths), Keeping(lengths)]
    with Run(lengths, settings, engines=others) as resumed:
        resumed.stream.load(position)
        saved = QueueReader(PROMPTS, 2).read(tmp_path)
        assert saved is not None
        resumed.ahead.load(saved, 2)
        resumed.steps = 2
        for engine in others:
            engine.version = 2
        begun = sum(answer.begun is not None for group in saved.groups for answer in group.answers)
        for _ in range(2, STEPS):
            resumed.step()
    assert sum(engine.refilled for engine in others) == begun > 0, "once each, by whichever engine gets them"


def test_the_caches_of_a_group_that_is_too_old_are_released() -> None:
    lengths, settings = {0: 9, 1: 1, 2: 1, 3: 1}, replace(wait(staleness=1), drop=True, keeps_cache=True)
    engine = Keeping(lengths)
    with Run(lengths, settings, engines=[engine]) as run:
        for _ in range(2):
            run.step()
        assert engine.caches == {0, 1, 8, 9}, "two groups of prompt 0"
        run.step()
        assert run.metrics["training/off_policy/dropped_groups"] == 1.0
        assert engine.caches == {8, 9} and engine.refilled == 0


@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    batches=st.integers(0, 3),
    staleness=st.integers(0, 4),
    drop=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_schedule_exceeds_the_bound_or_stops(
    lengths: list[int], batches: int, staleness: int, drop: bool, seed: int
) -> None:
    """A simulation: in a round, each unfinished answer gets a token with a probability of its own prompt; scores are
    late at random."""
    settings, rng, size = AheadSettings(2, batches, staleness, drop), random.Random(seed), 2
    left: dict[int, int] = {}  # tokens
    oldest: dict[int, int | None] = {}
    trained: list[int] = []
    admitted = dropped = 0
    for step in range(1, 30):
        for number in [n for n, v in oldest.items() if drop and v is not None and settings.deadline(v) < step]:
            del oldest[number], left[number]
            dropped += 1
        while len(oldest) + size <= settings.most_groups:
            for number in range(admitted, admitted + size):
                oldest[number], left[number] = None, lengths[number % 4]
            admitted += size
        for _ in range(1000):
            for number in oldest:
                if left[number] and rng.random() < 0.7:
                    left[number] -= 1
                    oldest[number] = step - 1 if oldest[number] is None else oldest[number]
            ready = [number for number in oldest if not left[number] and rng.random() < 0.8]
            chosen = groups_to_train(oldest, ready, step, settings)
            if chosen is not None:
                break
        else:
            pytest.fail("no step after 1000 rounds")
        for number in chosen:
            version = oldest.pop(number)
            assert version is not None and 0 <= step - 1 - version <= staleness
            trained.append(number)
    assert len(trained) == len(set(trained)) == 29 * size
    assert admitted - dropped - len(trained) == len(oldest), "none is lost"
    assert drop or dropped == 0
