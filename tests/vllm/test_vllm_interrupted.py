"""Answers that vLLM is interrupted in: what it returns of them, and how they go on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rloom.rollout.base import Begun
from tests.contract.test_rollout_contract import (
    GREEDY,
    LUCKY,
    PROMPTS,
    Bench,
    as_batch,
    assert_same_answers,
    requests,
)
from tests.contract.test_rollout_interrupted import (
    test_a_begun_answer_has_as_many_tokens_as_its_limit_allows_and_trainers_logprobs,
    test_a_request_that_waits_keeps_the_tokens_that_it_began_with,
    test_greedy_answers_are_the_same_wherever_they_are_interrupted,
    test_the_limit_of_one_token_more_and_a_stop_token_are_ends,
)
from tests.helpers import engine_of, policy
from tests.interruptions import continued, phase
from tests.requests import sampled

if TYPE_CHECKING:
    from rloom.rollout.vllm.engine import VllmRollout

__all__ = [
    "test_a_begun_answer_has_as_many_tokens_as_its_limit_allows_and_trainers_logprobs",
    "test_a_request_that_waits_keeps_the_tokens_that_it_began_with",
    "test_greedy_answers_are_the_same_wherever_they_are_interrupted",
    "test_the_limit_of_one_token_more_and_a_stop_token_are_ends",
]


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


@pytest.fixture
def bench(shared_engine: Callable[..., "VllmRollout"], model_folder: Callable[[str], Path]) -> Bench:
    network = policy(model_folder("qwen3"))
    engine = engine_of(network)
    rollout = shared_engine(network)
    rollout.load_weights(engine.weights(), version=0)
    return Bench(network, engine, rollout)


def test_tokens_and_logprobs_so_far_are_read_although_only_whole_answers_are_output(bench: Bench) -> None:
    asked = sampled(requests(), GREEDY)
    expected = bench.write(requests(), GREEDY)
    found = phase(bench.rollout, dict(enumerate(asked)), 4)
    assert all(one.interrupted and 0 < len(one.tokens_L) < 10 for one in found.values())
    for row, one in found.items():
        length = len(one.tokens_L)
        assert one.tokens_L.tolist() == expected[row].tokens_L[:length].tolist()
        torch.testing.assert_close(one.logprobs_L, expected[row].logprobs_L[:length], atol=1e-4, rtol=0)
    assert not bench.rollout.engine.has_unfinished_requests()  # type: ignore[attr-defined]
    bench.rollout.load_weights(bench.engine.weights(), version=1)  # its prefix cache is dropped: nothing is held
    later = [continued(one, found[row]) for row, one in enumerate(asked)]
    whole = phase(bench.rollout, dict(enumerate(later)), None)
    assert {one.version for one in whole.values()} == {1}
    assert_same_answers([whole[row] for row in range(len(asked))], expected)


def test_the_draws_of_a_begun_answer_are_not_those_of_its_beginning(bench: Bench) -> None:
    """Its generator starts anew: with the seed of the first part it would draw the same numbers again."""
    prompt, begun = PROMPTS[1], Begun((7,) * 5, (-1.0,) * 5)
    [whole] = sampled([replace(requests()[1], tokens=(*prompt, *begun.tokens))], replace(LUCKY, max_new_tokens=5))
    [part] = sampled([replace(requests()[1], begun=begun)], LUCKY)
    first, second = (phase(bench.rollout, {0: one}, None)[0].tokens_L[-5:].tolist() for one in (whole, part))
    assert first != second
    again = phase(bench.rollout, {0: part}, None)[0]
    assert again.tokens_L[-5:].tolist() == second, "the seed and the number of begun tokens determine them"
    batch = as_batch([replace(part, begun=None)], [again])
    after_T = bench.engine.score(batch)[len(prompt) + 5 :]
    torch.testing.assert_close(after_T, again.logprobs_L[5:], atol=1e-4, rtol=0)
