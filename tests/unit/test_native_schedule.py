"""What the native engine's host side decides: places of the cache, who runs in which slot, sizes of batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloom.errors import ConfigError
from rloom.rollout.base import Request, Sampling
from rloom.rollout.native import schedule as schedule_module
from rloom.rollout.native.graphs import Graphs, batch_of
from rloom.rollout.native.ranges import Ranges
from rloom.rollout.native.schedule import Answer, Schedule
from rloom.rollout.native.slots import MOST_STOP_IDS, Slots

A, B, C = (1, 2, 3), (4, 5, 6), (7, 8, 9)
PLENTY = 1000


def schedule_of(*requests: Request | tuple[int, ...], slots: int = 8, places: int = 100, longest: int = 4) -> Schedule:
    asked = [request if isinstance(request, Request) else Request(request, seed=0) for request in requests]
    return Schedule(asked, Sampling(max_new_tokens=longest), slots, Ranges(places))


def requests_of(answers: list[Answer]) -> list[int]:
    return [answer.request for answer in answers]


# --- places


def test_the_first_stretch_that_fits_is_taken_even_where_another_fits_better() -> None:
    ranges = Ranges(12)
    assert [ranges.take(5), ranges.take(2), ranges.take(3), ranges.take(2)] == [0, 5, 7, 10]
    assert ranges.free == [] and ranges.room == 0
    ranges.give(7, 3)
    ranges.give(0, 5)
    assert ranges.free == [(0, 5), (7, 3)] and ranges.room == 8
    assert ranges.take(3) == 0
    assert ranges.free == [(3, 2), (7, 3)]


def test_what_is_given_back_grows_together_with_its_neighbours() -> None:
    ranges = Ranges(9)
    for _ in range(3):
        ranges.take(3)
    ranges.give(0, 3)
    ranges.give(6, 3)
    assert ranges.free == [(0, 3), (6, 3)]
    ranges.give(3, 3)  # closes the gap
    assert ranges.free == [(0, 9)]


def test_nothing_is_taken_where_no_stretch_is_long_enough_though_together_they_would_be() -> None:
    ranges = Ranges(9)
    for _ in range(3):
        ranges.take(3)
    ranges.give(0, 3)
    ranges.give(6, 3)
    assert ranges.room == 6
    assert ranges.take(4) is None
    assert ranges.free == [(0, 3), (6, 3)]


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-9, -1)), max_size=40))
def test_places_are_never_handed_out_twice_and_all_come_back(orders: list[int]) -> None:
    """A positive number takes so many places, a negative one gives back one of the stretches held."""
    ranges, taken, held = Ranges(30), [False] * 30, []
    for order in orders:
        if order > 0:
            starts = (start for start in range(30 - order + 1) if not any(taken[start : start + order]))
            start = ranges.take(order)
            assert start == next(starts, None)
            if start is not None:
                taken[start : start + order] = [True] * order
                held.append((start, order))
        elif held:
            start, length = held.pop(order % len(held))
            taken[start : start + length] = [False] * length
            ranges.give(start, length)
        assert ranges.room == taken.count(False)
    for start, length in held:
        ranges.give(start, length)
    assert ranges.free == [(0, 30)]


# --- who runs


def test_requests_enter_in_their_order_and_find_slots_and_places() -> None:
    schedule = schedule_of(A, (4, 5), A, C, slots=3)
    first, second, third = schedule.admit(PLENTY)
    assert requests_of(schedule.running) == [0, 1, 2] and list(schedule.waiting) == [3]
    assert [answer.slot for answer in schedule.running] == [0, 1, 2]
    # 4 places for an answer, then those of its prompt, where it is not there yet
    assert (first.own_start, first.prompt.start) == (0, 4)
    assert (second.own_start, second.prompt.start) == (7, 11)
    assert (third.own_start, third.prompt) == (13, first.prompt)
    assert schedule.places.free == [(17, 83)]


def test_a_shared_prompt_goes_with_the_last_of_its_readers() -> None:
    schedule = schedule_of(A, A, A)
    first, second, third = schedule.admit(PLENTY)
    assert first.prompt.readers == 3 and schedule.places.room == 100 - 3 * 4 - 3
    schedule.leave([first, third])
    assert second.prompt.readers == 1 and schedule.places.room == 100 - 4 - 3
    assert schedule.prompts == {A: second.prompt}
    schedule.leave([second])
    assert schedule.prompts == {} and schedule.places.free == [(0, 100)]


def test_a_request_that_comes_later_reads_the_prompt_that_is_there() -> None:
    schedule = schedule_of(A, B, A, slots=2)
    first, second = schedule.admit(PLENTY)
    schedule.leave([second])
    [third] = schedule.admit(PLENTY)
    assert third.prompt is first.prompt and first.prompt.readers == 2


def test_slots_and_places_of_those_who_left_are_used_again() -> None:
    schedule = schedule_of(A, B, C, slots=2, places=14)
    first, second = schedule.admit(PLENTY)
    assert schedule.places.room == 0
    schedule.leave([first])
    assert first.collected and schedule.running == [second]
    [third] = schedule.admit(PLENTY)
    assert (third.slot, third.own_start, third.prompt.start) == (first.slot, 0, 4)
    assert requests_of(schedule.running) == [1, 2]


def test_prompts_of_so_many_tokens_are_read_at_a_time() -> None:
    schedule = schedule_of(A, B, A, C, B)
    assert requests_of(schedule.admit(6)) == [0, 1, 2]  # 3 + 3, and A is read already
    assert requests_of(schedule.admit(8)) == [3, 4]  # B is read again: it counts


def test_a_prompt_longer_than_the_limit_is_read_alone() -> None:
    schedule = schedule_of(A, A, B)
    assert requests_of(schedule.admit(1)) == [0, 1]
    assert requests_of(schedule.admit(1)) == [2]


def test_so_many_different_prompts_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "MOST_PROMPTS", 2)
    schedule = schedule_of(A, B, A, C)
    assert requests_of(schedule.admit(PLENTY)) == [0, 1, 2]
    assert requests_of(schedule.admit(PLENTY)) == [3]


@pytest.mark.parametrize("places", [13, 10])  # 3 short for the second's prompt; too few for its answer already
def test_nobody_overtakes_one_that_finds_no_room_and_nothing_stays_taken(places: int) -> None:
    schedule = schedule_of(A, B, Request((1,), seed=0, max_new_tokens=1), places=places)
    [first] = schedule.admit(PLENTY)
    assert schedule.places.free == [(7, places - 7)] and schedule.prompts.keys() == {A}
    assert schedule.admit(PLENTY) == [] and list(schedule.waiting) == [1, 2]
    schedule.leave([first])
    assert requests_of(schedule.admit(PLENTY)) == [1, 2]


def test_a_request_may_ask_for_less_than_the_sampling_allows_and_not_for_more() -> None:
    schedule = schedule_of(Request(A, 0, max_new_tokens=2), Request(A, 0, max_new_tokens=9), Request(A, 0))
    schedule.step = 5
    assert schedule.steps_left == 0  # nobody runs
    short, long, plain = schedule.admit(PLENTY)
    assert [answer.limit for answer in (short, long, plain)] == [2, 4, 4]
    # reading the prompt writes the first token, every step another
    assert [answer.last_step for answer in (short, long, plain)] == [6, 8, 8]
    assert schedule.steps_left == 3
    schedule.leave([long, plain])
    assert schedule.steps_left == 1


def test_an_answer_of_one_token_needs_no_step() -> None:
    schedule = schedule_of(A, longest=1)
    schedule.admit(PLENTY)
    assert schedule.steps_left == 0


def test_prompts_enter_in_handfuls() -> None:
    schedule = schedule_of(*[A] * 21, slots=16)  # a handful of 16 slots: 3
    assert schedule.should_admit()  # nobody runs
    schedule.admit(PLENTY)
    assert len(schedule.running) == 16 and not schedule.should_admit()
    schedule.leave(schedule.running[:2])
    assert not schedule.should_admit()
    schedule.leave(schedule.running[:1])
    assert schedule.should_admit()
    assert requests_of(schedule.admit(PLENTY)) == [16, 17, 18]
    schedule.leave(schedule.running[:1])
    assert not schedule.should_admit()
    schedule.leave(schedule.running[:1])
    assert schedule.should_admit()  # two wait and two slots are free
    schedule.admit(PLENTY)
    schedule.leave(schedule.running)
    assert not schedule.should_admit()  # nobody waits


def test_one_runs_at_a_time_where_the_prompt_and_the_answer_fill_the_cache() -> None:
    schedule = schedule_of(A, B, C, places=7)
    order = []
    while schedule.waiting:
        assert schedule.should_admit()
        [answer] = schedule.admit(PLENTY)
        order.append(answer.request)
        schedule.leave([answer])
    assert order == [0, 1, 2]


PROMPTS = st.sampled_from([A, B, (1,), (2, 3, 4, 5, 6, 7)])
REQUESTS = st.builds(Request, PROMPTS, st.just(0), st.one_of(st.none(), st.integers(1, 6)))


def assert_apart(running: list[Answer]) -> None:
    """No place and no slot has two owners; a prompt has one place, however many read it."""
    prompts = {id(answer.prompt): answer.prompt for answer in running}.values()
    stretches = [(answer.own_start, answer.limit) for answer in running]
    stretches += [(prompt.start, len(prompt.tokens)) for prompt in prompts]
    places = [place for start, length in stretches for place in range(start, start + length)]
    assert len(set(places)) == len(places)
    assert len({prompt.tokens for prompt in prompts}) == len(prompts)
    assert len({answer.slot for answer in running}) == len(running)


@given(
    st.lists(REQUESTS, min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(11, 40),  # one answer of 5 to a prompt of 6 always fits
    st.integers(1, 10),
    st.randoms(use_true_random=False),
)
def test_everyone_is_served_once_and_in_order_whatever_fits(asked, slots, places, max_tokens, luck) -> None:
    schedule = schedule_of(*asked, slots=slots, places=places, longest=5)
    served = []
    while schedule.waiting or schedule.running:
        while schedule.should_admit() and (entered := schedule.admit(max_tokens)):
            served += requests_of(entered)
        assert schedule.running  # or it would wait for ever
        assert_apart(schedule.running)
        schedule.leave(luck.sample(schedule.running, luck.randint(1, len(schedule.running))))
    assert served == list(range(len(asked)))
    assert schedule.places.free == [(0, places)] and sorted(schedule.free_slots) == list(range(slots))
    assert schedule.prompts == {}


# --- steps


def test_without_graphs_every_step_is_a_call() -> None:
    calls: list[int] = []
    graphs = Graphs(calls.append, capture=False)
    graphs.run(12, 3)
    graphs.run(8, 0)
    graphs.run(8, 1)
    assert calls == [12, 12, 12, 8] and graphs.graphs == {}


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
    for state in (slots.written, slots.stopped, slots.done, slots.prompt_start, slots.own_start, slots.limit):
        state.fill_(9)
    slots.uniform.fill_(0.5)
    luck = torch.tensor([[0.25, 0.75], [0.125, 0.375]])
    slot_B = slots.begin([(2, 10, 3, 20, 4), (0, 13, 1, 24, 2)], luck)
    assert slot_B.tolist() == [2, 0] and slot_B.dtype == torch.int32
    assert slots.prompt_start.tolist() == [13, 9, 10, 9]
    assert slots.prompt_length.tolist() == [1, 0, 3, 0]
    assert slots.own_start.tolist() == [24, 9, 20, 9]
    assert slots.limit.tolist() == [2, 9, 4, 9]
    for state in (slots.written, slots.stopped, slots.done):
        assert state.tolist() == [0, 9, 0, 9]
    assert slots.uniform.tolist() == [[0.125, 0.375, 0.5, 0.5], [0.5] * 4, [0.25, 0.75, 0.5, 0.5], [0.5] * 4]


def test_greedy_sequences_begin_without_luck() -> None:
    slots = slots_of()
    slots.begin([(1, 0, 2, 2, 4)], None)
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
    slots.begin([(0, 0, 3, 20, 4), (1, 3, 5, 24, 4)], None)
    slots.token.copy_(torch.tensor([41, 42, 0, 0]))
    slots.written.copy_(torch.tensor([1, 3, 0, 1]))
    token_B, position_B = slots.inputs(torch.tensor([1, 0, 3], dtype=torch.int32))
    assert token_B.tolist() == [42, 41, 0]
    assert position_B.tolist() == [7, 3, 0]  # 5 of the prompt and 2 of its own before it; 3 and none; nothing


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
