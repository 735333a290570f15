"""The only file that imports Ray. A worker is a Ray actor; `remote.py` has the groups of them."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, UnserializableException
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch import Tensor

from rloom.errors import ConfigError, WorkerError
from rloom.import_path import OWN_FOLDER, DriverFolders
from rloom.interrupts import sigterm_blocked
from rloom.runtime.group import Stored
from rloom.runtime.nodes import NODE, machine_marks
from rloom.runtime.pickling import reduced, restored
from rloom.runtime.remote import Answer, WorkerHost, could_not_begin, died

SCORED_AT_ONCE = 1000  # groups of samples sent to one machine; its pool limits how many are scored at a time
MARK = 0.001  # of the resource that numbers a machine: any amount places an actor on it
RETRY_S, PING_S = 1.0, 5.0  # between attempts to connect; for a machine to respond


class WorkerActor(WorkerHost):
    """A worker as an actor. Its output goes to a file and, through Ray, to the console."""

    def __init__(self, name: str, log_file: Path | None, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        send_tensors_as_arrays()
        super().__init__(name, log_file, ray.util.get_node_ip_address(), make, arguments)

    def put(self, value: Any) -> Stored:
        return StoredInRay(ray.put(value))

    def __repr__(self) -> str:  # Ray's prefix of each line of output
        return self.name


@dataclass(frozen=True)
class StoredInRay:
    """In Ray's memory of the driver's machine; a machine whose workers read it gets one copy."""

    reference: Any

    def get(self) -> Any:
        return ray.get(self.reference)


def send_tensors_as_arrays() -> None:
    """Ray copies a tensor's bytes several times, and an array's once."""
    ray.util.register_serializer(Tensor, serializer=reduced, deserializer=restored)


@dataclass(frozen=True)
class RayWorker:
    name: str
    actor: Any  # handle of a WorkerActor
    log_file: Path | None

    def submit(self, method: str, *arguments: Any) -> Answer:
        answer: Answer = Future()
        getattr(self.actor, method).remote(*arguments).future().add_done_callback(partial(pass_on, answer))
        return answer

    def put(self, value: Any) -> Stored:
        return StoredInRay(ray.put(value))

    def death(self, error: BaseException) -> WorkerError | None:
        if isinstance(error, RayActorError):
            return lost(self.name, error, self.log_file)
        if isinstance(error, RayError) and not isinstance(error, (RayTaskError, UnserializableException)):
            # an object lost with its node, or a lost cluster
            return WorkerError(f"{self.name} cannot be reached: {error}", lost=True)
        return None


def pass_on(answer: Answer, result: Answer) -> None:
    """Set an answer; instead of Ray's exception, what the call raised."""
    error = result.exception()
    if error is None:
        answer.set_result(result.result())
    else:
        answer.set_exception(error.cause if isinstance(error, RayTaskError) else error)


class RewardActor:
    """Scores many groups of samples at a time, in the queue that it creates."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.queue = make(*arguments)

    async def score(self, groups: Any) -> Any:
        return await asyncio.wrap_future(self.queue.submit(groups))


class RemoteScoreQueue:
    """Scores on another machine."""

    def __init__(self, worker: RayWorker) -> None:
        self.worker = worker

    def submit(self, groups: Any) -> "Future[Any]":
        scores: Future[Any] = Future()

        def pass_on_scores(answer: Answer) -> None:
            error = answer.exception()
            death = None if error is None else self.worker.death(error)
            if death is None:
                pass_on(scores, answer)
            else:
                scores.set_exception(death)

        self.worker.submit("score", groups).add_done_callback(pass_on_scores)
        return scores


def start_reward_actor(
    share: PlacementGroup, node: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> RemoteScoreQueue:
    where = PlacementGroupSchedulingStrategy(share, placement_group_bundle_index=node)
    options = {"num_cpus": 0, "max_concurrency": SCORED_AT_ONCE, "scheduling_strategy": where}
    actor = ray.remote(RewardActor).options(**options).remote(make, arguments)
    return RemoteScoreQueue(RayWorker(f"the scoring of machine {node}", actor, None))


def lost(name: str, error: RayActorError, log_file: Path | None = None) -> WorkerError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.actor_init_failed:  # it would fail again; the last line is the exception
        return could_not_begin(name, lines[-1], log_file)
    reason = next((line for line in lines if "exit" in line.lower()), lines[0] if lines else type(error).__name__)
    return died(name, reason, log_file)


@contextmanager
def connect(arguments: Mapping[str, Any], *, cpus: int, connect_timeout_s: float = 0.0) -> Iterator[None]:
    """Connect to a running cluster (an address among the arguments, or RAY_ADDRESS), or start one on this machine.

    `connect_timeout_s`: for a head that was just started, whose port answers before the rest of it on a busy machine.
    """
    if ray.is_initialized():
        raise WorkerError("this process is connected to Ray already; one run at a time")
    own = "address" not in arguments and not os.environ.get("RAY_ADDRESS")
    # "local": never join a cluster that someone else runs on this machine
    alone = {"address": "local", "num_cpus": cpus, "include_dashboard": False} if own else {}
    try:
        with sigterm_blocked():  # Ray's processes on this machine end with this one, not at a scheduler's SIGTERM
            init_ray({"log_to_driver": True, "configure_logging": False, **alone, **arguments}, connect_timeout_s)
    except Exception as error:  # also Ray's plain Exception, when its processes do not start in time
        raise ConfigError(
            f"ray_kwargs.ray_init={dict(arguments)}, RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}: "
            f"Ray cannot be reached: {str(error).strip().splitlines()[0]}"
        ) from error
    send_tensors_as_arrays()
    try:
        yield
    finally:
        ray.shutdown()


def init_ray(arguments: Mapping[str, Any], connect_timeout_s: float) -> None:
    until = time.monotonic() + connect_timeout_s
    while True:
        try:
            ray.init(job_config=JobConfig(_py_driver_sys_path=DriverFolders([OWN_FOLDER])), **arguments)
            return
        except ConnectionError:
            if time.monotonic() >= until:
                raise
            time.sleep(RETRY_S)


def machines() -> list[Mapping[str, float]]:
    """The resources of each machine that Ray reports as alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def machines_with(per_node: Mapping[str, float]) -> int:
    """Machines with resources for one node of the run."""
    return sum(fits(machine, per_node) for machine in machines())


def fits(machine: Mapping[str, float], per_node: Mapping[str, float]) -> bool:
    return all(machine.get(name, 0) >= amount for name, amount in per_node.items())


def responsive_machines(per_node: Mapping[str, float]) -> int:
    """Of these, those that respond: Ray reports a lost machine as alive for half a minute."""
    able = [node for node in ray.nodes() if node["Alive"] and fits(node["Resources"], per_node)]
    task = ray.remote(num_cpus=0)(ping)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in able
    ]
    found = 0
    for answer in ray.wait(asked, num_returns=len(asked), timeout=PING_S)[0] if asked else []:
        with suppress(RayError):  # the machine is gone
            found += bool(ray.get(answer))
    return found


def ping() -> int:
    return os.getpid()


def missing_numbers(nodes: int) -> list[int]:
    """Numbers of the machines that have not joined the cluster that this run started."""
    present = {name for machine in machines() for name in machine}
    return [number for number in range(nodes) if f"{NODE}{number}" not in present]


@contextmanager
def reserve(nodes: int, per_node: Mapping[str, float], timeout_s: float) -> Iterator[PlacementGroup]:
    """Resources on each of so many machines, all at once or not at all."""
    strategy = "STRICT_SPREAD" if nodes > 1 else "PACK"
    # numbered machines are used in order: number 0 runs the loop
    numbered = machine_marks(machines())
    marks = [{mark: MARK} for mark in numbered[:nodes]] if len(numbered) >= nodes else [{}] * nodes
    share = placement_group([{**per_node, **mark} for mark in marks], strategy=strategy)
    try:
        if not share.wait(timeout_s):
            raise WorkerError(
                f"trainer.nnodes={nodes} machines with {dict(per_node)} each are not free after "
                f"trainer.start_timeout_s={timeout_s:.0f}: the cluster has {[dict(one) for one in machines()]}, "
                f"free now is {dict(ray.available_resources())}; another job may hold them"
            )
        yield share
    finally:
        remove_placement_group(share)


def start_worker(
    share: PlacementGroup,
    node: int,
    needs: Mapping[str, float],
    worker: tuple[str, Path | None],
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> RayWorker:
    name, log_file = worker
    options = {
        "num_cpus": needs.get("CPU", 0),
        "num_gpus": needs.get("GPU", 0),
        "max_restarts": 0,  # one rank cannot rejoin its process group: the run restarts from its last checkpoint
        "scheduling_strategy": PlacementGroupSchedulingStrategy(share, placement_group_bundle_index=node),
    }
    actor = ray.remote(WorkerActor).options(**options).remote(name, log_file, make, arguments)
    return RayWorker(name, actor, log_file)


def kill_workers(workers: Sequence[RayWorker]) -> None:
    for worker in workers:
        ray.kill(worker.actor, no_restart=True)
