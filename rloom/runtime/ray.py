"""Ray: the only file that knows it. Hosts are Ray's actors; each holds one object of ours, and a group calls them."""

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, UnserializableException
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rloom.errors import ConfigError, RloomError, WorkerError
from rloom.runtime.failures import CallFailed, Failure, Kind, cause_first, kind_of, portable_errors, wait_for_others_s
from rloom.runtime.nodes import NODE, free_port, interface_of
from rloom.runtime.process_stats import Machine, ProcessStats

log = logging.getLogger(__name__)
calls = logging.getLogger("rloom.calls")
ITEMS_EVERY_S = 0.1  # a stream's items travel together: each journey costs about a millisecond
SCORED_AT_ONCE = 1000  # samples on their way on one machine; its pool decides how many are scored together
FIRST_WORD_S = 60.0  # of waiting without an answer, before the console says for whom
RAYS_OWN = (":actor_name:", ":job_id:", ":task_name:")  # what Ray prints for itself
MARK = 0.001  # of a machine's number: enough to be there
LOG_LINES_SHOWN = 15  # of a dead worker's log
HELLO_S = 5.0  # for a machine to answer


class WorkerActor:
    """The actor: an object, and its ears. What it prints goes to a file and, through Ray, to the console."""

    def __init__(self, name: str, log_file: str | None, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.name = name
        if log_file is not None:
            copy_output_to(Path(log_file))
            note_calls_in(Path(log_file))
        self.process_stats = ProcessStats(name)
        # gloo would ask what the machine's name resolves to, and on many that is 127.0.0.1
        if "GLOO_SOCKET_IFNAME" not in os.environ and (found := interface_of(ray.util.get_node_ip_address())):
            os.environ["GLOO_SOCKET_IFNAME"] = found
        self.object = make(*arguments)

    def __repr__(self) -> str:  # Ray puts it before each line
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

    def stream(self, role: str, method: str, arguments: tuple[Any, ...]) -> Iterator[list[Any]]:
        calls.info(f"{role}.{method}")
        items: list[Any] = []
        sent = time.monotonic()
        with portable_errors():
            for item in getattr(self.object.roles[role], method)(*arguments):
                items.append(item)
                if time.monotonic() - sent > ITEMS_EVERY_S:
                    yield items
                    items, sent = [], time.monotonic()
        yield items


def copy_output_to(file: Path) -> None:
    """Everything this process prints, native code included. `tee` outlives a process that is killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tee = subprocess.Popen(["tee", "-a", str(file)], stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)


def note_calls_in(file: Path) -> None:
    """What the worker was asked last is what one wants to know of it when it is dead; the console need not hear it."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    calls.addHandler(handler)
    calls.setLevel(logging.INFO)
    calls.propagate = False


@dataclass(frozen=True)
class RayWorker:
    name: str
    actor: Any  # handle of a Host
    log_file: Path | None


class RayGroup:
    """Hosts that are called together. When one fails, the call fails with its cause; the others are not waited for."""

    def __init__(self, workers: Sequence[RayWorker], role: str | None) -> None:
        self.workers, self.role = workers, role

    @property
    def size(self) -> int:
        return len(self.workers)

    def each(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        asked = zip(self.workers, args_per_worker, strict=True)
        if self.role is None:  # the hosts themselves
            return self.gather([getattr(worker.actor, method).remote(*args) for worker, args in asked])
        return self.gather([worker.actor.call.remote(self.role, method, args) for worker, args in asked])

    def gather(self, answers: Sequence[Any]) -> list[Any]:
        member_of = dict(zip(answers, self.workers, strict=True))
        found: dict[Any, Any] = {}
        waited = FIRST_WORD_S
        while len(found) < len(answers):
            left = [answer for answer in answers if answer not in found]
            ready, _ = ray.wait(left, num_returns=1, timeout=waited)
            if not ready:
                log.info(f"Waiting for {', '.join(member_of[answer].name for answer in left)} ({waited:.0f} s)")
                waited *= 2
            for answer in ready:
                try:
                    found[answer] = ray.get(answer)
                except RayError as error:
                    waiting = {other: member_of[other] for other in left if other != answer}
                    raise self.cause(member_of[answer], error, waiting) from error
        return [found[answer] for answer in answers]

    def stream(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        streams: list[Any] = [
            worker.actor.stream.options(num_returns="streaming").remote(self.role, method, args)
            for worker, args in zip(self.workers, args_per_worker, strict=True)
        ]
        number_of = {stream: number for number, stream in enumerate(streams)}
        while streams:
            ready: list[Any] = ray.wait(streams, num_returns=1)[0]
            for stream in ready:
                try:
                    items = ray.get(next(stream))
                except StopIteration:
                    streams.remove(stream)
                    continue
                except RayError as error:
                    raise self.cause(self.workers[number_of[stream]], error, {}) from error
                for item in items:
                    yield number_of[stream], item

    def cause(self, failed: RayWorker, error: RayError, waiting: Mapping[Any, RayWorker]) -> RloomError:
        """Why the group failed. `failed` was the first to report; `waiting`: pending answers of the others.

        A worker whose peer died, or that raised because of it, may report before that peer. One that hangs in a
        collective with a failed peer never answers: it is waited for as long as a likelier cause may arrive.
        """
        failures, began = [failure_of(failed, error)], time.monotonic()
        known = {failed.name, *(worker.name for worker in waiting.values())}
        # of those that have answered already, one may be dead by now
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
    elif isinstance(error, (RayTaskError, UnserializableException)):  # not in our code: arguments that do not unpickle
        shown = WorkerError(f"{worker.name} failed: {error}{last_log_lines(worker.log_file)}")
    else:  # an object lost with its node, a cluster that is gone
        kind, shown = Kind.DIED, WorkerError(f"{worker.name} cannot be reached: {error}", lost=True)
    shown.worker = worker.name
    return Failure(kind, shown)


class RewardActor:
    """An actor that scores many samples at a time, in the queue that it makes."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.queue = make(*arguments)

    async def score(self, sample: Any) -> Any:
        return await asyncio.wrap_future(self.queue.submit(sample))


class RemoteScoreQueue:
    """Scores on another machine."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor

    def submit(self, sample: Any) -> "Future[Any]":
        score: Future[Any] = Future()

        def arrived(answer: "Future[Any]") -> None:
            error = answer.exception()
            if error is None:
                score.set_result(answer.result())
            elif isinstance(error, RayTaskError):
                score.set_exception(error.cause)
            elif isinstance(error, RayActorError):
                score.set_exception(lost(self.name, error))
            else:
                score.set_exception(WorkerError(f"{self.name} cannot be reached: {error}", lost=True))

        self.actor.score.remote(sample).future().add_done_callback(arrived)
        return score


def start_reward_actor(
    share: PlacementGroup, node: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> RemoteScoreQueue:
    where = PlacementGroupSchedulingStrategy(share, placement_group_bundle_index=node)
    options = {"num_cpus": 0, "max_concurrency": SCORED_AT_ONCE, "scheduling_strategy": where}
    return RemoteScoreQueue(
        f"the scoring of machine {node}", ray.remote(RewardActor).options(**options).remote(make, arguments)
    )


def lost(name: str, error: RayActorError, log_file: Path | None = None) -> WorkerError:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.actor_init_failed:  # it would fail again; the last line is what was raised
        return WorkerError(f"{name} could not begin: {said[-1]}{last_log_lines(log_file)}")
    reason = next((line for line in said if "exit" in line.lower()), said[0] if said else type(error).__name__)
    return WorkerError(f"{name} died. {reason}{last_log_lines(log_file)}", lost=True)


def last_log_lines(log_file: Path | None) -> str:
    if log_file is None or not log_file.is_file():
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if not line.startswith(RAYS_OWN)]
    lines = lines[-LOG_LINES_SHOWN:]
    return "\n".join([f"\nIts last lines ({log_file}):", *(f"  {line}" for line in lines)]) if lines else ""


@contextmanager
def connect(arguments: Mapping[str, Any], *, cpus: int) -> Iterator[None]:
    """A cluster that is there (an address among the arguments, or RAY_ADDRESS), or one of this machine alone."""
    if ray.is_initialized():
        raise WorkerError("this process is connected to Ray already; one run at a time")
    own = "address" not in arguments and not os.environ.get("RAY_ADDRESS")
    # "local": never somebody else's cluster that happens to be on this machine
    alone = {"address": "local", "num_cpus": cpus, "include_dashboard": False} if own else {}
    try:
        ray.init(**{"log_to_driver": True, "configure_logging": False, **alone, **arguments})
    except (ConnectionError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"ray_kwargs.ray_init={dict(arguments)}, RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}: "
            f"Ray cannot be reached: {str(error).strip().splitlines()[0]}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> list[Mapping[str, float]]:
    """What each living machine of the cluster has, by resource."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def machines_with(per_node: Mapping[str, float]) -> int:
    """Machines that could carry a node's share."""
    return sum(fits(machine, per_node) for machine in machines())


def fits(machine: Mapping[str, float], per_node: Mapping[str, float]) -> bool:
    return all(machine.get(name, 0) >= amount for name, amount in per_node.items())


def responsive_machines(per_node: Mapping[str, float]) -> int:
    """Of these, those that answer: of a machine that is gone Ray speaks well for half a minute."""
    able = [node for node in ray.nodes() if node["Alive"] and fits(node["Resources"], per_node)]
    hello = ray.remote(num_cpus=0)(ping)
    asked = [
        hello.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in able
    ]
    found = 0
    for answer in ray.wait(asked, num_returns=len(asked), timeout=HELLO_S)[0] if asked else []:
        with suppress(RayError):  # an answer, too: the machine is gone
            found += bool(ray.get(answer))
    return found


def ping() -> int:
    return os.getpid()


def missing_numbers(nodes: int) -> list[int]:
    """Which of the machines of a run that starts its own cluster have not joined."""
    present = {name for machine in machines() for name in machine}
    return [number for number in range(nodes) if f"{NODE}{number}" not in present]


@contextmanager
def reserve(nodes: int, per_node: Mapping[str, float], timeout_s: float) -> Iterator[PlacementGroup]:
    """A share on each of so many machines, all at once or not at all."""
    strategy = "STRICT_SPREAD" if nodes > 1 else "PACK"
    # machines that have numbers are taken in their order: the first is the one that drives
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
        "max_restarts": 0,  # a rank cannot come back alone: the run begins again from its last checkpoint
        "scheduling_strategy": PlacementGroupSchedulingStrategy(share, placement_group_bundle_index=node),
    }
    actor = (
        ray.remote(WorkerActor).options(**options).remote(name, str(log_file) if log_file else None, make, arguments)
    )
    return RayWorker(name, actor, log_file)


def kill_actors(hosts: Sequence[RayWorker | RemoteScoreQueue]) -> None:
    for one in hosts:
        ray.kill(one.actor, no_restart=True)
