"""The order in which a worker reads its models."""

from typing import Any

import pytest

from rloom.config.load import load_config
from rloom.launch import worker
from rloom.launch.worker import Rendezvous, Worker
from rloom.runtime.placement import worker_layout


class Stop(Exception):
    pass


def test_the_reference_is_divided_before_the_policy_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads each of them whole, in float32: the host of its machine has room for one."""
    done: list[str] = []

    def stop(*arguments: Any, **settings: Any) -> None:
        raise Stop

    monkeypatch.setattr(worker, "reference_engine", lambda *arguments, **settings: done.append("reference"))
    monkeypatch.setattr(worker, "policy_network", stop)
    config = load_config(["actor_rollout_ref.actor.use_kl_loss=True", "trainer.device=cpu"])
    layout = worker_layout(1, 1, {})
    with pytest.raises(Stop):
        Worker(config, layout, layout.slots()[0]).build(Rendezvous())
    assert done == ["reference"]
