"""The whole loop with two workers that share one GPU: the same numbers as one worker on it."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rloom.models.source import EMBEDDED_FOLDER
from rloom.runtime import remote
from tests.e2e.runs import records, train
from tests.e2e.test_workers import Deadly, numbers, whole

pytestmark = [
    pytest.mark.usefixtures("time_limit"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns of itself; what is tested are numbers
]
STEPS = 3
EXACT = (  # what a GPU rounds differently from run to run stays far below what is compared
    "trainer.device=cuda",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "critic.model.fsdp_config.dtype=float32",
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "trainer.test_freq=3",  # greedy answers after training
)
TWO = ("trainer.n_gpus_per_node=2",)
MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "critic.megatron.dtype=float32",
)
ULYSSES = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "critic.ulysses_sequence_parallel_size=2",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """A run by name, made once."""
    made: dict[str, Path] = {}

    def make(name: str, *overrides: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name.replace(" ", "_")
            train(folder, STEPS, *EXACT, f"trainer.validation_data_dir={folder}/answers", *overrides)
            made[name] = folder
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLOOM_TEST_SHARE_GPU", "1")
        yield make


def differing(one: Path, other: Path) -> dict[str, tuple[float, float]]:
    """Metrics that are not the same in both runs, by step and name."""
    first, second = numbers(one), numbers(other)
    assert [list(row) for row in first] == [list(row) for row in second]
    return {
        f"step {row['step']:g} {key}": (row[key], beside[key])
        for row, beside in zip(first, second, strict=True)
        for key in row
        if row[key] != pytest.approx(beside[key], rel=5e-3, abs=1e-4)
    }


def apart(one: Path, other: Path) -> float:
    """How far the trained weights are from each other, as a share of the way that training moved them."""
    first, second = (trained(folder) for folder in (one, other))
    start = load_file(EMBEDDED_FOLDER / "model" / "model.safetensors")
    distance, way = (
        torch.cat([(a[name].float() - b[name].float()).flatten() for name in first]).norm()
        for a, b in ((first, second), (second, start))
    )
    return float(distance / way)


def trained(folder: Path) -> dict[str, torch.Tensor]:
    exported = folder / "hf" / "model.safetensors"
    return load_file(exported) if exported.is_file() else whole(folder, folder / "hf", STEPS)


def answers(folder: Path) -> str:
    return (folder / "answers" / f"{STEPS}.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("two workers", TWO),
        ("shared sequences", (*TWO, *ULYSSES)),
        ("rollout apart", (*TWO, "trainer.pools.rollout=1")),
        ("tensors", (*TWO, *MEGATRON, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")),
        ("stages", (*TWO, *MEGATRON, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2")),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_two_workers_on_one_gpu_compute_what_one_computes(
    run: Callable[..., Path], name: str, overrides: tuple[str, ...]
) -> None:
    alone, two = run("alone"), run(name, *overrides)
    assert differing(two, alone) == {}
    assert apart(two, alone) < 0.02
    assert answers(two) == answers(alone)
    for worker in (0, 1):
        assert records(two)[0][f"perf/worker_{worker}/gpu_allocated_gb"] > 0


def test_a_worker_killed_in_an_update_on_a_gpu_costs_nothing(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run("two workers", *TWO)
    monkeypatch.setattr(remote, "RemoteGroup", Deadly)
    Deadly.plan, Deadly.calls = (
        {"forward_backward": 6},
        Counter(),
    )  # in step 2: the critic has two a step, the actor too
    disturbed = run("disturbed", *TWO)
    assert Deadly.calls["build"] == 2
    assert differing(disturbed, calm) == {}
    assert apart(disturbed, calm) < 0.02
    assert answers(disturbed) == answers(calm)


def test_in_bfloat16_two_workers_generate_with_the_weights_that_they_trained(run: Callable[..., Path]) -> None:
    """Rounding may change which token is drawn, so metrics are not compared; a stale copy would drift away."""
    dtype = "fsdp_config.dtype=bfloat16"
    two = run("bfloat16", *TWO, f"actor_rollout_ref.actor.{dtype}", f"critic.model.{dtype}")
    for record in numbers(two)[:STEPS]:
        assert record["training/rollout_probs_diff_mean"] < 0.01
        assert record["actor/grad_norm"] > 0 and record["critic/grad_norm"] > 0
