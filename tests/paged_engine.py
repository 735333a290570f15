"""The native engine's paged path on a CPU, with plain torch in place of its two kernels."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rloom.engines.base import Placement
from rloom.models.attention import AttentionOptions, attend_with_mask
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Sampling
from rloom.rollout.native import graph_session
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.graph_session import GraphSession
from rloom.rollout.native.page_table import PageTable
from rloom.rollout.native.sampler import sample_tokens
from rloom.rollout.native.slots import Slots
from tests.helpers import engine_of

PAGE = 4


def attend_in_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_B: Tensor,
    slots: Slots,
    table: PageTable,
    options: AttentionOptions,
) -> Tensor:
    rows = []
    for row, slot in enumerate(slot_B.long()):
        prompt_length = slots.prompt_length[slot].long()
        position_T = torch.arange(int(prompt_length + slots.earlier[slot] + slots.written[slot]))
        place_T = table.places(slot.expand(len(position_T)), position_T, prompt_length.expand(len(position_T)))
        keys[:, place_T[-1]], values[:, place_T[-1]] = key[row], value[row]
        seen = (position_T.flip(0) < (options.window or len(position_T)))[None]
        found = attend_with_mask(
            query[row][None, :, None], keys[None, :, place_T], values[None, :, place_T], seen, options
        )
        rows.append(found[0, :, 0])
    return torch.stack(rows)


def sample_in_torch(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots, sampling: Sampling) -> None:
    for source, slot in zip(source_B.tolist(), slot_B.tolist(), strict=True):
        if slots.done[slot]:
            continue
        written = int(slots.written[slot])
        token, logprob = sample_tokens(logits_PV[source : source + 1], slots.uniform[slot, written][None], sampling)
        slots.tokens[slot, written], slots.logprobs[slot, written] = token[0], logprob[0]
        slots.token[slot], slots.written[slot] = token[0], written + 1
        slots.stopped[slot] = int((slots.stop_ids == token[0]).any())
        slots.done[slot] = int(bool(slots.stopped[slot]) or written + 1 >= int(slots.limit[slot]))


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch in their place."""

    def sample(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots) -> None:
        inverse, greedy = slots.settings[:2].tolist()
        temperature = 0.0 if greedy else 1 / inverse
        sample_in_torch(logits_PV, source_B, slot_B, slots, Sampling(1, temperature=temperature))

    monkeypatch.setattr("rloom.rollout.native.kernels.attend.attend_to_slots", attend_in_torch)
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.sample_and_record", sample)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch)
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.batch_of", lambda rows: rows + 1)
    monkeypatch.setattr(graph_session, "STEPS", 3)


def paged_rollout(
    network: PolicyNetwork,
    *,
    pages: int | None = None,
    max_sequences: int = 6,
    records_routing: bool = False,
    keeps_cache: bool = False,
) -> NativeRollout:
    rollout = NativeRollout(
        network,
        owner=engine_of(network, Placement(torch.device("cpu"))),
        max_sequences=max_sequences,
        max_prefill_tokens=24,
        memory_share=0.1,
        free_cache=True,
        records_routing=records_routing,
        keeps_cache=keeps_cache,
    )
    rollout.uses_graphs, rollout.page_tokens = True, PAGE
    if pages is not None:
        capacity = pages * PAGE
        rollout.capacity = lambda longest: capacity  # type: ignore[method-assign]
    return rollout


def assert_pages_are_held_once(session: GraphSession) -> None:
    scheduler = session.scheduler
    kept = [one for entries in scheduler.kept.values() for one in entries]
    prompts = {id(one.prompt): one.prompt for one in (*scheduler.running, *kept)}
    assert all(id(one) in prompts for one in scheduler.prompts.values())
    owners = (*scheduler.running, *kept, *prompts.values(), scheduler.allocator)
    pages = [page for owner in owners for page in (owner.free if owner is scheduler.allocator else owner.pages)]
    assert sorted(pages) == list(range(session.decoder.cache.pages))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist() and one.finished == other.finished
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-4)
