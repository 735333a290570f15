"""Interrupted answers whose cache stays while the weights change: the eager session, and the paged one with plain torch
in place of its two kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rloom.batch import Batch
from rloom.rollout.base import Completion, EndedConversation, Request, Sampling
from rloom.rollout.native.allocator import PageAllocator
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.scheduler import Scheduler
from tests.contract.test_rollout_contract import Bench, native
from tests.helpers import eager_model
from tests.interruptions import continued, phase
from tests.paged_engine import assert_pages_are_held_once, assert_same, in_torch, paged_rollout
from tests.requests import trajectories

pytest.importorskip("triton")
__all__ = ["in_torch"]  # a fixture
pytestmark = pytest.mark.usefixtures("in_torch")
SHORT, LONG = (11, 12, 13), (20, 30, 40, 50, 60, 10)  # in one page of 4 tokens, and in two
TOKENS = 24
ONE = Sampling(TOKENS)


def eager(bench: Bench, max_sequences: int = 6) -> NativeRollout:
    return native(bench.network, bench.engine, max_sequences, keeps_cache=True)


def paged(bench: Bench, max_sequences: int = 6, pages: int | None = None) -> NativeRollout:
    return paged_rollout(bench.network, pages=pages, max_sequences=max_sequences, keeps_cache=True)


@pytest.fixture(params=[eager, paged])
def engine(request: pytest.FixtureRequest) -> Callable[..., NativeRollout]:
    build: Callable[..., NativeRollout] = request.param
    return build


@pytest.fixture
def bench(model_folder: Callable[[str], Path]) -> Bench:
    return Bench.at(model_folder("qwen2"), native)


def asked_for(prompts: Sequence[tuple[int, ...]], sampling: Sampling = ONE) -> dict[int, Request]:
    return {row: Request(prompt, sampling, seed=100 + row, answer=row) for row, prompt in enumerate(prompts)}


def update(rollout: NativeRollout, version: int = 1) -> None:
    """A step of training, after which the weights may have changed."""
    rollout.sleep()
    rollout.network.module.train()
    rollout.load_weights(iter(()), version)
    rollout.wake()


def go_on(asked: Mapping[int, Request], found: Mapping[int, Completion]) -> dict[int, Request]:
    return {row: continued(request, found[row]) for row, request in asked.items() if found[row].interrupted}


def reused_all(request: Request) -> int:
    """All tokens but the last, whose logits are needed."""
    return len(request.context) - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_equal_weights_an_answer_goes_on_as_if_it_had_not_been_interrupted(
    bench: Bench, engine: Callable[..., NativeRollout], temperature: float
) -> None:
    asked = asked_for([SHORT, LONG, SHORT, SHORT, LONG], replace(ONE, temperature=temperature))
    expected = phase(engine(bench), asked, None)
    rollout, done = engine(bench), dict[int, Completion]()
    for version, polls in enumerate((2, 1, 3)):
        found = phase(rollout, asked, polls)
        done |= {row: one for row, one in found.items() if not one.interrupted}
        asked = go_on(asked, found)
        update(rollout, version + 1)
    found = phase(rollout, asked, None)
    assert len(found) == 5, "all of them were interrupted three times"
    assert {row: one.reused_tokens for row, one in found.items()} == {r: reused_all(one) for r, one in asked.items()}
    assert_same([found[row] for row in range(5)], [expected[row] for row in range(5)])
    assert rollout.session is None, "a finished answer leaves nothing behind"


def test_behind_an_update_an_answer_is_that_of_the_new_weights_over_the_keys_of_the_old_ones(
    bench: Bench, engine: Callable[..., NativeRollout], model_folder: Callable[[str], Path]
) -> None:
    """transformers' own model, with the old weights up to the interruption and with the new ones behind it."""
    rollout, asked = engine(bench), asked_for([SHORT, LONG])
    old, new = (eager_model(model_folder("qwen2")) for _ in range(2))
    first = phase(rollout, asked, 3)
    later = go_on(asked, first)
    bench.learn(rate=0.1)
    new.load_state_dict(bench.network.module.state_dict())
    update(rollout)
    for row, one in phase(rollout, later, None).items():
        context, begun = later[row].context, len(first[row].tokens_L)
        assert one.reused_tokens == len(context) - 1 and one.version == 1
        mixed_L = logprobs_over(old, new, context, one.tokens_L.tolist()[begun:])
        torch.testing.assert_close(one.logprobs_L[begun:], mixed_L, atol=1e-4, rtol=0)
        score_T = bench.engine.score(Batch.pack(trajectories([asked[row]], [one])))[len(asked[row].tokens) + begun :]
        assert float((score_T - one.logprobs_L[begun:]).abs().max()) > 1e-3, "what rollout correction sees"


@torch.no_grad()
def logprobs_over(
    old: PreTrainedModel, new: PreTrainedModel, context: tuple[int, ...], answer: list[int]
) -> torch.Tensor:
    cache = old(torch.tensor([context[:-1]]), use_cache=True).past_key_values
    found = []
    for last, token in zip([context[-1], *answer[:-1]], answer, strict=True):
        logits_V = new(torch.tensor([[last]]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(logits_V.log_softmax(-1)[token])
    return torch.stack(found)


def test_an_answer_that_begins_after_an_update_shares_nothing_that_older_weights_computed(
    bench: Bench, engine: Callable[..., NativeRollout], model_folder: Callable[[str], Path]
) -> None:
    """Nor does it overwrite what they have computed of its prompt."""
    rollout, asked = engine(bench), asked_for([LONG])
    old, trained = (eager_model(model_folder("qwen2")) for _ in range(2))
    first = phase(rollout, asked, 2)
    bench.learn(rate=0.1)
    trained.load_state_dict(bench.network.module.state_dict())
    update(rollout)
    later, new = go_on(asked, first), Request(LONG, ONE, seed=7, answer=1)
    found = phase(rollout, {**later, 1: new}, None)
    assert found[0].reused_tokens > 0 == found[1].reused_tokens
    begun = len(first[0].tokens_L)
    mixed_L = logprobs_over(old, trained, later[0].context, found[0].tokens_L.tolist()[begun:])
    torch.testing.assert_close(found[0].logprobs_L[begun:], mixed_L, atol=1e-4, rtol=0)
    score_T = bench.engine.score(Batch.pack(trajectories([new], [found[1]])))[len(LONG) :]
    torch.testing.assert_close(score_T, found[1].logprobs_L, atol=1e-4, rtol=0)


def test_a_validation_in_between_leaves_the_caches_as_they_are(
    bench: Bench, engine: Callable[..., NativeRollout]
) -> None:
    asked, validation = asked_for([SHORT, LONG]), replace(ONE, temperature=0.0)
    greedy = {row: Request(prompt, validation, seed=row) for row, prompt in enumerate((LONG, SHORT, LONG))}
    expected, expected_greedy = phase(engine(bench), asked, None), phase(engine(bench), greedy, None)
    rollout = engine(bench)
    rollout.expect(6, 2, TOKENS)
    asked = go_on(asked, phase(rollout, asked, 3))
    found_greedy = phase(rollout, greedy, None)
    rollout.sleep()
    rollout.wake()
    found = phase(rollout, asked, None)
    assert {row: one.reused_tokens for row, one in found.items()} == {r: reused_all(one) for r, one in asked.items()}
    assert_same([found[row] for row in range(2)], [expected[row] for row in range(2)])
    assert_same([found_greedy[row] for row in range(3)], [expected_greedy[row] for row in range(3)])


def test_a_request_that_is_too_large_for_what_is_allocated_ends_the_caches_and_not_the_answers(
    bench: Bench, engine: Callable[..., NativeRollout]
) -> None:
    asked = asked_for([SHORT, LONG])
    expected, rollout = phase(engine(bench), asked, None), engine(bench)
    asked = go_on(asked, phase(rollout, asked, 2))
    [longer] = phase(rollout, {0: Request(LONG, Sampling(3 * TOKENS), seed=3)}, None).values()
    assert len(longer.tokens_L) == 3 * TOKENS
    found = phase(rollout, asked, None)
    assert [one.reused_tokens for one in found.values()] == [0, 0]
    assert_same([found[row] for row in range(2)], [expected[row] for row in range(2)])


def test_an_engine_without_the_cache_prefills_the_answer(bench: Bench, engine: Callable[..., NativeRollout]) -> None:
    """As after the death of the worker that had it, or after a checkpoint was loaded."""
    asked = asked_for([SHORT, LONG])
    expected = phase(engine(bench), asked, None)
    asked = go_on(asked, phase(engine(bench), asked, 2))
    found = phase(engine(bench), asked, None)
    assert [one.reused_tokens for one in found.values()] == [0, 0]
    assert_same([found[row] for row in range(2)], [expected[row] for row in range(2)])


def test_the_caches_of_answers_that_do_not_go_on_are_released(
    bench: Bench, engine: Callable[..., NativeRollout]
) -> None:
    rollout = engine(bench)
    phase(rollout, asked_for([SHORT, LONG]), 2)
    assert rollout.session is not None and rollout.session.keeps_conversations
    stream = rollout.generate_stream(report_every_s=0.0)
    next(stream)
    stream.send([EndedConversation(0)])
    assert rollout.session is not None
    stream.send([EndedConversation(1)])
    stream.close()
    assert rollout.session is None


def test_if_pages_are_short_caches_are_released_and_their_answers_prefilled(bench: Bench) -> None:
    """In pages of 4 tokens. Interrupted after 10 tokens, the answers have 2 + 3 and 1 + 3; of 13, 4 are left. Another
    one takes 2 + 6, and they, whole, 2 + 6 and 1 + 4."""
    asked = asked_for([LONG, SHORT])
    asked[1] = replace(asked[1], sampling=Sampling(16))
    expected, rollout = phase(paged(bench), asked, None), paged(bench, pages=13)
    asked = go_on(asked, phase(rollout, asked, 3))
    phase(rollout, {0: Request((1,) * 6, ONE, seed=1)}, None)
    update(rollout)
    assert isinstance(rollout.session, GraphSession)
    session = rollout.session
    assert len(session.scheduler.kept) == 1, "the one that waits longest is released first"
    assert_pages_are_held_once(session)
    found = phase(rollout, asked, None)
    assert [found[0].reused_tokens, found[1].reused_tokens] == [0, reused_all(asked[1])]
    assert_same([found[row] for row in range(2)], [expected[row] for row in range(2)])
    assert len(session.scheduler.allocator.free) == 13 and not session.scheduler.prompts


@pytest.mark.parametrize("pages", [8, 14])
def test_answers_of_a_small_cache_are_the_same_whatever_was_preempted_or_released(bench: Bench, pages: int) -> None:
    asked = asked_for([SHORT, LONG, SHORT, LONG, LONG, SHORT, LONG])
    expected, rollout = phase(paged(bench), asked, None), paged(bench, pages=pages)
    done, reused = dict[int, Completion](), 0
    for version, polls in enumerate((1, 2, 4, 3, 5, None)):
        found = phase(rollout, asked, polls)
        done |= {row: one for row, one in found.items() if not one.interrupted}
        reused += sum(one.reused_tokens for one in found.values())
        asked = go_on(asked, found)
        if isinstance(rollout.session, GraphSession):
            assert_pages_are_held_once(rollout.session)
        update(rollout, version + 1)
    assert reused > 0 and rollout.session is None
    assert_same([done[row] for row in range(7)], [expected[row] for row in range(7)])


def test_weights_leave_the_device_while_it_sleeps_and_are_those_of_inference_when_it_wakes(
    bench: Bench, engine: Callable[..., NativeRollout]
) -> None:
    held: list[int] = []

    class Owner:
        device = torch.device("cpu")

        @contextmanager
        def on_device(self) -> Iterator[None]:
            held.append(1)
            yield
            held.pop()

    rollout, asked = engine(bench), asked_for([SHORT])
    rollout.owner = Owner()
    first = phase(rollout, asked, 2)
    assert held == [1]
    rollout.sleep()
    assert held == [] and rollout.session is not None
    bench.network.module.train()
    rollout.load_weights(iter(()), 1)
    rollout.wake()
    rollout.wake()
    assert held == [1] and not bench.network.module.training
    phase(rollout, go_on(asked, first), None)
    assert held == []


def test_weights_that_have_moved_end_the_session_whose_graphs_hold_their_addresses(bench: Bench) -> None:
    asked = asked_for([SHORT, LONG])
    expected, rollout = phase(paged(bench), asked, None), paged(bench)
    asked = go_on(asked, phase(rollout, asked, 2))
    rollout.sleep()
    for parameter in bench.network.module.parameters():
        parameter.data = parameter.data.clone()
    rollout.wake()
    assert rollout.session is None
    found = phase(rollout, asked, None)
    assert_same([found[row] for row in range(2)], [expected[row] for row in range(2)])


def test_an_engine_that_keeps_nothing_releases_what_an_answer_has(bench: Bench) -> None:
    for rollout in (native(bench.network, bench.engine), paged_rollout(bench.network)):
        phase(rollout, asked_for([SHORT]), 2)
        rollout.load_weights(iter(()), 1)
        assert rollout.session is None


def test_an_interrupted_answer_and_its_cache_in_pages_by_hand() -> None:
    """Pages of 4 tokens: 6 of the prompt take 2, 6 own ones 2. The last one is not in the cache: it is prefilled."""
    scheduler = Scheduler(2, PageAllocator(12), page_tokens=4)
    request = Request(LONG, Sampling(8), 0, answer=3)
    scheduler.add(0, request)
    [sequence] = scheduler.admit(100)
    assert scheduler.grow(5)
    scheduler.step += 5
    old = sequence.prompt
    scheduler.keep(sequence, [1, 2, 3, 4, 5, 6], interrupted=True)
    scheduler.cancel(0)
    assert list(scheduler.kept) == [3] and len(scheduler.allocator.free) == 12 - 4
    scheduler.forget_prompts()
    completion = Completion(0, torch.arange(1, 7), torch.full((6,), -1.0), False, 0, interrupted=True)
    scheduler.add(1, continued(request, completion))
    scheduler.add(2, Request(LONG, Sampling(8), 1, answer=4))
    first, second = scheduler.admit(100)
    assert first.prompt is old and second.prompt is not old, "that of the new weights"
    assert (first.reused_tokens, first.prefill_tokens, first.last_step) == (11, [6], 5 + 1)
    assert (second.reused_tokens, second.prefill_tokens) == (0, [*LONG])
    assert not scheduler.kept and len(scheduler.allocator.free) == 12 - 4 - 2
    scheduler.release([first])
    assert scheduler.prompts == {LONG: second.prompt}, "the old one has left, and the new one stays"
    scheduler.release([second])
    assert len(scheduler.allocator.free) == 12 and not scheduler.prompts
