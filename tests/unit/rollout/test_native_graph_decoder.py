"""The device-resident path of the native engine writes what the path through plain torch writes.

Without a CUDA device its kernels run in Triton's interpreter, and every step is a call: graphs are tested on a GPU.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.engines.base import Placement
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native import graph_session
from rloom.rollout.native.engine import NativeRollout
from tests.families import tiny_model
from tests.helpers import copied_policy, engine_of
from tests.interruptions import in_phases
from tests.paged_engine import replace_kernels
from tests.requests import ask, sampled

pytestmark = [
    pytest.mark.usefixtures("interpreted_kernels", "few_programs"),
    # the interpreter makes a number of an array to know where a loop ends
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
P, Q, R = (5, 6, 7), (20, 30, 40, 50, 60, 10), (11,)  # one shorter than the window of 4, one longer
PAGE = 16  # tokens: the smallest that a GPU's kernel reads
LUCKY = Sampling(5)
GREEDY = Sampling(5, temperature=0.0)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one after the other."""
    monkeypatch.setattr("rloom.rollout.native.kernels.attend.PROGRAMS", 1)
    monkeypatch.setattr("rloom.rollout.native.kernels.sample.BLOCK", 64)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch, few_programs: None) -> None:
    """One row beyond the sequences, not five."""
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.batch_of", lambda rows: rows + 1)


@pytest.fixture
def quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a CUDA device plain torch in place of the interpreter, where not the kernels are tested."""
    if DEVICE.type == "cpu":
        replace_kernels(monkeypatch)


@pytest.fixture
def network(model_folder: Callable[[str], Path]) -> PolicyNetwork:
    """Gemma 2 has all there is: a window in every other layer, softcaps, heads of size 8 that share keys."""
    return copied_policy(model_folder("gemma2"))


def rollout_of(network: PolicyNetwork, device: torch.device = DEVICE, max_sequences: int = 3) -> NativeRollout:
    rollout = NativeRollout(
        network,
        owner=engine_of(network, Placement(device)),
        max_sequences=max_sequences,
        max_prefill_tokens=8,
        memory_share=0.1,
        free_cache=True,
        eager=True,
    )
    rollout.uses_graphs = True  # on a CPU, too
    rollout.page_tokens = PAGE
    return rollout


def family_network(family: str) -> PolicyNetwork:
    model = tiny_model(family)
    model.set_attn_implementation("rloom")
    return PolicyNetwork(model, packed=True)


def asked(*prompts: tuple[int, ...], limits: Sequence[int | None] = ()) -> list[Request]:
    rows = zip(prompts, [*limits, *[None] * (len(prompts) - len(limits))], strict=True)
    return [ask(tokens, 100 + row, limit) for row, (tokens, limit) in enumerate(rows)]


def write(rollout: NativeRollout, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    found = list(rollout.generate(sampled(requests, sampling)))
    assert sorted(row for row, _ in found) == list(range(len(requests)))
    return [completion for _, completion in sorted(found, key=lambda pair: pair[0])]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens_L.tolist() for completion in completions]


def by_torch(network: PolicyNetwork, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    """The other path, on the host, by a copy of the network."""
    rollout = rollout_of(copy.deepcopy(network), torch.device("cpu"))
    rollout.uses_graphs = False
    return write(rollout, requests, sampling)


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    assert [one.finished for one in found] == [one.finished for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.tokens_L.dtype == torch.int64 and one.logprobs_L.dtype == torch.float32
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-4)


MIXED = asked(P, Q, P, R, P, limits=[None, 3, 1])  # more than there are slots, and one prompt three times


def with_a_stop(network: PolicyNetwork, sampling: Sampling) -> tuple[Sampling, list[Completion]]:
    """A stop token that some of the answers write in their midst, and what they are then."""
    whole = by_torch(network, MIXED, sampling)
    sampling = replace(sampling, stop_ids=(63, int(whole[0].tokens_L[2])))
    expected = by_torch(network, MIXED, sampling)
    assert {completion.finished for completion in expected} == {True, False}
    assert {len(completion.tokens_L) for completion in expected} >= {1, 3, 5}
    return sampling, expected


@pytest.mark.long
def test_greedy_answers_are_those_of_plain_torch(network: PolicyNetwork) -> None:
    sampling, expected = with_a_stop(network, GREEDY)
    assert_same(write(rollout_of(network), MIXED, sampling), expected)


@pytest.mark.parametrize(
    "steps", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(8, marks=pytest.mark.long)]
)  # between two looks: the second look at some comes when they have left
def test_drawn_answers_are_those_of_plain_torch(
    small_batches: None, monkeypatch: pytest.MonkeyPatch, network: PolicyNetwork, steps: int
) -> None:
    monkeypatch.setattr(graph_session, "STEPS", steps)
    sampling, expected = with_a_stop(network, replace(LUCKY, temperature=0.8) if steps == 2 else LUCKY)
    assert_same(write(rollout_of(network), MIXED, sampling), expected)


def test_an_abandoned_generation_leaves_the_engine_usable(
    small_batches: None, quick_kernels: None, monkeypatch: pytest.MonkeyPatch, network: PolicyNetwork
) -> None:
    monkeypatch.setattr(graph_session, "STEPS", 1)
    rollout = rollout_of(network)
    requests = sampled(asked(P, R, Q, limits=[4, 1, 4]), replace(LUCKY, max_new_tokens=4))
    for row, completion in rollout.generate(requests):
        assert row == 1 and len(completion.tokens_L) == 1  # the short one is there first
        break
    left, again = rollout.decoder, asked(Q, P, P, limits=[2, 3, 3])
    sampling = replace(LUCKY, max_new_tokens=3)
    assert_same(write(rollout, again, sampling), by_torch(network, again, sampling))
    assert rollout.decoder is left


def test_the_tokens_so_far_are_the_beginning_of_the_answer(
    small_batches: None, quick_kernels: None, network: PolicyNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_session, "STEPS", 1)
    rollout = rollout_of(network)
    number = rollout.submit(Request(P, GREEDY, seed=0))
    assert rollout.tokens_so_far(number).tolist() == [], "it waits"
    assert rollout.poll() == []
    begun = rollout.tokens_so_far(number).tolist()
    while not (found := rollout.poll()):
        assert rollout.tokens_so_far(number).tolist()[: len(begun)] == begun
    assert len(begun) == 2 and found[0].tokens_L.tolist()[:2] == begun


def test_an_interrupted_answer_goes_on_as_if_it_had_not_been(
    small_batches: None, quick_kernels: None, network: PolicyNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps in flight when it is interrupted: they are waited for."""
    monkeypatch.setattr(graph_session, "STEPS", 1)
    rollout, requests = rollout_of(network), sampled(asked(P, Q), LUCKY)
    found, begun = in_phases(rollout, requests, [2, 0])
    assert begun == 4, "both, in each of the two interruptions"
    assert_same(found, by_torch(network, requests, LUCKY))


def test_the_cache_grows_with_what_is_asked_for_and_stays(
    small_batches: None, quick_kernels: None, network: PolicyNetwork
) -> None:
    rollout = rollout_of(network)
    few, many = asked(R), asked(P, Q)
    short, long = replace(LUCKY, max_new_tokens=2), replace(LUCKY, max_new_tokens=4)
    assert_same(write(rollout, few, short), by_torch(network, few, short))
    first = rollout.decoder
    assert first is not None
    assert (first.slots.count, first.slots.longest_answer, first.cache.pages) == (1, 2, 1 + 1)
    assert_same(write(rollout, many, long), by_torch(network, many, long))
    second = rollout.decoder
    assert second is not None and second is not first
    assert (second.slots.count, second.slots.longest_answer, second.cache.pages) == (2, 4, 2 + 2)
    assert_same(write(rollout, few, short), by_torch(network, few, short))
    assert rollout.decoder is second


def test_a_cache_too_small_for_one_sequence_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, network: PolicyNetwork
) -> None:
    """In it the sequence would wait for ever."""
    rollout, one = rollout_of(network), replace(LUCKY, max_new_tokens=1)
    monkeypatch.setattr(rollout, "capacity", lambda longest: longest)
    assert rollout.decoder_for([Request(tuple(range(3, 3 + 16)), one, 0)]).cache.pages == 1 + 1
    assert rollout.decoder_for([Request(tuple(range(3, 3 + 17)), one, 0)]).cache.pages == 2 + 1


def test_a_cache_that_holds_one_sequence_serves_all_of_them_in_turn(
    small_batches: None, quick_kernels: None, monkeypatch: pytest.MonkeyPatch, network: PolicyNetwork
) -> None:
    rollout, sampling, requests = rollout_of(network), replace(LUCKY, max_new_tokens=3), asked(Q, P, Q)
    monkeypatch.setattr(rollout, "capacity", lambda longest: longest)
    assert_same(write(rollout, requests, sampling), by_torch(network, requests, sampling))
    assert rollout.decoder is not None and rollout.decoder.cache.pages == 1 + 1


def test_a_prompt_is_read_once_for_all_its_answers_and_one_token_needs_no_step(
    monkeypatch: pytest.MonkeyPatch, network: PolicyNetwork
) -> None:
    rollout, sampling, requests = rollout_of(network), replace(LUCKY, max_new_tokens=1), asked(P, R, P)
    expected, read, hidden = by_torch(network, requests, sampling), [], network.decoder.packed_hidden

    def noted(tokens_T: Tensor, *rest: Any) -> Tensor:
        read.append(tokens_T.tolist())
        return hidden(tokens_T, *rest)

    rollout.token_shape()  # asks for one token of its own, once
    monkeypatch.setattr(network.decoder, "packed_hidden", noted)
    assert_same(write(rollout, requests, sampling), expected)
    assert read == [[*P, *R]]


def test_weights_that_moved_are_found_again(network: PolicyNetwork) -> None:
    rollout, sampling, requests = rollout_of(network), replace(LUCKY, max_new_tokens=1), asked(P)
    before = write(rollout, requests, sampling)
    first = rollout.decoder
    for parameter in network.module.parameters():
        parameter.data = parameter.data.clone()
    assert_same(write(rollout, requests, sampling), before)
    assert rollout.decoder is not first


def test_a_cache_that_no_longer_fits_is_made_anew_as_large_as_there_is_room(
    small_batches: None, quick_kernels: None, monkeypatch: pytest.MonkeyPatch, network: PolicyNetwork
) -> None:
    """The optimizer's moments come with the first update, after the cache was sized."""
    rollout, few, sampling = rollout_of(network), asked(P, Q), replace(GREEDY, max_new_tokens=3)
    write(rollout, few, sampling)
    assert rollout.decoder is not None and rollout.decoder.cache.pages == 2 + 2
    monkeypatch.setattr(rollout, "capacity", lambda longest: 3 * PAGE)
    assert_same(write(rollout, few, sampling), by_torch(network, few, sampling))
    assert rollout.decoder.cache.pages == 3


def test_layers_with_unlike_caches_are_generated_step_by_step_and_it_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gemma 4: heads of another size in layers that attend to all."""
    network, few = family_network("gemma4_text"), asked(P, Q)
    rollout = rollout_of(network)
    assert_same(write(rollout, few, GREEDY), by_torch(network, few, GREEDY))
    assert "different caches, (heads, key, value size): [(2, 8, 8), (2, 512, 512)]" in caplog.text
    assert not rollout.uses_graphs


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_sinks_and_values_smaller_than_keys_stay_on_the_device(small_batches: None, family: str) -> None:
    network, few, sampling = family_network(family), asked(P, Q, P), replace(GREEDY, max_new_tokens=3)
    rollout = rollout_of(network)
    assert_same(write(rollout, few, sampling), by_torch(network, few, sampling))
    assert rollout.uses_graphs


def test_a_continued_conversation_is_that_of_plain_torch_prefilled_whole(
    small_batches: None, network: PolicyNetwork
) -> None:
    rollout, sampling = rollout_of(network), replace(GREEDY, max_new_tokens=3)
    rollout.expect(3, 2, 20)
    tokens, reused = [P, Q, P], []
    for turn in range(3):
        requests = [Request(past, sampling, row, conversation=row) for row, past in enumerate(tokens)]
        found = write(rollout, requests, sampling)
        assert_same(found, by_torch(network, [replace(one, conversation=None) for one in requests], sampling))
        reused.append([one.reused_tokens for one in found])
        tokens = [
            (*past, *one.tokens_L.tolist(), *range(3, 3 + 7 * turn + row))
            for row, (past, one) in enumerate(zip(tokens, found, strict=True))
        ]
    assert reused == [[0, 0, 0], [5, 8, 5], [8, 12, 10]]
