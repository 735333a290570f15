"""Answers that are preempted and resumed are those of a cache with much room.

The engine's device path on a CPU, with plain torch in place of its two kernels, which have tests of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.page_table import PageTable
from tests.helpers import copied_policy
from tests.paged_engine import assert_pages_are_held_once, assert_same, in_torch, paged_rollout

pytest.importorskip("triton")
__all__ = ["in_torch"]  # a fixture
SHORT, LONG = (11, 12, 13), (20, 30, 40, 50, 60, 10)  # in one page and in two


@pytest.fixture
def network(model_folder: Callable[[str], Path]) -> PolicyNetwork:
    """Gemma 2 has a window in every other layer and softcaps."""
    return copied_policy(model_folder("gemma2"))


pytestmark = pytest.mark.usefixtures("in_torch")


def session_of(rollout: NativeRollout) -> GraphSession:
    assert isinstance(rollout.session, GraphSession)
    return rollout.session


def written(rollout: NativeRollout, requests: Sequence[Request]) -> tuple[list[Completion], int]:
    """The completions, and how often a sequence was preempted."""
    found: dict[int, Completion] = {}
    number_of = {rollout.submit(request): row for row, request in enumerate(requests)}
    preempted = 0
    while len(found) < len(requests):
        session = rollout.session
        found |= {number_of[one.request]: one for one in rollout.poll()}
        if isinstance(session, GraphSession):
            preempted = session.preempted
            assert_pages_are_held_once(session)
    return [found[row] for row in range(len(requests))], preempted


def requests_of(limits: Sequence[int], sampling: Sampling) -> list[Request]:
    prompts = [SHORT, LONG, SHORT, LONG]
    return [
        Request(prompts[row % 4], replace(sampling, max_new_tokens=limit), seed=100 + row)
        for row, limit in enumerate(limits)
    ]


@pytest.mark.parametrize(("pages", "temperature"), [(8, 1.0), (10, 0.0), (12, 1.0)])  # LONG and 24 tokens fill 8
def test_answers_of_every_length_are_those_of_a_cache_with_much_room(
    network: PolicyNetwork, pages: int, temperature: float
) -> None:
    sampling = Sampling(24, temperature=temperature)
    whole, _ = written(paged_rollout(network), requests_of([24] * 8, sampling))
    stop = int(whole[0].tokens_L[9])  # so that some end early
    sampling = replace(sampling, stop_ids=(stop,))
    requests = requests_of([24, 24, 1, 4, 5, 24, 13, 24, 8, 24], sampling)
    expected, none = written(paged_rollout(network), requests)
    found, preempted = written(paged_rollout(network, pages=pages), requests)
    assert none == 0 and preempted > 0
    assert_same(found, expected)
    assert {len(one.tokens_L) for one in found} >= {1, 4, 24} and {one.finished for one in found} == {True, False}


def test_a_preempted_answer_keeps_the_tokens_and_logprobs_it_has(network: PolicyNetwork) -> None:
    """They are not sampled again: a resumed answer returns what was read when it was preempted."""
    rollout = paged_rollout(network, pages=8)
    for request in requests_of([20, 20], Sampling(20)):
        rollout.submit(request)
    finished = rollout.poll()
    session, found = session_of(rollout), {}
    while not session.scheduler.progress:
        finished += rollout.poll()
    [(number, progress)] = session.scheduler.progress.items()
    assert number == 1 and len(progress.tokens_L) == len(progress.logprobs_L) > 0
    # a mark that no model writes
    session.scheduler.progress[1] = progress._replace(logprobs_L=torch.full_like(progress.logprobs_L, 0.5))
    while rollout.session is not None:
        finished += rollout.poll()
    found = {one.request: one for one in finished}
    length = len(progress.tokens_L)
    assert found[1].tokens_L[:length].tolist() == progress.tokens_L.tolist()
    assert set(found[1].logprobs_L[:length].tolist()) == {0.5} and len(found[1].tokens_L) == 20
    assert float(found[1].logprobs_L[length:].max()) < 0


def test_an_answer_takes_pages_as_it_grows_and_the_table_has_only_new_ones_written(
    network: PolicyNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STEPS is 3 and a page has 4 tokens: 3, 6, 9, 12 tokens in 1, 2, 3, 3 pages."""
    rollout, sent = paged_rollout(network), []
    write = PageTable.write

    def counted(table: PageTable, entries: Sequence[tuple[int, int, int]]) -> None:
        sent.append([entry[1] for entry in entries])
        write(table, entries)  # type: ignore[arg-type]

    monkeypatch.setattr(PageTable, "write", counted)
    rollout.submit(Request(LONG, Sampling(32_000), seed=1))
    pages = []
    for _ in range(4):
        rollout.poll()
        [sequence] = session_of(rollout).scheduler.running
        pages.append(len(sequence.pages))
    assert pages == [1, 2, 3, 3]
    assert sent == [[0, 1], [2], [3], [4], []]  # columns: the prompt's two at the prefill, then its own
    assert len(session_of(rollout).scheduler.allocator.free) == rollout.decoder.cache.pages - 2 - 3  # type: ignore[union-attr]


def test_cancelled_answers_free_their_pages_and_the_last_reader_frees_the_prompt(network: PolicyNetwork) -> None:
    rollout = paged_rollout(network)
    numbers = [rollout.submit(Request(LONG, Sampling(12), seed)) for seed in range(3)]
    rollout.poll()
    scheduler = session_of(rollout).scheduler
    assert len(scheduler.allocator.free) == scheduler.allocator.pages - 2 - 3
    rollout.cancel(numbers[0])
    assert len(scheduler.allocator.free) == scheduler.allocator.pages - 2 - 2
    rollout.cancel(numbers[2])
    rollout.cancel(numbers[1])
    assert len(scheduler.allocator.free) == scheduler.allocator.pages and scheduler.prompts == {}
    assert rollout.session is None


def test_a_preempted_answer_that_is_cancelled_is_not_resumed(network: PolicyNetwork) -> None:
    rollout = paged_rollout(network, pages=8)
    for request in requests_of([20, 20], Sampling(20)):
        rollout.submit(request)
    rollout.poll()
    session, finished = session_of(rollout), []
    while not session.scheduler.progress:
        finished += rollout.poll()
    rollout.cancel(1)
    assert session.scheduler.progress == {} and session.scheduler.requests.keys() == {0}
    while rollout.session is not None:
        finished += rollout.poll()
    assert [(one.request, len(one.tokens_L)) for one in finished] == [(0, 20)]


def test_a_longer_prompt_with_a_shorter_answer_joins_though_it_takes_a_page_more(network: PolicyNetwork) -> None:
    rollout = paged_rollout(network)
    for seed in range(2):
        rollout.submit(Request((1, 2, 3, 4), Sampling(8), seed))  # 1 + 2 pages of 4 tokens
    rollout.poll()
    session = session_of(rollout)
    assert session.fits(Request((1, 2, 3, 4, 5), Sampling(7), seed=1))  # 2 + 2
    assert not session.fits(Request(tuple(range(1, 10)), Sampling(8), seed=1))  # 3 + 2
    assert not session.fits(Request((1, 2), Sampling(9), seed=1))  # longer than any answer that was asked for


def test_a_full_cache_is_reported_once(network: PolicyNetwork, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _, preempted = written(paged_rollout(network, pages=8), requests_of([20] * 4, Sampling(20)))
    assert preempted > 1
    assert caplog.text.count("the key-value cache is full: 2 sequences run, others wait and continue later") == 1
