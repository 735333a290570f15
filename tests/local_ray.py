"""Ray's actors as processes that are forked on this machine: several workers without the time that Ray takes to start.

`LocalRay` has what `rloom/runtime/ray.py` uses of the module `ray`. Everything above that module runs unchanged.
"""

import itertools
import os
import pickle
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rloom.runtime import ray as cluster
from tests.ranks import forkserver

VALUE, ERROR = "value", "error"


class Answer:
    """A call's result (ray.ObjectRef)."""

    def __init__(self, actor: "Actor") -> None:
        self.actor = actor
        self.arrived: list[tuple[str, Any]] = []

    @property
    def ready(self) -> bool:
        return bool(self.arrived) or not self.actor.alive


class Actor:
    """A process with one object, which answers one call after the other."""

    def __init__(self, make: type, arguments: tuple[Any, ...]) -> None:
        context = forkserver()
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=serve, args=(other_end, make, arguments), daemon=True)
        self.process.start()
        other_end.close()
        self.alive = True
        self.numbers = itertools.count()
        self.answers: dict[int, Answer] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Answer:
            number, answer = next(self.numbers), Answer(self)
            self.answers[number] = answer
            try:
                self.pipe.send_bytes(pickle.dumps((number, method, arguments)))
            except OSError:
                self.alive = False
            return answer

        return SimpleNamespace(remote=remote)

    def receive(self) -> None:
        try:
            number, kind, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.alive = False
        else:
            self.answers[number].arrived.append((kind, content))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.alive = False


class LocalRay:
    """The module `ray`, on one machine of `cpus` cores."""

    def __init__(self, cpus: int) -> None:
        self.cpus, self.actors = cpus, list[Actor]()
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None: ...

    def shutdown(self) -> None:
        for actor in self.actors:
            actor.kill()
        self.actors.clear()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": "0", "Resources": {"CPU": self.cpus}}]

    def remote(self, make: Any = None, **_: Any) -> Any:
        if make is None:  # a function with options: rloom has one, which the machine answers
            return lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=Pong))

        def start(*arguments: Any) -> Actor:
            self.actors.append(Actor(make, arguments))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def wait(
        self, answers: Sequence[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """As soon as one is ready: rloom never waits for more of what an actor answers."""
        while not (ready := [answer for answer in answers if answer.ready]):
            actors = {answer.actor.pipe: answer.actor for answer in answers}
            pipes = wait(list[Connection](actors), timeout)
            if not pipes:
                break
            for pipe in pipes:
                actors[pipe].receive()  # type: ignore[index]
        return ready[:num_returns], []

    def get(self, answer: Any) -> Any:
        self.wait([answer])
        if not answer.arrived:
            raise RayActorError(error_msg=f"The actor's process exited ({answer.actor.process.exitcode}).")
        kind, content = answer.arrived[0]
        if kind == ERROR:
            error, trace = content
            raise RayTaskError("call", trace, error)
        return content

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.kill()


class Pong:
    """The answer of a machine that is there."""

    def __init__(self) -> None:
        self.ready, self.arrived = True, [(VALUE, os.getpid())]


def serve(pipe: Connection, make: type, arguments: tuple[Any, ...]) -> None:
    cluster.ray = LocalRay(0)
    made = make(*arguments)
    while True:
        number, method, called_with = pickle.loads(pipe.recv_bytes())
        try:
            kind, content = VALUE, getattr(made, method)(*called_with)
        except Exception as error:
            kind, content = ERROR, (error, traceback.format_exc())
        pipe.send_bytes(pickle.dumps((number, kind, content)))


def use_local_ray(patch: pytest.MonkeyPatch, cpus: int = 8) -> None:
    patch.setattr(cluster, "ray", LocalRay(cpus))
    patch.setattr(cluster, "placement_group", lambda *_, **__: SimpleNamespace(wait=lambda _: True))
    patch.setattr(cluster, "remove_placement_group", lambda _: None)
    patch.setattr(cluster, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    patch.setattr(cluster, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
