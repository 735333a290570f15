"""Runs with strategy=megatron: the numbers of one process, on any split and from one to the next."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import records, train, weights
from tests.e2e.test_workers import GAE, assert_near, numbers, whole, with_workers  # noqa: F401

pytestmark = pytest.mark.slow
ACTOR = "actor_rollout_ref.actor"
ROLES = GAE[:2]  # actor, critic and reference; no validation
Run = Callable[..., Path]


def split(tensor: int, pipeline: int) -> tuple[str, ...]:
    return (
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron_config.tensor_model_parallel_size={tensor}",
        f"{ACTOR}.megatron_config.pipeline_model_parallel_size={pipeline}",
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actor, critic and reference in one process."""
    directory = tmp_path_factory.mktemp("alone")
    train(directory, 2, *ROLES)
    return directory


def test_four_ranks_that_divide_the_models_compute_what_one_process_computes_and_it_goes_on_from_them(
    with_workers: Run,  # noqa: F811
    alone: Path,
) -> None:
    """Actor, critic and reference are on two tensor-parallel ranks in each of two stages."""
    check_exported(with_workers(4, 1, *ROLES, *split(2, 2), name="run"), alone, step=1)
    assert_near(numbers(with_workers(1, 2, *ROLES, name="run")), numbers(alone))


@pytest.mark.long
def test_a_run_goes_on_with_another_split(with_workers: Run, alone: Path) -> None:  # noqa: F811
    check_exported(with_workers(2, 1, *ROLES, *split(2, 1), name="run"), alone, step=1)
    assert_near(numbers(with_workers(2, 2, *ROLES, *split(1, 2), name="run")), numbers(alone))


def check_exported(run: Path, alone: Path, step: int) -> None:
    exported, expected = whole(run, run / "hf", step), weights(alone, step)
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "tensor", "pipeline"), [("gae", 2, 1), ("grpo", 1, 2)], ids=["PPO, tensors", "GRPO, stages"]
)
def test_the_default_task_is_learned(with_workers: Run, algorithm: str, tensor: int, pipeline: int) -> None:  # noqa: F811
    """The sizes of the packaged configuration: 64 prompts, 8 answers each."""
    sizes = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=8")
    data = ("data.train_max_samples=-1", "data.val_max_samples=-1", "trainer.test_freq=8", "trainer.save_freq=-1")
    start = ("trainer.val_before_train=True", f"algorithm.adv_estimator={algorithm}")
    found = records(with_workers(2, 8, *sizes, *data, *start, *split(tensor, pipeline)))
    accuracy = [
        record["val-core/math_reasoning/acc/mean@1"]
        for record in found
        if "val-core/math_reasoning/acc/mean@1" in record
    ]
    assert accuracy[0] < 0.45 and accuracy[-1] > 0.7
