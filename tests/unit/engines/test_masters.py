"""bfloat16 weights with float32 masters: nothing that is learned is lost to rounding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.launch.models import note_slow_bfloat16, placement
from rloom.packing import MicroBatching
from tests.helpers import ADAMW, a_batch, configured, policy

REINFORCE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, None, "kl")
EVERYTHING = frozenset({"model", "optimizer"})
BATCH = a_batch()
COUNTS = Counts.of(BATCH, 16)


@pytest.fixture
def build(model_folder: Callable[[str], Path]) -> Callable[[], LocalEngine]:
    def engine() -> LocalEngine:
        each = MicroBatching(samples=1)
        where = Placement(torch.device("cpu"), torch.bfloat16)
        return LocalEngine(policy(model_folder("qwen3")), where, scoring=each, training=each, optimizer=ADAMW)

    return engine


def test_the_model_computes_in_bfloat16_and_its_angles_stay_float32(build: Callable[[], LocalEngine]) -> None:
    module = build().module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_micro_batches_add_up_in_float32(build: Callable[[], LocalEngine]) -> None:
    whole, single = build(), build()
    whole.forward_backward(BATCH, REINFORCE, COUNTS)
    exact, coarse = {}, {}
    for row in range(len(BATCH)):
        single.forward_backward(BATCH.select([row]), REINFORCE, COUNTS)
        for name, gradient in single.accumulated.items():
            exact[name] = exact[name] + gradient if name in exact else gradient
            coarse[name] = coarse[name] + gradient.bfloat16() if name in coarse else gradient.bfloat16()
        single.accumulated = {}
    assert len(exact) == len(whole.trainable)  # the embedding and the head it is tied to are one of them
    assert all(torch.equal(whole.accumulated[name], exact[name]) for name in exact)
    assert any(not torch.equal(coarse[name].float(), exact[name]) for name in exact)


def test_steps_too_small_for_bfloat16_are_not_lost(build: Callable[[], LocalEngine]) -> None:
    engine = build()
    before = {name: parameter.detach().clone() for name, parameter in engine.trainable.items()}
    exact = {name: master.detach().clone() for name, master in engine.masters.items()}
    for _ in range(12):
        engine.forward_backward(BATCH, REINFORCE, COUNTS)
        assert engine.optim_step(1e-5).applied
    moved = torch.cat([(engine.masters[name].detach() - exact[name]).flatten().abs() for name in exact])
    assert 5e-5 < float(moved.mean()) < 1.3e-4  # AdamW moves a weight by about the rate: 12 times 1e-5
    changed = torch.cat([(engine.trainable[name] != before[name]).flatten() for name in before])
    assert 0 < float(changed.float().mean()) < 0.5  # most bfloat16 weights did not get to their next number yet
    for name, parameter in engine.trainable.items():
        assert torch.equal(parameter, engine.masters[name].bfloat16())


def test_a_checkpoint_holds_the_masters_and_resumes_bit_for_bit(
    build: Callable[[], LocalEngine], tmp_path: Path
) -> None:
    straight, resumed = build(), build()
    for step in range(4):
        straight.forward_backward(BATCH, REINFORCE, COUNTS)
        straight.optim_step(1e-4)
        if step == 1:
            straight.save(tmp_path, EVERYTHING)
    resumed.load(tmp_path, EVERYTHING)
    for _ in range(2):
        resumed.forward_backward(BATCH, REINFORCE, COUNTS)
        resumed.optim_step(1e-4)
    for name in straight.masters:
        assert straight.masters[name].dtype == torch.float32
        assert torch.equal(resumed.masters[name], straight.masters[name])
        assert torch.equal(resumed.trainable[name], straight.trainable[name])


@pytest.mark.parametrize(
    ("supported", "dtype", "notes"), [(False, "bfloat16", 1), (True, "bfloat16", 0), (False, "auto", 0)]
)
def test_a_cpu_without_bfloat16_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, supported: bool, dtype: str, notes: int
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    note_slow_bfloat16.cache_clear()
    config = configured("trainer.device=cpu", f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}")
    for _ in range(2):
        placement(config, config.actor_rollout_ref.actor.fsdp_config)
    assert len(caplog.messages) == notes
    assert all("this CPU has no bfloat16 arithmetic" in message for message in caplog.messages)
