"""When a mismatch between rollout engine and trainer is reported, and what the warning contains."""

import math
from pathlib import Path

import pytest
import torch

from rloom.algos.correction import k3_kl
from rloom.runs.display import Display
from rloom.runs.mismatch import MismatchMonitor, MismatchWarning
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog


def found(monitor: MismatchMonitor, figure: float | None) -> MismatchWarning | None:
    metrics = {"training/rollout_logprobs_diff_mean": 0.25} | ({} if figure is None else {"rollout_corr/k3_kl": figure})
    return monitor.check(metrics, engine_versions=[2, 2, 3], trainer_version=3)


def test_the_figure_is_the_ratio_minus_its_logarithm_minus_one() -> None:
    """Probabilities 1/2 in the engine and 1/4 in the trainer: 1/2 + ln 2 - 1; the reverse: 2 - ln 2 - 1."""
    rollout_T, trainer_T = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    assert k3_kl(rollout_T, trainer_T).tolist() == pytest.approx([math.log(2) - 0.5, 1 - math.log(2)])


def test_a_difference_of_rounding_keeps_its_digits_in_float32() -> None:
    """x² / 2 for a small log-ratio x: exp(x) - x - 1 in float32 would be 0."""
    assert float(k3_kl(torch.tensor([0.0]), torch.tensor([1e-4]))) == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize(
    "figure",
    [
        0.0022**2 * math.pi / 4,  # the native engine in bfloat16: mean difference 0.0022 of a normal distribution
        0.002,  # SGLang and vLLM in bfloat16 beside an FSDP trainer
        0.01,  # the threshold itself
        None,  # not measured
    ],
)
def test_a_healthy_run_is_not_warned_about(figure: float | None) -> None:
    assert found(MismatchMonitor(0.01), figure) is None


def test_a_warning_comes_once_and_again_only_if_ten_times_worse() -> None:
    monitor = MismatchMonitor(0.01)
    warned = [found(monitor, figure) is not None for figure in (0.009, 0.02, 0.02, 0.19, 0.2, 0.5, 1.99, 2.1)]
    assert warned == [False, True, False, False, True, False, False, True]


def test_null_switches_it_off() -> None:
    assert found(MismatchMonitor(None), 100.0) is None


def test_the_message_has_the_figure_the_threshold_the_causes_in_order_and_the_keys() -> None:
    warning = found(MismatchMonitor(0.01), 0.0456)
    assert warning is not None
    first, *causes, way_out = warning.message.splitlines()
    assert "rollout_corr/k3_kl 0.0456 is above trainer.rollout_mismatch_warning=0.01" in first
    assert "log-probs differ by 0.25 on average" in first
    words = ("actor_rollout_ref.actor.fsdp_config.dtype", "MoE", "version", "temperature", "fp8", "lora_rank")
    assert all(word in cause for word, cause in zip(words, causes, strict=True))
    assert "its answers have version 2, 3, the trainer's weights version 3" in causes[2]
    assert "algorithm.rollout_correction.rollout_is=token" in way_out


def test_the_warning_is_printed_and_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = found(MismatchMonitor(0.01), 0.5)
    assert warning is not None
    with RunLog(tmp_path, trackers=[], display=Display(total_steps=1)) as log:
        log.begin_step(7)
        log.warning(**warning.fields)
    assert "rollout_corr/k3_kl 0.5 is above" in " ".join(capsys.readouterr().out.split())
    event = RunFolder(tmp_path).events[0]
    assert {name: event[name] for name in event if name not in ("time", "message")} == {
        "event": "warning",
        "step": 7,
        "kind": "rollout_mismatch",
        "metric": "rollout_corr/k3_kl",
        "value": 0.5,
        "threshold": 0.01,
        "engine_versions": [2, 3],
        "trainer_version": 3,
    }
    assert event["message"] == warning.message
