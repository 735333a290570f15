"""Which trainer mode pays: the simulation of generation, what a step waits for, and keys that prevent a mode."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.config.load import load_config
from rloom.plan import modes
from rloom.plan.make import make_plan
from rloom.plan.modes import ModeTime, longest_answers, mode_times
from rloom.plan.render import render
from rloom.plan.timing import ACTOR_UPDATE, GENERATION, TO_ENGINE, Stage, StepTime
from tests.unit.plan.test_plan import SHAPES, SMALL, written

GPU = 140.0 * 2**30
KEYS = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "data.max_response_length=8192",
)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    model = written(tmp_path / "model", {**SMALL, **SHAPES["1.5B"]})
    return (*KEYS, f"actor_rollout_ref.model.path='{model}'")


def times(*keys: str) -> dict[str, ModeTime]:
    return {time.mode: time for time in mode_times(load_config([*keys]), GPU)}


def test_answers_of_one_length_are_generated_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 groups of 2 answers in a step: 8 at a time take one round, 4 two; 16, with 8 begun ahead, half of one."""
    monkeypatch.setattr(modes, "SPREAD", 1)
    assert longest_answers(4, 2, running=8, ahead=0) == 1.0
    assert longest_answers(4, 2, running=4, ahead=0) == 2.0
    assert longest_answers(4, 2, running=16, ahead=1) == 0.5
    assert longest_answers(4, 2, running=8, ahead=1) == 1.0


def test_answers_begun_ahead_fill_the_decode_steps_of_the_longest_one() -> None:
    """Of 512 answers of log-uniform lengths the longest is close to the limit. Their mean is 0.24 of it, so that 1,024
    at a time take 0.12 at least, and 512 take 0.24."""
    waits, ahead = longest_answers(64, 8, running=512, ahead=0), longest_answers(64, 8, running=1024, ahead=1)
    assert 0.97 < waits <= 1 and 0.12 < ahead < 0.6 * waits
    assert 0.24 < longest_answers(64, 8, running=512, ahead=1) < 0.7 * waits
    assert longest_answers(1, 8, running=1, ahead=0) == pytest.approx(8 * 0.2367, rel=0.3)  # 64 answers are drawn
    assert longest_answers(1024, 8, running=8192, ahead=0) == longest_answers(64, 8, running=512, ahead=0)


def test_the_mean_of_the_assumed_lengths() -> None:
    steps = 10_000
    assert pytest.approx(sum(64 ** -((one + 0.5) / steps) for one in range(steps)) / steps, rel=1e-6) == modes.MEAN


def test_answers_that_run_at_a_time_are_bounded_by_the_work_the_key_and_the_cache(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 answers a step on one GPU, twice as many with a batch ahead."""
    running: list[int] = []
    monkeypatch.setattr(modes, "longest_answers", lambda groups, answers, one, ahead: running.append(one) or 1.0)

    def found(gpu_bytes: float, *more: str) -> list[int]:
        running.clear()
        mode_times(load_config([*keys, *more]), gpu_bytes)
        return running[:2]  # sync, colocate_async

    many = "actor_rollout_ref.rollout.max_num_seqs=4096"
    assert found(1e15, many) == [512, 1024]
    assert found(1e15, "actor_rollout_ref.rollout.max_num_seqs=100") == [100, 100]
    waits, ahead = found(GPU / 2, many)
    assert waits == 512 < ahead < 1024, "the cache has no room for twice as many"


def test_on_workers_of_its_own_generation_and_training_take_the_time_of_the_longer_one(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 s of generation and 4 s of updates, 1 s to send the weights; then 40 s of updates."""
    update_s = 4.0
    monkeypatch.setattr(modes, "generation", lambda *given, decode_steps: Stage(GENERATION, 10.0))
    stages = lambda: [Stage(GENERATION, 99.0), Stage(ACTOR_UPDATE, update_s), Stage(TO_ENGINE, 1.0)]  # noqa: E731
    monkeypatch.setattr(modes, "step_time", lambda *given: StepTime(stages(), 1))
    pools = ("trainer.n_gpus_per_node=8", "trainer.pools.rollout=4", "trainer.v1.trainer_mode=separate_async")
    assert [time.seconds for time in times(*keys, *pools).values()] == [15.0, 15.0, 11.0]
    update_s = 40.0
    assert [time.seconds for time in times(*keys, *pools).values()] == [51.0, 51.0, 41.0]
    strict = (*pools, "trainer.v1.sampler.max_off_policy_threshold=0")
    assert times(*keys, *strict)["separate_async"].seconds == 51.0, "nothing is generated while a step trains"


def test_workers_that_generate_are_chosen_where_none_are_given(keys: tuple[str, ...]) -> None:
    found = times(*keys, "trainer.n_gpus_per_node=8")
    seconds = {mode: time.seconds for mode, time in found.items()}
    assert seconds["sync"] is not None and seconds["colocate_async"] is not None
    assert seconds["colocate_async"] < 0.75 * seconds["sync"]
    by_engines = {}
    for engines in (1, 2, 4, 6):
        given = times(*keys, "trainer.n_gpus_per_node=8", f"trainer.pools.rollout={engines}")
        by_engines[given["separate_async"].seconds] = engines
    assert found["separate_async"].seconds == min(by_engines)
    assert found["separate_async"].engines == by_engines[min(by_engines)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("algorithm.filter_groups.enable=True", "with algorithm.filter_groups.enable=True the data would end"),
        ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.name=native"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "actor_rollout_ref.rollout.multi_turn"),
    ],
)
def test_the_key_that_prevents_a_mode_is_named(keys: tuple[str, ...], given: str, named: str) -> None:
    more = ["actor_rollout_ref.rollout.multi_turn.environment=guess_number"] if "multi_turn" in given else []
    found = times(*keys, "trainer.n_gpus_per_node=8", given, *more)
    for mode in ("colocate_async", "separate_async"):
        assert found[mode].seconds is None and named in found[mode].fault
    assert found["sync"].seconds is not None


def lines(*keys: str) -> Iterator[str]:
    text = render(make_plan(load_config([*keys]), 140.0))
    yield from text[text.index("Trainer modes") :].split("\n\n")[0].splitlines()


def test_the_plan_says_which_mode_pays_in_four_lines(keys: tuple[str, ...]) -> None:
    title, sync, colocated, separate, assumed = lines(*keys, "trainer.n_gpus_per_node=8")
    assert title == "Trainer modes, s a step, estimated" and sync.split()[0] == "sync"
    assert "% less: it pays" in colocated and separate.endswith("% less: it pays, with trainer.pools.rollout=4")
    assert assumed.endswith("A model, no promise.")
    alone = [*lines(*keys, "trainer.n_gpus_per_node=1")][3]
    assert (
        "not possible: trainer.v1.trainer_mode=separate_async needs workers" in alone
        and "trainer.pools.rollout" in alone
    )
