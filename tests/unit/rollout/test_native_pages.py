"""Pages of the native engine's cache: answers get them as they grow, and wait where none are left."""

import torch

from rloom.rollout.base import Sampling
from rloom.rollout.limits import cache_capacity, pages_of, wanted_cache_tokens
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.page_table import PageEntry, PageTable
from rloom.rollout.native.scheduler import RunningSequence, Scheduler
from rloom.rollout.native.session import Progress
from tests.requests import ask, sampled

A, B, C = (1, 2, 3), (4, 5, 6), (7, 8, 9)
PLENTY = 1000


def scheduler_of(*prompts: tuple[int, ...], pages: int, longest: int, page_tokens: int = 4) -> Scheduler:
    scheduler = Scheduler(8, PageAllocator(pages), page_tokens)
    for number, request in enumerate(sampled([ask(tokens) for tokens in prompts], Sampling(longest))):
        scheduler.add(number, request)
    return scheduler


def free(scheduler: Scheduler) -> int:
    return len(scheduler.allocator.free)


def held(scheduler: Scheduler) -> list[int]:
    """Own pages of each running answer."""
    return [len(answer.pages) for answer in scheduler.running]


def progress(length: int) -> Progress:
    return Progress(torch.arange(length), -torch.arange(length).float())


def resume(scheduler: Scheduler, preempted: list[RunningSequence], length: int) -> None:
    for answer in preempted:
        scheduler.resume(answer.request, progress(length))


def test_a_token_takes_a_whole_page_and_none_takes_none() -> None:
    assert [pages_of(tokens, 128) for tokens in (0, 1, 128, 129, 32768)] == [0, 1, 1, 2, 256]


def test_the_cache_wanted_and_the_cache_that_fits_are_whole_pages() -> None:
    # 10 answers of 200 tokens in 2 pages each, and 3 prompts of 128 in one each
    assert wanted_cache_tokens(10, 3, 128, 200) == 128 * (10 * 2 + 3 * 1)
    assert wanted_cache_tokens(2, 3, 5, 4, page_tokens=4) == 4 * (2 * 1 + 2 * 2)
    assert cache_capacity(10, memory_share=0.5, total_bytes=10_000, free_bytes=1e9) == 384  # 500 tokens: 3 pages
    assert cache_capacity(10, memory_share=0.5, total_bytes=10_000, free_bytes=3_000) == 128  # 240 tokens: 1 page


def test_an_answer_with_a_limit_of_32k_that_stops_early_takes_only_the_pages_of_its_tokens() -> None:
    scheduler = scheduler_of(A, pages=300, longest=32768, page_tokens=128)
    [answer] = scheduler.admit(PLENTY)
    assert scheduler.grow(8) and free(scheduler) == 300 - 1 - 1
    for _ in range(25):  # launches of 8 steps: 200 tokens, and with those of the next launch 208
        scheduler.step += 8
        assert scheduler.grow(8)
    assert answer.cached_tokens(scheduler.step) == 200
    assert held(scheduler) == [2] and free(scheduler) == 300 - 1 - 2
    scheduler.release([answer])
    assert free(scheduler) == 300


def test_a_page_is_allocated_by_the_launch_that_can_write_to_it() -> None:
    scheduler = scheduler_of(A, pages=9, longest=10)
    scheduler.admit(PLENTY)
    found = []
    for _ in range(5):
        assert scheduler.grow(3)
        found.append(held(scheduler))
        scheduler.step += 3
    # 3, 6, 9, 10 and 10 tokens; the prefill pass writes a token, but not its keys and values
    assert found == [[1], [2], [3], [3], [3]]


def test_many_short_answers_run_where_few_would_at_their_limit() -> None:
    scheduler = scheduler_of(*[A] * 8, pages=20, longest=40)  # at its limit an answer takes 10 pages
    assert len(scheduler.admit(PLENTY)) == 8
    assert scheduler.grow(4) and free(scheduler) == 20 - 1 - 8


def test_admission_leaves_one_page_free_for_each_answer_that_can_grow() -> None:
    scheduler = scheduler_of(A, B, C, pages=5, longest=8)
    assert len(scheduler.admit(PLENTY)) == 2  # two prompts and two pages to grow: a third one finds 1 page
    assert scheduler.grow(4) and free(scheduler) == 1
    short = scheduler_of(A, A, A, pages=4, longest=4)  # a page is all that each can take
    assert len(short.admit(PLENTY)) == 3
    assert short.grow(8) and free(short) == 0


def test_the_answers_admitted_last_are_preempted_and_continue_before_those_that_wait() -> None:
    scheduler = scheduler_of(A, B, C, A, pages=8, longest=12)
    first, second, third, fourth = scheduler.admit(PLENTY)  # three prompts: 5 pages are left for 4 answers
    assert scheduler.grow(4) and free(scheduler) == 1
    scheduler.add(4, scheduler.requests[0])
    scheduler.step += 4
    assert not scheduler.grow(4) and free(scheduler) == 1 and scheduler.take_new_entries()
    preempted = scheduler.preempt(4)
    # without the fourth 2 pages are free, and three are missing; the third gives its own and its prompt's
    assert preempted == [fourth, third] and all(answer.collected for answer in preempted)
    assert scheduler.running == [first, second] and held(scheduler) == [2, 2]
    assert free(scheduler) == 8 - 2 - 4 and scheduler.prompts.keys() == {A, B}
    resume(scheduler, preempted, 5)
    assert list(scheduler.waiting) == [2, 3, 4]


def test_a_resumed_answer_has_pages_for_its_tokens_and_as_many_steps_as_it_lacks() -> None:
    scheduler = scheduler_of(A, B, pages=7, longest=12)
    scheduler.admit(PLENTY)
    scheduler.grow(4)
    scheduler.step += 4
    scheduler.grow(4)
    scheduler.step += 4
    assert free(scheduler) == 7 - 2 - 4 and not scheduler.grow(4)
    resume(scheduler, scheduler.preempt(4), 9)
    scheduler.step += 3
    assert scheduler.steps_left == 0
    scheduler.release(scheduler.running)
    scheduler.take_new_entries()
    [answer] = scheduler.admit(PLENTY)
    assert (answer.request, answer.resumed_tokens, len(answer.pages)) == (1, 9, 3)  # 9 tokens in pages of 4
    assert [(entry.slot, entry.column) for entry in scheduler.take_new_entries()] == [
        (answer.slot, i) for i in range(4)
    ]
    assert answer.prefill_tokens == [*B, *range(9)]
    assert scheduler.steps_left == 2  # the prefill pass writes the tenth token of 12
    assert scheduler.grow(8) and held(scheduler) == [3]
    assert scheduler.progress == {}


def test_resumed_answers_have_a_prefill_pass_each_and_count_with_their_tokens() -> None:
    scheduler = scheduler_of(A, A, A, pages=50, longest=12)
    scheduler.resume(2, progress(4))
    scheduler.waiting.pop()
    admitted = scheduler.admit(9)  # 3 + 4 tokens for the resumed one: the prompt of the others is too long
    assert [answer.request for answer in admitted] == [2]
    admitted += scheduler.admit(9)
    assert [answer.prefill_key for answer in admitted] == [2, A, A]
    assert [answer.prefill_tokens for answer in admitted] == [[*A, 0, 1, 2, 3], [*A], [*A]]


def test_after_a_full_cache_an_eighth_leaves_before_others_enter() -> None:
    scheduler = scheduler_of(A, A, A, A, A, pages=6, longest=8)
    admitted = scheduler.admit(PLENTY)
    assert len(admitted) == 5 and scheduler.grow(4)
    scheduler.step += 4
    preempted = scheduler.preempt(4)  # five pages are missing; three answers give 3, and two need 2
    assert len(preempted) == 3 and held(scheduler) == [2, 2]
    resume(scheduler, preempted, 5)
    assert not scheduler.should_admit()  # six slots are free, and no answer has left
    scheduler.release(scheduler.running[:1])
    assert scheduler.should_admit()


def test_a_cancelled_request_releases_its_pages_and_its_tokens() -> None:
    scheduler = scheduler_of(A, B, pages=5, longest=8)
    scheduler.admit(PLENTY)
    scheduler.grow(4)
    scheduler.step += 4
    resume(scheduler, scheduler.preempt(4), 5)
    assert list(scheduler.waiting) == [1] and free(scheduler) == 5 - 1 - 2
    scheduler.cancel(1)
    assert not scheduler.waiting and scheduler.progress == {} and scheduler.requests.keys() == {0}
    scheduler.cancel(0)
    assert free(scheduler) == 5 and scheduler.requests == {} and scheduler.prompts == {}


def test_a_tokens_place_is_found_by_its_page() -> None:
    table = PageTable(2, 4, page_tokens=4, spare_page=9, device=torch.device("cpu"))
    # slot 0: a prompt of 5 tokens in pages 7 and 2, and an answer in 0 and 3; slot 1: a prompt of 4 in page 7
    pages = [(0, 0, 7), (0, 1, 2), (0, 2, 0), (0, 3, 3), (1, 0, 7), (1, 1, 5)]
    table.write([PageEntry(*entry) for entry in pages])
    assert table.pages.tolist() == [[7, 2, 0, 3], [7, 5, 9, 9], [9, 9, 9, 9]]
    slot_T = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    position_T = torch.tensor([0, 3, 4, 5, 8, 9, 3, 4])
    prompt_length_T = torch.tensor([5, 5, 5, 5, 5, 5, 4, 4])
    places = table.places(slot_T, position_T, prompt_length_T)
    assert places.tolist() == [28, 31, 8, 0, 3, 12, 31, 20]
