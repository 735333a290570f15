"""The next request of a conversation reuses the cache of the last answer: its answers are those of a whole prefill."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.models.network import PolicyNetwork
from rloom.rollout.base import CancelledRequest, Completion, EndedConversation, Request, Sampling
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.eager import EagerSession
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.scheduler import PrefillPass, Scheduler
from rloom.rollout.native.session import Progress
from tests.helpers import copied_policy
from tests.paged_engine import assert_pages_are_held_once, assert_same, in_torch, paged_rollout

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("in_torch")
__all__ = ["in_torch"]  # a fixture
SHORT, LONG = (11, 12, 13), (20, 30, 40, 50, 60, 10)  # with pages of 4 tokens: in one page and in two
SAMPLING = Sampling(6)


@pytest.fixture
def network(model_folder: Callable[[str], Path]) -> PolicyNetwork:
    """Gemma 2 has a window of 4 tokens in every other layer, and softcaps."""
    return copied_policy(model_folder("gemma2"))


@pytest.fixture(params=["paged", "eager"])
def make(network: PolicyNetwork, request: pytest.FixtureRequest) -> Callable[..., NativeRollout]:
    """A new engine of either path."""

    def new(*, pages: int | None = None, max_sequences: int = 6) -> NativeRollout:
        rollout = paged_rollout(network, pages=pages, max_sequences=max_sequences)
        rollout.uses_graphs = request.param == "paged"
        rollout.expect(6, 2, 40)
        return rollout

    return new


@dataclass(frozen=True)
class Script:
    """An episode: its prompt, what the environment adds after each answer, and the limit of each answer."""

    prompt: tuple[int, ...]
    added: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]


SCRIPTS = [
    Script(SHORT, ((7, 8, 9), (5,), (1, 2, 3, 4, 5, 6, 7)), (3, 1, 6, 4)),
    Script(LONG, ((7,), (8, 9)), (6, 6, 2)),
    Script(SHORT, ((9, 9, 9, 9, 9), (), (3,)), (4, 4, 2, 3)),
    Script(LONG, ((7, 8), (5, 4, 3)), (1, 5, 5)),
    Script(SHORT, ((),), (2, 6)),
]


def asked(script: Script, number: int, answers: Sequence[Completion], conversation: int | None) -> Request:
    tokens, turn = list(script.prompt), len(answers)
    for answer, added in zip(answers, script.added, strict=False):
        tokens += [*answer.tokens_L.tolist(), *added]
    sampling = replace(SAMPLING, max_new_tokens=script.limits[turn])
    return Request(tuple(tokens), sampling, seed=100 * number + turn, conversation=conversation)


def converse(
    rollout: NativeRollout, scripts: Sequence[Script], *, reuse: bool = True, polls: int = 0
) -> list[list[Completion]]:
    """The answers of each episode. Its environment takes so many polls after an answer."""
    answers: list[list[Completion]] = [[] for _ in scripts]
    running: dict[int, int] = {}
    acting: deque[list[int]] = deque([[]] * polls, maxlen=polls)  # episodes whose environments act

    def go_on(number: int) -> None:
        if len(answers[number]) < len(scripts[number].limits):
            request = asked(scripts[number], number, answers[number], number if reuse else None)
            running[rollout.submit(request)] = number

    for number in range(len(scripts)):
        go_on(number)
    while running or any(acting):
        ready = []
        for completion in rollout.poll():
            number = running.pop(completion.request)
            answers[number].append(completion)
            ready.append(number)
        if polls:
            due = acting.popleft()
            acting.append(ready)
            ready = due
        for number in ready:
            go_on(number)
        if isinstance(rollout.session, GraphSession):
            assert_pages_are_held_once(rollout.session)
    return answers


def flat(answers: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for episode in answers for completion in episode]


def reused(answers: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [[completion.reused_tokens for completion in episode] for episode in answers]


def test_answers_with_reuse_are_those_of_whole_prefills(make: Callable[..., NativeRollout]) -> None:
    found, expected = converse(make(), SCRIPTS), converse(make(), SCRIPTS, reuse=False)
    assert_same(flat(found), flat(expected))
    assert {one.reused_tokens for one in flat(expected)} == {0}
    # all tokens before the last sampled one: of the prompt, of the answers and of the environment
    assert reused(found) == [[0, 5, 9, 16], [0, 11, 18], [0, 6, 15, 17], [0, 6, 13], [0, 4]]


def test_only_new_tokens_are_prefilled(
    make: Callable[..., NativeRollout], network: PolicyNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, read, hidden = SCRIPTS[0], list[int](), network.decoder.packed_hidden

    def noted(tokens_T, *rest):
        read.append(len(tokens_T))
        return hidden(tokens_T, *rest)

    rollout = make(max_sequences=1)
    if rollout.uses_graphs:
        rollout.token_shape()
    monkeypatch.setattr(network.decoder, "packed_hidden", noted)
    converse(rollout, [script])
    # the prompt; then the last sampled token and what was added. One token a step in between
    assert [tokens for tokens in read if tokens > 2] == [3, 4, 8] and sum(read) >= 3 + 4 + 2 + 8


@pytest.mark.parametrize("polls", [0, 2, 9])
@pytest.mark.parametrize("pages", [13, 16])
def test_answers_are_the_same_when_pages_are_evicted(network: PolicyNetwork, pages: int, polls: int) -> None:
    rollout = paged_rollout(network, pages=pages)
    rollout.expect(6, 2, 40)
    found = converse(rollout, SCRIPTS, polls=polls)
    assert_same(flat(found), flat(converse(paged_rollout(network), SCRIPTS, reuse=False)))
    later = [tokens for episode in reused(found) for tokens in episode[1:]]
    assert 0 in later and any(later), "some were evicted, others reused"


@pytest.mark.parametrize(("slots", "polls", "evicted"), [(2, 0, 0), (2, 2, 11), (4, 2, 6), (4, 9, 7)])
def test_answers_are_the_same_when_slots_are_taken(
    network: PolicyNetwork, slots: int, polls: int, evicted: int
) -> None:
    rollout = paged_rollout(network, max_sequences=slots)  # for five conversations with 11 later turns
    rollout.uses_graphs = False
    rollout.expect(5, 2, 40)
    found = converse(rollout, SCRIPTS, polls=polls)
    assert_same(flat(found), flat(converse(paged_rollout(network), SCRIPTS, reuse=False)))
    assert [tokens for episode in reused(found) for tokens in episode[1:]].count(0) == evicted


def answer(rollout: NativeRollout, request: Request) -> Completion:
    [(_, completion)] = rollout.generate([request])
    return completion


def test_a_branch_does_not_continue_and_the_other_one_still_does(make: Callable[..., NativeRollout]) -> None:
    rollout, sampling = make(), replace(SAMPLING, max_new_tokens=4)
    first = answer(rollout, Request(LONG, sampling, 1, conversation=7))
    past = (*LONG, *first.tokens_L.tolist())
    rewritten = (63, *past[1:], 9, 9)
    changed = answer(rollout, Request(rewritten, sampling, 2, conversation=7))
    longer = answer(rollout, Request((*past, 9, 9), sampling, 3, conversation=7))
    other = answer(rollout, Request((*past, 9, 8), sampling, 3, conversation=8))
    assert [one.reused_tokens for one in (first, changed, longer, other)] == [0, 0, len(past) - 1, 0]
    whole = [Request(rewritten, sampling, 2), Request((*past, 9, 9), sampling, 3), Request((*past, 9, 8), sampling, 3)]
    assert_same([changed, longer, other], [answer(make(), request) for request in whole])


def test_a_late_turn_of_the_only_episode_has_room(network: PolicyNetwork) -> None:
    """8 + 8 tokens take 4 pages; 9 before the answer and 7 in it take 5."""
    rollout = paged_rollout(network)
    rollout.longest_prompt = 8
    rollout.expect(1, 1, 8)
    rollout.submit(Request((*SHORT, *LONG), replace(SAMPLING, max_new_tokens=7, ignore_eos=True), 1, conversation=0))
    found = [one for _ in range(20) for one in rollout.poll()]
    assert [len(one.tokens_L) for one in found] == [7]


@pytest.mark.parametrize("new", [(), (9,), (9, 8, 7, 6, 5, 4, 3)])
@pytest.mark.parametrize("left", [6, 5, 4, 1, 0])
def test_an_answer_that_was_cut_or_edited_is_reused_up_to_there(
    make: Callable[..., NativeRollout], left: int, new: tuple[int, ...]
) -> None:
    rollout = make()
    first = answer(rollout, Request(LONG, SAMPLING, 1, conversation=0))
    sampled = first.tokens_L.tolist()
    new = tuple((token + (token == sampled[left])) for token in new[:1]) + new[1:] if left < 6 else new
    second = Request((*LONG, *sampled[:left], *new), SAMPLING, 2, conversation=0)
    if second.tokens == LONG:
        return  # a second answer to the prompt, in a pass of its own
    found = answer(rollout, second)
    assert found.reused_tokens == len(LONG) + min(left, 5, left + len(new) - 1)
    third = Request((*second.tokens, *found.tokens_L.tolist(), 9), SAMPLING, 3, conversation=0)
    last = answer(rollout, third)
    assert last.reused_tokens == len(third.tokens) - 2
    whole = [answer(make(), replace(request, conversation=None)) for request in (second, third)]
    assert_same([found, last], whole)


def test_a_request_with_little_in_common_is_a_branch_and_the_kept_sequence_stays(
    make: Callable[..., NativeRollout],
) -> None:
    rollout = make()
    first = answer(rollout, Request(SHORT, SAMPLING, 1, conversation=0))
    past = (*SHORT, *first.tokens_L.tolist())  # 8 tokens are in the cache
    branch = (*past[:3], (past[3] + 1) % 60, 9)
    assert answer(rollout, Request(branch, SAMPLING, 2, conversation=0)).reused_tokens == 0
    assert answer(rollout, Request((*past, 9), SAMPLING, 3, conversation=0)).reused_tokens == 8


def test_a_cancelled_request_frees_its_slot_at_once_and_its_conversation_is_continued(
    make: Callable[..., NativeRollout],
) -> None:
    rollout = make(max_sequences=2)
    rollout.expect(2, 1, 60)
    stream = rollout.generate_stream()
    next(stream)
    [(_, first)] = until_found(stream, [Request(LONG, replace(SAMPLING, max_new_tokens=4), 1, conversation=0)])
    second = Request((*LONG, *first.tokens_L.tolist(), 9, 9), replace(SAMPLING, max_new_tokens=40), 2, conversation=0)
    [(index, _)] = until_found(stream, [second, Request(LONG, replace(SAMPLING, max_new_tokens=2), 3, conversation=1)])
    assert index == 2 and rollout.unfinished == {1}, "the second request runs"
    retry = replace(second, sampling=replace(SAMPLING, max_new_tokens=5), seed=7)
    [(index, found)] = until_found(stream, [CancelledRequest(1), retry])
    assert (index, found.reused_tokens) == (3, len(second.tokens) - 1)
    assert_same([found], [answer(make(), replace(retry, conversation=None))])
    session = rollout.session
    running = session.scheduler.running if isinstance(session, GraphSession) else session.request_of
    assert not running and not rollout.unfinished
    stream.send([EndedConversation(0), EndedConversation(1)])
    assert rollout.session is None


def until_found(stream, items):
    found = stream.send(items)
    while not found:
        found = stream.send([])
    return found


@pytest.mark.parametrize("event", ["weights", "sleep"])
def test_new_weights_and_sleep_drop_the_caches(
    make: Callable[..., NativeRollout], network: PolicyNetwork, event: str
) -> None:
    rollout = make()
    first = answer(rollout, Request(LONG, SAMPLING, 1, conversation=0))
    second = Request((*LONG, *first.tokens_L.tolist(), 7, 8), SAMPLING, 2, conversation=0)
    assert rollout.session is not None
    if event == "weights":
        weights = {name: one * 1.5 for name, one in network.module.named_parameters()}
        rollout.load_weights(iter(weights.items()), 1)
    else:
        rollout.sleep()
    assert rollout.session is None
    found = answer(rollout, second)
    assert found.reused_tokens == 0
    assert_same([found], [answer(make(), replace(second, conversation=None))])


def test_a_conversation_that_ends_while_it_waits_leaves_nothing(make: Callable[..., NativeRollout]) -> None:
    rollout = make()
    for conversation in (3, 4):
        answer(rollout, Request(LONG, SAMPLING, conversation, conversation=conversation))
    session = rollout.session
    assert session is not None and session.idle and session.keeps_conversations
    assert rollout.poll() == []
    rollout.end_conversation(3)
    if isinstance(session, GraphSession):
        scheduler = session.scheduler  # LONG is in two pages; of 6 own tokens, in two
        assert list(scheduler.kept) == [4] and len(scheduler.allocator.free) == scheduler.allocator.pages - 4
    else:
        assert isinstance(session, EagerSession) and [kept.key for kept in session.kept] == [4]
    rollout.end_conversation(4)
    assert rollout.session is None, "nothing runs, and nothing is kept"


def test_a_request_that_waits_while_its_conversation_ends_is_prefilled_whole(
    make: Callable[..., NativeRollout],
) -> None:
    rollout = make(pages=13)
    first = answer(rollout, Request(LONG, SAMPLING, 1, conversation=0))
    answer(rollout, Request(SHORT, SAMPLING, 2, conversation=1))
    second = Request((*LONG, *first.tokens_L.tolist(), 9), SAMPLING, 3, conversation=0)
    number = rollout.submit(second)
    rollout.end_conversation(0)
    found = []
    while not found:
        found = rollout.poll()
    assert [(one.request, one.reused_tokens) for one in found] == [(number, 0)]
    assert_same(found, [answer(make(), replace(second, conversation=None))])


def test_the_request_of_an_episode_that_has_ended_is_cancelled(make: Callable[..., NativeRollout]) -> None:
    rollout, sampling = make(), replace(SAMPLING, max_new_tokens=30)
    stream = rollout.generate_stream()
    next(stream)
    requests = [Request(SHORT, replace(sampling, max_new_tokens=n), n, conversation=n) for n in (1, 30)]
    found = stream.send(requests)
    while not found:
        found = stream.send([])
    assert [index for index, _ in found] == [0], "it is reported while the other runs"
    assert rollout.unfinished == {1}
    assert stream.send([EndedConversation(30)]) == [] and not rollout.unfinished
    found = stream.send([Request(SHORT, replace(sampling, max_new_tokens=2), 5, conversation=1)])
    while not found:
        found = stream.send([])
    assert [(index, len(one.tokens_L)) for index, one in found] == [(2, 2)]
    stream.close()
    rollout.end_conversation(1)
    assert rollout.session is None


def test_a_request_that_no_longer_fits_is_not_overtaken(make: Callable[..., NativeRollout]) -> None:
    rollout = make()
    rollout.expect(2, 1, 6)
    first = answer(rollout, Request(SHORT, SAMPLING, 1, conversation=0))
    long = rollout.submit(Request((*SHORT, *range(1, 41)), SAMPLING, 2, conversation=1))
    later = rollout.submit(Request((*SHORT, *first.tokens_L.tolist(), 9), SAMPLING, 3, conversation=0))
    found = []
    while len(found) < 2:
        found += rollout.poll()
    assert {one.request for one in found} == {long, later} and {one.reused_tokens for one in found} == {0}


def test_without_conversations_a_request_that_does_not_fit_is_overtaken(make: Callable[..., NativeRollout]) -> None:
    rollout = make()
    rollout.expect(0, 0, 0)
    running = rollout.submit(Request(SHORT, replace(SAMPLING, max_new_tokens=9), 1))
    rollout.poll()
    greedy = rollout.submit(Request(SHORT, replace(SAMPLING, temperature=0.0), 2))
    later = rollout.submit(Request(SHORT, replace(SAMPLING, max_new_tokens=2), 3))
    found = []
    while len(found) < 3:
        found += [one.request for one in rollout.poll()]
    assert {*found[:2]} == {running, later} and found[2] == greedy


def test_a_session_that_is_opened_again_for_a_late_turn_is_no_larger(make: Callable[..., NativeRollout]) -> None:
    rollout = make()
    rollout.longest_prompt = len(LONG)
    rollout.expect(2, 1, 40)
    first = answer(rollout, Request(LONG, SAMPLING, 1, conversation=0))
    decoder, cache = rollout.decoder, rollout.slot_cache
    rollout.end_conversation(0)
    assert rollout.session is None
    late = (*LONG, *first.tokens_L.tolist(), *range(1, 29))  # 34 tokens of 40 after the prompt
    assert len(answer(rollout, Request(late, SAMPLING, 2, conversation=0)).tokens_L) == 6
    assert rollout.decoder is decoder and rollout.slot_cache is cache and (decoder or cache) is not None


# --- the scheduler


def scheduler_of(pages: int, slots: int = 4) -> Scheduler:
    return Scheduler(slots, PageAllocator(pages), page_tokens=4)


def run_one(scheduler: Scheduler, number: int, request: Request, answer: Sequence[int]) -> int:
    """Admit, grow and finish a request; the tokens that it reused."""
    scheduler.add(number, request)
    [sequence] = scheduler.admit(1000)
    assert scheduler.grow(len(answer))
    scheduler.step += len(answer)
    scheduler.keep(sequence, answer)
    scheduler.release([sequence])
    return sequence.reused_tokens


def test_the_conversation_that_waits_longest_is_evicted_first_and_a_queued_one_last() -> None:
    scheduler, sampling = scheduler_of(pages=8), Sampling(4)
    for number in range(3):  # a page for the prompt and one for the answer
        run_one(scheduler, number, Request((number + 1, 5, 6), sampling, 0, conversation=number), [9, 8, 7])
    assert len(scheduler.allocator.free) == 2 and list(scheduler.kept) == [0, 1, 2]
    scheduler.add(3, Request((1, 5, 6, 9, 8, 7, 4), sampling, 0, conversation=0))
    assert scheduler.free_pages(3) and list(scheduler.kept) == [0, 2], "the next request of 0 is queued"
    [sequence] = scheduler.admit(1000)
    assert sequence.reused_tokens == 5 and sequence.prefill_tokens == [7, 4]
    assert not scheduler.free_pages(7) and list(scheduler.kept) == [2], "of 8 pages, 2 are in use: 6 would not do"
    assert scheduler.free_pages(6) and not scheduler.kept


def test_of_queued_conversations_the_one_that_is_admitted_last_is_evicted_first() -> None:
    scheduler, sampling = scheduler_of(pages=8), Sampling(4)
    for number in range(4):
        run_one(scheduler, number, Request((number + 1, 5, 6), sampling, 0, conversation=number), [9, 8, 7])
    for number in (2, 0, 3, 1):
        scheduler.add(4 + number, Request((number + 1, 5, 6, 9, 8, 7, 4), sampling, 0, conversation=number))
    assert scheduler.free_pages(1) and list(scheduler.kept) == [0, 2, 3]
    assert scheduler.free_pages(3) and list(scheduler.kept) == [0, 2]


def test_kept_sequences_are_evicted_before_a_running_one_is_preempted() -> None:
    scheduler = scheduler_of(pages=8)  # two prompts of a page; 12 own tokens each are in 3
    for number in range(2):
        scheduler.add(number, Request((number + 1, 5, 6), Sampling(16), 0, conversation=number))
    first, second = scheduler.admit(1000)
    assert scheduler.grow(12) and not scheduler.allocator.free
    scheduler.step = 12
    assert not scheduler.grow(4)
    scheduler.keep(second, [9] * 12)  # as the engine does before it preempts: the answer had stopped
    scheduler.release([second])
    assert scheduler.preempt(4) == [] and scheduler.running == [first] and not scheduler.kept
    assert len(first.pages) == 4


@pytest.mark.parametrize(("pads", "expected"), [(False, 401), (True, 5)])
def test_a_pass_that_pads_is_bounded_by_its_longest_context(pads: bool, expected: int) -> None:
    def admitted(contexts: Sequence[int]) -> int:
        size = PrefillPass(10**6, pads)
        for context in contexts:
            if not size.fits(10, context):
                break
            size.add(10, context)
        return size.sequences

    assert admitted([24_000, *[250] * 400]) == expected, "131072 // 24010"
    assert admitted([10**9, 1]) == 1 and admitted([0] * 1000) == 1000


def test_a_pass_that_pads_is_bounded_by_its_longest_new_part() -> None:
    size = PrefillPass(10**6, pads=True)
    size.add(4000, 4000)
    assert not size.fits(10, 10), "2 x 4000 x 8000 scores of 2 ** 25"
    assert PrefillPass(10**6, True, 1, 10, 4000, 10, 4010).fits(10, 10)


def test_a_few_turns_wait_for_others_beside_many_running_sequences_but_not_for_long() -> None:
    scheduler, sampling = scheduler_of(pages=100, slots=24), Sampling(100)
    for number in range(16):
        scheduler.add(number, Request((number,), sampling, 0, conversation=number))
    assert scheduler.should_admit() and len(scheduler.admit(1000)) == 16
    scheduler.step = 8
    scheduler.add(16, Request((50,), sampling, 0, conversation=16))
    scheduler.add(17, Request((51,), sampling, 0, conversation=17))
    assert not scheduler.should_admit(), "2 of 16"
    scheduler.step = 8 + 24
    assert scheduler.should_admit()
    scheduler.step = 16
    scheduler.add(18, Request((52,), sampling, 0, conversation=18))
    assert scheduler.should_admit(), "3 of 16"


def test_a_prompt_stays_for_the_request_that_reads_it_while_its_other_reader_is_evicted() -> None:
    scheduler, sampling, prompt = scheduler_of(pages=4), Sampling(4), (1, 5, 6, 7, 8)
    run_one(scheduler, 0, Request(prompt, sampling, 0, conversation=0), [9, 8, 7])
    assert len(scheduler.allocator.free) == 1
    scheduler.add(1, Request(prompt, sampling, 0))
    assert scheduler.grow(4)
    [sequence] = scheduler.admit(1000)
    assert sequence.prompt.readers == 2 and scheduler.grow(4)
    scheduler.add(2, Request((3,), sampling, 0))
    assert scheduler.admit(1000) == [] and list(scheduler.kept) == [0], "its page would not be enough"
    assert scheduler.free_pages(1) and not scheduler.kept and sequence.prompt.readers == 1


def test_a_continuation_that_would_take_a_page_too_many_is_prefilled_whole() -> None:
    scheduler = scheduler_of(pages=3)  # 1 + 8 + 4 tokens: as one prompt 3 + 1 pages, continued 1 + 3
    assert run_one(scheduler, 0, Request((1,), Sampling(4), 0, conversation=0), [2, 3, 4, 5]) == 0
    request = Request((1, 2, 3, 4, 5, 6), Sampling(4), 0, conversation=0)  # 2 + 1 pages, continued 1 + 3
    assert run_one(scheduler, 1, request, [7]) == 0


def admit_and_grow(scheduler: Scheduler) -> None:
    for sequence in scheduler.admit(1000):
        request = scheduler.requests[sequence.request]
        new = len(request.tokens) - sequence.reused_tokens
        assert sequence.prefill_tokens[:new] == [*request.tokens[sequence.reused_tokens :]]
    if not scheduler.grow(2):
        for sequence in scheduler.preempt(2):
            done = min(sequence.limit, scheduler.step - sequence.first_step + 1)
            scheduler.resume(sequence.request, Progress(torch.full((done,), 40), torch.zeros(done)))
    scheduler.step += 2
    assert scheduler.running or not scheduler.waiting, "a request that fits the cache is admitted if nothing runs"


def assert_all_have_one_owner(scheduler: Scheduler) -> None:
    kept = [one for entries in scheduler.kept.values() for one in entries]
    held = [page for owner in (*scheduler.running, *kept, *scheduler.prompts.values()) for page in owner.pages]
    assert sorted([*held, *scheduler.allocator.free]) == list(range(scheduler.allocator.pages))
    assert sorted([*scheduler.free_slots, *(one.slot for one in scheduler.running)]) == list(range(scheduler.slots))
    for prompt in scheduler.prompts.values():
        assert prompt.readers == sum(one.prompt is prompt for one in (*scheduler.running, *kept))


@settings(deadline=None, max_examples=300)
@given(st.integers(6, 24), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)), max_size=40))
def test_every_page_has_one_owner_whatever_happens(pages: int, events: list[tuple[int, int, int]]) -> None:
    """Events: (conversation, what happens, how many tokens)."""
    scheduler, numbers = scheduler_of(pages, slots=3), iter(range(10_000))
    past: dict[int, tuple[int, ...]] = {}
    for conversation, event, count in events:
        asked = [n for n, one in scheduler.requests.items() if one.conversation == conversation]
        if event in (0, 1) and not asked:  # the next request, in one case after an edited end
            known = past.get(conversation, (conversation // 2,))
            tokens = (*known[: len(known) - (count if event and count < len(known) else 0)], *[30] * count)
            if scheduler.pages(len(tokens)) + scheduler.pages(count) <= pages:
                scheduler.add(next(numbers), Request(tokens, Sampling(count), 0, conversation=conversation))
        elif event == 2:
            admit_and_grow(scheduler)
        elif event == 3:
            for sequence in [one for one in scheduler.running if one.last_step <= scheduler.step]:
                request = scheduler.requests[sequence.request]
                past[request.conversation] = (*request.tokens, *[40] * sequence.limit)
                scheduler.keep(sequence, [40] * sequence.limit)
                scheduler.release([sequence])
        elif event == 4:  # maybe after an answer was kept and before the next request is admitted
            scheduler.end_conversation(conversation)
        else:
            for number in asked:
                scheduler.cancel(number)
        assert_all_have_one_owner(scheduler)


def test_a_kept_sequence_that_fills_the_cache_is_cut_for_its_own_continuation() -> None:
    scheduler = Scheduler(2, PageAllocator(4), 4, 4)  # 4 pages of 4 tokens
    prompt, answer = tuple(range(4)), tuple(range(100, 112))
    scheduler.add(0, Request(prompt, Sampling(12), 0, conversation=7))
    [first] = scheduler.admit(1000)
    assert scheduler.grow(11)
    scheduler.keep(first, answer)
    scheduler.release([first])
    assert (len(scheduler.allocator.free), len(scheduler.kept[7][0].pages)) == (0, 3)
    # 7 own tokens are in 2 pages; the third one is free for its next 4 tokens
    scheduler.add(1, Request(prompt + answer[:7], Sampling(4), 0, conversation=7))
    [second] = scheduler.admit(1000)
    assert (len(second.pages), second.reused_tokens, len(scheduler.allocator.free)) == (2, 4 + 6, 1)
    assert scheduler.grow(3) and len(second.pages) == 3
    scheduler.release([second])
    assert len(scheduler.allocator.free) == 4
