"""The native engine's paged cache on a GPU: its size, and answers that wait for pages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.errors import ModelError
from rloom.models.attention import AttentionOptions, attend_with_mask
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.limits import PAGE_TOKENS
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.page_table import PageEntry, PageTable
from rloom.rollout.native.slots import Slots
from rloom.rollout.native.token_cache import PromptAttention, TokenCache, TokenShape
from tests.helpers import engine_of, policy
from tests.requests import ask, sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),  # torch's compiler imports what torch deprecates
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CUDA = torch.device("cuda")
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
REQUESTS = [ask(range(3 + row, 5 + 2 * row), seed=row) for row in range(12)]


def native(
    network: PolicyNetwork, owner: LocalEngine, *, share: float = 0.5, free_cache: bool = True, eager: bool = False
) -> NativeRollout:
    return NativeRollout(
        network,
        owner=owner,
        max_sequences=8,
        max_prefill_tokens=40,
        memory_share=share,
        free_cache=free_cache,
        eager=eager,
    )


def stepping(network: PolicyNetwork, owner: LocalEngine) -> NativeRollout:
    return native(network, owner, eager=True)


def write(rollout: NativeRollout, requests: Sequence[Request]) -> list[Completion]:
    return [completion for _, completion in sorted(rollout.generate(requests), key=lambda pair: pair[0])]


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_cache_keeps_to_its_share_of_memory_and_does_not_count_itself_twice(
    model_folder: Callable[[str], Path], dtype: torch.dtype, number: int
) -> None:
    network = policy(model_folder("llama"))
    owner = engine_of(network, Placement(CUDA, dtype))
    page = 2 * 2 * 2 * 8 * PAGE_TOKENS * number  # keys and values, layers, heads, size
    total = torch.cuda.get_device_properties(CUDA).total_memory
    rollout = native(network, owner, share=5.5 * page / total, free_cache=False)
    for _ in range(2):
        write(rollout, sampled(REQUESTS, GREEDY))
        assert rollout.decoder is not None
        assert rollout.decoder.cache.pages == 5


@pytest.mark.parametrize("build", [native, stepping])
@pytest.mark.parametrize("page_tokens", [16, 64, 128])
def test_preempted_answers_are_those_of_a_cache_with_much_room(
    model_folder: Callable[[str], Path],
    build: Callable[[PolicyNetwork, LocalEngine], NativeRollout],
    page_tokens: int,
) -> None:
    """Answers of 1 to 140 tokens: the small cache has two pages more than one of them and its prompt take."""
    network = policy(model_folder("gemma2"))
    owner = engine_of(network, Placement(CUDA))
    limits = [140, 140, 1, 17, 140, 64, 130, 16, 140, 100, 140, 129]
    requests = [
        replace(request, sampling=Sampling(limit, ignore_eos=True))
        for request, limit in zip(REQUESTS, limits, strict=True)
    ]
    found, preempted = [], []
    for small in (False, True):
        rollout = build(network, owner)
        rollout.page_tokens = page_tokens
        if small:
            rollout.capacity = lambda longest: longest + 2 * page_tokens  # type: ignore[method-assign]
        found.append(write(rollout, requests))
        preempted.append(preemptions(rollout, requests))
    assert preempted[0] == 0 and preempted[1] > 0
    for one, other in zip(*found, strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist()
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-4)
    assert [len(one.tokens_L) for one in found[1]] == limits


def preemptions(rollout: NativeRollout, requests: Sequence[Request]) -> int:
    """Of another generation by the same engine."""
    for request in requests:
        rollout.submit(request)
    rollout.poll()
    session = rollout.session
    assert isinstance(session, GraphSession)
    while rollout.session is not None:
        rollout.poll()
    return session.preempted


def test_a_share_too_small_for_one_sequence_is_named(model_folder: Callable[[str], Path]) -> None:
    network = policy(model_folder("llama"))
    rollout = native(network, engine_of(network, Placement(CUDA)), share=1e-12)
    with pytest.raises(ModelError, match="gpu_memory_utilization=1e-12: not one sequence of"):
        write(rollout, sampled(REQUESTS, GREEDY))


def converse(rollout: NativeRollout, *, reuse: bool, turns: int = 3) -> tuple[list[list[Completion]], list[int]]:
    """The answers of each turn, and the tokens that the requests of each reused."""
    rollout.expect(12, 12, 400)
    past = [request.tokens for request in REQUESTS]
    found, reused = [], []
    for turn in range(turns):
        requests = [
            Request(tokens, replace(GREEDY, max_new_tokens=20 + row), 10 * row + turn, row if reuse else None)
            for row, tokens in enumerate(past)
        ]
        found.append(write(rollout, requests))
        reused.append(sum(one.reused_tokens for one in found[-1]))
        past = [
            (*tokens, *one.tokens_L.tolist(), *(3 + n % 60 for n in range(1 + 9 * row)))
            for row, (tokens, one) in enumerate(zip(past, found[-1], strict=True))
        ]
    return found, reused


@pytest.mark.parametrize("build", [native, stepping])
def test_a_continued_conversation_has_the_answers_of_whole_prefills(
    model_folder: Callable[[str], Path], build: Callable[[PolicyNetwork, LocalEngine], NativeRollout]
) -> None:
    """Gemma 2 in float32: windows and softcaps, attention by plain torch."""
    network = policy(model_folder("gemma2"))
    owner = engine_of(network, Placement(CUDA))
    (found, reused), (expected, none) = (converse(build(network, owner), reuse=reuse) for reuse in (True, False))
    assert none == [0, 0, 0] and reused[0] == 0 and 0 < reused[1] < reused[2]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist()
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-3)


@pytest.mark.parametrize("build", [native, stepping])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_answers_after_a_cut_and_a_cancelled_request_are_those_of_whole_prefills(
    model_folder: Callable[[str], Path], family: str, build: Callable[[PolicyNetwork, LocalEngine], NativeRollout]
) -> None:
    network = policy(model_folder(family))
    owner = engine_of(network, Placement(CUDA))
    rollout, prompt, sampling = build(network, owner), tuple(range(3, 40)), Sampling(30, ignore_eos=True)
    rollout.expect(8, 1, 400)
    first = write(rollout, [Request(prompt, sampling, row, row) for row in range(4)])
    requests = [
        Request((*prompt, *one.tokens_L.tolist()[: 5 + 8 * row], 3, 4), sampling, 10 + row, row)
        for row, one in enumerate(first)
    ]
    cancelled = rollout.submit(replace(requests[3], sampling=replace(sampling, max_new_tokens=200)))
    for _ in range(3):
        assert rollout.poll() == []
    rollout.cancel(cancelled)
    requests += [Request(prompt, sampling, 20 + row, 4 + row) for row in range(2)]  # episodes that begin now
    found = write(rollout, requests)
    assert [one.reused_tokens for one in found] == [37 + 5, 37 + 13, 37 + 21, 37 + 30, 0, 0]
    for row in range(6):
        rollout.end_conversation(row)
    assert rollout.session is None
    expected = write(build(network, owner), [replace(request, conversation=None) for request in requests])
    for one, other in zip(found, expected, strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist()
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-3)


@pytest.mark.parametrize("window", [None, 20])
def test_torchs_kernel_attends_from_the_last_tokens_of_a_longer_context(window: int | None) -> None:
    """In bfloat16: three sequences, of which two have tokens in the cache."""
    length_P, reused_P = torch.tensor([5, 40, 1]), torch.tensor([150, 0, 33])
    slots, table = Slots(3, 10, CUDA), PageTable(3, 3, 128, 9, CUDA)
    table.write([PageEntry(slot, column, 3 * slot + column) for slot in range(3) for column in range(3)])
    slots.begin([(0, 140, 15, 0, 5), (1, 40, 0, 0, 5), (2, 30, 4, 0, 5)], None)
    cache = TokenCache(TokenShape(1, 2, 64, 64, torch.bfloat16), 9, 128, CUDA)
    cache.wake()
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    attend = PromptAttention(length_P, reused_P, torch.arange(3, device=CUDA), cache, slots, table)
    query, key, value = (torch.randn(1, heads, 46, 64, device=CUDA, dtype=torch.bfloat16) for heads in (4, 2, 2))
    options = AttentionOptions(0.125, window)
    found = attend(query, key, value, options)
    first = 0
    for slot, (new, reused, prompt) in enumerate(zip([5, 40, 1], [150, 0, 33], [140, 40, 30], strict=True)):
        position = torch.arange(reused + new, device=CUDA)
        place = table.places(torch.full_like(position, slot), position, torch.full_like(position, prompt))
        distance = position[reused:, None] - position
        mask = (distance >= 0) & (distance < (window or 1000))
        keys, values = cache.keys[0, :, place][None], cache.values[0, :, place][None]
        assert torch.equal(keys[0, :, reused:], key[0, :, first : first + new]), "the new ones are in the cache"
        expected = attend_with_mask(query[:, :, first : first + new], keys, values, mask, options).transpose(1, 2)
        torch.testing.assert_close(found[:, first : first + new], expected, rtol=0.02, atol=0.02)
        first += new
