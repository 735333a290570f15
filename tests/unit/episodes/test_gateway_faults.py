"""The gateway and requests that are wrong, huge, slow or cut off: a 4xx in the API's form, and the server goes on."""

import asyncio
import errno
import json
import socket
import threading
import time
from contextlib import ExitStack
from copy import deepcopy

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rloom.episodes import session
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.gateway import server
from rloom.episodes.record import Ending
from tests.unit.episodes.gateway_runs import serving
from tests.waiting import wait_until

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00000", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA}}],
        "max_tokens": 5,
        "n": 1,
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "temperature": 1.0,
    },
    "responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "call00000", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call00000", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "description": "d", "parameters": SCHEMA}],
        "max_output_tokens": 5,
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "stream": True,
    },
    "messages": {
        "model": "m",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": ""},
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "call00000", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call00000", "content": "2"},
                    {"type": "text", "text": "u"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 5,
        "stop_sequences": ["x"],
    },
    "messages/count_tokens": {"messages": [{"role": "user", "content": "q"}], "system": "s"},
}
OTHERS = [
    None,
    True,
    False,
    0,
    -1,
    10**30,
    1.5,
    "",
    "x",
    "auto",
    [],
    [1],
    [None],
    {},
    {"type": "text"},
    [[]],
    "\u2028\0",
]


def places(value, path=()):
    """The paths of everything in a body."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*path, name))


def changed(body, path, value):
    body = deepcopy(body)
    inner = body
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return body


@pytest.fixture(scope="module")
def run():
    with serving(lambda prompt: "ok") as run:
        yield run


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=60) as http:
        yield http


def check_answer(answer, path):
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["code"] and error["type"]
        assert answer.json().get("type") == ("error" if path.startswith("messages") else None)


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_type_in_any_field_is_refused_or_has_no_effect(run, http, path):
    assert http.post(f"{run.url}/v1/{path}", json=BODIES[path]).status_code == 200
    refused = 0
    for place in places(BODIES[path]):
        for value in OTHERS if place else ():
            body = changed(BODIES[path], place, value)
            answer = http.post(f"{run.url}/v1/{path}", json=body)
            check_answer(answer, path)
            refused += answer.status_code != 200
    assert refused > (10 if path.endswith("count_tokens") else 100)
    assert http.post(f"{run.url}/v1/{path}", json=BODIES[path]).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_any_json_in_any_place_gets_an_answer(run, http, data):
    path = data.draw(st.sampled_from(sorted(BODIES)))
    place = data.draw(st.sampled_from([place for place in places(BODIES[path]) if place]))
    body = changed(BODIES[path], place, data.draw(JSON))
    check_answer(http.post(f"{run.url}/v1/{path}", content=json.dumps(body)), path)


WRONG = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a text": b'"x"',
    "bytes": b"\xff\xfe\x00",
    "many digits": b'{"messages": ' + b"9" * 100_000 + b"}",
    "half of a pair": b'{"messages": [{"role": "user", "content": "\\uD800"}]}',
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "less deep": b'{"messages": [{"role": "user", "content": "q"}], "tools": ' + b"[" * 90 + b"]" * 90 + b"}",
    "deep objects": b'{"a":' * 500 + b"1" + b"}" * 500,
}


@pytest.mark.parametrize("path", [*BODIES, "rl/set_reward"])
@pytest.mark.parametrize("name", WRONG)
def test_a_body_that_is_no_json_object_is_refused(run, http, path, name):
    answer = http.post(f"{run.url}/v1/{path}", content=WRONG[name])
    assert answer.status_code == 400
    check_answer(answer, path)


def test_a_huge_body_is_refused_before_it_is_read(run, http):
    body = b'{"messages": "' + b"x" * 100_000_000 + b'"}'
    for content in (body, (body[place : place + 2**20] for place in range(0, len(body), 2**20))):
        try:
            answer = http.post(f"{run.url}/v1/chat/completions", content=content)
        except httpx.NetworkError:  # closed while it was sent
            continue
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    assert http.get(f"{run.url}/v1/models").status_code == 200


def test_unknown_paths_and_methods_are_named(run, http):
    for method, path, status in [
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/chat", 404),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/rl/set_reward", 405),
        ("GET", "/%2e%2e/%00%ff", 404),
    ]:
        answer = http.request(method, run.url + path)
        assert answer.status_code == status, (path, answer.text)
        assert answer.json()["error"]["code"] in ("not_found", "method_not_allowed")
    assert http.get(f"{run.gateway.url}/sessions/").status_code == 401


def connect(run):
    return socket.create_connection(("127.0.0.1", int(run.gateway.url.rsplit(":")[-1])), timeout=60)


RAW = {
    "no HTTP": (b"hello\r\n\r\n", b"400"),
    "a negative length": (b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", b"400"),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"400"),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", b"400"),
    "long headers": (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", b"400"),
    "a wrong chunk": (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"40"),
    "an upgrade": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"401"),
    "an old version": (b"GET /v1/models HTTP/1.0\r\n\r\n", b"401"),
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_not_http_is_refused(run, http, name):
    sent, status = RAW[name]
    with connect(run) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
    assert http.get(f"{run.url}/v1/models").status_code == 200


def test_half_sent_requests_end_at_their_time_limit_and_keep_nobody_waiting(run, http, monkeypatch):
    head = f"POST /sessions/{run.session.id}/v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n".encode()
    half = [connect(run) for _ in range(50)]
    for connection in half[:25]:
        connection.sendall(b"POST /v1/chat/completions HT")
    for connection in half[25:]:
        connection.sendall(head + b'{"input"')
    assert http.post(f"{run.url}/v1/chat/completions", json=BODIES["chat/completions"]).status_code == 200
    monkeypatch.setattr(server, "BODY_S", 0.5)
    half.append(connect(run))
    half[-1].sendall(head + b'{"input"')
    assert half[-1].recv(200).startswith(b"HTTP/1.1 408")
    for connection in half:
        connection.close()
    assert http.get(f"{run.url}/v1/models").status_code == 200


def test_a_client_that_sends_byte_by_byte_is_answered(run):
    body = b'{"input": "q"}'
    head = f"POST /sessions/{run.session.id}/v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with connect(run) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head.encode() + body:
            connection.send(bytes([byte]))
            time.sleep(0.001)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_answers_are_sent_without_delay():
    """Without TCP_NODELAY an answer waits 40 ms for the client's acknowledgement of its headers."""
    with serving([]) as run, httpx.Client(timeout=60) as client:
        client.get(f"{run.url}/v1/models")
        [used] = run.gateway._server.server_state.connections
        assert used.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_stop_ends_open_connections_at_once():
    """It waits neither for a body (BODY_S) nor for an idle connection (IDLE_S)."""
    with ExitStack() as stack:
        with serving(lambda prompt: "ok") as run:
            waiting = [stack.enter_context(connect(run)) for _ in range(3)]
            waiting[0].sendall(b"POST /v1/chat/completions HT")
            head = f"POST /sessions/{run.session.id}/v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: "
            waiting[1].sendall(f"{head}50\r\n\r\n".encode())
            body = json.dumps({"input": "q"})
            waiting[2].sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
            assert waiting[2].recv(100).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
        assert time.monotonic() - began < server.BODY_S / 2


def connected(run, stack):
    """A connection that sends a half of a request's head."""
    host, port = run.gateway.url.removeprefix("http://").split(":")
    one = stack.enter_context(socket.create_connection((host, int(port))))
    one.settimeout(60)
    one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    return one


def test_connections_without_a_request_do_not_keep_agents_out(monkeypatch, caplog):
    monkeypatch.setattr(server, "HEAD_S", 60.0)
    monkeypatch.setattr(server, "MOST_SILENT", 10)
    with serving(["a"]) as run, ExitStack() as stack:
        monkeypatch.setattr(server, "BURST_S", 60.0)
        idle = [connected(run, stack) for _ in range(50)]
        wait_until(lambda: len(run.gateway.silent) == 50)  # a burst: any of them may be an agent's
        monkeypatch.setattr(server, "BURST_S", 0.0)
        body = {"messages": [{"role": "user", "content": "q"}]}
        assert httpx.post(f"{run.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert all(is_closed(one) for one in idle[:41])
        wait_until(lambda: len(run.gateway.silent) == 9)
    assert not caplog.records


def test_a_connection_without_a_request_is_closed_and_one_with_a_request_stays(monkeypatch):
    kept = httpx.Limits(keepalive_expiry=None)  # by default the client closes its own after 5 s
    with serving(["a"] * 2) as run, ExitStack() as stack, httpx.Client(timeout=60, limits=kept) as client:
        body = {"messages": [{"role": "user", "content": "q"}]}
        assert client.post(f"{run.url}/v1/chat/completions", json=body).status_code == 200
        [used] = run.gateway._server.server_state.connections
        monkeypatch.setattr(server, "HEAD_S", 3.0)
        assert is_closed(connected(run, stack))
        wait_until(lambda: not run.gateway.silent)
        assert client.post(f"{run.url}/v1/chat/completions", json=body).status_code == 200
        assert [*run.gateway._server.server_state.connections] == [used]


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_connection_is_closed_after_a_request_without_a_session():
    with serving([]) as run, httpx.Client(timeout=60) as client:
        refused = client.post(f"{run.gateway.url}/v1/chat/completions", json={})
        assert (refused.status_code, refused.headers["connection"]) == (401, "close")
        wait_until(lambda: not run.gateway._server.server_state.connections)


def test_errors_that_an_agent_can_cause_again_and_again_are_said_once(monkeypatch, caplog):
    async def fail(*arguments):
        raise ZeroDivisionError("none")

    monkeypatch.setattr(server, "ask", fail)
    with serving([]) as run, httpx.Client(timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "q"}]}
        found = [client.post(f"{run.url}/v1/chat/completions", json=body) for _ in range(5)]
        run.runner.loop.run(report(run, OSError(errno.EMFILE, "Too many open files")))
        run.runner.loop.run(report(run, OSError(errno.EMFILE, "Too many open files")))
    assert [one.status_code for one in found] == [500] * 5
    failed, no_descriptors = [one.getMessage() for one in caplog.records]
    assert failed == "a request of an agent failed: ZeroDivisionError: none"
    assert no_descriptors.startswith("a connection of an agent waits: Too many open files; raise `ulimit -n`")


async def report(run, error):
    """As asyncio does for a connection that it cannot accept."""
    context = {"message": "socket.accept() out of system resource", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


QUESTION = [{"role": "user", "content": "q"}]


def request(run, **body):
    """A whole request, for a client that goes away before its answer."""
    sent = json.dumps(body)
    path = f"/sessions/{run.session.id}/v1/chat/completions"
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n{sent}".encode()


def chat(url, **body):
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, **body}, timeout=60)


def test_answers_that_no_client_received_are_not_trained():
    """Two of three were generated when the client went away."""
    with serving(["one", "two", "three", "kept"]) as run:
        generates, release = threading.Event(), threading.Event()  # the third one
        wait = run.released.wait
        run.released.wait = lambda limit: len(run.sampled) < 2 or generates.set() or release.wait(limit)
        with connect(run) as client:
            client.sendall(request(run, messages=QUESTION, n=3))
            assert generates.wait(60)
        wait_until(lambda: run.session.run.counts["dropped_answers"] == 3)
        release.set()
        run.released.wait = wait
        assert chat(run.url, messages=QUESTION).json()["choices"][0]["message"]["content"] == "kept"
        record = run.end()
    assert len(run.sampled) == 4 and record.turns == 1 and len(run.session.nodes) == 1
    [branch] = record.episode.branches()
    assert [branch.tokens_L[turn.start : turn.stop].tolist() for turn in branch.turns] == run.sampled[3:]


def test_the_number_of_answers_to_one_request_is_bounded_by_the_turns_that_are_left():
    with serving(["a"] * 8, limits=EpisodeLimits(400, turns=3)) as run:
        assert len(chat(run.url, n=8).json()["choices"]) == 3
        record = run.end()
    assert (record.turns, record.ending) == (3, Ending.TURNS)


def test_an_agent_waits_for_a_bounded_number_of_answers(monkeypatch):
    monkeypatch.setattr(session, "MOST_OPEN", 2)
    with serving(["a"] * 8) as run:
        found = httpx.post(f"{run.url}/v1/chat/completions", json={"messages": QUESTION, "n": 8}, timeout=60)
        assert len(found.json()["choices"]) == 2 and len(run.sampled) == 2


@pytest.mark.parametrize("limited_first", [True, False])
def test_of_two_requests_at_a_time_one_at_a_limit_is_the_ending(limited_first):
    """The other one was sent before: it is no answer to a shorter history."""

    async def ask(url, text):
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})

    with serving(lambda prompt: "x" * (5 if "short" in prompt else 80), limits=EpisodeLimits(60)) as run:
        run.released.clear()
        first, second = ("long", "short") if limited_first else ("short", "long")
        asked = [run.runner.loop.start(ask(run.url, first))]
        wait_until(lambda: len(run.session._requests) == 1)
        asked.append(run.runner.loop.start(ask(run.url, second)))
        wait_until(lambda: len(run.session._requests) == 2)
        run.released.set()
        assert [one.result(60).status_code for one in asked] == [200, 200]
        assert run.session.run.ending is Ending.TOKENS
        assert chat(run.url, messages=[{"role": "user", "content": "short again"}]).status_code == 200  # it goes on
        assert run.end().ending is Ending.DONE
