"""Answers that are interrupted in the paged cache go on as if they had not been.

The engine's device path on a CPU, with plain torch in place of its two kernels, which have tests of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Begun, Completion, Request, Sampling
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.scheduler import Scheduler
from tests.helpers import copied_policy
from tests.interruptions import continued, in_phases, phase, random_polls
from tests.paged_engine import assert_pages_are_held_once, assert_same, in_torch, paged_rollout

pytest.importorskip("triton")
__all__ = ["in_torch"]  # a fixture
SHORT, LONG = (11, 12, 13), (20, 30, 40, 50, 60, 10)  # in one page and in two
LIMITS = (24, 24, 1, 4, 5, 24, 13, 24, 8, 24)
pytestmark = pytest.mark.usefixtures("in_torch")


@pytest.fixture
def network(model_folder: Callable[[str], Path]) -> PolicyNetwork:
    """Gemma 2 has a window in every other layer and softcaps."""
    return copied_policy(model_folder("gemma2"))


def requests_of(limits: Sequence[int], sampling: Sampling) -> list[Request]:
    return [
        Request((SHORT, LONG)[row % 2], replace(sampling, max_new_tokens=limit), seed=100 + row)
        for row, limit in enumerate(limits)
    ]


def session_of(rollout: NativeRollout) -> GraphSession:
    assert isinstance(rollout.session, GraphSession)
    return rollout.session


def checked(rollout: NativeRollout) -> NativeRollout:
    """After every poll, each page has one owner."""
    poll = rollout.poll

    def polled() -> list[Completion]:
        found = poll()
        if isinstance(rollout.session, GraphSession):
            assert_pages_are_held_once(rollout.session)
        return found

    rollout.poll = polled  # type: ignore[method-assign]
    return rollout


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pages", [8, None])  # LONG and 24 tokens fill 8: sequences are preempted
def test_an_answer_is_the_same_wherever_it_is_interrupted(network: PolicyNetwork, seed: int, pages: int | None) -> None:
    sampling = Sampling(24, temperature=float(seed % 2))
    whole = phase(paged_rollout(network), dict(enumerate(requests_of([24] * 2, sampling))), None)
    stop = int(whole[0].tokens_L[9])  # so that some end early
    asked = requests_of(LIMITS, replace(sampling, stop_ids=(stop,)))
    expected = phase(paged_rollout(network), dict(enumerate(asked)), None)
    found, begun = in_phases(checked(paged_rollout(network, pages=pages)), asked, [2, *random_polls(seed, most=5)])
    assert_same(found, [expected[row] for row in range(len(asked))])
    assert begun > 0 and {one.finished for one in found} == {True, False}


def test_a_sequence_that_ends_in_the_steps_in_flight_has_finished(network: PolicyNetwork) -> None:
    """STEPS is 3. The first poll launches the prefill pass and three steps, whose result the second one would read."""
    asked = requests_of([4, 24], Sampling(24))
    rollout = paged_rollout(network)
    expected = phase(rollout, dict(enumerate(asked)), None)
    found = phase(rollout, dict(enumerate(asked)), 1)
    assert [len(found[row].tokens_L) for row in (0, 1)] == [4, 4]
    assert [found[row].interrupted for row in (0, 1)] == [False, True]
    assert found[0].tokens_L.tolist() == expected[0].tokens_L.tolist()
    stop = int(expected[1].tokens_L[2])
    with_stop = [replace(one, sampling=replace(one.sampling, stop_ids=(stop,))) for one in asked[1:]]
    [stopped] = phase(rollout, dict(enumerate(with_stop)), 1).values()
    assert stopped.finished and not stopped.interrupted, "it wrote its stop token in a step in flight"
    assert stopped.tokens_L.tolist() == expected[1].tokens_L[: len(stopped.tokens_L)].tolist()
    assert int(stopped.tokens_L[-1]) == stop


def test_preempted_and_waiting_answers_keep_what_they_have(network: PolicyNetwork) -> None:
    asked = requests_of([20, 20, 20], Sampling(20))
    expected = phase(paged_rollout(network), dict(enumerate(asked)), None)
    rollout = paged_rollout(network, pages=8, max_sequences=2)
    numbers = [rollout.submit(one) for one in asked]
    assert rollout.poll() == []
    while not session_of(rollout).scheduler.progress:
        assert rollout.poll() == []
    assert list(session_of(rollout).scheduler.waiting) == numbers[1:]  # preempted, and not started
    found = rollout.interrupt_all(numbers)
    assert rollout.session is None and not rollout.unfinished
    lengths = [len(one.tokens_L) for one in found]
    assert lengths[0] > lengths[1] > 0 == lengths[2] and all(one.interrupted for one in found)
    for one, whole in zip(found, expected.values(), strict=True):
        assert one.tokens_L.tolist() == whole.tokens_L[: len(one.tokens_L)].tolist()
    later = [continued(one, so_far) for one, so_far in zip(asked, found, strict=True)]
    finished = phase(rollout, dict(enumerate(later)), None)
    assert_same([finished[row] for row in range(3)], [expected[row] for row in range(3)])


def test_begun_answers_are_prefilled_with_their_tokens_and_take_the_pages_of_them() -> None:
    """Pages of 4 tokens: 3 of the prompt and 5 begun ones take 1 + 2; 3 tokens are left of the limit."""
    scheduler = Scheduler(2, PageAllocator(8), page_tokens=4)
    begun = Begun((7, 8, 9, 7, 8), (-1.0,) * 5)
    scheduler.add(5, Request(SHORT, Sampling(8), 0, begun=begun))
    scheduler.add(6, Request(SHORT, Sampling(8), 1))
    first, second = scheduler.admit(max_tokens=100)
    assert first.prefill_tokens == [*SHORT, *begun.tokens] and second.prefill_tokens == [*SHORT]
    assert first.prompt is second.prompt and len(first.pages) == 2 and second.pages == []
    assert (first.last_step, second.last_step) == (2, 7), "the prefill pass samples one of 3 and of 8 tokens"
    assert first.progress is not None and not scheduler.progress
    scheduler.cancel(5, 6)
    assert len(scheduler.allocator.free) == 8 and not scheduler.requests and len(scheduler.free_slots) == 2


def test_several_requests_are_cancelled_together() -> None:
    scheduler = Scheduler(2, PageAllocator(8), page_tokens=4)
    for number in range(4):
        scheduler.add(number, Request(SHORT, Sampling(8), number, begun=Begun((7,), (-1.0,)) if number == 3 else None))
    scheduler.admit(max_tokens=100)
    scheduler.cancel(0, 2, 3, 9)
    assert [sequence.request for sequence in scheduler.running] == [1] and list(scheduler.requests) == [1]
    assert not scheduler.waiting and not scheduler.progress
    scheduler.cancel(1)
    assert len(scheduler.allocator.free) == 8
