"""Answers that are preempted and resumed are those of a cache with much room.

The engine's device path on a CPU, with plain torch in place of its two kernels, which have tests of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rloom.engines.base import Placement
from rloom.models.attention import AttentionOptions, attend_with_mask
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native import graph_session
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.page_table import PageTable
from rloom.rollout.native.sampler import sample_tokens
from rloom.rollout.native.slots import Slots
from tests.helpers import engine_of, policy

pytest.importorskip("triton")
PAGE = 4
SHORT, LONG = (11, 12, 13), (20, 30, 40, 50, 60, 10)  # in one page and in two


def attend_in_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_B: Tensor,
    slots: Slots,
    table: PageTable,
    options: AttentionOptions,
) -> Tensor:
    rows = []
    for row, slot in enumerate(slot_B.long()):
        prompt_length = slots.prompt_length[slot].long()
        position_T = torch.arange(int(prompt_length + slots.written[slot]))
        place_T = table.places(slot.expand(len(position_T)), position_T, prompt_length.expand(len(position_T)))
        keys[:, place_T[-1]], values[:, place_T[-1]] = key[row], value[row]
        seen = (position_T.flip(0) < (options.window or len(position_T)))[None]
        found = attend_with_mask(
            query[row][None, :, None], keys[None, :, place_T], values[None, :, place_T], seen, options
        )
        rows.append(found[0, :, 0])
    return torch.stack(rows)


def sample_in_torch(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots, sampling: Sampling) -> None:
    for source, slot in zip(source_B.tolist(), slot_B.tolist(), strict=True):
        if slots.done[slot]:
            continue
        written = int(slots.written[slot])
        token, logprob = sample_tokens(logits_PV[source : source + 1], slots.uniform[slot, written][None], sampling)
        slots.tokens[slot, written], slots.logprobs[slot, written] = token[0], logprob[0]
        slots.token[slot], slots.written[slot] = token[0], written + 1
        slots.stopped[slot] = int((slots.stop_ids == token[0]).any())
        slots.done[slot] = int(bool(slots.stopped[slot]) or written + 1 >= int(slots.limit[slot]))


@pytest.fixture
def network(model_folder: Callable[[str], Path]) -> PolicyNetwork:
    """Gemma 2 has a window in every other layer and softcaps."""
    return policy(model_folder("gemma2"))


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots) -> None:
        inverse, greedy = slots.settings[:2].tolist()
        temperature = 0.0 if greedy else 1 / inverse
        sample_in_torch(logits_PV, source_B, slot_B, slots, Sampling(1, temperature=temperature))

    monkeypatch.setattr("rloom.rollout.native.kernels.attend.attend_to_slots", attend_in_torch)
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.sample_and_record", sample)
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.batch_of", lambda rows: rows + 1)
    monkeypatch.setattr(graph_session, "STEPS", 3)


pytestmark = pytest.mark.usefixtures("in_torch")


def rollout_of(network: PolicyNetwork, *, pages: int | None = None, max_sequences: int = 6) -> NativeRollout:
    rollout = NativeRollout(
        network,
        owner=engine_of(network, Placement(torch.device("cpu"))),
        max_sequences=max_sequences,
        max_prefill_tokens=24,
        memory_share=0.1,
        free_cache=True,
    )
    rollout.uses_graphs, rollout.page_tokens = True, PAGE
    if pages is not None:
        capacity = pages * PAGE
        rollout.capacity = lambda longest: capacity  # type: ignore[method-assign]
    return rollout


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


def assert_pages_are_held_once(session: GraphSession) -> None:
    scheduler = session.scheduler
    owners = (*scheduler.running, *scheduler.prompts.values(), scheduler.allocator)
    pages = [page for owner in owners for page in (owner.free if owner is scheduler.allocator else owner.pages)]
    assert sorted(pages) == list(range(session.decoder.cache.pages))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist() and one.finished == other.finished
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-4)


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
    whole, _ = written(rollout_of(network), requests_of([24] * 8, sampling))
    stop = int(whole[0].tokens_L[9])  # so that some end early
    sampling = replace(sampling, stop_ids=(stop,))
    requests = requests_of([24, 24, 1, 4, 5, 24, 13, 24, 8, 24], sampling)
    expected, none = written(rollout_of(network), requests)
    found, preempted = written(rollout_of(network, pages=pages), requests)
    assert none == 0 and preempted > 0
    assert_same(found, expected)
    assert {len(one.tokens_L) for one in found} >= {1, 4, 24} and {one.finished for one in found} == {True, False}


def test_a_preempted_answer_keeps_the_tokens_and_logprobs_it_has(network: PolicyNetwork) -> None:
    """They are not sampled again: a resumed answer returns what was read when it was preempted."""
    rollout = rollout_of(network, pages=8)
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
    rollout, sent = rollout_of(network), []
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
    rollout = rollout_of(network)
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
    rollout = rollout_of(network, pages=8)
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
    rollout = rollout_of(network)
    for seed in range(2):
        rollout.submit(Request((1, 2, 3, 4), Sampling(8), seed))  # 1 + 2 pages of 4 tokens
    rollout.poll()
    session = session_of(rollout)
    assert session.fits(Request((1, 2, 3, 4, 5), Sampling(7), seed=1))  # 2 + 2
    assert not session.fits(Request(tuple(range(1, 10)), Sampling(8), seed=1))  # 3 + 2
    assert not session.fits(Request((1, 2), Sampling(9), seed=1))  # longer than any answer that was asked for


def test_a_full_cache_is_reported_once(network: PolicyNetwork, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _, preempted = written(rollout_of(network, pages=8), requests_of([20] * 4, Sampling(20)))
    assert preempted > 1
    assert caplog.text.count("the key-value cache is full: 2 sequences run, others wait and continue later") == 1
