"""The native engine reports the experts that the routers of a mixture-of-experts model chose for each input token."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rloom.batch import Batch
from rloom.errors import ModelError
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native import graph_session
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.slots import Slots
from tests.helpers import FAMILIES, eager_model, engine_of, policy, save_model
from tests.moe import MOE_FAMILIES, chosen_by_transformers
from tests.paged_engine import attend_in_torch, sample_in_torch
from tests.requests import trajectories

SHORT, LONG = (11, 12, 13), (20, 30, 40, 50, 60, 10)
# more answers than slots, prompts that answers share, and answers of several lengths
REQUESTS = [
    Request(tokens, Sampling(limit), seed)
    for seed, (tokens, limit) in enumerate([(SHORT, 5), (LONG, 2), (SHORT, 7), (SHORT, 1), (LONG, 6), (SHORT, 7)])
]


def rollout_of(folder: Path, *, records: bool = True) -> NativeRollout:
    network = policy(folder)
    return NativeRollout(
        network,
        owner=engine_of(network),
        max_sequences=3,
        max_prefill_tokens=8,
        memory_share=0.1,
        free_cache=True,
        records_routing=records,
    )


def generated(rollout: NativeRollout, requests: Sequence[Request] = REQUESTS) -> list[Completion]:
    return [completion for _, completion in sorted(rollout.generate(requests), key=lambda pair: pair[0])]


def assert_transformers_choices(folder: Path, completions: Sequence[Completion]) -> None:
    model = eager_model(folder)
    for request, completion in zip(REQUESTS, completions, strict=True):
        tokens = [*request.tokens, *completion.tokens_L.tolist()]
        expected = chosen_by_transformers(model, tokens).to(torch.int16)
        expected[-1] = -1  # sampled, but never an input
        assert completion.experts_LMK is not None
        assert completion.experts_LMK.dtype == torch.int16 and completion.experts_LMK.tolist() == expected.tolist()


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path, MOE_FAMILIES[request.param]())


@pytest.fixture
def graph_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path with pages on a CPU: plain torch in place of its two kernels, each step a call, three between reads."""
    pytest.importorskip("triton")

    def sample(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots) -> None:
        sample_in_torch(logits_PV, source_B, slot_B, slots, Sampling(1))

    monkeypatch.setattr("rloom.rollout.native.kernels.attend.attend_to_slots", attend_in_torch)
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.sample_and_record", sample)
    monkeypatch.setattr("rloom.rollout.native.graph_decoder.batch_of", lambda rows: rows + 1)
    monkeypatch.setattr(graph_session, "STEPS", 3)


def test_recorded_experts_are_those_of_one_pass_by_transformers(folder: Path) -> None:
    assert_transformers_choices(folder, generated(rollout_of(folder)))


@pytest.mark.parametrize("pages", [None, 6])  # 6 pages of 4 tokens: some answers are preempted and resumed
def test_the_paged_path_records_the_same(graph_path: None, folder: Path, pages: int | None) -> None:
    rollout = rollout_of(folder)
    rollout.uses_graphs, rollout.page_tokens = True, 4
    if pages is not None:
        rollout.capacity = lambda longest: 4 * pages  # type: ignore[method-assign]
    preempted = []
    original = graph_session.GraphSession.preempt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            graph_session.GraphSession, "preempt", lambda self: (original(self), preempted.append(self.preempted))[0]
        )
        completions = generated(rollout)
    assert bool(sum(preempted)) == (pages is not None)
    assert_transformers_choices(folder, completions)


def test_records_travel_to_the_batch(folder: Path) -> None:
    completions = generated(rollout_of(folder))
    batch = Batch.pack(trajectories(REQUESTS, completions))
    assert batch.experts_TMK is not None
    assert batch.experts_TMK.shape == (3 + 5 + 6 + 2 + 3 + 7 + 3 + 1 + 6 + 6 + 3 + 7, 2, 2)
    ends_N = torch.cumsum(batch.length_N, 0) - 1
    assert (batch.experts_TMK < 0).all(-1).all(-1).nonzero().squeeze(1).tolist() == ends_N.tolist()


def test_without_the_setting_nothing_is_recorded_and_the_answers_are_the_same(folder: Path) -> None:
    plain, recorded = generated(rollout_of(folder, records=False)), generated(rollout_of(folder))
    assert [one.experts_LMK for one in plain] == [None] * len(REQUESTS)
    for one, other in zip(plain, recorded, strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist() and torch.equal(one.logprobs_L, other.logprobs_L)


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, FAMILIES["qwen2"]())
    with pytest.raises(ModelError, match=r"Qwen2Model has no router.*Qwen3MoeTopKRouter.*router_replay.mode=disabled"):
        rollout_of(folder)
