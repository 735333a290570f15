"""The only file that imports Ray. A worker is a Ray actor that holds one object; a group calls several of them."""

import asyncio
import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, UnserializableException
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rloom.errors import ConfigError, RloomError, WorkerError
from rloom.import_path import OWN_FOLDER, DriverFolders
from rloom.interrupts import outlive_sigterm, sigterm_blocked
from rloom.runtime.failures import CallFailed, Failure, Kind, cause_first, kind_of, portable_errors, wait_for_others_s
from rloom.runtime.group import Arguments, Group, NextItems, Stream, for_workers
from rloom.runtime.nodes import NODE, free_port, interface_of
from rloom.runtime.process_stats import Machine, ProcessStats

log, calls = logging.getLogger(__name__), logging.getLogger("rloom.calls")
SENDS_AHEAD = 2  # of a stream: a worker has its next items when it has answered the last ones
SCORED_AT_ONCE = 1000  # groups of samples sent to one machine; its pool limits how many are scored at a time
FIRST_NOTICE_S = 60.0  # after so long without a result, the log names the workers that are waited for
RAY_LINES = (":actor_name:", ":job_id:", ":task_name:")  # lines that Ray adds to a log
MARK = 0.001  # of the resource that numbers a machine: any amount places an actor on it
LOG_LINES_SHOWN = 15  # of a dead worker
RETRY_S, PING_S = 1.0, 5.0  # between attempts to connect; for a machine to respond


class WorkerActor:
    """Holds one object and calls its methods. Its output goes to a file and, through Ray, to the console."""

    def __init__(self, name: str, log_file: str | None, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.name = name
        outlive_sigterm()
        if log_file is not None:
            copy_output_to(Path(log_file))
            note_calls_in(Path(log_file))
        self.process_stats = ProcessStats(name)
        self.stream: Generator[Any, Any, None] | None = None
        # gloo uses the address of the machine's name, which is 127.0.0.1 on many machines
        if "GLOO_SOCKET_IFNAME" not in os.environ and (found := interface_of(ray.util.get_node_ip_address())):
            os.environ["GLOO_SOCKET_IFNAME"] = found
        self.object = make(*arguments)

    def __repr__(self) -> str:  # Ray's prefix of each line of output
        return self.name

    def address(self) -> str:
        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    def machine(self) -> Machine:
        return Machine.of_this_process(ray.util.get_node_ip_address())

    def stats(self) -> dict[str, float]:
        return self.process_stats.metrics()

    def build(self, *arguments: Any) -> Any:
        calls.info("build")
        with portable_errors():
            return self.object.build(*arguments)

    def call(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        calls.info(f"{role}.{method}")
        with portable_errors():
            return getattr(self.object.roles[role], method)(*arguments)

    def open_stream(self, role: str, method: str) -> None:
        calls.info(f"{role}.{method}")
        with portable_errors():
            self.stream = getattr(self.object.roles[role], method)()
            next(self.stream)

    def send(self, items: Sequence[Any]) -> Any:
        assert self.stream is not None
        with portable_errors():
            return self.stream.send(items)

    def close_stream(self) -> None:
        assert self.stream is not None
        with portable_errors():
            self.stream.close()


def copy_output_to(file: Path) -> None:
    """Copy all output of this process, that of native code too. `tee` survives the kill of this process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with sigterm_blocked():
        tee = subprocess.Popen(["tee", "-a", str(file)], stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)


def note_calls_in(file: Path) -> None:
    """Log every call to the file only: after a worker's death its last call is the most useful fact."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    calls.addHandler(handler)
    calls.setLevel(logging.INFO)
    calls.propagate = False


@dataclass(frozen=True)
class RayWorker:
    name: str
    actor: Any  # handle of a WorkerActor
    log_file: Path | None


class Waiting:
    """Logs the workers that have not answered for FIRST_NOTICE_S, and again each time that time has doubled."""

    def __init__(self) -> None:
        self.since: dict[str, tuple[float, float]] = {}  # by worker: when it was called, seconds until its next notice

    def first_ready(self, worker_of: Mapping[Any, RayWorker]) -> Any:
        """The first of the pending answers to arrive. It is no longer waited for."""
        began = time.monotonic()
        for worker in worker_of.values():
            self.since.setdefault(worker.name, (began, FIRST_NOTICE_S))
        while True:
            due = min(since + notice_s for since, notice_s in self.since.values())
            ready, _ = ray.wait(list(worker_of), num_returns=1, timeout=max(due - time.monotonic(), 0.0))
            if ready:
                del self.since[worker_of[ready[0]].name]
            self.log_late()
            if ready:
                return ready[0]

    def log_late(self) -> None:
        now = time.monotonic()
        late = {name: notice_s for name, (since, notice_s) in self.since.items() if now >= since + notice_s}
        if late:
            log.info(f"Waiting for {', '.join(late)} ({max(late.values()):.0f} s)")
        for name, notice_s in late.items():
            self.since[name] = self.since[name][0], 2 * notice_s


@dataclass(frozen=True)
class RayCalls:
    """Calls that are running on the workers of a group."""

    group: "RayGroup"
    answers: Sequence[Any]  # one reference for each worker

    def wait(self) -> list[Any]:
        worker_of = dict(zip(self.answers, self.group.workers, strict=True))
        found: dict[Any, Any] = {}
        waiting = Waiting()
        while worker_of:
            answer = waiting.first_ready(worker_of)
            worker = worker_of.pop(answer)
            try:
                found[answer] = ray.get(answer)
            except RayError as error:
                raise self.group.cause(worker, error, worker_of) from error
        return [found[answer] for answer in self.answers[:: self.group.workers_per_share]]


class RayGroup(Group):
    """Actors that are called together. When one fails, the call raises the cause and does not wait for the others."""

    def __init__(self, workers: Sequence[RayWorker], role: str | None, *, workers_per_share: int = 1) -> None:
        assert len(workers) % workers_per_share == 0
        self.workers, self.role, self.workers_per_share = workers, role, workers_per_share

    @property
    def shares(self) -> int:
        return len(self.workers) // self.workers_per_share

    def start(self, method: str, arguments: Arguments) -> RayCalls:
        each = zip(self.workers, for_workers(arguments, self.workers_per_share), strict=True)
        if self.role is None:  # methods of the actor itself
            return RayCalls(self, [getattr(worker.actor, method).remote(*own) for worker, own in each])
        return RayCalls(self, [worker.actor.call.remote(self.role, method, own) for worker, own in each])

    def stream(self, method: str, next_items: NextItems) -> Stream:
        """Calls of the actors in turn: an actor runs one call at a time, in the order in which they were sent."""
        pending: list[deque[Any]] = [deque() for _ in self.workers]  # answers of each worker, the oldest first
        waiting = Waiting()

        def send(share: int) -> None:
            items, first = next_items(share), share * self.workers_per_share
            for number in range(first, first + self.workers_per_share) if items is not None else ():
                pending[number].append(self.workers[number].actor.send.remote(items))

        with self.open_streams(method):
            for share in [*range(self.shares)] * SENDS_AHEAD:
                send(share)
            while any(pending):
                number, found = self.first_answer(pending, waiting)
                if number % self.workers_per_share == 0:
                    share = number // self.workers_per_share
                    yield share, found
                    send(share)

    @contextmanager
    def open_streams(self, method: str) -> Iterator[None]:
        RayCalls(self, [worker.actor.open_stream.remote(self.role, method) for worker in self.workers]).wait()
        worker_failed = False
        try:
            yield
        except RloomError:
            worker_failed = True  # its peers may hang in a collective: they are not called
            raise
        finally:
            if not worker_failed:
                RayCalls(self, [worker.actor.close_stream.remote() for worker in self.workers]).wait()

    def first_answer(self, pending: Sequence[deque[Any]], waiting: Waiting) -> tuple[int, Any]:
        """Waits; (number of the worker, its answer), which is no longer pending."""
        number_of = {answers[0]: number for number, answers in enumerate(pending) if answers}
        ready = waiting.first_ready({answer: self.workers[number] for answer, number in number_of.items()})
        number = number_of[ready]
        pending[number].popleft()
        try:
            return number, ray.get(ready)
        except RayError as error:
            raise self.cause(self.workers[number], error, {}) from error

    def cause(self, failed: RayWorker, error: RayError, waiting: Mapping[Any, RayWorker]) -> RloomError:
        """Why the group failed. `failed` was the first to report; `waiting`: pending answers of the others.

        A worker whose peer died, or that raised because of it, may report before that peer. One that hangs in a
        collective with a failed peer never answers: it is waited for as long as a likelier cause may arrive.
        """
        failures, began = [failure_of(failed, error)], time.monotonic()
        known = {failed.name, *(worker.name for worker in waiting.values())}
        # a worker that has returned its result may have died since
        pending = {**waiting, **{m.actor.stats.remote(): m for m in self.workers if m.name not in known}}
        while pending and (left_s := began + wait_for_others_s(failures) - time.monotonic()) > 0:
            for answer in ray.wait(list(pending), num_returns=1, timeout=left_s)[0]:
                worker = pending.pop(answer)
                try:
                    ray.get(answer)
                except RayError as other:
                    failures.append(failure_of(worker, other))
        return cause_first(failures)


def failure_of(worker: RayWorker, error: RayError) -> Failure:
    cause = error.cause if isinstance(error, RayTaskError) else None
    kind = Kind.RAISED
    shown: RloomError
    if isinstance(error, RayActorError):
        kind, shown = Kind.DIED, lost(worker.name, error, worker.log_file)
    elif isinstance(cause, RloomError):
        kind, shown = kind_of(str(cause)), type(cause)(f"{worker.name}: {cause}")
    elif isinstance(cause, CallFailed):
        trace = "" if cause.out_of_memory else f"\n{cause.trace.rstrip()}"
        text = f"{worker.name} failed: {cause.what}{trace}{last_log_lines(worker.log_file)}"
        kind, shown = kind_of(cause.what), WorkerError(text, out_of_memory=cause.out_of_memory)
    elif isinstance(error, (RayTaskError, UnserializableException)):  # arguments that cannot be unpickled
        shown = WorkerError(f"{worker.name} failed: {error}{last_log_lines(worker.log_file)}")
    else:  # an object lost with its node, or a lost cluster
        kind, shown = Kind.DIED, WorkerError(f"{worker.name} cannot be reached: {error}", lost=True)
    shown.worker = worker.name
    return Failure(kind, shown)


class RewardActor:
    """Scores many groups of samples at a time, in the queue that it creates."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.queue = make(*arguments)

    async def score(self, groups: Any) -> Any:
        return await asyncio.wrap_future(self.queue.submit(groups))


class RemoteScoreQueue:
    """Scores on another machine."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor

    def submit(self, groups: Any) -> "Future[Any]":
        scores: Future[Any] = Future()

        def pass_on(answer: "Future[Any]") -> None:
            error = answer.exception()
            if error is None:
                scores.set_result(answer.result())
            elif isinstance(error, RayTaskError):
                scores.set_exception(error.cause)
            elif isinstance(error, RayActorError):
                scores.set_exception(lost(self.name, error))
            else:
                scores.set_exception(WorkerError(f"{self.name} cannot be reached: {error}", lost=True))

        self.actor.score.remote(groups).future().add_done_callback(pass_on)
        return scores


def start_reward_actor(
    share: PlacementGroup, node: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> RemoteScoreQueue:
    where = PlacementGroupSchedulingStrategy(share, placement_group_bundle_index=node)
    options = {"num_cpus": 0, "max_concurrency": SCORED_AT_ONCE, "scheduling_strategy": where}
    actor = ray.remote(RewardActor).options(**options).remote(make, arguments)
    return RemoteScoreQueue(f"the scoring of machine {node}", actor)


def lost(name: str, error: RayActorError, log_file: Path | None = None) -> WorkerError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.actor_init_failed:  # it would fail again; the last line is the exception
        return WorkerError(f"{name} could not begin: {lines[-1]}{last_log_lines(log_file)}")
    reason = next((line for line in lines if "exit" in line.lower()), lines[0] if lines else type(error).__name__)
    return WorkerError(f"{name} died. {reason}{last_log_lines(log_file)}", lost=True)


def last_log_lines(log_file: Path | None) -> str:
    if log_file is None or not log_file.is_file():
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if not line.startswith(RAY_LINES)]
    lines = lines[-LOG_LINES_SHOWN:]
    return "\n".join([f"\nIts last lines ({log_file}):", *(f"  {line}" for line in lines)]) if lines else ""


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
    except (ConnectionError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"ray_kwargs.ray_init={dict(arguments)}, RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}: "
            f"Ray cannot be reached: {str(error).strip().splitlines()[0]}"
        ) from error
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
    numbered = sorted({name for machine in machines() for name in machine if name.startswith(NODE)})
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
    actor = (
        ray.remote(WorkerActor).options(**options).remote(name, str(log_file) if log_file else None, make, arguments)
    )
    return RayWorker(name, actor, log_file)


def kill_actors(holders: Sequence[RayWorker | RemoteScoreQueue]) -> None:
    for holder in holders:
        ray.kill(holder.actor, no_restart=True)
