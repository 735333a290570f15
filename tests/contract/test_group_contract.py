"""Requests that a group's workers get while they generate: in this process, and in processes of their own."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollout_contract import Bench, native

from rloom.batch import Trajectory
from rloom.rewards.base import ScoringUnit
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Begun, Completion, InterruptAll, Request, Rollout, Sampling, StreamItem
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.remote import RemoteGroup
from rloom.training.dispatch import Dispatcher
from rloom.training.sampling import Sampler
from rloom.types import Prompt, SampleGroup, Score
from tests.requests import ask
from tests.rollout_workers import StubRollout
from tests.worker_backends import PROCESSES, RAY, ray_address, started_actors, started_processes  # noqa: F401

N = 2
# of different lengths; the last are the longest
PROMPTS = [Prompt(row, (), "", tuple(range(3, 4 + row)), "a", row) for row in range(12)]
Make = Callable[..., tuple[Group, Group]]  # the group, and one in which each worker is a share


class Ones:
    unit = ScoringUnit.ANSWER

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        scores: Future[list[list[Score]]] = Future()
        scores.set_result([[Score(1.0) for _ in group] for group in groups])
        return scores

    def metrics(self) -> dict[str, float]:
        return {}


# Ray takes ten seconds for each
@pytest.fixture(
    params=["local", pytest.param(PROCESSES, marks=pytest.mark.slow), pytest.param(RAY, marks=pytest.mark.long)]
)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Workers of StubRollout, by their arguments."""
    with ExitStack() as stack:

        def made(arguments: Sequence[tuple[Any, ...]], workers_per_share: int = 1) -> tuple[Group, Group]:
            if request.param == "local":
                workers = [StubRollout(*own) for own in arguments]
                return LocalGroup(workers, workers_per_share=workers_per_share), LocalGroup(workers)
            stack.close()  # one connection to Ray at a time
            if request.param == PROCESSES:
                context = started_processes(StubRollout, arguments)
            else:
                context = started_actors(request.getfixturevalue("ray_address"), StubRollout, arguments)
            remote = stack.enter_context(context)
            every = RemoteGroup(remote, "rollout")
            return RemoteGroup(remote, "rollout", workers_per_share=workers_per_share), every

        yield made


def generate(
    group: Group, progress: Callable[[int, int], None] = lambda done, total: None, limit: int = 4
) -> list[Trajectory]:
    sampler = Sampler(
        group,
        LocalGroup([]),
        CompositeReward([MixedPart("ones", Ones())]),
        lambda answers: ["" for _ in answers],
        seed=1,
    )
    pending = sampler.generate(PROMPTS, N, Sampling(max_new_tokens=limit), "train/1", progress)
    return pending.scored(lambda done, total: None)


def answers(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    return [list(trajectory.answer_tokens) for trajectory in trajectories]


def test_a_worker_that_finishes_nothing_keeps_its_first_portion_and_the_other_gets_the_rest(
    make: Make, tmp_path: Path
) -> None:
    released = tmp_path / "released"

    def release(done: int, total: int) -> None:
        if done == total - 4:  # all but the first portion of the slow worker: 2 prompts with 2 answers each
            released.touch()

    group, every = make([(0, 4), (1, 4, released)])
    found = generate(group, release)
    assert [trajectory.group for trajectory in found] == [row // N for row in range(24)]
    workers = [trajectory.turns[0].version for trajectory in found]
    assert Counter(workers) == {0: 20, 1: 4}
    assert workers[0::N] == workers[1::N], "the answers to a prompt come from one worker"
    assert [prompt for prompt in range(12) if workers[N * prompt] == 1] == [9, 10], "two of the four longest"
    assert every.call("unfinished") == [0, 0]

    divided, every = make([(0, None), (1, None)])
    beforehand = generate(divided)
    assert Counter(trajectory.turns[0].version for trajectory in beforehand) == {0: 12, 1: 12}
    assert answers(beforehand) == answers(found)
    assert sorted(chain(*every.call("seeds"))) == sorted(chain(*answers(found)))


def test_the_workers_of_a_share_get_the_same_requests_in_the_same_order(make: Make) -> None:
    group, every = make([(0, 4), (0, 4), (1, 4), (1, 4)], workers_per_share=2)
    assert len(generate(group)) == 24
    first, second, third, fourth = every.call("seeds")
    assert first == second and third == fourth
    assert len(first) + len(third) == 24 and not set(first) & set(third)


def test_a_stream_that_is_closed_early_leaves_no_request_behind(make: Make, tmp_path: Path) -> None:
    never = tmp_path / "never"
    group, every = make([(0, 4), (1, 4, never)])
    dispatcher = Dispatcher([[ask([5], seed)] for seed in range(40)], 2, max_unfinished=4)
    with closing(group.stream("generate_stream", dispatcher.next_requests)) as stream:
        for _ in range(2):
            next(stream)
    assert every.call("unfinished") == [0, 0]
    assert len(every.call("seeds")[1]) == 4


def test_all_workers_of_a_share_are_interrupted_at_the_same_item(make: Make) -> None:
    """Two shares of two workers each. All items of a share come at once."""
    group, every = make([(0, 4), (0, 4), (1, 4), (1, 4)], workers_per_share=2)
    begun = Begun((7,), (-0.5,))
    sampling = Sampling(max_new_tokens=4)
    first = [Request((5,), sampling, seed=10 * share + row, begun=begun) for share in range(2) for row in range(3)]
    later = [Request((5,), sampling, seed=10 * share + 5) for share in range(2)]
    sends = [[*first[3 * share : 3 * share + 3], InterruptAll(), later[share], InterruptAll()] for share in range(2)]
    items: list[list[list[StreamItem]]] = [[list(send)] for send in sends]
    found: dict[int, list[tuple[int, Completion]]] = {0: [], 1: []}
    with closing(group.stream("generate_stream", lambda share: items[share].pop() if items[share] else None)) as stream:
        for share, completions in stream:
            found[share] += completions
    for share in range(2):
        assert [index for index, _ in found[share]] == [0, 1, 2, 3]
        seeds = [10 * share + row for row in (0, 1, 2, 5)]
        tokens = [one.tokens_L.tolist() for _, one in found[share]]
        assert tokens == [[7, seeds[0]], [7, seeds[1]], [7, seeds[2]], [seeds[3]]]
        assert all(one.interrupted and one.version == share for _, one in found[share])
        assert every.call("interrupted_seeds")[2 * share : 2 * share + 2] == [seeds, seeds], "ranks in lock-step"
    assert every.call("unfinished") == [0, 0, 0, 0]


def test_an_error_of_a_worker_ends_the_stream(make: Make) -> None:
    group, _ = make([(0, 4), (1, 4, None, 3)])
    with pytest.raises(Exception, match="no such token"):
        generate(group)


def test_answers_are_the_same_whoever_generates_them(model_folder: Callable[[str], Path]) -> None:
    """24 answers with 3 slots for each of two engines, beside one engine that has a slot for each answer."""

    def engines(count: int, slots: int) -> list[Rollout]:
        return [Bench.at(model_folder("qwen2"), native, max_sequences=slots).rollout for _ in range(count)]

    several = engines(2, slots=3)
    assert [rollout.max_unfinished() for rollout in several] == [6, 6]
    found, expected = generate(LocalGroup(several), limit=6), generate(LocalGroup(engines(1, slots=24)), limit=6)
    assert answers(found) == answers(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, atol=1e-5, rtol=0)
