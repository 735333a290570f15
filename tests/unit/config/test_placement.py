"""Which worker holds what and sits where, by hand."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError, WorkerError
from rloom.launch import job
from rloom.launch.early_checks import layout_of
from rloom.launch.rewards import offloads_reward_model, scores_during_generation
from rloom.launch.worker import Worker
from rloom.launch.workers import pool_lines
from rloom.runtime.placement import WorkerLayout, worker_layout

EIGHT = (  # rollout on GPUs 0 and 1 with TP 2, the reward model on 2 and 3, actor, critic and reference on all
    "trainer.n_gpus_per_node=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.pools.rollout=[0,1]",
    "trainer.pools.reward=[2,3]",
    "reward_model.path=some/model",
    "data.train_files=a.parquet",
)


def checked(*overrides: str) -> Config:
    config = load_config([*EIGHT, *overrides])
    check(config, declared_needs(config))
    return config


def test_the_documents_table_of_eight_gpus_that_roles_share() -> None:
    config = checked()
    layout = layout_of(config)
    [pool] = layout.pools
    both = ("actor", "critic", "ref")
    assert [layout.roles_of(slot) for slot in layout.slots()] == [
        *[(*both, "rollout")] * 2,
        *[(*both, "reward")] * 2,
        *[both] * 4,
    ]
    assert list(pool_lines(config, layout, pool)) == [
        "Creating Actor worker pool: 8 workers ...",
        "Creating Critic worker pool: the workers of actor ...",
        "Creating Ref worker pool: the workers of actor ...",
        "Creating Rollout worker pool: workers 0 and 1 ...",
        "Creating Reward worker pool: workers 2 and 3 ...",
    ]
    assert (config.workers_of("rollout"), config.workers_of("critic"), config.actor_workers) == (2, 8, 8)


def test_workers_for_one_role_are_the_last_and_a_list_names_some_of_the_others() -> None:
    layout = worker_layout(2, 4, {"rollout": [1, 2, 5], "ref": 2})
    assert [layout.workers_of(role) for role in ("actor", "rollout", "ref", "reward")] == [
        (0, 1, 2, 3, 4, 5),
        (1, 2, 5),
        (6, 7),
        (0, 1, 2, 3, 4, 5),
    ]
    assert {layout.node_of(layout.slots()[number]) for number in (5, 6)} == {1}


def test_the_ranks_of_an_engine_are_those_of_its_workers() -> None:
    """With Megatron, workers that hold the stages of one copy have other numbers as ranks."""
    megatron = "actor_rollout_ref.actor.megatron"
    stages = ("actor_rollout_ref.actor.strategy=megatron", f"{megatron}.pipeline_model_parallel_size=2")
    for keys, expected in {
        (): [[2, 3], [2, 3], [5, 7], [5, 7]],
        stages: [[1, 5], [1, 5], [6, 7], [6, 7]],  # worker 2 is stage 0 of copy 1, worker 3 its stage 1
    }.items():
        config = checked("trainer.pools.rollout=[2,3,5,7]", "trainer.device=cpu", *keys)
        layout = layout_of(config)
        slots = [slot for slot in layout.slots() if slot.number in (2, 3, 5, 7)]
        assert [Worker(config, layout, slot).ranks_of_engine() for slot in slots] == expected


@pytest.mark.parametrize(
    ("keys", "during"),
    [
        ((), False),  # its weights are on the host while other roles use its GPU
        (("reward_model.model.fsdp_config.param_offload=False",), True),
        (("reward_model.model.fsdp_config.param_offload=False", "trainer.pools.reward=[1,2]"), False),
        (("trainer.pools.reward=2",), True),
        (("trainer.pools.reward=null",), False),
    ],
)
def test_a_reward_model_scores_during_generation_where_its_workers_wait(keys: tuple[str, ...], during: bool) -> None:
    config = checked(*keys)
    assert scores_during_generation(config, layout_of(config)) is during
    assert offloads_reward_model(config, layout_of(config)) is (not during and "param_offload=False" not in str(keys))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "trainer.pools.rollout=[0,8]",
            "trainer.pools.rollout=[0, 8]: of trainer.nnodes × trainer.n_gpus_per_node = 1 × 8 = 8 workers, the actor "
            "has 0 to 7; name some of these, each once and in ascending order",
        ),
        ("trainer.pools.critic=5", "8 workers, the actor has 0 to 2; name some of these"),
        ("trainer.pools.reward=[3,2]", "trainer.pools.reward=[3, 2]: of trainer.nnodes"),
        ("trainer.pools.rollout=[0,1,4]", "tensor_model_parallel_size=2 does not divide 3, the number of workers with"),
        ("trainer.pools.rollout=[]", "trainer.pools.rollout=[]: input should be a valid integer; it takes int or list"),
        (
            "trainer.pools.ref=[0,1]",
            "trainer.pools.ref=[0, 1]: a model that is divided over some of the actor's workers is not in this version "
            "of rloom; remove the key: it is divided over all of them, or give it a number of workers for itself alone",
        ),
        ("reward_model.enable=False", "trainer.pools.reward=[2, 3]: no effect in this run, because there is no reward"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(key)
    assert reason in str(caught.value)


def test_a_smaller_cluster_keeps_the_placement_if_it_has_these_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rloom.launch import ray_cluster

    monkeypatch.setattr(ray_cluster.cluster, "responsive_machines", lambda _: 1)
    monkeypatch.setattr(ray_cluster, "RETURN_S", 0.0)
    config = load_config(["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.device=cpu"])
    first, second = {"rollout": [0, 1], "reward": [3]}, {"rollout": [0, 4]}
    smaller = ray_cluster.shrink_layout(config, worker_layout(2, 4, first))
    assert (smaller.workers, smaller.workers_of("rollout"), smaller.workers_of("reward")) == (4, (0, 1), (3,))
    with pytest.raises(WorkerError, match="1 of 2 machines are left, and none came back within 0 s"):
        ray_cluster.shrink_layout(config, worker_layout(2, 4, second))


def test_after_each_loss_the_run_goes_on_with_all_machines_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rloom.launch import ray_cluster

    tried = list[int]()  # machines of each attempt

    def attempt(parts: Any, directory: Path, layout: WorkerLayout, *, again: bool) -> str:
        tried.append(layout.nodes)
        if len(tried) < 3:
            raise WorkerError("worker 1 died", lost=True)
        return "trained"

    monkeypatch.setattr(ray_cluster.cluster, "responsive_machines", lambda _: 1 if len(tried) == 1 else 2)
    monkeypatch.setattr(ray_cluster, "RETURN_S", 0.0)
    monkeypatch.setattr(job, "run_attempt", attempt)
    monkeypatch.setattr(job, "open_cluster_if_needed", lambda *_: nullcontext())
    config = load_config(["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.device=cpu"])
    assert job.run_with_restarts(cast(Any, SimpleNamespace(config=config))) == "trained"
    assert tried == [2, 1, 2]


def test_by_default_every_worker_holds_every_role() -> None:
    layout = worker_layout(2, 4, {})
    [pool] = layout.pools
    assert (pool.roles, pool.size, layout.colocated) == (("actor", "critic", "ref", "rollout", "reward"), 8, True)
    assert [layout.node_of(slot) for slot in layout.slots()] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_documents_layout_of_eight_eight_and_two_engines_of_four() -> None:
    layout = worker_layout(3, 8, {"actor": 8, "ref": 8, "rollout": 8})
    assert [(pool.name, pool.first, pool.size) for pool in layout.pools] == [
        ("actor+critic+reward", 0, 8),
        ("ref", 8, 8),
        ("rollout", 16, 8),
    ]
    assert {layout.node_of(slot) for slot in layout.slots() if slot.pool.name == "ref"} == {1}
    assert layout.pool_of("critic") is layout.pool_of("actor") and not layout.colocated


def test_the_actor_gets_what_the_others_leave() -> None:
    layout = worker_layout(1, 4, {"rollout": 1})
    assert [(pool.name, pool.size) for pool in layout.pools] == [("actor+critic+ref+reward", 3), ("rollout", 1)]


@pytest.mark.parametrize("own", [{"ref": 4}, {"ref": 3, "rollout": 2}, {"actor": 1, "rollout": 1}])
def test_pools_that_do_not_add_up_say_what_is_left(own: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"trainer.pools .* 1 × 4 = 4 workers, of which -?\d+ are left for the actor"):
        worker_layout(1, 4, own)


def test_every_worker_has_a_gpu_of_its_own_unless_a_test_makes_them_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rloom.launch.ray_cluster import needs_of_a_worker, node_share

    config = load_config(["trainer.n_gpus_per_node=4", "trainer.device=cuda"])
    found = {}
    for share in ("0", "1"):
        monkeypatch.setenv("RLOOM_TEST_SHARE_GPU", share)
        layout = layout_of(config)
        found[share] = needs_of_a_worker(config, layout), node_share(config, layout)
    assert found == {
        "0": ({"CPU": 1, "GPU": 1}, {"CPU": 4, "GPU": 4}),
        "1": ({"CPU": 1, "GPU": 0.25}, {"CPU": 4, "GPU": 1}),
    }
    monkeypatch.setenv("RLOOM_TEST_SHARE_GPU", "yes")
    with pytest.raises(ConfigError, match="RLOOM_TEST_SHARE_GPU=yes: use 1 to put all workers of a machine on one GPU"):
        layout_of(config)


@pytest.mark.parametrize("role", ["actor", "critic", "ref", "rollout", "reward"])
def test_a_truth_value_is_no_number_of_workers(role: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.pools\.{role}=True: input should be a valid integer"):
        load_config([f"trainer.pools.{role}=true"])


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_list_of_truth_values_is_no_list_of_workers(role: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.pools\.{role}="):
        load_config([f"trainer.pools.{role}=[true]"])
