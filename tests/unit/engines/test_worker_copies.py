"""Workers that are left after a machine is lost: they hold whole copies of a divided model, or the run ends."""

import pytest

from rloom.errors import WorkerError
from tests.helpers import configured

pytest.importorskip("ray")
from rloom.launch.ray_cluster import check_copies

ACTOR = "actor_rollout_ref.actor"
DIVIDED = (
    "trainer.nnodes=3",
    "trainer.n_gpus_per_node=2",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.megatron.tensor_model_parallel_size=2",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=3",
)


def test_workers_that_cannot_hold_a_copy_of_the_model_are_too_few() -> None:
    """A copy takes 2 x 3 workers; with one of three machines lost, four are left."""
    check_copies(configured(*DIVIDED), 6)
    with pytest.raises(WorkerError, match="4 workers are left, and 6 of them together hold a copy of the model"):
        check_copies(configured(*DIVIDED), 4)


def test_whole_models_go_on_with_any_number_of_workers() -> None:
    check_copies(configured("trainer.nnodes=3", "trainer.n_gpus_per_node=2"), 5)
