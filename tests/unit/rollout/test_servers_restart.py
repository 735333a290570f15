"""Servers of the user's that are started again: what their new processes answer is never used under the old version.

A server's own weight is 222, the trainer's is 111, and a server answers with the weight that it has.
"""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rloom.errors import WorkerError
from rloom.rollout.base import Request, Sampling
from rloom.rollout.servers import client as client_module
from rloom.rollout.servers import watch
from rloom.rollout.servers.client import ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.queues import Server
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.vllm import VllmApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import COLLECTIVE, SHARED, Call, ServerApi, TransferSettings
from tests.fake_servers import FakeServer, FakeSglang, FakeTrtllm, FakeVllm
from tests.streams import listening

OWN, TRAINERS = 222, 111
NEVER_S = 1000.0
Start = Callable[..., FakeServer]


def weights(number: int = TRAINERS) -> Iterator[tuple[str, torch.Tensor]]:
    return iter([("w", torch.tensor(float(number)))])


@contextmanager
def client(
    kind: str, urls: list[str], *, resends: bool = True, request_timeout_s: float = 60.0, **watched: Any
) -> Iterator[ServerRollout]:
    """Without health checks, unless asked for: they are not what finds a restart."""
    settings = ClientSettings(
        WatchSettings(**({"start_timeout_s": 60.0, "health_interval_s": NEVER_S, "max_restarts": 2} | watched)),
        request_timeout_s,
        releases_memory=False,
    )
    transfer = TransferSettings(COLLECTIVE if kind == "vllm" else SHARED, torch.device("cpu"), 1, timeout_s=60)
    wires: dict[str, ServerApi] = {"vllm": VllmApi(0.5), "trtllm": TrtllmApi(), "sglang": SglangApi()}
    rollout = ServerRollout(
        [ServerSpec(url, None, transfer) for url in urls],
        wires[kind],
        settings,
        lambda weights: weights,
        weights if resends else None,
    )
    try:
        yield rollout
    finally:
        rollout.close()


def answers(rollout: ServerRollout, count: int = 1) -> list[tuple[int, int]]:
    """(token, version) of each."""
    requests = [Request((5, row), Sampling(1, temperature=0.5), seed=row) for row in range(count)]
    return [(int(found.tokens_L), found.version) for _, found in rollout.generate(requests)]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers, at the port of one that was killed if it is given, and ends them after the test."""
    made: list[FakeServer] = []

    def begin(kind: str, *, at: FakeServer | None = None, **options: Any) -> FakeServer:
        server = {"vllm": FakeVllm, "trtllm": FakeTrtllm, "sglang": FakeSglang}[kind]
        made.append(server(OWN, port=0 if at is None else at.server_port, **options).begin())
        return made[-1]

    yield begin
    for server in made:
        if not server.dead.is_set():
            server.kill()
    gc.collect()  # dropped connections: here, so that no other test gets their warning


def paths(server: FakeServer) -> list[str]:
    return [body.get("method", path) for path, body in list(server.bodies)]


KINDS = pytest.mark.parametrize("kind", ["vllm", "trtllm"])


@KINDS
def test_a_server_that_was_started_again_while_idle_gets_the_weights_before_a_request(
    kind: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_S", 0.0)
    first = start(kind)
    with client(kind, [first.url], health_interval_s=0.05) as rollout:
        rollout.load_weights(weights(), version=7)
        assert answers(rollout) == [(111, 7)]
        first.kill()
        time.sleep(0.2)
        second = start(kind, at=first)
        assert answers(rollout) == [(111, 7)]
        assert second.calls["generate"] == 1
        done = paths(second)
        update = "receive_weights" if kind == "vllm" else "/update_weights"
        assert done.index(update) < done.index("/v1/completions")
        if isinstance(second, FakeVllm):
            assert second.temperature == 0.5  # set again


@KINDS
def test_an_answer_of_a_new_process_is_not_used_if_it_came_before_the_restart_was_seen(
    kind: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_S", NEVER_S)  # nothing is read before a request
    first = start(kind)
    with client(kind, [first.url]) as rollout:
        rollout.load_weights(weights(), version=7)
        assert answers(rollout, 3) == [(111, 7)] * 3
        first.kill()
        second = start(kind, at=first)
        if isinstance(second, FakeVllm):
            second.aborting = 2
        assert answers(rollout, 3) == [(111, 7)] * 3
        assert second.calls["generate"] == 6  # three of them with 222
        assert rollout.watched.servers[0].failures_since_answer == 0


@KINDS
def test_a_restart_in_the_middle_of_requests_repeats_those_without_an_answer(kind: str, start: Start) -> None:
    first = start(kind, hold_after=2)
    with client(kind, [first.url], health_interval_s=0.05) as rollout:
        rollout.load_weights(weights(), version=7)
        requests = [Request((5, row), Sampling(1, temperature=0.5), seed=row) for row in range(5)]
        stream = rollout.generate(requests)
        found = [next(stream), next(stream)]
        first.kill()
        second = start(kind, at=first)
        found += list(stream)
        assert [(int(one.tokens_L), one.version) for _, one in found] == [(111, 7)] * 5
        assert sorted(row for row, _ in found) == [0, 1, 2, 3, 4]
        # twice, if the requests of connections that had been used before reached it while it had other weights
        assert second.calls["generate"] in (3, 6)


def test_an_answer_counts_only_if_the_process_is_the_same_afterwards(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends after its answer and before the reading: the answer may be of either process."""
    monkeypatch.setattr(watch, "IDLE_S", NEVER_S)  # nothing is read before the request
    first, again = start("vllm"), threading.Event()
    with client("vllm", [first.url], health_interval_s=0.05) as rollout:
        rollout.load_weights(weights(), version=7)
        generate = first.engine.generate
        first.engine.weight = 333  # what the first process answers is told from what is used

        asked: list[int] = []
        first.engine.generate = lambda *given: asked.append(1) or generate(*given)  # type: ignore[method-assign]
        send, reading = rollout.watched.send, rollout.wire.identity_route

        async def send_after_restart(server: Server, call: Call) -> bytes:
            assert reading is not None
            if call == reading.call and asked and not again.is_set():
                await asyncio.to_thread(end_and_start_again)
            return await send(server, call)

        def end_and_start_again() -> None:
            again.set()
            first.kill()
            start("vllm", at=first)

        monkeypatch.setattr(rollout.watched, "send", send_after_restart)
        assert answers(rollout) == [(111, 7)] and again.is_set()


@KINDS
def test_without_weights_to_send_again_the_run_ends_and_says_what_happened(kind: str, start: Start) -> None:
    first = start(kind)
    with client(kind, [first.url], resends=False) as rollout:
        rollout.load_weights(weights(), version=7)
        first.kill()
        start(kind, at=first)
        with pytest.raises(
            WorkerError, match=r"no server is left that has the current weights.*was started again"
        ) as it:
            answers(rollout)
        assert it.value.lost


@KINDS
def test_an_update_goes_to_the_new_process_at_the_old_url(kind: str, start: Start) -> None:
    first = start(kind)
    with client(kind, [first.url], resends=False, health_interval_s=0.05) as rollout:
        rollout.load_weights(weights(), version=7)
        first.kill()
        start(kind, at=first)
        time.sleep(0.2)
        rollout.load_weights(weights(112), version=8)
        assert answers(rollout) == [(112, 8)]


def test_a_process_that_is_started_while_weights_are_sent_joins_anew(start: Start) -> None:
    first = start("vllm")
    with client("vllm", [first.url], health_interval_s=0.05) as rollout:
        rollout.load_weights(weights(), version=7)
        assert isinstance(first, FakeVllm)
        first.trainer = None  # as in a process that began after the reading before the update
        rollout.load_weights(weights(), version=8)
        assert answers(rollout) == [(111, 8)]
        assert first.calls["join_trainer"] == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("vllm", "has other weights than it was sent:"),
        ("trtllm", "has other weights than it was sent:"),
        ("sglang", "generated with weights"),
    ],
)
def test_weights_of_another_trainer_are_not_taken_for_ones_own(kind: str, reason: str, start: Start) -> None:
    server = start(kind)
    with (
        client(kind, [server.url], health_interval_s=0.05) as rollout,
        client(kind, [server.url], resends=False) as other,
    ):
        rollout.load_weights(weights(), version=7)
        other.load_weights(weights(333), version=7)  # the same version, other weights
        assert answers(rollout) == [(111, 7)]
        with pytest.raises(WorkerError, match=rf"{reason} rloom-.*-7-1 in place of rloom-.*-7-0"):
            answers(other)


def test_two_servers_behind_one_url_are_refused_at_the_start(start: Start) -> None:
    ports = [start("vllm").server_port, start("vllm").server_port]
    with balanced(ports) as url:
        refusal = pytest.raises(WorkerError, match=rf"urls={url}: the server is 2 processes, as behind")
        with refusal, client("vllm", [url]):
            pass


@contextmanager
def balanced(ports: list[int]) -> Iterator[str]:
    """A load balancer: each connection goes to the next port."""
    turn = iter(ports * 100)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", next(turn))
        try:
            await asyncio.gather(pipe(reader, behind_writer), pipe(behind_reader, writer))
        finally:
            behind_writer.close()

    with listening(forward) as port:
        yield f"http://127.0.0.1:{port}"


@KINDS
def test_a_server_without_rlooms_routes_is_refused_at_the_start(kind: str, start: Start) -> None:
    server = start("sglang")
    refusal = pytest.raises(WorkerError, match=r"HTTP status 404.*Start it with the arguments of docs/rollout.md")
    with refusal, client(kind, [server.url]):
        pass


def test_a_server_that_hangs_is_named_and_after_the_time_limit_used_no_more(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts requests and is healthy. Each time it comes back it gets the weights, and fails again."""
    monkeypatch.setattr(client_module, "FIRST_NOTICE_S", 0.1)
    caplog.set_level(logging.INFO)
    server = start("trtllm", hold_after=0)
    with client("trtllm", [server.url], request_timeout_s=0.4, health_interval_s=0.05, max_restarts=1) as rollout:
        rollout.load_weights(weights(), version=7)
        with pytest.raises(WorkerError, match=r"none is started again: .*completions in 0.4 s, and failed 2 times"):
            answers(rollout, 3)
    assert f"Waiting for the server {server.url} (3 requests) (0 s without an answer)" in caplog.text
    assert server.calls["/update_weights"] == 4  # twice, in a bucket and an end each
