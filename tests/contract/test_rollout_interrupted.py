"""Answers that are interrupted, and that go on in a later call: every engine, then what only `native` promises."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloom.batch import Batch
from rloom.rollout.base import Begun, Completion, InterruptAll, Request, Rollout
from rloom.rollout.kinds import ROLLOUTS
from tests.contract.test_rollout_contract import (
    ENGINES,
    GREEDY,
    LUCKY,
    MANY,
    PROMPTS,
    UNEVEN,
    Bench,
    assert_same_answers,
    native,
    requests,
)
from tests.interruptions import continued, in_phases, phase, random_polls
from tests.requests import sampled, trajectories


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> Callable[..., Rollout]:
    return ENGINES[request.param]


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


def all_of_them(rollout: Rollout, asked: list[Request]) -> list[Completion]:
    found = dict(rollout.generate(asked))
    return [found[row] for row in range(len(asked))]


@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_are_the_same_wherever_they_are_interrupted(
    build: Callable[..., Rollout], folder: Path, seed: int
) -> None:
    bench = Bench.at(folder, build, max_sequences=3)
    asked = sampled(requests(), GREEDY)
    expected = all_of_them(bench.rollout, asked)
    found, _ = in_phases(bench.rollout, asked, random_polls(seed, most=6))
    assert_same_answers(found, expected)
    assert not any(one.interrupted for one in [*found, *expected])


def test_a_request_that_waits_keeps_the_tokens_that_it_began_with(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build)
    fresh, begun = sampled(requests()[:2], LUCKY)
    begun = replace(begun, begun=Begun((7, 8), (-0.5, -0.25)))
    found = phase(bench.rollout, {0: fresh, 1: begun}, 0)
    assert [found[row].tokens_L.tolist() for row in (0, 1)] == [[], [7, 8]]
    assert [found[row].logprobs_L.tolist() for row in (0, 1)] == [[], [-0.5, -0.25]]
    assert all(one.interrupted and not one.finished for one in found.values())
    assert found[0].tokens_L.dtype == torch.int64 and found[0].logprobs_L.dtype == torch.float32
    bench.rollout.load_weights(iter(()), version=1)  # nothing is unfinished


@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_a_begun_answer_has_as_many_tokens_as_its_limit_allows_and_trainers_logprobs(
    build: Callable[..., Rollout], folder: Path, tokens: int
) -> None:
    """The limit of 10 is that of the whole answer. Behind the begun part log-probs are those of the whole context."""
    bench = Bench.at(folder, build)
    plain = sampled(requests(), LUCKY)
    begun = Begun(tuple(range(20, 20 + tokens)), (-7.0,) * tokens)
    completions = all_of_them(bench.rollout, [replace(one, begun=begun) for one in plain])
    assert [len(one.tokens_L) for one in completions] == [10] * 5
    assert all(one.tokens_L[:tokens].tolist() == list(begun.tokens) for one in completions)
    assert all(one.logprobs_L[:tokens].tolist() == [-7.0] * tokens for one in completions)
    scored = [bench.engine.score(batch_of(one, found)) for one, found in zip(plain, completions, strict=True)]
    for prompt, score_T, found in zip(PROMPTS, scored, completions, strict=True):
        after_L = score_T[len(prompt) + tokens :]
        torch.testing.assert_close(after_L, found.logprobs_L[tokens:], atol=1e-4, rtol=0)


def batch_of(asked: Request, found: Completion) -> Batch:
    return Batch.pack(trajectories([asked], [found]))


def test_the_limit_of_one_token_more_and_a_stop_token_are_ends(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build)
    asked = sampled(requests(), GREEDY)
    whole = all_of_them(bench.rollout, asked)
    almost = [continued(one, prefix(found, 9)) for one, found in zip(asked, whole, strict=True)]
    assert [one.tokens_L.tolist() for one in all_of_them(bench.rollout, almost)] == [
        one.tokens_L.tolist() for one in whole
    ]
    stops = [
        replace(one, sampling=replace(one.sampling, stop_ids=(int(found.tokens_L[9]),)))
        for one, found in zip(almost, whole, strict=True)
    ]
    ended = [all_of_them(bench.rollout, [one])[0] for one in stops]
    assert all(one.finished and not one.interrupted for one in ended)
    assert [one.tokens_L.tolist() for one in ended] == [one.tokens_L.tolist() for one in whole]


def prefix(found: Completion, tokens: int) -> Completion:
    return replace(found, tokens_L=found.tokens_L[:tokens], logprobs_L=found.logprobs_L[:tokens])


def test_an_engine_that_declares_partial_answers_returns_them(folder: Path) -> None:
    for name, build in ENGINES.items():
        bench = Bench.at(folder, build, max_sequences=2)
        found = phase(bench.rollout, dict(enumerate(sampled(requests(), GREEDY))), 1)
        some = [one for one in found.values() if one.interrupted and len(one.tokens_L)]
        assert bool(some) == ROLLOUTS[name].partial_answers


# --- what only native promises


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_sequences", [3, 64])
def test_an_answer_is_the_same_wherever_it_is_interrupted(
    model_folder: Callable[[str], Path], seed: int, max_sequences: int
) -> None:
    bench = Bench.at(model_folder("mistral"), native, max_sequences=max_sequences)
    asked = sampled(requests(MANY), UNEVEN)
    expected = all_of_them(bench.rollout, asked)
    polls = random_polls(seed, most=8)
    found, begun = in_phases(bench.rollout, asked, polls)
    assert_same_answers(found, expected)
    assert begun > 0 or sum(polls) < 3
    assert {one.finished for one in found} == {True, False}


@pytest.mark.parametrize("top", [{"top_k": 5}, {"top_p": 0.7, "temperature": 1.3}])
def test_an_answer_interrupted_after_every_token_is_the_same(folder: Path, top: dict[str, float]) -> None:
    bench = Bench.at(folder, native)
    asked = sampled(requests(), replace(LUCKY, **top))
    found, begun = in_phases(bench.rollout, asked, [1] * 9)  # 1: the prefill pass, which samples one token
    assert begun == 5 * 9
    assert_same_answers(found, all_of_them(bench.rollout, asked))


def test_an_answer_goes_on_with_the_weights_of_now(folder: Path) -> None:
    bench = Bench.at(folder, native)
    asked = sampled(requests(), LUCKY)
    first = phase(bench.rollout, dict(enumerate(asked)), 4)
    assert {one.version for one in first.values()} == {0}
    assert {len(one.tokens_L) for one in first.values()} == {4}
    before = dict(first)
    bench.learn(rate=0.1)
    bench.rollout.load_weights(iter(()), version=1)
    second = all_of_them(bench.rollout, [continued(one, before[row]) for row, one in enumerate(asked)])
    assert {one.version for one in second} == {1}
    for row, (request, found) in enumerate(zip(asked, second, strict=True)):
        assert found.logprobs_L[:4].tolist() == before[row].logprobs_L.tolist()
        score_T = bench.engine.score(batch_of(request, found))[len(request.tokens) :]
        torch.testing.assert_close(score_T[4:], found.logprobs_L[4:], atol=1e-4, rtol=0)
        assert float((score_T[:4] - found.logprobs_L[:4]).abs().max()) > 1e-3, "those of the old weights"


def test_one_request_can_be_interrupted_and_the_others_go_on(folder: Path) -> None:
    bench = Bench.at(folder, native, max_sequences=3)
    asked = sampled(requests(), GREEDY)
    expected = all_of_them(bench.rollout, asked)
    numbers = [bench.rollout.submit(one) for one in asked]
    for _ in range(3):
        assert bench.rollout.poll() == []
    running, waiting = bench.rollout.interrupt(numbers[1]), bench.rollout.interrupt(numbers[4])
    assert running.tokens_L.tolist() == expected[1].tokens_L[:3].tolist() and running.interrupted
    assert waiting.tokens_L.tolist() == [] and waiting.interrupted
    found: dict[int, Completion] = {}
    while len(found) < 3:
        found |= {one.request: one for one in bench.rollout.poll()}
    assert_same_answers([found[numbers[row]] for row in (0, 2, 3)], [expected[row] for row in (0, 2, 3)])
    assert bench.rollout.poll() == []


def test_requests_of_several_kinds_of_sampling_are_interrupted_together(folder: Path) -> None:
    """Those of the second kind wait for a session of their own."""
    bench = Bench.at(folder, native)
    asked = [*sampled(requests()[:3], GREEDY), *sampled(requests()[3:], LUCKY)]
    found, _ = in_phases(bench.rollout, asked, [3, 2, 4])
    assert_same_answers(found, all_of_them(bench.rollout, asked))


def test_requests_after_an_interruption_are_generated_in_the_same_stream(folder: Path) -> None:
    bench = Bench.at(folder, native)
    first, second = sampled(requests()[:2], GREEDY)
    stream = bench.rollout.generate_stream(report_every_s=0.0)
    next(stream)
    assert stream.send([first]) == []
    found = stream.send([InterruptAll(), second])
    assert [(index, one.interrupted, len(one.tokens_L)) for index, one in found] == [(0, True, 1)]
    later: list[tuple[int, Completion]] = []
    while not later:
        later = stream.send(())
    assert [(index, one.interrupted) for index, one in later] == [(1, False)]
    stream.close()


def test_begun_tokens_have_no_recorded_routing(folder: Path) -> None:
    bench = Bench.at(folder, native)
    bench.rollout.routing_shape = (2, 2)  # type: ignore[attr-defined]
    [one] = sampled(requests()[:1], LUCKY)
    with pytest.raises(AssertionError, match="the routing of begun tokens is not recorded"):
        bench.rollout.submit(replace(one, begun=Begun((7,), (-1.0,))))
