"""Generation on workers of its own, with an engine that samples one token of each running answer when a test allows it.

Token t of an answer is the number t, and its log-prob is -v if weights of version v sampled it.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloom.algos.estimators import AdvantageSettings, Shaping
from rloom.algos.kl import KlControl
from rloom.algos.registry import resolve_algorithm
from rloom.batch import Trajectory, Turn
from rloom.data.stream import PromptStream
from rloom.errors import WorkerError
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion, Sampling
from rloom.runs.display import Display
from rloom.runs.runlog import RunLog
from rloom.runtime.group import LocalGroup, NextItems, Stream
from rloom.training.ahead import AheadSettings, Queue, groups_to_train
from rloom.training.checkpoint import Checkpoints
from rloom.training.loop import Roles, Training
from rloom.training.queue_file import QueueReader, write_queue
from rloom.training.sampling import DynamicSampling, Sampler, draw_seed
from rloom.training.separate import SeparateSampler
from tests.unit.rollout.test_ahead import PROMPTS, STEPS, Late, N, TokenByToken, no_progress
from tests.unit.rollout.test_ahead_filtered import Equal
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("time_limit")
SHORT_OTHERS = {0: 5, 1: 2, 2: 2, 3: 2}
WORST = "training/off_policy/trajectory_staleness_worst/max"


class OnDemand(TokenByToken):
    """A poll samples a token if one was allowed."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        super().__init__(lengths)
        self.allowed = threading.Semaphore(0)
        self.sampled = 0  # polls that sampled tokens
        self.fails_at: int | None = None

    def poll(self) -> list[Completion]:
        if not self.allowed.acquire(timeout=0.001):
            return []
        if self.sampled == self.fails_at:
            raise WorkerError("worker 1 died", lost=True)
        try:
            return super().poll()
        finally:
            self.sampled += 1

    def is_sampling(self) -> bool:
        return bool(self.running)


class SeparateRun:
    """Steps of a run whose weights get the version of each step."""

    def __init__(
        self, lengths: Mapping[int, int], settings: AheadSettings, engines: int = 1, equal: Sequence[int] | None = None
    ) -> None:
        dynamic = None if equal is None else DynamicSampling(N, 9)
        self.engines = [OnDemand(lengths) for _ in range(engines)]
        self.engine = self.engines[0]
        mix = CompositeReward([MixedPart("rule_score", Late() if equal is None else Equal(equal))])
        decode = lambda answers: [str(len(answer)) for answer in answers]  # noqa: E731
        sampler = Sampler(LocalGroup(self.engines), LocalGroup([]), mix, decode, seed=1)
        self.stream = PromptStream(PROMPTS, batch_size=N, shuffle=False, seed=0)
        self.ahead = SeparateSampler(sampler, self.stream, settings, Sampling(99), 2, STEPS, dynamic)
        self.steps = 0
        self.metrics: dict[str, float] = {}

    def allow(self, tokens: int) -> None:
        """So many for each running answer. Returns when they are sampled."""
        for engine in self.engines:
            sampled = engine.sampled
            for _ in range(tokens):
                engine.allowed.release()
            wait_until(lambda engine=engine, goal=sampled + tokens: engine.sampled == goal, poll_s=0.001)  # type: ignore[misc]

    def collect(self) -> list[Trajectory]:
        """The answers of the next step. It trains from now on."""
        self.steps += 1
        self.ahead.generate(self.steps, no_progress)
        pending, self.metrics = self.ahead.take(self.steps)
        return pending.scored(no_progress)

    def sync(self) -> tuple[Queue, dict[str, object]]:
        """The weights of the step to the engines. Returns what a checkpoint of the step has."""
        with self.ahead.paused(next_step=self.steps + 1):
            assert not any(engine.running for engine in self.engines), "no request runs while weights change"
            for engine in self.engines:
                engine.version = self.steps
            return self.ahead.queue, self.stream.state()

    def step(self, tokens_in_training: int = 0) -> list[Trajectory]:
        found = self.collect()
        self.allow(tokens_in_training)
        self.sync()
        return found


@contextmanager
def opened(run: SeparateRun) -> Iterator[SeparateRun]:
    with run.ahead:
        yield run
    assert not [thread for thread in threading.enumerate() if thread.name == "generate"], "the thread has ended"


@contextmanager
def unlimited(run: SeparateRun) -> Iterator[SeparateRun]:
    """Tokens are always allowed."""
    for engine in run.engines:
        engine.allowed.release(1_000_000)
    with opened(run):
        yield run


def wait(batches: int = 1, staleness: int = 2) -> AheadSettings:
    return AheadSettings(N, batches_ahead=batches, max_staleness=staleness, separate=True)


def prompts(trajectories: list[Trajectory]) -> list[int]:
    return [trajectory.prompt.index for trajectory in trajectories[::2]]


def test_it_is_known_when_the_engines_have_requests() -> None:
    """Without a gap where it is asked in the midst of generation, with one where weights are sent."""
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.engine.allowed.release(2)
        run.collect()
        [(_, asked)] = run.ahead.generated()
        run.sync()
        wait_until(run.engine.is_sampling, poll_s=0.001)
        before, after = run.ahead.generated()
        assert asked == before[0] <= before[1] <= after[0] <= after[1]


def test_a_long_answer_goes_on_with_new_weights_behind_the_tokens_that_a_step_saw_sampled() -> None:
    """Answers to prompt 0 have 5 tokens. Two are sampled before step 1 begins to train, one while it trains."""
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.engine.allowed.release(2)
        assert prompts(run.collect()) == [1, 2]
        assert [group.prompt.index for group in run.ahead.groups.values()] == [0, 3, 0, 1], "the queue is full again"
        wait_until(lambda: len(run.engine.running) == 6, poll_s=0.001)
        run.allow(1)
        run.sync()
        wait_until(run.engine.is_sampling, poll_s=0.001)
        begun = [request.begun for request in run.engine.requests if request.tokens == (10,) and request.begun]
        assert [one.tokens for one in begun] == [(0, 1, 2), (0, 1, 2), (0,), (0,)], "of two groups"
        run.allow(2)
        wait_until(lambda: run.ahead.groups[0].complete, poll_s=0.001)
        found = run.collect()
        assert prompts(found) == [0, 3]
        assert found[0].tokens_L.tolist() == [10, 0, 1, 2, 3, 4]
        assert found[0].logprobs_L.tolist() == [0.0, 0.0, 0.0, 0.0, -1.0, -1.0]
        assert found[0].turns == (Turn(1, 6, 1, earlier=((4, 0),)),)
        assert run.metrics["training/off_policy/trajectory_spans/max"] == 2.0
        assert run.metrics[WORST] == 1.0, "step 2 trains the weights of version 1"
        assert run.metrics["training/off_policy/trajectory_staleness/max"] == 1.0, "prompt 3: complete before step 1"


@pytest.mark.parametrize(
    ("settings", "before", "in_training"),
    [
        (wait(batches=0, staleness=1), 1, 1),  # the next batch is generated while this one trains
        (wait(batches=1, staleness=1), 2, 1),  # with two of version 0, steps 2 and 3 would train them: one is too old
        (wait(batches=1, staleness=2), 2, 2),
        (wait(batches=1, staleness=0), 1, 0),
        (replace(wait(batches=1, staleness=0), drop=True), 1, 0),
        (replace(wait(batches=1, staleness=1), drop=True), 2, 2),
        (replace(wait(batches=1, staleness=2), separate=False), 2, 0),
    ],
)
def test_how_many_batches_the_queue_has_by_hand(settings: AheadSettings, before: int, in_training: int) -> None:
    assert settings.most_groups == before * N
    assert settings.most_groups_in_training == in_training * N


def test_nothing_is_generated_while_a_step_trains_if_no_staleness_is_allowed() -> None:
    with unlimited(SeparateRun({0: 9, 1: 1, 2: 1, 3: 4}, wait(staleness=0))) as run:
        found = []
        for _ in range(3):
            found.append(prompts(run.collect()))
            assert not run.ahead.groups and not run.engine.running
            assert run.metrics[WORST] == 0.0
            run.sync()
        assert found == [[0, 1], [2, 3], [0, 1]]
        seeds = [draw_seed(1, f"train/{step}", row) for step in (1, 2, 3) for row in range(4)]
        assert [request.seed for request in run.engine.requests] == seeds, "as in a synchronous run"


@pytest.mark.parametrize("engines", [1, 3])
def test_a_run_trains_each_prompt_once_within_the_bound_and_in_whole_groups(engines: int) -> None:
    with unlimited(SeparateRun({0: 30, 1: 2, 2: 9, 3: 1}, wait(staleness=1), engines)) as run:
        trained: Counter[int] = Counter()
        for _ in range(STEPS):
            found = run.step()
            assert [one.prompt.index for one in found[::2]] == [one.prompt.index for one in found[1::2]]
            assert run.metrics[WORST] <= 1.0
            trained.update(prompts(found))
        assert trained == {0: 3, 1: 3, 2: 3, 3: 3}
        assert not run.ahead.groups and run.ahead.admitted == N * STEPS
        assert sum(len(engine.requests) for engine in run.engines) >= 2 * N * STEPS
        assert all(engine.requests for engine in run.engines), "groups that are admitted later go to all engines"


@pytest.mark.parametrize(("batches", "staleness"), [(1, 0), (0, 1), (1, 2)])
def test_groups_of_equal_scores_are_replaced_while_others_are_generated(batches: int, staleness: int) -> None:
    with unlimited(SeparateRun({0: 9, 1: 2, 2: 5, 3: 1}, wait(batches, staleness), engines=2, equal=[1, 2])) as run:
        for _ in range(STEPS):
            assert {*prompts(run.step())} <= {0, 3} and run.metrics[WORST] <= staleness
        assert run.ahead.dropped > 0


def test_generation_pauses_for_a_validation_and_goes_on_with_the_same_weights() -> None:
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.engine.allowed.release(2)
        run.collect()
        wait_until(lambda: len(run.engine.running) == 6, poll_s=0.001)
        with run.ahead.paused():
            assert run.ahead.streaming is None and not run.engine.running
            validated = run.ahead.sampler.rollout.call("generate_all", [])
            assert validated == [[]]
        wait_until(run.engine.is_sampling, poll_s=0.001)
        run.allow(3)
        assert [request.begun.tokens for request in run.engine.requests if request.begun] == [(0, 1), (0, 1)]
        run.sync()
        found = run.collect()
        assert found[0].turns == (Turn(1, 6, 0),), "one version"


def test_an_error_of_the_engines_is_raised_on_the_thread_of_the_loop_wherever_it_is() -> None:
    """While it waits for groups; between two stages of training; when it sends weights."""
    with pytest.raises(WorkerError, match="worker 1 died"), opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.engine.fails_at = 1
        run.engine.allowed.release(2)
        run.collect()
    for where in ("check", "pause"):
        with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
            run.engine.fails_at = 2
            run.engine.allowed.release(2)
            run.collect()
            run.engine.allowed.release()
            wait_until(lambda run=run: run.ahead.error is not None, poll_s=0.001)  # type: ignore[misc]
            with pytest.raises(WorkerError, match="worker 1 died"):
                getattr(run.ahead, where)()


def test_an_error_while_a_step_trains_ends_the_generation_that_goes_on() -> None:
    with pytest.raises(ValueError, match="of the update"), opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.engine.allowed.release(2)
        run.collect()
        wait_until(run.engine.is_sampling, poll_s=0.001)
        raise ValueError("of the update")
    assert not run.engine.running, "its requests are cancelled"


def test_a_checkpoint_of_a_step_has_every_prompt_whatever_was_generated_after_it(tmp_path: Path) -> None:
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.engine.allowed.release(2)
        trained = Counter(prompts(run.collect()))
        queue, position = run.sync()
        wait_until(run.engine.is_sampling, poll_s=0.001)
        run.allow(2)  # these tokens, and the groups of the next step, are lost with the process
        write_queue(tmp_path, queue)
    with unlimited(SeparateRun(SHORT_OTHERS, wait())) as run:
        run.stream.load(position)
        saved = QueueReader(PROMPTS, 2).read(tmp_path)
        assert saved is not None
        run.ahead.load(saved, 1)
        run.steps = 1
        run.engine.version = 1
        for _ in range(1, STEPS):
            trained.update(prompts(run.step()))
    assert trained == {0: 3, 1: 3, 2: 3, 3: 3} and run.ahead.admitted == N * STEPS, "no other prompts in their place"
    assert all(request.begun.tokens == (0, 1) for request in run.engine.requests[:2] if request.begun)


class Stopped(Exception): ...


def training_of(run: SeparateRun, folder: Path, learn: Callable[[], None] = lambda: None, **settings: Any) -> Training:
    """The loop of a run whose update and weight sync are these."""

    def sync(version: int) -> None:
        assert not any(engine.running for engine in run.engines), "no request runs while weights change"
        for engine in run.engines:
            engine.version = version

    def update(*arguments: Any, **keywords: Any) -> dict[str, float]:
        learn()
        return {}

    run.ahead.sampler = replace(run.ahead.sampler, weight_sync=LocalGroup([SimpleNamespace(sync=sync)]))
    chosen = {
        "algorithm": resolve_algorithm("grpo"), "advantage": AdvantageSettings(), "old_logprobs": None,
        "kl_estimator": None, "correction": None, "compare_logprobs": False, "shaping": Shaping(), "critic_warmup": 0,
        "mask_truncated": False, "max_failed_share": 1.0, "answers_per_prompt": 2, "mismatch_warning": None,
    }  # fmt: skip
    policy = SimpleNamespace(updates=0, learn=update, store=lambda batch, step: None)
    roles = Roles(cast(Any, policy), run.ahead.sampler, None, None, None, run.ahead)
    log = RunLog(folder, trackers=[], display=Display(total_steps=STEPS, quiet=True))
    checkpoints = Checkpoints(folder, keep={"actor": None})
    nothing = lambda *arguments: None  # noqa: E731
    all_settings = cast(Any, SimpleNamespace(**(chosen | settings)))
    return Training(all_settings, roles, run.stream, KlControl(0.0), log, checkpoints, nothing, nothing)


def test_the_loop_changes_weights_and_saves_prompts_while_no_request_runs(tmp_path: Path) -> None:
    """Tokens are sampled during the update, and after the step before its checkpoint is written."""
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:

        def learn() -> None:
            wait_until(lambda: len(run.engine.running) == 6, poll_s=0.001)
            run.allow(1)

        training = training_of(run, tmp_path, learn)
        run.engine.allowed.release(2)
        trained = Counter(prompts([*training.step(1).trajectories]))
        assert run.engine.version == 1 and len(run.ahead.groups) == 4
        wait_until(run.engine.is_sampling, poll_s=0.001)
        run.allow(2)
        run.ahead.generate(2, no_progress)
        run.ahead.take(2)  # the groups of step 3 enter the queue
        training.write(tmp_path, background=False)
        saved = training.saved_state()
    with unlimited(SeparateRun(SHORT_OTHERS, wait())) as run:
        training = training_of(run, tmp_path)
        run.stream.load(saved["stream"])
        training.load_queue(tmp_path, 1)
        run.engine.version = 1
        for step in range(2, STEPS + 1):
            trained.update(prompts([*training.step(step).trajectories]))
    assert trained == {0: 3, 1: 3, 2: 3, 3: 3} and run.ahead.admitted == N * STEPS


def test_the_loop_pauses_generation_for_a_validation(tmp_path: Path) -> None:
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        training = training_of(run, tmp_path)

        def answer(step: int, progress: object) -> None:
            assert not run.engine.running
            raise Stopped

        training.roles = replace(training.roles, evaluator=cast(Any, SimpleNamespace(answer=answer)))
        run.engine.allowed.release(2)
        training.step(1)
        wait_until(run.engine.is_sampling, poll_s=0.001)
        with pytest.raises(Stopped):
            training.validate(1)


def test_an_engine_that_fails_while_the_loop_waits_for_its_pause_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="worker 1 died"), opened(SeparateRun(SHORT_OTHERS, wait())) as run:

        def interrupt_all(requests: Sequence[int]) -> list[Completion]:
            assert not run.ahead.generates, "the loop waits"
            raise WorkerError("worker 1 died", lost=True)

        run.engine.interrupt_all = interrupt_all  # type: ignore[method-assign]
        run.engine.allowed.release(2)
        training_of(run, tmp_path).step(1)


def test_no_stage_begins_once_an_engine_has_failed(tmp_path: Path) -> None:
    with opened(SeparateRun(SHORT_OTHERS, wait())) as run:
        training = training_of(run, tmp_path)
        run.ahead.error = WorkerError("worker 1 died", lost=True)
        with pytest.raises(WorkerError, match="worker 1 died"), training.stage("update_actor"):
            raise Stopped


class OneAnswerBehind(LocalGroup):
    """As workers of their own: the last answer of each arrives when all has ended for the first. Then `arrives`."""

    arrives: Callable[[], None]

    def stream(self, method: str, next_items: NextItems) -> Stream:
        yield from super().stream(method, next_items)
        self.arrives()
        for share in range(self.shares):
            yield share, []
            assert not next_items(share), "its stream has ended"


def test_groups_that_enter_when_all_answers_have_ended_wait_for_the_next_stream() -> None:
    """A stream that has ended gets no request, and the others would wait for it."""
    run = SeparateRun({0: 1, 1: 1, 2: 1, 3: 1}, wait(batches=0))
    group = OneAnswerBehind(run.engines)
    run.ahead.sampler = replace(run.ahead.sampler, rollout=group)
    group.arrives = lambda: run.ahead.admit(2 * N)
    run.engine.allowed.release(1)
    run.ahead.generates = True
    run.ahead.begin(1)
    run.ahead.scoring.start()
    run.ahead.run_stream(lambda: False, no_progress)
    assert run.ahead.unsent == [2, 3]
    run.ahead.scoring.stop(cancel=True)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    batches=st.integers(0, 3),
    staleness=st.integers(0, 4),
    drop=st.booleans(),
    pace=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    seed=st.integers(0, 1000),
)
def test_no_schedule_with_generation_in_training_exceeds_the_bound_or_stops(
    lengths: list[int], batches: int, staleness: int, drop: bool, pace: tuple[int, int], seed: int
) -> None:
    """As test_no_schedule_exceeds_the_bound_or_stops, with rounds while a step trains. `pace`: fewest and most."""
    run = SimulatedRun(lengths, AheadSettings(2, batches, staleness, drop, separate=True), random.Random(seed))
    for step in range(1, 30):
        run.drop_old(step)
        run.admit(run.settings.most_groups)
        for _ in range(1000):
            chosen = groups_to_train(run.known(step), run.ready(), step, run.settings)
            if chosen is not None:
                break
            run.sample(step - 1)
        else:
            pytest.fail("no step after 1000 rounds")
        for number in chosen:
            version = run.oldest.pop(number)
            assert version is not None and 0 <= step - 1 - version <= staleness
            run.trained.append(number)
        run.admit(run.settings.most_groups_in_training)
        for _ in range(run.rng.randint(min(pace), max(pace))):
            run.sample(step - 1)
        assert staleness > 0 or not run.oldest
    assert len(run.trained) == len(set(run.trained)) == 29 * 2
    assert run.admitted - run.dropped - len(run.trained) == len(run.oldest), "none is lost"
    assert drop or run.dropped == 0


class SimulatedRun:
    """In a round each unfinished answer gets a token with a probability of 0.7; scores are late at random."""

    def __init__(self, lengths: list[int], settings: AheadSettings, rng: random.Random) -> None:
        self.lengths, self.settings, self.rng = lengths, settings, rng
        self.left: dict[int, int] = {}  # tokens of each group
        self.oldest: dict[int, int | None] = {}  # groups in the queue
        self.trained: list[int] = []
        self.admitted = self.dropped = 0

    def drop_old(self, step: int) -> None:
        deadlines = {n: self.settings.deadline(v) for n, v in self.oldest.items() if v is not None}
        for number in [n for n, deadline in deadlines.items() if self.settings.drop and deadline < step]:
            del self.oldest[number]
            self.dropped += 1

    def admit(self, most: int) -> None:
        size = self.settings.groups_per_step
        while len(self.oldest) + size <= most:
            for number in range(self.admitted, self.admitted + size):
                self.oldest[number], self.left[number] = None, self.lengths[number % 4]
            self.admitted += size

    def sample(self, version: int) -> None:
        for number, oldest in self.oldest.items():
            if self.left[number] and self.rng.random() < 0.7:
                self.left[number] -= 1
                self.oldest[number] = version if oldest is None else oldest

    def ready(self) -> list[int]:
        return [number for number in self.oldest if not self.left[number] and self.rng.random() < 0.8]

    def known(self, step: int) -> dict[int, int | None]:
        """To the driver: not always the first tokens of answers that run."""
        new = {number for number, version in self.oldest.items() if version == step - 1 and self.left[number]}
        return {n: None if n in new and self.rng.random() < 0.5 else version for n, version in self.oldest.items()}
