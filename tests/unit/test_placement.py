"""Which worker holds what and sits where, by hand."""

import pytest

from rloom.config.load import load_config
from rloom.errors import ConfigError
from rloom.runtime.placement import worker_layout
from rloom.trainer.assemble.worker_groups import layout_of


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
    from rloom.trainer.assemble.ray_workers import needs_of_a_worker, node_share

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
