"""ServerRollout over servers that replay the protocols of SGLang and TensorRT-LLM: tests/fake_servers.py."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.engines.local import LocalEngine
from rloom.errors import ModelError, WorkerError
from rloom.import_path import OWN_FOLDER
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, InterruptAll, Request, Rollout, Sampling
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.servers.client import ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.vllm import VllmApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import COLLECTIVE, SHARED, ServerApi, TransferSettings
from tests.fake_servers import KINDS, FakeServer, FakeSglang, FakeTrtllm
from tests.helpers import engine_of, policy
from tests.interruptions import continued
from tests.ranks import forkserver, free_port
from tests.waiting import is_running, wait_until

SERVERS = {"sglang": FakeSglang, "trtllm": FakeTrtllm}
WIRES: dict[str, Callable[[], ServerApi]] = {"sglang": SglangApi, "trtllm": TrtllmApi, "vllm": VllmApi}
SAMPLED = Sampling(12, temperature=1.0)


def prompts(n: int, answers: int = 2) -> list[Request]:
    return [Request((5 + row // answers, 6, 7), SAMPLED, seed=row) for row in range(n)]


def native(folder: Path) -> tuple[PolicyNetwork, LocalEngine, NativeRollout]:
    network = policy(folder)
    engine = engine_of(network)
    settings = {"max_sequences": 64, "max_prefill_tokens": 1000, "memory_share": 0.5, "free_cache": True}
    return network, engine, NativeRollout(network, owner=engine, **settings)


@pytest.fixture(autouse=True)
def collect_dropped_connections() -> Iterator[None]:
    """Here, so that no other test gets their warning."""
    yield
    gc.collect()


@contextmanager
def client(
    wire: ServerApi, urls: list[str], engine: LocalEngine, kind: str = SHARED, *, resends: bool = True, **changed: Any
) -> Iterator[ServerRollout]:
    transfer = TransferSettings(kind, torch.device("cpu"), 1, timeout_s=120)
    watch = {"start_timeout_s": 120.0, "health_interval_s": 0.05, "max_restarts": 2}
    settings = ClientSettings(
        WatchSettings(**{key: changed.pop(key, value) for key, value in watch.items()}),
        request_timeout_s=120,
        releases_memory=changed.pop("releases_memory", False),
        bucket_bytes=4096,  # several buckets
    )
    specs = [ServerSpec(url, None, transfer) for url in urls]
    rollout = ServerRollout(specs, wire, settings, lambda weights: weights, engine.weights if resends else None)
    try:
        yield rollout
    finally:
        rollout.close()


Answers = list[tuple[list[int], Any]]


def answers(rollout: Rollout, requests: list[Request]) -> Answers:
    return in_order(list(rollout.generate(requests)), len(requests))


def in_order(found: list[tuple[int, Completion]], count: int) -> Answers:
    """Tokens, and log-probs, whose last digits depend on the rest of the batch."""
    found = sorted(found, key=lambda pair: pair[0])
    assert [row for row, _ in found] == list(range(count))  # all of them, none twice
    return [
        (completion.tokens_L.tolist(), pytest.approx(completion.logprobs_L.tolist(), abs=1e-4))
        for _, completion in found
    ]


def same(one: Answers, other: Answers) -> bool:
    return [tokens for tokens, _ in one] == [tokens for tokens, _ in other] and all(
        first.expected == second for (_, first), (_, second) in zip(one, other, strict=True)
    )


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


@contextmanager
def server_process(kind: str, folder: Path) -> Iterator[str]:
    port = free_port()
    process = forkserver().Process(target=serve, args=(kind, folder, port))
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


def serve(kind: str, folder: Path, port: int) -> None:
    SERVERS[kind](folder, port).serve_forever()


@pytest.mark.parametrize(("name", "kind"), [("sglang", COLLECTIVE), ("sglang", SHARED), ("trtllm", SHARED)])
def test_an_update_is_seen_in_the_next_token_and_in_the_version(folder: Path, name: str, kind: str) -> None:
    network, engine, local = native(folder)
    with server_process(name, folder) as url, client(WIRES[name](), [url], engine, kind) as rollout:
        rollout.load_weights(engine.weights(), version=3)
        before = answers(rollout, prompts(6))
        assert same(before, answers(local, prompts(6)))
        change(network)
        assert same(answers(rollout, prompts(6)), before)  # not before it is sent
        rollout.load_weights(engine.weights(), version=4)
        local.load_weights(iter(()), version=4)
        after = answers(rollout, prompts(6))
        assert same(after, answers(local, prompts(6))) and not same(after, before)
        assert {completion.version for _, completion in rollout.generate(prompts(2))} == {4}


def change(network: PolicyNetwork) -> None:
    with torch.no_grad():
        for parameter in network.module.parameters():
            parameter.mul_(1.1)


def test_answers_to_one_prompt_go_to_one_server_and_servers_get_equal_shares(folder: Path) -> None:
    _, engine, local = native(folder)
    servers = [FakeSglang(folder).begin() for _ in range(2)]
    with client(SglangApi(), [server.url for server in servers], engine) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        assert same(answers(rollout, prompts(16, answers=4)), answers(local, prompts(16, answers=4)))
    for server in servers:
        asked = [tuple(body["input_ids"]) for path, body in server.bodies if path == "/generate"]
        assert len(asked) == 8 and len(set(asked)) == 2
        server.kill()


def test_requests_of_a_server_that_dies_finish_elsewhere_once(folder: Path) -> None:
    _, engine, local = native(folder)
    dying, other = FakeSglang(folder, hold_after=3).begin(), FakeSglang(folder).begin()
    with client(SglangApi(), [dying.url, other.url], engine) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        stream, found = rollout.generate(prompts(16)), []
        while len(found) < 8 + 3:  # the share of `other`, and three of `dying`
            found.append(next(stream))
        wait_until(lambda: dying.calls["generate"] == 8)  # the other five are on their way
        dying.kill()
        found += list(stream)
        assert same(in_order(found, 16), answers(local, prompts(16)))
        assert other.calls["generate"] == 8 + 5
        rollout.load_weights(engine.weights(), version=1)  # with the server that is left
        assert same(answers(rollout, prompts(4)), answers(local, prompts(4)))
    other.kill()


def test_the_only_server_gets_the_current_weights_again_before_it_is_used(folder: Path) -> None:
    network, engine, local = native(folder)
    change(network)  # a new server reads those of the folder
    first = FakeSglang(folder, hold_after=2).begin()
    with client(SglangApi(), [first.url], engine) as rollout:
        rollout.load_weights(engine.weights(), version=5)
        stream = rollout.generate(prompts(6))
        found = [next(stream), next(stream)]
        first.kill()
        second = FakeSglang(folder, port=first.server_port).begin()  # the user starts it again
        found += list(stream)
        assert same(in_order(found, 6), answers(local, prompts(6)))
        assert {completion.version for _, completion in found} == {5}
    second.kill()


def test_a_server_that_hangs_loses_its_requests_after_three_health_checks(folder: Path) -> None:
    _, engine, local = native(folder)
    hanging, other = FakeSglang(folder, hold_after=0).begin(), FakeSglang(folder).begin()
    with client(SglangApi(), [hanging.url, other.url], engine) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        hanging.is_healthy = False
        assert same(answers(rollout, prompts(8)), answers(local, prompts(8)))
        assert hanging.calls["/health"] >= 3 and other.calls["generate"] == 8
    hanging.kill()
    other.kill()


def test_with_no_server_left_the_error_names_their_urls(folder: Path) -> None:
    _, engine, _ = native(folder)
    server = FakeSglang(folder, hold_after=0).begin()
    with client(SglangApi(), [server.url], engine, start_timeout_s=1.0) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        stream = rollout.generate(prompts(4))
        threading.Timer(0.2, server.kill).start()
        reasons = "gave no|ended|did not accept|did not take"  # by when the kill meets it
        with pytest.raises(WorkerError, match=rf"no server is left for .*_timeout_s=1 s: {server.url} ({reasons})"):
            next(stream)
        assert not rollout.tasks


def test_a_cancelled_request_is_not_reported_and_its_server_is_told_to_abort_it(folder: Path) -> None:
    _, engine, local = native(folder)
    server = FakeSglang(folder, hold_after=3).begin()
    with client(SglangApi(), [server.url], engine) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        numbers, found = {rollout.submit(request) for request in prompts(5)}, set()
        while len(found) < 3:
            found |= {completion.request for completion in rollout.poll()}
        for number in numbers:  # those that are gone, too
            rollout.cancel(number)
        assert rollout.poll() == [] and not rollout.tasks
        named = {body["rid"] for path, body in server.bodies if path == "/abort_request"}
        assert named == {rollout.name_of(number) for number in numbers - found}
        server.hold_after = None
        assert same(answers(rollout, prompts(4)), answers(local, prompts(4)))
    server.kill()


def few_polls(server: FakeServer, polls: int) -> threading.Event:
    """The server's engine has all four requests, then generates for so many polls, then waits for the event."""
    rollout, left, released = server.engine.rollout, [polls], threading.Event()
    poll = rollout.poll

    def polled() -> list[Completion]:
        if released.is_set():
            return poll()
        if len(rollout.unfinished) < 4 or not left[0]:
            return []
        left[0] -= 1
        return poll()

    rollout.poll = polled
    return released


# vLLM of some versions has no route to abort requests
@pytest.mark.parametrize(("name", "tokens"), [("sglang", 3), ("vllm", 3), ("vllm without the route", 0), ("trtllm", 0)])
def test_interrupted_requests_go_on_behind_what_their_server_returned(folder: Path, name: str, tokens: int) -> None:
    """SGLang and vLLM answer an aborted request with what it has. TensorRT-LLM does not: the request begins anew."""
    _, engine, local = native(folder)
    asked = [Request((5 + row, 6, 7), Sampling(12, temperature=0.0), seed=row) for row in range(4)]
    expected, server = answers(local, asked), KINDS[name.split()[0]](folder).begin()
    released = few_polls(server, polls=3)
    server.has_abort_route = "without" not in name
    kind = COLLECTIVE if name.startswith("vllm") else SHARED
    with client(WIRES[name.split()[0]](), [server.url], engine, kind) as rollout:
        rollout.load_weights(engine.weights(), version=3)
        dropped = server.calls["/flush_cache"] + server.calls["/reset_prefix_cache"]
        assert dropped == (name != "trtllm"), "what the server has cached is of older weights"
        stream = rollout.generate_stream()
        next(stream)
        assert stream.send(asked) == []
        if tokens:
            wait_until(lambda: len(rollout.server_of) == 4 and generated(server) == 3)
        found = stream.send([InterruptAll()])
        stream.close()
        released.set()
        assert [index for index, _ in found] == [0, 1, 2, 3] and not rollout.tasks and not rollout.begun
        assert all(one.interrupted and not one.finished and one.version == 3 for _, one in found)
        assert [one.tokens_L.tolist() for _, one in found] == [whole[:tokens] for whole, _ in expected]
        later = [continued(request, one) for request, (_, one) in zip(asked, found, strict=True)]
        assert same(answers(rollout, later), expected)
        bodies = [body for path, body in server.bodies if path in ("/generate", "/v1/completions")][-4:]
        limits = [body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in bodies]
        assert limits == [12 - tokens] * 4
    server.kill()


def generated(server: FakeServer) -> int:
    """Tokens of every request."""
    rollout = server.engine.rollout
    return min((len(rollout.tokens_so_far(number)) for number in list(rollout.unfinished)), default=0)


def test_memory_is_released_while_training_and_resumed_in_parts(folder: Path) -> None:
    _, engine, local = native(folder)
    server = FakeSglang(folder).begin()
    with client(SglangApi(), [server.url], engine, releases_memory=True) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        rollout.sleep()
        rollout.sleep()  # once is enough
        assert server.released == {"weights", "kv_cache"}
        rollout.load_weights(engine.weights(), version=1)
        assert server.released == {"kv_cache"}  # not needed for new weights
        rollout.wake()
        assert server.released == set()
        assert same(answers(rollout, prompts(4)), answers(local, prompts(4)))
        assert server.calls["/release_memory_occupation"] == 1
    server.kill()


def test_weights_that_a_server_does_not_have_end_the_run(folder: Path) -> None:
    _, engine, _ = native(folder)
    server = FakeSglang(folder).begin()
    refusal = pytest.raises(ModelError, match=rf"the server {server.url} answered with HTTP status 400.*no_such")
    with client(SglangApi(), [server.url], engine) as rollout, refusal:
        rollout.load_weights(iter([("no_such", torch.zeros(1))]), version=1)
    server.kill()


def test_without_a_source_of_weights_a_server_that_came_back_waits_for_the_next_update(folder: Path) -> None:
    _, engine, local = native(folder)
    first = FakeSglang(folder, hold_after=0).begin()
    with client(SglangApi(), [first.url], engine, resends=False) as rollout:
        rollout.load_weights(engine.weights(), version=0)
        stream = rollout.generate(prompts(2))
        threading.Timer(0.2, first.kill).start()
        with pytest.raises(WorkerError, match="no server is left that has the current weights") as raised:
            next(stream)
        assert raised.value.lost  # the run begins again from its last checkpoint
        second = FakeSglang(folder, port=first.server_port).begin()
        wait_until(rollout.watched.stale)
        rollout.load_weights(engine.weights(), version=1)
        assert same(answers(rollout, prompts(4)), answers(local, prompts(4)))
    second.kill()


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from rloom.rollout.servers.launch import Launch, ServerProcess; "
        f"process = ServerProcess(Launch(['sleep', '600'], {{}}, Path({str(tmp_path / 'log')!r}))); process.start(); "
        "print(process.process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            server = Path("/proc") / parent.stdout.readline().strip()
            wait_until(lambda: (server / "comm").read_text() == "sleep\n")  # before that it is Python, which starts it
            # rloom's packages are not those of another program's environment
            assert f"PYTHONPATH={OWN_FOLDER}".encode() not in (server / "environ").read_bytes()
        finally:
            parent.kill()
    wait_until(lambda: not is_running(int(server.name)))
