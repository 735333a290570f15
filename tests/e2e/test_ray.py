"""Workers of a real Ray cluster: what `test_workers.py` shows of processes, once, and what only Ray does."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray looks when it is imported
pytest.importorskip("ray")

from rloom import gpus
from rloom.errors import ConfigError, WorkerError
from rloom.launch.ray_cluster import await_machines
from rloom.runtime import ray as cluster
from rloom.runtime import remote
from rloom.runtime.nodes import NODE
from rloom.runtime.secret import LOOPBACK
from tests.e2e.runs import records, train
from tests.e2e.test_workers import GAE, Deadly, alone, assert_near, numbers, whole  # noqa: F401
from tests.helpers import configured
from tests.worker_backends import ray_address  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("time_limit")]


ONE_MACHINE = """
import json, os
from rloom.runtime.nodes import own_addresses, reachable
from rloom.runtime.secret import on_this_machine
with on_this_machine():
    from rloom.runtime import ray as cluster
    with cluster.connect({}, cpus=1):
        [node] = cluster.ray.nodes()
        gcs = cluster.ray.get_runtime_context().gcs_address.split(":")[1]
        ports = [gcs, node["NodeManagerPort"], node["ObjectManagerPort"]]
        others = [address for address in own_addresses().values() if not address.startswith("127.")]
        reached = {host: [reachable(f"{host}:{port}") for port in ports] for host in ["127.0.0.1", *others]}
        print(json.dumps([reached, os.listdir(os.environ["HOME"])]))
"""


@pytest.mark.long
def test_a_cluster_of_one_machine_listens_on_its_loopback_device_alone_and_leaves_nothing_at_home(
    tmp_path: Path,
) -> None:
    """Ray's own defaults: ports of all addresses, and a token in ~/.ray that every user can read."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", ONE_MACHINE], env={**clean, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reached, left = json.loads(done.stdout.splitlines()[-1])
    assert reached.pop("127.0.0.1") == [True] * 3
    assert all(found == [False] * 3 for found in reached.values()), reached
    assert left == []


@pytest.mark.long
def test_two_workers_of_ray_one_of_which_is_killed_compute_the_same_as_one(
    alone: Path,  # noqa: F811
    ray_address: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "RemoteGroup", Deadly)
    monkeypatch.setattr(cluster, "PING_S", 60.0)  # Ray starts a process for the answer, which takes long on busy cores
    # of step 2: each step has two calls for the critic and two for the actor
    Deadly.plan, Deadly.calls = {"forward_backward": 7}, Counter()
    two = tmp_path / "two"
    where = ("trainer.n_gpus_per_node=2", f"ray_kwargs.ray_init.address={ray_address}")
    train(two, 2, *GAE, f"trainer.validation_data_dir={tmp_path}/answers", *where)
    said = capfd.readouterr().out
    assert said.count("worker 1 died") == 1 and "Restart 1 of 3" in said
    assert f"Going on from {two / 'global_step_1'}" in said
    assert "Its last lines" in said and "critic.optim_step" in said  # before the call in which it died
    assert_near(numbers(alone), numbers(two))
    assert (tmp_path / "answers" / "2.jsonl").read_text() == (alone / "answers" / "2.jsonl").read_text()
    assert "perf/worker_1/resident_gb" in records(two)[0]
    expected = whole(alone, tmp_path / "hf")
    for name, tensor in whole(two, tmp_path / "hf2").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


def test_a_machine_that_never_comes_is_named_and_not_awaited_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"Alive": True, "NodeID": "0", "Resources": {"CPU": 1, f"{NODE}0": 1}}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [here])
    where = ("trainer.master_addr=10.0.0.1", f"trainer.master_port={(port := 6379)}")
    config = configured("trainer.nnodes=3", "trainer.start_timeout_s=1", *where)
    with pytest.raises(WorkerError) as caught:
        await_machines(config)
    said = str(caught.value)
    assert said.startswith("trainer.nnodes=3: after trainer.start_timeout_s=1 these machines have not come: ")
    assert "trainer.node_rank=1, trainer.node_rank=2" in said and f"trainer.master_port={port}" in said


def test_gpus_that_are_not_there_are_missed_at_once_in_a_cluster_of_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = list[str | None]()
    monkeypatch.setattr(gpus, "UNCOUNTED", ("/dev/null",))  # as with an AMD GPU: Ray counts them
    monkeypatch.setattr(cluster.ray, "init", lambda **_: found.append(os.environ.get(LOOPBACK)))
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True, "NodeID": "0", "Resources": {"CPU": 8}}])
    with pytest.raises(AssertionError):  # exit status 2
        train(tmp_path, 1, "trainer.n_gpus_per_node=8", "trainer.backend=ray", "trainer.device=cuda")
    said = capfd.readouterr().err
    assert "machines with 8 CPU and 8 GPU each are needed, 0 of these are here. The cluster has: 8 CPU" in said
    assert found == ["0"] and LOOPBACK not in os.environ


def test_a_ray_whose_processes_do_not_start_in_time_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nSee the logs.")  # as Ray's Node raises it

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused = pytest.raises(ConfigError, match=r"Ray cannot be reached: The current node timed out during startup\.$")
    with refused, cluster.connect({}, cpus=1):
        pass
