"""Several workers: the same numbers as one process, and runs that survive a death.

A run with real Ray imports everything again in each worker, so there is one; the others start the same workers as
forked processes (`tests/local_ray.py`).
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray looks when it is imported
pytest.importorskip("ray")

from rloom.errors import WorkerError
from rloom.launch.export import export
from rloom.launch.ray_workers import await_machines
from rloom.runtime import failures
from rloom.runtime import ray as cluster
from rloom.runtime.group import NextItems, Stream
from rloom.runtime.nodes import free_port, head_node, wait_until
from rloom.runtime.secret import LOOPBACK
from tests.e2e.peers import KILLED, Peer
from tests.e2e.runs import records, same, terminate_all, train
from tests.helpers import configured
from tests.local_ray import use_local_ray

pytestmark = pytest.mark.slow
OWN = ("timing_s/", "perf/")  # what another number of workers may change
LIMIT_S = 240


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of one machine, with more cores for Ray than it has."""
    where = f"127.0.0.1:{free_port()}"
    with head_node(where, cpus=4, gpus=0):  # Ray starts a process for each
        yield where


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A run that does not end is a failure."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    use_local_ray(monkeypatch, cpus=8)

    def run(workers: int, steps: int, *overrides: str, name: str = "") -> Path:
        directory = tmp_path / (name or f"workers_{workers}")
        train(directory, steps, *overrides, f"trainer.n_gpus_per_node={workers}")
        return directory

    return run


def numbers(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith(OWN)} for record in records(directory)]


def whole(run: Path, folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(export(run / f"global_step_{step}", folder) / "model.safetensors")


def assert_near(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other) > 0
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for key in first:
            assert first[key] == pytest.approx(second[key], rel=2e-3, abs=1e-5), key


# gae has every role, and with KL a reference; each test below compares some workers with the one run without
GAE = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.test_freq=3",  # greedy answers after training
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    train(directory, 3, *GAE, f"trainer.validation_data_dir={directory}/answers")
    return directory


class Deadly(cluster.RayGroup):
    """A group whose last worker is killed at chosen calls: after they were sent, before all have answered."""

    plan: ClassVar[dict[str, int]] = {}  # method -> at which of its calls in the whole run
    calls: ClassVar[Counter[str]] = Counter()
    processes: ClassVar[dict[str, int]] = {}

    def strike(self, method: str) -> None:
        self.calls[method] += 1
        if self.plan.get(method) == self.calls[method]:
            os.kill(self.processes[self.workers[-1].name], signal.SIGKILL)

    def start(self, method: str, arguments: Any) -> cluster.RayCalls:
        pending = super().start(method, arguments)
        self.strike(method)
        return pending

    def each(self, method: str, arguments: Any) -> list[Any]:
        found = super().each(method, arguments)
        if method == "machine":
            self.processes.update({worker.name: one.process for worker, one in zip(self.workers, found, strict=True)})
        return found

    def stream(self, method: str, next_items: NextItems) -> Stream:
        for number, item in enumerate(super().stream(method, next_items)):
            if number == 0:
                self.strike(method)
            yield item


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
    alone: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "RayGroup", Deadly)
    monkeypatch.setattr(cluster, "PING_S", 60.0)  # Ray starts a process for the answer, which takes long on busy cores
    # of step 2: each step has two calls for the critic and two for the actor
    Deadly.plan, Deadly.calls = {"forward_backward": 7}, Counter()
    two = tmp_path / "two"
    where = ("trainer.n_gpus_per_node=2", f"ray_kwargs.ray_init.address={address}")
    train(two, 3, *GAE, f"trainer.validation_data_dir={tmp_path}/answers", *where)
    said = capfd.readouterr().out
    assert said.count("worker 1 died") == 1 and "Restart 1 of 3" in said
    assert f"Going on from {two / 'global_step_1'}" in said
    assert "Its last lines" in said and "actor.forward_backward" in said
    assert_near(numbers(alone), numbers(two))
    assert (tmp_path / "answers" / "3.jsonl").read_text() == (alone / "answers" / "3.jsonl").read_text()
    assert "perf/worker_1/resident_gb" in records(two)[0]
    expected = whole(alone, tmp_path / "hf")
    for name, tensor in whole(two, tmp_path / "hf2").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


def test_roles_apart_compute_the_same_as_together(alone: Path, with_workers: Callable[..., Path]) -> None:
    apart = with_workers(4, 3, *GAE, "trainer.pools.ref=1", "trainer.pools.rollout=1")
    assert_near(numbers(alone), numbers(apart))
    for record in records(apart):
        if "perf/throughput" in record:
            per_worker = record["perf/total_num_tokens"] / record["perf/time_per_step"] / 4
            assert record["perf/throughput"] == pytest.approx(per_worker)
            resident = [record[f"perf/worker_{number}/resident_gb"] for number in range(4)]
            # Linux updates the peak of a process in batches of pages: it may be some pages below what is resident
            assert record["perf/max_memory_allocated_gb"] >= 0.99 * max(resident)


def test_a_run_goes_on_with_another_number_of_workers_and_another_placement(
    alone: Path, with_workers: Callable[..., Path], tmp_path: Path
) -> None:
    # one answer at a time: two workers get one prompt of the four each, and the others as they finish
    one_by_one = "actor_rollout_ref.rollout.max_num_seqs=1"
    engines = ("trainer.pools.rollout=[1,2]",)  # on two of three workers that train
    # 8 samples a step: 3 workers train on 3, 3 and 2
    for workers, steps, placement in ((2, 1, ()), (1, 2, ()), (3, 3, engines)):
        moved = with_workers(workers, steps, *GAE, *placement, one_by_one, "trainer.test_freq=-1", name="moved")
    assert_near([record for record in numbers(alone) if "actor/grad_norm" in record], numbers(moved))
    expected = whole(alone, tmp_path / "alone")
    for name, tensor in whole(moved, tmp_path / "moved_hf").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


def test_gpus_that_are_not_there_are_missed_at_once_in_a_cluster_of_this_machine_alone(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = list[str | None]()
    monkeypatch.setattr(cluster.ray, "init", lambda **_: found.append(os.environ.get(LOOPBACK)))
    with pytest.raises(AssertionError):  # exit status 2
        with_workers(8, 1, "algorithm.adv_estimator=grpo", "trainer.device=cuda")
    said = capfd.readouterr().err
    assert "machines with 8 CPU and 8 GPU each are needed, 0 of these are here. The cluster has: 8 CPU" in said
    assert found == ["0"] and LOOPBACK not in os.environ


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_workers_that_share_sequences_compute_the_same(
    alone: Path, with_workers: Callable[..., Path], role: str
) -> None:
    """Those of one role; the other's are whole on the same two workers."""
    shared = with_workers(2, 2, *GAE, f"{role}.ulysses_sequence_parallel_size=2", "trainer.test_freq=-1")
    assert_near(numbers(alone)[:2], numbers(shared))


def test_a_worker_killed_in_generation_in_an_update_and_while_saving_costs_nothing(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calm = with_workers(2, 4, "algorithm.adv_estimator=grpo", name="calm")
    monkeypatch.setattr(cluster, "RayGroup", Deadly)
    # step 2, once more step 2 and then step 3, and the checkpoint of step 4
    Deadly.plan, Deadly.calls = {"generate_stream": 2, "forward_backward": 6, "save": 4}, Counter()
    disturbed = with_workers(2, 4, "algorithm.adv_estimator=grpo", name="disturbed")
    said = capfd.readouterr().out
    assert said.count("worker 1 died") == 3 and "Restart 3 of 3" in said
    assert "Its last lines" in said and all(f"actor.{call}" in said for call in ("forward_backward", "save"))
    # 2 before the first death, of steps 2 and 3 before the second, of 3 and 4 before the third, and of 4 again
    assert Deadly.calls["generate_stream"] == 7, "each time the run went on from its last checkpoint"
    assert numbers(disturbed) == numbers(calm)
    assert same(whole(disturbed, disturbed / "hf", 4), whole(calm, calm / "hf", 4))


def test_a_machine_that_never_comes_is_named_and_not_awaited_forever(address: str) -> None:
    host, port = address.split(":")
    where = (f"trainer.master_addr={host}", f"trainer.master_port={port}")
    config = configured("trainer.nnodes=3", "trainer.start_timeout_s=1", *where)
    with cluster.connect({"address": address}, cpus=1), pytest.raises(WorkerError) as caught:
        await_machines(config)
    said = str(caught.value)
    assert said.startswith("trainer.nnodes=3: after trainer.start_timeout_s=1 these machines have not come: ")
    assert "trainer.node_rank=1, trainer.node_rank=2" in said and f"trainer.master_port={port}" in said


def test_a_worker_that_cannot_begin_is_an_error_and_no_loss(address: str) -> None:
    """To begin again would end the same."""
    with cluster.connect({"address": address}, cpus=1), cluster.reserve(1, {"CPU": 1}, timeout_s=30) as share:
        member = cluster.start_worker(share, 0, {"CPU": 1}, ("worker 0", None), int, ("no number",))
        with pytest.raises(WorkerError) as caught:
            cluster.RayGroup([member], None).each("stats", [()])
    assert str(caught.value).startswith("worker 0 could not begin: ValueError: ")
    assert not caught.value.lost


def test_the_cause_is_reported_first_and_a_worker_that_hangs_is_not_waited_for(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a lost peer arrives first, its cause a second later; a third worker is in a collective for ever."""
    monkeypatch.setattr(failures, "RAISED_WAIT_S", 2.0)
    with cluster.connect({"address": address}, cpus=1), cluster.reserve(1, {"CPU": 3}, timeout_s=30) as share:
        members = [
            cluster.start_worker(share, 0, {"CPU": 1}, (f"worker {n}", tmp_path / f"{n}.log"), Peer, ())
            for n in range(3)
        ]
        group = cluster.RayGroup(members, "actor")
        assert group.each("act", [(0, None)] * 3) == ["done"] * 3
        assert len(terminate_all(head_process())) > 3 + 2 * 3  # Ray's own, and three workers with the `tee` of each
        time.sleep(0.5)
        assert group.each("act", [(0, None)] * 3) == ["done"] * 3
        assert group.each("end_a_child", [()] * 3) == [-signal.SIGTERM] * 3, "a worker's own children do end"
        with pytest.raises(WorkerError) as caught:
            group.each("act", [(0, "Connection closed by peer"), (1, "the disk is gone"), (LIMIT_S, None)])
        error = caught.value
        assert str(error).startswith("worker 1 failed: Strange: the disk is gone\nTraceback")
        assert f"Its last lines ({tmp_path / '1.log'})" in str(error) and "actor.act" in str(error)
        assert error.__notes__ == [
            "Another failure, possibly a consequence: worker 0 failed: Strange: Connection closed by peer"
        ]
        assert (error.worker, error.lost) == ("worker 1", False)
        pair = cluster.RayGroup(members[:2], "actor")
        left: list[list[Any]] = [[[None, None], [None]], [[], [None]]]  # of each share
        found = list(pair.stream("act_stream", lambda share: left[share].pop(0) if left[share] else None))
        assert [items for share, items in found if share == 0] == [["done", "done"], ["done"]]
        assert [items for share, items in found if share == 1] == [[], ["done"]]
        with pytest.raises(WorkerError, match="worker 0 failed: Strange: no such token"):
            list(pair.stream("act_stream", lambda share: [None, "no such token"] if share == 0 else None))
        cluster.kill_actors(members)


def head_process() -> int:
    """The child of this process that runs `ray start --head`."""
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    [found] = [line for line in listed.stdout.splitlines() if " start --head " in line]
    return int(found.split()[0])


class SlowRay:
    """The module `ray` with a clock of its own: an answer of worker 0 takes 10 s, one of worker 1 takes 250 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def worker(self, name: str, seconds: float) -> cluster.RayWorker:
        def call(*_: Any) -> tuple[str, float]:
            return name, self.now + seconds

        def at_once(*_: Any) -> tuple[str, float]:
            return name, self.now

        send, other = SimpleNamespace(remote=call), SimpleNamespace(remote=at_once)
        return cluster.RayWorker(name, SimpleNamespace(send=send, open_stream=other, close_stream=other), None)

    def wait(self, answers: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        first = min(answers, key=lambda answer: answer[1])
        self.now = min(max(first[1], self.now), self.now + timeout)
        return ([first] if first[1] <= self.now else []), []

    def get(self, answer: tuple[str, float]) -> float:
        return answer[1]


def test_a_worker_of_a_stream_that_does_not_answer_is_named_although_others_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowRay()
    monkeypatch.setattr(cluster, "ray", slow)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: slow.now))
    monkeypatch.setattr(cluster, "SENDS_AHEAD", 1)
    caplog.set_level(logging.INFO, logger=cluster.__name__)
    left = [30, 1]  # items of each share: worker 0 is busy for 300 s, worker 1 for 250 s

    def next_items(share: int) -> list[int] | None:
        left[share] -= 1
        return [0] if left[share] >= 0 else None

    group = cluster.RayGroup([slow.worker("worker 0", 10.0), slow.worker("worker 1", 250.0)], "rollout")
    assert len(list(group.stream("generate_stream", next_items))) == 31
    assert [record.message for record in caplog.records] == [
        f"Waiting for worker 1 ({seconds} s)" for seconds in (60, 120, 240)
    ]


def test_a_death_is_reported_before_an_error_that_arrived_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_ray(monkeypatch)
    with cluster.connect({}, cpus=2), cluster.reserve(1, {"CPU": 2}, timeout_s=30) as share:
        members = [cluster.start_worker(share, 0, {"CPU": 1}, (f"worker {n}", None), Peer, ()) for n in range(2)]
        group = cluster.RayGroup(members, "actor")
        assert group.each("act", [(0, None)] * 2) == ["done"] * 2
        with pytest.raises(WorkerError, match="worker 1 died") as caught:
            group.each("act", [(0, "no such token"), (0.5, KILLED)])
    assert caught.value.lost
    assert caught.value.__notes__ == [
        "Another failure, possibly a consequence: worker 0 failed: Strange: no such token"
    ]


class Faulty(cluster.RayGroup):
    """A group whose last worker raises at its fourth call of `score`, where the others wait for it in a collective."""

    processes: ClassVar[list[int]] = []
    called: ClassVar[list[str]] = []

    def start(self, method: str, arguments: Any) -> cluster.RayCalls:
        self.called.append(method)
        if method != "score" or self.called.count("score") != 4:
            return super().start(method, arguments)
        *peers, last = self.workers
        answers = [peer.actor.call.remote(self.role, method, arguments[0]) for peer in peers]
        return cluster.RayCalls(self, [*answers, last.actor.call.remote(self.role, "score_with_no_such_method", ())])

    def each(self, method: str, arguments: Any) -> list[Any]:
        found = super().each(method, arguments)
        if method == "machine":
            self.processes[:] = [machine.process for machine in found]
        return found


def test_an_error_on_one_worker_is_shown_first_ends_the_others_and_saves_nothing(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "RayGroup", Faulty)
    monkeypatch.setattr(failures, "RAISED_WAIT_S", 1.0)
    with pytest.raises(AssertionError):  # exit status 2
        with_workers(2, 5, "algorithm.adv_estimator=grpo", "trainer.save_freq=2", name="run")
    said = capfd.readouterr().err
    shown = said[said.index("rloom: worker error: ") :].splitlines()
    assert shown[0].startswith("rloom: worker error: worker 1 failed: AttributeError: ")
    assert "score_with_no_such_method" in shown[0]
    assert "checkpoint error" not in said and "room on the disk" not in said
    assert any(line.startswith("Its last lines") and line.endswith("worker_1.log):") for line in shown)
    assert shown[-1].startswith("A worker failed, so nothing was saved after it. The last good checkpoint is ")
    assert shown[-1].endswith("global_step_2; the same command goes on from it."), "step 3 was not saved"
    assert Faulty.called[-1] == "score", "nothing was asked of the workers after one had failed"
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in Faulty.processes), 30, "still there")


def test_a_run_does_not_begin_again_more_often_than_it_may(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "RayGroup", Deadly)
    Deadly.plan, Deadly.calls = {"optim_step": 1}, Counter()
    with pytest.raises(AssertionError):  # exit status 3
        with_workers(2, 2, "algorithm.adv_estimator=grpo", "trainer.max_restarts=0")
    assert "trainer.max_restarts=0: the run does not begin again" in capfd.readouterr().err
