"""What the native engine's host side decides: pages of the cache, who runs in which slot, sizes of batches."""

import gc
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloom.errors import ConfigError
from rloom.rollout.base import Request, Sampling
from rloom.rollout.native import scheduler as schedule_module
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.graphs import Graphs, batch_of
from rloom.rollout.native.scheduler import RunningSequence, Scheduler
from rloom.rollout.native.session import Progress
from rloom.rollout.native.slots import MOST_STOP_IDS, Slots
from tests.requests import ask, sampled

A, B, C = (1, 2, 3), (4, 5, 6), (7, 8, 9)
PLENTY = 1000


def scheduler_of(
    *requests: Request | tuple[int, ...], slots: int = 8, pages: int = 100, longest: int = 4, page_tokens: int = 4
) -> Scheduler:
    asked = [request if isinstance(request, Request) else ask(request) for request in requests]
    scheduler = Scheduler(slots, PageAllocator(pages), page_tokens)
    for number, request in enumerate(sampled(asked, Sampling(max_new_tokens=longest))):
        scheduler.add(number, request)
    return scheduler


def requests_of(answers: list[RunningSequence]) -> list[int]:
    return [answer.request for answer in answers]


# --- pages


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(-9, -1)), max_size=40))
def test_pages_are_never_allocated_twice_and_all_come_back(orders: list[int]) -> None:
    """A positive number allocates so many pages, a negative one releases one of the lists held."""
    allocator, held = PageAllocator(30), []
    for order in orders:
        if 0 <= order <= len(allocator.free):
            held.append(allocator.allocate(order))
        elif order < 0 and held:
            allocator.release(held.pop(order % len(held)))
        taken = [page for pages in held for page in pages]
        assert sorted([*taken, *allocator.free]) == list(range(30))
    for pages in held:
        allocator.release(pages)
    assert sorted(allocator.free) == list(range(30))


def test_pages_are_allocated_in_their_order_and_those_released_last_first() -> None:
    allocator = PageAllocator(5)
    assert [allocator.allocate(2), allocator.allocate(2)] == [[0, 1], [2, 3]]
    allocator.release([0, 1])
    assert allocator.allocate(3) == [0, 1, 4] and allocator.free == []


# --- who runs


def test_requests_enter_in_their_order_and_find_slots_and_pages() -> None:
    scheduler = scheduler_of(A, (4, 5, 6, 7, 8), A, C, slots=3)
    first, second, third = scheduler.admit(PLENTY)
    assert requests_of(scheduler.running) == [0, 1, 2] and list(scheduler.waiting) == [3]
    assert [answer.slot for answer in scheduler.running] == [0, 1, 2]
    # 3 tokens are in one page, 5 in two; answers have no token in the cache yet
    assert (first.prompt.pages, second.prompt.pages, third.prompt) == ([0], [1, 2], first.prompt)
    assert [answer.pages for answer in scheduler.running] == [[], [], []]
    assert scheduler.take_new_entries() == [(0, 0, 0), (1, 0, 1), (1, 1, 2), (2, 0, 0)]
    assert scheduler.grow(8)  # the limit is 4 tokens: one page
    assert [answer.pages for answer in scheduler.running] == [[3], [4], [5]]
    assert scheduler.take_new_entries() == [(0, 1, 3), (1, 2, 4), (2, 1, 5)]
    assert len(scheduler.allocator.free) == 100 - 6
    assert scheduler.take_new_entries() == []


def test_a_shared_prompt_goes_with_the_last_of_its_readers() -> None:
    scheduler = scheduler_of(A, A, A)
    first, second, third = scheduler.admit(PLENTY)
    assert scheduler.grow(1)
    assert first.prompt.readers == 3 and len(scheduler.allocator.free) == 100 - 3 - 1
    scheduler.release([first, third])
    assert second.prompt.readers == 1 and len(scheduler.allocator.free) == 100 - 1 - 1
    assert scheduler.prompts == {A: second.prompt}
    scheduler.release([second])
    assert scheduler.prompts == {} and len(scheduler.allocator.free) == 100


def test_a_request_that_comes_later_reads_the_prompt_that_is_there() -> None:
    scheduler = scheduler_of(A, B, A, slots=2)
    first, second = scheduler.admit(PLENTY)
    scheduler.release([second])
    [third] = scheduler.admit(PLENTY)
    assert third.prompt is first.prompt and first.prompt.readers == 2


def test_slots_and_pages_of_those_who_left_are_used_again() -> None:
    scheduler = scheduler_of(A, B, C, slots=2, pages=4)
    first, second = scheduler.admit(PLENTY)
    assert scheduler.grow(4) and scheduler.allocator.free == []
    scheduler.release([first])
    assert first.collected and scheduler.running == [second]
    [third] = scheduler.admit(PLENTY)
    assert scheduler.grow(4)
    assert third.slot == first.slot and {*third.prompt.pages, *third.pages} == {*first.prompt.pages, *first.pages}
    assert requests_of(scheduler.running) == [1, 2]


def test_prompts_of_so_many_tokens_are_read_at_a_time() -> None:
    scheduler = scheduler_of(A, B, A, C, B)
    assert requests_of(scheduler.admit(6)) == [0, 1, 2]  # 3 + 3, and A is read already
    assert requests_of(scheduler.admit(8)) == [3, 4]  # B is read again: it counts


def test_a_prompt_longer_than_the_limit_is_read_alone() -> None:
    scheduler = scheduler_of(A, A, B)
    assert requests_of(scheduler.admit(1)) == [0, 1]
    assert requests_of(scheduler.admit(1)) == [2]


def test_so_many_different_prompts_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "MAX_PROMPTS", 2)
    scheduler = scheduler_of(A, B, A, C)
    assert requests_of(scheduler.admit(PLENTY)) == [0, 1, 2]
    assert requests_of(scheduler.admit(PLENTY)) == [3]


def test_nobody_overtakes_one_that_finds_no_room_and_nothing_stays_taken() -> None:
    scheduler = scheduler_of(A, B, ask((1,), limit=1), pages=3)  # two for each, one of them once it has written
    [first] = scheduler.admit(PLENTY)
    assert len(scheduler.allocator.free) == 2 and scheduler.prompts.keys() == {A}
    assert scheduler.admit(PLENTY) == [] and list(scheduler.waiting) == [1, 2]
    assert len(scheduler.allocator.free) == 2 and scheduler.prompts.keys() == {A}
    scheduler.release([first])
    assert requests_of(scheduler.admit(PLENTY)) == [1]
    assert list(scheduler.waiting) == [2]


def test_a_request_may_ask_for_less_than_the_sampling_allows_and_not_for_more() -> None:
    scheduler = scheduler_of(ask(A, limit=2), ask(A, limit=9), ask(A))
    scheduler.step = 5
    assert scheduler.steps_left == 0  # nobody runs
    short, long, plain = scheduler.admit(PLENTY)
    assert [answer.limit for answer in (short, long, plain)] == [2, 4, 4]
    # reading the prompt writes the first token, every step another
    assert [answer.last_step for answer in (short, long, plain)] == [6, 8, 8]
    assert scheduler.steps_left == 3
    scheduler.release([long, plain])
    assert scheduler.steps_left == 1


def test_an_answer_of_one_token_needs_no_step() -> None:
    scheduler = scheduler_of(A, longest=1)
    scheduler.admit(PLENTY)
    assert scheduler.steps_left == 0


def test_prompts_enter_in_handfuls() -> None:
    scheduler = scheduler_of(*[A] * 21, slots=16)  # a handful of 16 slots: 3
    assert scheduler.should_admit()  # nobody runs
    scheduler.admit(PLENTY)
    assert len(scheduler.running) == 16 and not scheduler.should_admit()
    scheduler.release(scheduler.running[:2])
    assert not scheduler.should_admit()
    scheduler.release(scheduler.running[:1])
    assert scheduler.should_admit()
    assert requests_of(scheduler.admit(PLENTY)) == [16, 17, 18]
    scheduler.release(scheduler.running[:1])
    assert not scheduler.should_admit()
    scheduler.release(scheduler.running[:1])
    assert scheduler.should_admit()  # two wait and two slots are free
    scheduler.admit(PLENTY)
    scheduler.release(scheduler.running)
    assert not scheduler.should_admit()  # nobody waits


def test_one_runs_at_a_time_where_the_prompt_and_the_answer_fill_the_cache() -> None:
    scheduler = scheduler_of(A, B, C, pages=2)
    order = []
    while scheduler.waiting:
        assert scheduler.should_admit()
        [answer] = scheduler.admit(PLENTY)
        order.append(answer.request)
        scheduler.release([answer])
    assert order == [0, 1, 2]


PROMPTS = st.sampled_from([A, B, (1,), (2, 3, 4, 5, 6, 7)])
REQUESTS = st.builds(ask, PROMPTS, st.just(0), st.one_of(st.none(), st.integers(1, 6)))


def assert_apart(scheduler: Scheduler) -> None:
    """No page and no slot has two owners, and each has one or is free; a prompt has its pages once."""
    running = scheduler.running
    prompts = {id(answer.prompt): answer.prompt for answer in running}.values()
    owned = [page for owner in (*running, *prompts) for page in owner.pages]
    assert sorted([*owned, *scheduler.allocator.free]) == list(range(scheduler.allocator.pages))
    assert len({prompt.tokens for prompt in prompts}) == len(prompts)
    slots = [answer.slot for answer in running]
    assert sorted([*slots, *scheduler.free_slots]) == list(range(scheduler.slots))


@given(
    st.lists(REQUESTS, min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(5, 20),  # one answer of 5 tokens to a prompt of 6 always fits, in pages of 2 + 3
    st.integers(1, 10),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_everyone_is_served_once_whatever_fits(asked, slots, pages, max_tokens, steps, draws) -> None:
    """The device's part is played by the count of steps: an answer ends at its limit, or before it by chance."""
    scheduler = scheduler_of(*asked, slots=slots, pages=pages, longest=5, page_tokens=2 if draws.random() < 0.5 else 3)
    if scheduler.page_tokens == 2:
        scheduler.allocator = PageAllocator(pages + 1)  # 3 + 3
    served, first_times = [], []
    while scheduler.waiting or scheduler.running:
        while scheduler.should_admit() and (entered := scheduler.admit(max_tokens)):
            first_times += [answer.request for answer in entered if answer.progress is None]
            assert_apart(scheduler)
        assert scheduler.running  # or it would wait for ever
        oldest = scheduler.running[0]
        if not scheduler.grow(steps):
            for answer in scheduler.preempt(steps):
                written = min(answer.limit, answer.resumed_tokens + 1 + scheduler.step - answer.first_step)
                scheduler.resume(answer.request, Progress(torch.zeros(written), torch.zeros(written)))
        assert scheduler.running[0] is oldest
        scheduler.step += steps
        assert_apart(scheduler)
        for answer in scheduler.running:
            assert len(answer.pages) * scheduler.page_tokens >= answer.cached_tokens(scheduler.step)
        done = [one for one in scheduler.running if one.last_step <= scheduler.step or draws.random() < 0.2]
        served += requests_of(done)
        scheduler.release(done)
    assert sorted(served) == list(range(len(asked)))
    assert first_times == list(range(len(asked)))
    assert_apart(scheduler)
    assert scheduler.prompts == {} and scheduler.progress == {} and scheduler.requests == {}


# --- steps


def test_without_graphs_every_step_is_a_call() -> None:
    calls: list[int] = []
    graphs = Graphs(calls.append, capture=False)
    graphs.run(12, 3)
    graphs.run(8, 0)
    graphs.run(8, 1)
    assert calls == [12, 12, 12, 8] and graphs.graphs == {}


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold an earlier engine's memory, whose release synchronises with the device."""
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    collects: list[bool] = []

    def step(rows: int) -> None:
        collects.append(gc.isenabled())
        if rows == 0:
            raise RuntimeError("cannot be captured")

    graphs, graph = Graphs(step, capture=True), MagicMock()
    graphs.record(graph, 8)
    assert gc.isenabled() and graph.capture_end.called
    with pytest.raises(RuntimeError, match="cannot be captured"):
        graphs.record(graph, 0)
    assert gc.isenabled()
    gc.disable()
    try:
        graphs.record(graph, 8)
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()
    assert collects == [False] * 3


def test_a_batch_is_filled_up_to_the_next_of_two_sizes_an_octave_or_four() -> None:
    small = {1: 8, 8: 8, 9: 12, 12: 12, 13: 16, 16: 16, 17: 24, 25: 32, 33: 48, 129: 192, 193: 256, 256: 256}
    large = {257: 320, 320: 320, 321: 384, 400: 448, 449: 512, 513: 640, 1024: 1024, 1025: 1280}
    assert {rows: batch_of(rows) for rows in (*small, *large)} == {**small, **large}


def test_batches_grow_with_their_rows_and_few_rows_are_wasted() -> None:
    sizes = [batch_of(rows) for rows in range(1, 2050)]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, start=1):
        assert size >= rows and batch_of(size) == size
        assert rows < 8 or size < rows * (1.25 if rows > 256 else 1.5)
    assert len(set(sizes)) == 1 + 2 * 5 + 4 * 3 + 1  # 8, five octaves up to 256, three up to 2048, one beyond


# --- what the device is told


def slots_of(count: int = 3, longest_answer: int = 4) -> Slots:
    return Slots(count, longest_answer, torch.device("cpu"))


def test_a_sequence_begins_in_its_slot_and_nowhere_else() -> None:
    slots = slots_of()
    for state in (slots.written, slots.stopped, slots.done, slots.prompt_length, slots.limit):
        state.fill_(9)
    slots.uniform.fill_(0.5)
    draws = torch.tensor([[0.25, 0.75], [0.125, 0.375]])
    slot_B = slots.begin([(2, 3, 0, 0, 4), (0, 1, 0, 1, 2)], draws)
    assert slot_B.tolist() == [2, 0] and slot_B.dtype == torch.int32
    assert slots.prompt_length.tolist() == [1, 9, 3, 9]
    assert slots.limit.tolist() == [2, 9, 4, 9]
    assert slots.written.tolist() == [1, 9, 0, 9]  # the second one had a token before it was preempted
    for state in (slots.stopped, slots.done):
        assert state.tolist() == [0, 9, 0, 9]
    assert slots.uniform.tolist() == [[0.125, 0.375, 0.5, 0.5], [0.5] * 4, [0.25, 0.75, 0.5, 0.5], [0.5] * 4]


def test_resumed_answers_find_their_tokens_and_logprobs() -> None:
    slots = slots_of()
    logprobs = [torch.tensor([-0.5]), torch.tensor([-1.0, -2.0, -3.0])]
    slots.restore([2, 0], [torch.tensor([7]), torch.tensor([4, 5, 6])], logprobs)
    assert slots.tokens.tolist() == [[4, 5, 6, 0], [0] * 4, [7, 0, 0, 0], [0] * 4]
    assert slots.logprobs.tolist() == [[-1.0, -2.0, -3.0, 0.0], [0.0] * 4, [-0.5, 0.0, 0.0, 0.0], [0.0] * 4]


def test_greedy_sequences_begin_without_luck() -> None:
    slots = slots_of()
    slots.begin([(1, 2, 0, 0, 4)], None)
    assert slots.limit.tolist() == [0, 4, 0, 0] and not slots.uniform.any()


def test_rows_beyond_the_sequences_belong_to_a_spare_slot_that_is_done() -> None:
    slots = slots_of()
    assert (slots.done.tolist(), slots.written.tolist()) == ([0, 0, 0, 1], [0, 0, 0, 1])
    slots.set_rows([2, 0], 8)
    assert slots.row_slot.tolist() == [2, 0, 3, 3, 3, 3, 3, 3]
    slots.set_rows([1], 4)  # a smaller batch leaves the rest as it was
    assert slots.row_slot.tolist() == [1, 3, 3, 3, 3, 3, 3, 3]


def test_a_row_reads_the_last_token_written_at_the_place_behind_what_was_read() -> None:
    slots = slots_of()
    slots.begin([(0, 3, 0, 0, 4), (1, 5, 0, 0, 4)], None)
    slots.token.copy_(torch.tensor([41, 42, 0, 0]))
    slots.written.copy_(torch.tensor([1, 3, 0, 1]))
    token_B, position_B = slots.inputs(torch.tensor([1, 0, 3], dtype=torch.int32))
    assert token_B.tolist() == [42, 41, 0]
    assert position_B.tolist() == [7, 3, 0]  # 5 of the prompt and 2 of its own before it; 3 and none; nothing
    assert slots.batch_tokens.tolist() == [10]


def test_the_sampling_is_told_as_four_numbers_and_a_list_of_stop_tokens() -> None:
    slots = slots_of()
    slots.set_sampling(Sampling(4, temperature=0.5, top_p=0.75, top_k=20, stop_ids=(7, 2)))
    assert slots.settings.tolist() == [2.0, 0.0, 0.75, 20.0]
    assert slots.stop_ids.tolist() == [7, 2] + [-1] * (MOST_STOP_IDS - 2)
    slots.set_sampling(Sampling(4, temperature=0.0, stop_ids=(7, 2), ignore_eos=True))
    assert slots.settings.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert set(slots.stop_ids.tolist()) == {-1}


def test_more_stop_tokens_than_the_device_has_room_for_are_named() -> None:
    with pytest.raises(ConfigError, match=r"65 stop tokens; the native engine takes 64"):
        slots_of().set_sampling(Sampling(4, stop_ids=tuple(range(MOST_STOP_IDS + 1))))
