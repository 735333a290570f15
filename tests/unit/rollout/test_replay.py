"""A run that generates ahead writes its schedule, and a replay computes the same, wherever the first was killed.

Engines make a random number of polls between two reports, and scores arrive at random. The log-probs of a token depend
on the requests that run beside it, as the last bits of a real engine's do.
"""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest

from rloom.batch import Trajectory
from rloom.data.stream import PromptStream
from rloom.errors import ConfigError, TrainingError
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion, PollUntil, Request, Sampling, WaitIfIdle
from rloom.runs.records import SCHEDULE_FILE
from rloom.runtime.group import LocalGroup
from rloom.training.ahead import AheadSampler, AheadSettings
from rloom.training.queue_file import QueueReader, write_queue
from rloom.training.sampling import Sampler
from rloom.training.schedule import RecordedRun, ScheduleWriter, read_lines
from rloom.training.separate import SeparateSampler
from rloom.types import SampleGroup, Score
from tests.unit.rollout.test_ahead import PROMPTS, Late, N, TokenByToken, no_progress

LENGTHS = {0: 14, 1: 3, 2: 6, 3: 2}
STEPS = 8
ANSWERS = 2


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("training.ahead.SCORES_S", "training.separate.SCORES_S", "rollout.base.TURN_REPORT_S"):
        monkeypatch.setattr(f"rloom.{name}", 0.001)


class Killed(BaseException):
    """As SIGKILL: nothing is written after it."""


class Irregular(TokenByToken):
    """`killed_at`: the poll in which the process ends."""

    def __init__(self, rng: random.Random, killed_at: int | None = None) -> None:
        super().__init__(LENGTHS)
        self.rng, self.killed_at, self.polls = rng, killed_at, 0

    @property
    def polls_per_report(self) -> int:  # type: ignore[override]
        return self.rng.randint(1, 4)

    def poll(self) -> list[Completion]:
        self.polls += 1
        if self.polls == self.killed_at:
            raise Killed
        beside = len(self.running) / 128
        for _, logprobs in self.running.values():
            logprobs.append(-self.version - beside)
        ended = [number for number, (request, found) in self.running.items() if len(found) == self.length(request)]
        return [self.completion(number) for number in ended]


class Irregularly(Late):
    """Each look at the scores finds some more of them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(range(len(PROMPTS)))
        self.rng = rng

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        scores: Future[list[list[Score]]] = Future()
        self.waiting.append((scores, groups))
        return scores

    def look(self) -> None:
        for entry in [entry for entry in self.waiting if self.rng.random() < 0.2]:
            self.waiting.remove(entry)
            self.score(*entry)


class TimedRun:
    """`seed`: of all that depends on time. `folder`: its schedule, and checkpoints of its queue."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        settings: AheadSettings,
        *,
        replay: Path | None = None,
        engines: int = 2,
        killed_at: int | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.rng = folder, random.Random(seed)
        self.engines = [Irregular(self.rng, killed_at) for _ in range(engines)]
        reward = Irregularly(self.rng)
        make: type[AheadSampler] = SeparateSampler if settings.separate else AheadSampler

        class Looking(make):  # type: ignore[misc, valid-type]
            def chosen(self, step: int) -> list[int] | None:
                reward.look()
                found: list[int] | None = super().chosen(step)
                return found

        decode = lambda answers: [str(len(answer)) for answer in answers]  # noqa: E731
        mix = CompositeReward([MixedPart("rule_score", reward)])
        sampler = Sampler(LocalGroup(self.engines), LocalGroup([]), mix, decode, seed=1)
        self.stream = PromptStream(PROMPTS, batch_size=N, shuffle=True, seed=0)
        writer = ScheduleWriter(folder / SCHEDULE_FILE)
        replayed = None if replay is None else RecordedRun(replay)
        self.ahead: AheadSampler = Looking(
            sampler, self.stream, settings, Sampling(99), ANSWERS, STEPS, schedule=writer, replay=replayed
        )
        self.settings, self.steps = settings, 0
        self.killed_in: int | None = None  # the checkpoint of this step

    def resume(self) -> "TimedRun":
        """From the newest checkpoint, if there is one."""
        folders = sorted(self.folder.glob("step_*"))
        if folders:
            self.steps = int(folders[-1].name.removeprefix("step_"))
            self.stream.load(json.loads((folders[-1] / "position").read_text()))
            queue = QueueReader(PROMPTS, ANSWERS).read(folders[-1])
            assert queue is not None
            self.ahead.load(queue, self.steps)
            self.set_version()
        return self

    def set_version(self) -> None:
        for engine in self.engines:
            engine.version = self.steps

    def step(self, checkpoint: bool = True) -> list[Trajectory]:
        """With a validation of its own after some, and answers that are generated while it trains."""
        self.steps += 1
        self.ahead.generate(self.steps, no_progress)
        pending, metrics = self.ahead.take(self.steps)
        trajectories = pending.scored(no_progress)
        worst = metrics["training/off_policy/trajectory_staleness_worst/max"]
        assert worst <= self.settings.max_staleness
        self.train()
        with self.ahead.paused():  # greedy answers
            pass
        self.train()
        with self.ahead.paused(next_step=self.steps + 1):
            self.set_version()
            queue, position = self.ahead.queue, self.stream.state()
        self.train()
        if self.steps % 3 == 0:
            with self.ahead.paused():  # a validation
                pass
        if checkpoint:
            draft = self.folder / "draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            write_queue(draft, queue)
            if self.killed_in == self.steps:
                raise Killed
            (draft / "position").write_text(json.dumps(position))
            draft.rename(self.folder / f"step_{self.steps:02}")
        return trajectories

    def train(self) -> None:
        if self.settings.separate:
            time.sleep(self.rng.random() * 0.002)
            self.ahead.check()

    def to_end(self, checkpoint: bool = False) -> list[list[tuple[object, ...]]]:
        """What each step trained."""
        with self.ahead:
            return [facts(self.step(checkpoint)) for _ in range(self.steps, STEPS)]


def facts(trajectories: Sequence[Trajectory]) -> list[tuple[object, ...]]:
    return [(t.prompt.index, t.group, t.tokens_L.tolist(), t.logprobs_L.tolist(), t.turns) for t in trajectories]


def schedule(folder: Path) -> list[object]:
    """Without the order in which two threads wrote it."""
    return sorted(
        (line["step"], str(line.get("sends")), str(line.get("groups"))) for line in read_lines(folder / SCHEDULE_FILE)
    )


SETTINGS = {
    "colocated": AheadSettings(N, batches_ahead=1, max_staleness=2),
    "dropping": AheadSettings(N, batches_ahead=2, max_staleness=1, drop=True),
    "separate": AheadSettings(N, batches_ahead=1, max_staleness=2, separate=True),
    "separate, dropping": AheadSettings(N, batches_ahead=2, max_staleness=1, drop=True, separate=True),
}
each_mode = pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))


@each_mode
def test_a_replay_computes_the_same_whatever_the_time_that_everything_takes(
    tmp_path: Path, settings: AheadSettings
) -> None:
    expected = TimedRun(tmp_path / "run", 1, settings).to_end()
    assert TimedRun(tmp_path / "other", 2, settings).to_end() != expected, "time decides"
    for seed in (3, 4):
        found = TimedRun(tmp_path / f"replay {seed}", seed, settings, replay=tmp_path / "run").to_end()
        assert found == expected
        assert schedule(tmp_path / f"replay {seed}") == schedule(tmp_path / "run"), "it writes what it repeats"


def run_with_kills(
    folder: Path, settings: AheadSettings, rng: random.Random, kills: int
) -> dict[int, list[tuple[object, ...]]]:
    """What each step trained in the end. A kill is in a poll or in a checkpoint, and may leave half a line."""
    trained: dict[int, list[tuple[object, ...]]] = {}
    for left in range(kills, -1, -1):
        in_poll = rng.random() < 0.8
        run = TimedRun(
            folder, rng.randint(0, 9999), settings, killed_at=rng.randint(1, 30) if left and in_poll else None
        )
        run.resume()
        run.killed_in = None if in_poll or not left else run.steps + rng.randint(1, 2)
        with suppress(Killed), run.ahead:
            while run.steps < STEPS:
                found = run.step()
                trained[run.steps] = facts(found)
        file = folder / SCHEDULE_FILE
        if left and file.exists() and rng.random() < 0.5:
            with file.open("a") as lines:
                lines.write('{"step":')
    return trained


def check_kills(folder: Path, settings: AheadSettings, seed: int, kills: int) -> None:
    trained = run_with_kills(folder / "run", settings, random.Random(seed), kills)
    prompts = Counter(answer[0] for answers in trained.values() for answer in answers)
    assert sorted(trained) == [*range(1, STEPS + 1)] and prompts.total() == STEPS * N * ANSWERS
    if not settings.drop:
        epochs = STEPS * N // len(PROMPTS)
        assert prompts == {prompt.index: epochs * ANSWERS for prompt in PROMPTS}, "as in a synchronous run"
    replayed = TimedRun(folder / "replay", seed + 1, settings, replay=folder / "run").to_end()
    assert replayed == [trained[step] for step in range(1, STEPS + 1)]


@each_mode
def test_a_run_that_was_killed_trains_each_prompt_as_often_as_a_synchronous_one_and_is_repeated(
    tmp_path: Path, settings: AheadSettings
) -> None:
    check_kills(tmp_path, settings, seed=7, kills=3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@each_mode
def test_fifty_kills_at_random(tmp_path: Path, settings: AheadSettings, seed: int) -> None:
    """In each mode, so that there are 12 runs with 5 kills."""
    check_kills(tmp_path, settings, seed=100 + seed, kills=5)


@each_mode
def test_a_replay_may_begin_at_a_checkpoint_of_the_run(tmp_path: Path, settings: AheadSettings) -> None:
    expected = TimedRun(tmp_path / "run", 1, settings).to_end(checkpoint=True)
    (tmp_path / "replay").mkdir()
    shutil.copytree(tmp_path / "run" / "step_03", tmp_path / "replay" / "step_03")
    found = TimedRun(tmp_path / "replay", 2, settings, replay=tmp_path / "run").resume().to_end()
    assert found == expected[3:]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    TimedRun(folder, 1, SETTINGS["separate"]).to_end()
    return folder


@pytest.mark.parametrize("prompt, length", [(1, 2), (1, 4), (0, 12), (0, 16)])
def test_an_answer_that_ends_elsewhere_stops_the_replay_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path, prompt: int, length: int
) -> None:
    monkeypatch.setitem(LENGTHS, prompt, length)
    run = TimedRun(tmp_path / "replay", 2, SETTINGS["separate"], replay=recorded)
    with pytest.raises(
        TrainingError,
        match=r"step \d: answer \d to group \d+ is (complete|not complete) after .* polls .*machine",
    ):
        run.to_end()


def test_other_log_probs_stop_the_replay(tmp_path: Path, recorded: Path) -> None:
    """The weights of another version, say of another learning rate, first differ in the answers of the next step."""
    run = TimedRun(tmp_path / "replay", 2, SETTINGS["separate"], replay=recorded)
    run.engines[1].version = 7
    with pytest.raises(TrainingError, match=r"step [12]: answer 0 to group \d+ has other tokens or log-probs"):
        run.to_end()


def test_a_replay_needs_as_many_engines(tmp_path: Path, recorded: Path) -> None:
    run = TimedRun(tmp_path / "replay", 2, SETTINGS["separate"], replay=recorded, engines=1)
    with pytest.raises(TrainingError, match="step 1: 2 engines generated, and this run has 1"):
        run.to_end()


def test_a_replay_ends_with_its_schedule(tmp_path: Path, recorded: Path) -> None:
    """Of a run that was killed in step 4, and left part of a line."""
    (tmp_path / "run").mkdir()
    lines = [json.dumps(line) for line in read_lines(recorded / SCHEDULE_FILE) if line["step"] < 4]
    (tmp_path / "run" / SCHEDULE_FILE).write_text("\n".join([*lines, '{"step": 4, "part']))
    run = TimedRun(tmp_path / "replay", 2, SETTINGS["separate"], replay=tmp_path / "run")
    with pytest.raises(TrainingError, match="step 4 is not in its schedule: the replay ends before it"):
        run.to_end()
    assert run.steps == 4, "three were trained"


def test_a_schedule_without_one_of_its_streams_is_an_error_and_not_a_replay_that_waits(
    tmp_path: Path, recorded: Path
) -> None:
    (tmp_path / "run").mkdir()
    lines = [
        json.dumps(line) for line in read_lines(recorded / SCHEDULE_FILE) if "sends" not in line or line["step"] > 2
    ]
    (tmp_path / "run" / SCHEDULE_FILE).write_text("".join(f"{line}\n" for line in lines))
    run = TimedRun(tmp_path / "replay", 2, SETTINGS["separate"], replay=tmp_path / "run")
    with pytest.raises(TrainingError, match="step 1: no stream of its schedule completes group"):
        run.to_end()


@pytest.mark.parametrize("settings", [SETTINGS["colocated"], SETTINGS["separate"]], ids=["colocated", "separate"])
def test_a_group_that_is_not_in_the_queue_is_an_error_and_not_a_replay_that_waits(
    tmp_path: Path, settings: AheadSettings
) -> None:
    """Sent last in a stream, so that no group of the step waits for it."""
    (tmp_path / "run").mkdir()
    TimedRun(tmp_path / "recorded", 1, settings).to_end()
    lines = list(read_lines(tmp_path / "recorded" / SCHEDULE_FILE))
    last = [line for line in lines if line["step"] <= 3 and line.get("sends", [[]])[0]][-1]
    last["sends"][0].append([max(abs(end) for _, _, ends in last["sends"][0] for end in ends), [99], [999]])
    (tmp_path / "run" / SCHEDULE_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = TimedRun(tmp_path / "replay", 2, settings, replay=tmp_path / "run")
    with pytest.raises(TrainingError, match=r"step \d: group 99 is not in the queue, and was in that run"):
        run.to_end()


def test_a_missing_or_damaged_schedule_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no .*{SCHEDULE_FILE}; name the directory of a run"):
        RecordedRun(tmp_path)
    for text in ("no json", '{"step": 1}', '{"step": 1, "groups": [3]}', "[]"):
        (tmp_path / SCHEDULE_FILE).write_text(f"{text}\n")
        with pytest.raises(ConfigError, match=f"{SCHEDULE_FILE} cannot be read"):
            RecordedRun(tmp_path)


def test_prescribed_polls_by_hand() -> None:
    """Answers to prompt 1 have three tokens, to prompt 2 six. Time does not count: a report is due at once."""
    engine = TokenByToken(LENGTHS)
    stream = engine.generate_stream(report_every_s=0.0)
    next(stream)
    first, second = (Request((10 + prompt,), Sampling(99), 0) for prompt in (1, 2))
    assert stream.send([first, PollUntil(2)]) == []
    assert stream.send([WaitIfIdle()]) == [], "no poll that was not prescribed"
    found = stream.send([second, PollUntil(5)])
    assert [(index, len(one.tokens_L), one.polls) for index, one in found] == [(0, 3, (0, 3))]
    assert stream.send([PollUntil(7)]) == []
    found = stream.send([PollUntil(99)])
    assert [(index, len(one.tokens_L), one.polls) for index, one in found] == [(1, 6, (2, 8))]
