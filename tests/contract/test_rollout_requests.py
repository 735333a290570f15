"""Requests that are submitted, polled and cancelled, and weights that are loaded by name, for every rollout engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.errors import ModelError
from rloom.rollout import hf
from rloom.rollout.base import Completion, Rollout
from rloom.rollout.hf import HfRollout
from tests.contract.test_rollout_contract import ENGINES, GREEDY, LUCKY, PROMPTS, Bench, greedy_by_hand, requests
from tests.helpers import eager_model
from tests.requests import sampled


@pytest.fixture(params=ENGINES)
def bench(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Bench:
    return Bench.at(model_folder("qwen2"), ENGINES[request.param], max_sequences=2)


def drain(rollout: Rollout, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < count:
        found |= {completion.request: completion for completion in rollout.poll()}
    assert rollout.poll() == []
    return found


def test_a_cancelled_request_is_not_reported_and_the_others_are_as_ever(bench: Bench) -> None:
    asked = sampled(requests(), GREEDY)
    expected = bench.tokens(requests(), GREEDY)
    first, second, *others = [bench.rollout.submit(request) for request in asked]
    early = bench.rollout.poll()  # two run, the others wait
    for number in (first, others[0]):
        bench.rollout.cancel(number)
    kept = {second: 1, others[1]: 3, others[2]: 4}
    if early:  # hf generates a whole batch in one call
        assert {completion.request for completion in early} == {first, second}
        del kept[second]
    found = drain(bench.rollout, len(kept))
    assert {number: found[number].tokens_L.tolist() for number in found} == {n: expected[i] for n, i in kept.items()}
    bench.rollout.cancel(first)  # a request that is gone


def test_the_tokens_so_far_are_the_beginning_of_the_answer(bench: Bench) -> None:
    [request] = sampled(requests()[:1], GREEDY)
    number, seen = bench.rollout.submit(request), list[list[int]]()
    while not (found := bench.rollout.poll()):
        seen.append(bench.rollout.tokens_so_far(number).tolist())
    answer = found[0].tokens_L.tolist()
    assert all(answer[: len(tokens)] == tokens for tokens in seen)
    assert [len(tokens) for tokens in seen] == sorted({len(tokens) for tokens in seen}), "each poll adds some"
    assert bench.rollout.tokens_so_far(number).tolist() == [], "it has ended"


def test_requests_join_while_others_run_whatever_their_sampling(bench: Bench) -> None:
    greedy, drawn = bench.tokens(requests(), GREEDY), bench.tokens(requests()[:2], replace(LUCKY, top_k=1))
    assert drawn == greedy[:2]  # one token to choose from
    early = [bench.rollout.submit(request) for request in sampled(requests()[:2], GREEDY)]
    found = {completion.request: completion for completion in bench.rollout.poll()}
    late = [bench.rollout.submit(request) for request in sampled(requests()[2:], GREEDY)]
    other = [bench.rollout.submit(request) for request in sampled(requests()[:2], replace(LUCKY, top_k=1))]
    found |= drain(bench.rollout, len(early + late + other) - len(found))
    assert [found[number].tokens_L.tolist() for number in early + late] == greedy
    assert [found[number].tokens_L.tolist() for number in other] == drawn


def test_weights_are_loaded_by_name_and_completions_have_their_version(bench: Bench, tmp_path: Path) -> None:
    assert bench.write(requests(), GREEDY)[0].version == 0
    torch.manual_seed(3)
    other = {name: torch.randn_like(p) * 0.05 for name, p in bench.network.module.named_parameters()}
    bench.rollout.load_weights(iter(other.items()), version=7)
    bench.network.module.save_pretrained(tmp_path)
    completions = bench.write(requests(), GREEDY)
    model = eager_model(tmp_path)
    assert [one.tokens_L.tolist() for one in completions] == [greedy_by_hand(model, prompt) for prompt in PROMPTS]
    assert {one.version for one in completions} == {7}
    with pytest.raises(ModelError, match=r"no parameter model\.no_such, which the trainer sent"):
        bench.rollout.load_weights(iter([("model.no_such", torch.zeros(1))]), version=8)


def test_an_error_leaves_no_request_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bench.tokens(requests(), GREEDY)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more memory"):
        patch.setattr(bench.network.decoder.body, "forward", fail)
        list(bench.rollout.generate(sampled(requests(), GREEDY)))
    assert bench.rollout.poll() == []
    assert bench.tokens(requests(), GREEDY) == expected


def test_hf_generates_so_many_at_a_time_that_their_logits_fit(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 logits of three answers: the batches of seven have 3, 3 and 1; of one that is too long, 1."""
    bench = Bench.at(model_folder("qwen2"), ENGINES["hf"], max_sequences=64)
    rollout = bench.rollout
    assert isinstance(rollout, HfRollout)
    asked = sampled(requests([PROMPTS[0]] * 7), GREEDY)
    expected = rollout.generate_all(asked)
    batches, generate = list[int](), rollout.call_generate

    def counted(**arguments: Any) -> Any:
        batches.append(len(arguments["input_ids"]))
        return generate(**arguments)

    monkeypatch.setattr(rollout, "call_generate", counted)
    vocabulary = rollout.model.config.vocab_size
    monkeypatch.setattr(hf, "LOGITS_BYTES", 4 * vocabulary * GREEDY.max_new_tokens * 4 - 1)
    found = rollout.generate_all(asked)
    assert batches == [3, 3, 1]
    for one, other in zip(found, expected, strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist()
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L)
    monkeypatch.setattr(hf, "LOGITS_BYTES", 1)
    assert len(rollout.generate_all(asked[:1])) == 1
