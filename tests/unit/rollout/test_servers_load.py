"""Many requests over servers: connections, descriptors and time limits of a client with more requests than these."""

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rloom.errors import WorkerError
from rloom.net.http import allowed_connections
from rloom.rollout.base import Request, Sampling
from rloom.rollout.servers.client import CONTROL_CONNECTIONS, ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import SHARED, TransferSettings
from tests.fake_servers import FakeTrtllm
from tests.ranks import forkserver


@contextmanager
def client(urls: list[str], **settings: Any) -> Iterator[ServerRollout]:
    transfer = TransferSettings(SHARED, torch.device("cpu"), 1, timeout_s=60)
    settings = {"request_timeout_s": 240.0, "releases_memory": False} | settings
    rollout = ServerRollout(
        [ServerSpec(url, None, transfer) for url in urls],
        TrtllmApi(),
        ClientSettings(WatchSettings(60.0, 10.0, 0), **settings),
        lambda weights: weights,
    )
    try:
        rollout.load_weights(iter([("w", torch.tensor(111.0))]), version=7)
        yield rollout
    finally:
        rollout.close()


def answers(rollout: ServerRollout, prompts: int, answers_per_prompt: int = 1) -> list[tuple[int, int]]:
    requests = [
        Request((5, row // answers_per_prompt), Sampling(1), row) for row in range(prompts * answers_per_prompt)
    ]
    return [(int(found.tokens_L), found.version) for _, found in rollout.generate(requests)]


@pytest.fixture
def servers() -> Iterator[list[FakeTrtllm]]:
    made = [FakeTrtllm(222) for _ in range(2)]
    for server in made:
        server.begin()
    yield made
    for server in made:
        server.kill()
    gc.collect()  # dropped connections: here, so that no other test gets their warning


def in_a_process(work: Callable[[str, Connection], None], url: str) -> Any:
    """What it sends. Limits of a process cannot be raised again."""
    here, there = forkserver().Pipe()
    process = forkserver().Process(target=work, args=(url, there))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def answers_at_a_low_limit(url: str, pipe: Connection) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    raised = allowed_connections(1500), resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1500
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    with client([url], max_requests=512) as rollout:
        pipe.send((raised, answers(rollout, 2048)))


def test_2048_answers_need_no_more_than_160_descriptors(servers: list[FakeTrtllm]) -> None:
    server = servers[0]
    raised, found = in_a_process(answers_at_a_low_limit, server.url)
    assert raised == (1500, True)
    assert found == [(111, 7)] * 2048 and server.calls["generate"] == 2048
    assert 20 < server.most_connections < 160


def answers_without_descriptors(url: str, pipe: Connection) -> None:
    with client([url]) as rollout:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        try:
            answers(rollout, 40)
        except WorkerError as error:
            found = str(error), rollout.watched.servers[0].is_up
        for descriptor in taken:
            os.close(descriptor)
        pipe.send(found)


def test_a_process_without_descriptors_does_not_blame_the_server(servers: list[FakeTrtllm]) -> None:
    message, is_up = in_a_process(answers_without_descriptors, servers[0].url)
    assert f"no file descriptor is left in this process for a connection to {servers[0].url}" in message
    assert "`ulimit -n` is 100, its hard limit is 100. Raise both" in message and is_up


def test_a_server_has_a_bounded_number_of_requests_over_as_many_connections(servers: list[FakeTrtllm]) -> None:
    with client([server.url for server in servers], max_requests=4) as rollout:
        assert answers(rollout, 40, answers_per_prompt=4) == [(111, 7)] * 160
    for server in servers:
        assert 4 <= server.most_connections <= 4 + CONTROL_CONNECTIONS
    asked = [{tuple(body["prompt"]) for path, body in server.bodies if "prompt" in body} for server in servers]
    assert asked[0].isdisjoint(asked[1]) and len(asked[0] | asked[1]) == 40  # a prompt's answers come from one server


def test_a_prompt_with_more_answers_than_a_server_takes_goes_to_several(servers: list[FakeTrtllm]) -> None:
    requests = threading.Barrier(4)  # two at each server: one that is slower gets no fewer of them
    for server in servers:

        def together(*arguments: Any, own: Callable[..., Any] = server.engine.generate) -> Any:
            requests.wait(timeout=60)
            return own(*arguments)

        server.engine.generate = together  # type: ignore[method-assign]
    with client([server.url for server in servers], max_requests=2) as rollout:
        assert answers(rollout, 1, answers_per_prompt=40) == [(111, 7)] * 40
    assert all(server.calls["generate"] >= 4 for server in servers)


def prompts_of(server: FakeTrtllm) -> list[tuple[int, ...]]:
    return [tuple(body["prompt"]) for _, body in list(server.bodies) if "prompt" in body]


def ask_turn(rollout: ServerRollout, conversations: list[int], turn: int) -> None:
    requests = [Request((5, number, *[9] * turn), Sampling(1), turn, conversation=number) for number in conversations]
    assert {int(found.tokens_L) for _, found in rollout.generate(requests)} == {111}


def test_all_turns_of_an_episode_go_to_one_server_and_on_at_another_when_it_dies(servers: list[FakeTrtllm]) -> None:
    with client([server.url for server in servers], max_requests=4) as rollout:
        for turn in range(3):
            ask_turn(rollout, list(range(turn, 12)) + list(range(turn)), turn)  # in another order each time
        first, second = ([prompt[1] for prompt in prompts_of(server)] for server in servers)
        assert len(first) + len(second) == 36 and set(first).isdisjoint(second)
        assert 4 <= len(set(first)) <= 8, "each has a share of the episodes"
        servers[0].kill()
        ask_turn(rollout, list(range(12)), 3)
        assert [prompt[1] for prompt in prompts_of(servers[1])].count(first[0]) == 1
        ask_turn(rollout, [first[0]], 4)
        assert (5, first[0], 9, 9, 9, 9) in prompts_of(servers[1])
        rollout.end_conversation(first[0])
        homes = rollout.watched.queues.server_of_conversation
        assert len(homes) == 11 and {server.url for server in homes.values()} == {servers[1].url}
        rollout.sleep()
        assert not homes


def test_the_time_limit_of_a_request_begins_when_it_is_sent(servers: list[FakeTrtllm]) -> None:
    generate = servers[0].engine.generate

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return generate(*arguments)

    servers[0].engine.generate = slow  # type: ignore[method-assign]
    with client([servers[0].url], max_requests=1, request_timeout_s=2.0) as rollout:
        assert answers(rollout, 9) == [(111, 7)] * 9  # 2.7 s in all


def test_servers_sleep_and_wake_at_the_same_time(servers: list[FakeTrtllm], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits in its call until the other has been called, too."""
    both = threading.Barrier(2)
    for name in ("release_tags", "resume_tags"):
        own = getattr(FakeTrtllm, name)

        def together(server: FakeTrtllm, tags: list[str], own: Callable[..., None] = own) -> None:
            both.wait(timeout=60)
            own(server, tags)

        monkeypatch.setattr(FakeTrtllm, name, together)
    with client([server.url for server in servers], releases_memory=True) as rollout:
        rollout.sleep()
        assert all(server.released for server in servers)
        rollout.load_weights(iter([("w", torch.tensor(111.0))]), version=8)
        rollout.wake()
        assert not any(server.released for server in servers)
        assert answers(rollout, 2) == [(111, 8)] * 2
