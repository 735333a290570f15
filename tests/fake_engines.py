"""Engines of the servers in tests/fake_servers.py: rloom's own, and one whose answer is a number."""

import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from rloom.rollout.base import Completion, Request, copy_weights
from rloom.rollout.native.engine import NativeRollout
from tests.helpers import policy


class Refusal(Exception):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Owner:
    device = torch.device("cpu")

    def on_device(self) -> nullcontext[None]:
        return nullcontext()


class Engine:
    """rloom's own engine in a thread: requests of many connections are generated together."""

    def __init__(self, folder: Path) -> None:
        self.network = policy(folder)
        self.rollout = NativeRollout(
            self.network, owner=Owner(), max_sequences=64, max_prefill_tokens=1000, memory_share=0.5, free_cache=True
        )
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.futures: dict[int, Future[Completion]] = {}
        self.names: dict[str, int] = {}
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while not self.stopped.is_set():
            with self.lock:
                done = [(self.futures.pop(found.request), found) for found in self.rollout.poll()]
            for future, found in done:
                future.set_result(found)
            time.sleep(0.0 if self.futures else 0.005)

    def generate(self, request: Request, name: str) -> Completion:
        with self.lock:
            number = self.names[name] = self.rollout.submit(request)
            future = self.futures[number] = Future()
        return future.result(timeout=120)

    def abort(self, name: str) -> None:
        """The request is answered with what it has."""
        with self.lock:
            number = self.names.get(name)
            if number in self.futures:
                self.futures.pop(number).set_result(self.rollout.interrupt(number))

    def load(self, weights: list[tuple[str, Tensor]]) -> None:
        with self.lock:
            if self.futures:
                raise Refusal("requests are being generated")
            copy_weights(iter(weights), self.network.module)

    def flush(self) -> None:
        with self.lock:
            self.rollout.load_weights(iter(()), 0)  # drops the keys of prompts


class OneToken:
    """In place of an engine: its one weight, a number, is the answer to every request."""

    def __init__(self, weight: int) -> None:
        self.weight, self.stopped = weight, threading.Event()
        self.futures: dict[int, Future[Completion]] = {}  # none at any time

    def generate(self, request: Request, name: str) -> Completion:
        return Completion(0, torch.tensor([self.weight]), torch.tensor([-1.0]), finished=True, version=0)

    def load(self, weights: list[tuple[str, Tensor]]) -> None:
        [(_, weight)] = weights
        self.weight = int(weight)

    def abort(self, name: str) -> None:
        pass

    def flush(self) -> None:
        pass
