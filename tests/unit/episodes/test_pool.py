"""The driver's side of environments' processes: descriptors, output, errors with their place, and faults under load."""

import asyncio
import os
import random
import resource
import signal
import sys
import textwrap
import threading
import time
from contextlib import closing, contextmanager

import pytest

from rloom.episodes import pool as pools
from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.output import Output
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.record import Ending
from rloom.episodes.runner import EnvironmentDriver, EpisodeRow, EpisodeRunner
from rloom.errors import ConfigError, TrainingError
from rloom.net import http
from rloom.rollout.base import Sampling
from rloom.types import Prompt
from tests.unit.episodes import agent_runs
from tests.unit.episodes.engines import texts_for
from tests.unit.episodes.test_faults import FAULTS, environment_file, mark, processes, rows_in  # noqa: F401
from tests.unit.episodes.test_runner import run
from tests.waiting import wait_until

HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
LIMITS = EpisodeLimits(4000, turns=8, call_s=20.0, result_characters=20)


def written(folder, code, name="given.py"):
    file = folder / name
    file.write_text(textwrap.dedent(code))
    return file


@contextmanager
def soft_limit(descriptors):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_64_episodes_with_random_faults_while_their_server_is_killed_twice(
    environment_file,  # noqa: F811
    tmp_path,
    mark,  # noqa: F811
    monkeypatch,
):
    servers, draw = [], random.Random(0)

    class Watched(pools.EnvironmentServer):
        def __init__(self, *given):
            super().__init__(*given)
            servers.append(self)

    monkeypatch.setattr(pools, "EnvironmentServer", Watched)
    quick = [name for name in FAULTS if name not in ("hang", "hang for ever", "hang in close", "print")]
    faults = [draw.choice(quick) if draw.random() < 0.4 else None for _ in range(64)]
    scripts = [["wait", "7" if fault is None else fault, "wait", "done"] for fault in faults]

    def begun():
        return len(list(tmp_path.iterdir()))  # episodes

    def kill_twice():
        wait_until(lambda: begun() >= 8, 240)
        os.kill(servers[0].process.pid, signal.SIGKILL)
        wait_until(lambda: len(servers) == 2, 240)
        most = max(24, begun() + 8)  # the second server has begun some of them
        wait_until(lambda: begun() >= most, 240)
        os.kill(servers[1].process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_twice, daemon=True)
    killer.start()
    records, _, _ = run(environment_file, scripts, limits=LIMITS, rows=rows_in(tmp_path, 64), most=12)
    killer.join(240)
    assert not killer.is_alive() and len(servers) == 3
    for fault, record in zip(faults, records, strict=True):
        expected = FAULTS.get(fault or "", (Ending.DONE, None))[0]
        assert record.ending in (expected, Ending.EXITED), (fault, record.failure)
        assert (record.failure is None) == (record.ending is Ending.DONE) == (record.reward is not None)
    exited = [fault for fault, record in zip(faults, records, strict=True) if record.ending is Ending.EXITED]
    own = [fault for fault in exited if fault is not None and FAULTS[fault][0] is Ending.EXITED]
    assert 2 <= len(exited) - len(own) <= 2 * 12  # those that ran when their server was killed
    wait_until(lambda: not processes(mark))


def test_places_are_those_that_descriptors_allow(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(pools, "allowed_connections", lambda wanted: asked.append(wanted) or min(wanted, 90))
    assert pools.allowed_places(EnvironmentSetup("x:y", {}, LIMITS), 64) == 64
    assert caplog.text == ""
    assert pools.allowed_places(AgentSetup(path="x:y"), 64) == 22
    assert asked == [64, 256]
    assert "At most 22 agents run at a time in place of 64 (max_environments): `ulimit -n`" in caplog.text


@pytest.mark.skipif(HARD_LIMIT < 1024, reason="the hard limit of descriptors is lower")
def test_the_soft_limit_of_descriptors_is_raised_for_all_places():
    with soft_limit(300):
        assert pools.allowed_places(EnvironmentSetup("x:y", {}, LIMITS), 512) == 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 512 + http.SPARE_DESCRIPTORS


def test_without_a_descriptor_an_episode_fails_and_the_run_goes_on(environment_file, tmp_path, monkeypatch):  # noqa: F811
    real, calls = pools.socket.socketpair, []

    def socketpair():
        calls.append(None)
        if len(calls) == 3:  # the first one is the server's
            raise OSError(24, "Too many open files")
        return real()

    monkeypatch.setattr(pools.socket, "socketpair", socketpair)
    records, _, _ = run(environment_file, [["done"]] * 4, rows=rows_in(tmp_path, 4), most=1)
    assert sorted(record.ending.value for record in records) == ["done", "done", "done", "environment exited"]
    [failed] = [record.failure for record in records if record.failure]
    assert failed == "no connection to its process could be opened (Too many open files); raise `ulimit -n`"


def test_output_has_a_prefix_whole_lines_and_no_control_characters(capsys):
    output = Output("environment")
    with output.written() as descriptor:
        os.write(descriptor, b"\x1b]0;owned\x07\x1b[2Jbegun ")
        os.write(descriptor, b"and ended\n10 %\r100 %\r\nlast")
    output.close()
    assert capsys.readouterr().err.splitlines() == [
        "environment: \ufffd]0;owned\ufffd\ufffd[2Jbegun and ended",
        "environment: 100 %",
        "environment: last",
    ]


def test_the_output_is_shown_up_to_its_limit_and_then_counted(capsys, caplog, monkeypatch):
    monkeypatch.setattr("rloom.episodes.output.OUTPUT_BYTES", 20)
    output = Output("agent")
    with output.written() as descriptor:
        os.write(descriptor, b"first line\nsecond line\nx\n")
    output.close()
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("agent: ")]
    assert shown == ["agent: first line"]
    assert "14 bytes that environments have printed are not shown" in caplog.text


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
PLACES = """
    def helper(row):
        return row["nokey"]

    class Game:
        def reset(self, **row):
            if row["fault"] == "reset":
                helper(row)

        def look(self) -> str:
            '''Look.'''
            return {}["unseen"]

        def get_reward(self):
            return helper({})
"""


def test_errors_name_file_line_and_function_and_the_traceback_is_shown_once(tmp_path, capsys):
    file = written(tmp_path, PLACES)
    rows = {n: {"fault": "reset" if n < 3 else ""} for n in range(4)}
    limits = EpisodeLimits(4000, turns=8, call_s=20.0)
    pool = EnvironmentPool(EnvironmentSetup(f"{file}:Game", {}, limits), most=4)
    tools = pool.load()
    records, _ = agent_runs.run(
        EnvironmentDriver(pool, tools),
        4,
        answer=lambda number, turn: '<tool_call>{"name": "look", "arguments": {}}</tool_call>' if turn < 2 else "7",
        limits=limits,
        rows=rows,
    )
    assert {record.failure for record in records} == {"KeyError: 'nokey' (given.py:3 in helper)"}
    error = capsys.readouterr().err
    assert error.count("Traceback (most recent call last)") == 1
    assert "in reset" in error
    told = "environment: the tool look raised KeyError: 'unseen' (given.py:12 in Game.look); the policy reads the error"
    assert error.count(told) == 1


def test_the_policy_reads_the_whole_error_of_a_tool_also_if_it_has_no_text(tmp_path):
    file = written(
        tmp_path,
        """
        class Odd(Exception):
            def __str__(self):
                raise ValueError

        def look() -> str:
            '''Look.'''
            raise Odd

        def ask() -> str:
            '''Ask.'''
            raise ValueError("first\\nsecond")

        TOOLS = [look, ask]
        """,
    )
    pool = EnvironmentPool(EnvironmentSetup(f"{file}:TOOLS", {}, EpisodeLimits(4000, call_s=20.0)), most=1)
    tools = pool.load()
    answers = [CALL, CALL.replace("look", "ask"), "7"]
    [record], _ = agent_runs.run(EnvironmentDriver(pool, tools), answer=lambda number, turn: answers[turn])
    assert record.ending is Ending.DONE
    calls = [(call.result, call.error) for node in record.episode.nodes for call in node.calls]
    assert calls == [
        ("Error: Odd: ", "Odd: "),
        ("Error: ValueError: first\nsecond", "ValueError: first\nsecond"),
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_this_name", r"ModuleNotFoundError: .*given\.py:1 in <module>"),
        (
            "class Game:\n    def __init__(self, high):\n        raise KeyError('x')",
            r"KeyError: 'x' \(given\.py:3 in Game\.__",
        ),
        (
            "class Game:\n    def __init__(self): ...",
            r"unexpected keyword argument 'high'; it is called with .*environment_kwargs: high",
        ),
        ("raise SystemExit(3)", r"SystemExit: 3 \(given\.py:1"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_configuration_error_with_its_key(tmp_path, code, reason):
    file = written(tmp_path, code)
    setup = EnvironmentSetup(f"{file}:Game", {"high": 9}, LIMITS, name="my_game")
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.multi_turn\.environment=.*" + reason):
        EnvironmentPool(setup, most=1).load()


def test_keys_of_rloom_are_not_passed_on(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "JUDGE_KEY", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")
    file = written(
        tmp_path,
        """
        import os
        SEEN = sorted(name for name, value in os.environ.items() if value == "secret")

        async def agent(base_url, row, **kwargs):
            raise ValueError(" ".join(SEEN))
        """,
    )
    setup = AgentSetup(path=f"{file}:agent", withheld=("HF_TOKEN", "WANDB_API_KEY", "JUDGE_KEY"))
    [record], _ = agent_runs.run(agent_runs.agent_driver(setup))
    assert record.failure.startswith("ValueError: SEARCH_KEY (")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_result_that_an_agent_did_not_return_fails_its_episode(tmp_path):
    file = written(
        tmp_path,
        """
        import json, os

        async def agent(base_url, row, **kwargs):
            links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{fd}")}
            connection = min(fd for fd, link in links.items() if fd > 2 and "socket" in link)
            body = json.dumps({"result": {"reward": 100.0}}).encode()
            os.write(connection, len(body).to_bytes(8, "big") + body)
            return 0.0
        """,
    )
    [record], _ = agent_runs.run(agent_runs.agent_driver(AgentSetup(path=f"{file}:agent")))
    assert (record.ending, record.reward) == (Ending.WRONG_REPLY, None)
    assert record.failure.startswith("its process sent a reply without a request")


class NeverEnds:
    async def run(self, run):
        await asyncio.sleep(600)

    async def end(self): ...

    def close(self): ...


def test_an_interrupted_step_does_not_wait_for_ever_for_environments(monkeypatch):
    monkeypatch.setattr("rloom.episodes.runner.STOP_S", 1.0)
    runner = EpisodeRunner(NeverEnds(), texts_for("chatml"), LIMITS)
    prompt = Prompt(0, agent_runs.QUESTION, "", (), "game")
    planned = [EpisodeRow(n, 0, prompt, lambda turn: turn) for n in range(3)]
    with closing(runner), runner.started(planned, Sampling(10), shares=1) as turns:
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            assert turns.next_requests(0) == []
        runner.interrupted = True
        start_s = time.monotonic()
        with pytest.raises(TrainingError, match="for 1 s its 3 unfinished episodes have waited for their environments"):
            while time.monotonic() < start_s + 60:
                turns.next_requests(0)
        assert time.monotonic() - start_s >= 1


def test_a_server_that_is_late_keeps_its_episodes_and_is_counted(environment_file, monkeypatch, caplog):  # noqa: F811
    pool = EnvironmentPool(EnvironmentSetup(f"{environment_file}:Game", {}, LIMITS), most=2)
    pool.load()
    server = pool.server

    async def forked_twice():
        first = await pool.process()
        os.kill(server.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(pools, "FORK_LIMIT_S", 0.5)
        forking = asyncio.create_task(pool.process())
        await turns_until(lambda: "are forked from did not answer in 0.5 s" in caplog.text)
        os.kill(server.process.pid, signal.SIGCONT)
        second = await forking
        os.kill(first.pid, 0)  # it runs
        return [first, second]

    try:
        with_late = asyncio.run(forked_twice())
    finally:
        pool.close()
    assert (pool.late_forks, pool.restarts, pool.server) == (1, 0, server)
    for process in with_late:
        process.close()


async def turns_until(condition):
    """Of the event loop."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_server_whose_loading_was_not_waited_for_forks_once_it_is_loaded(tmp_path):
    file = written(
        tmp_path,
        """
        import pathlib, time
        begun = pathlib.Path(__file__).with_name("begun")
        if begun.exists():
            begun.with_name("again").touch()
            while not begun.with_name("waited for").exists():
                time.sleep(0.02)
        begun.touch()

        def add(a: int, b: int) -> int:
            '''Add.

            Args:
                a: One.
                b: Other.
            '''
            return a + b

        TOOLS = [add]
        """,
    )
    pool = EnvironmentPool(EnvironmentSetup(f"{file}:TOOLS", {}, LIMITS), most=1)
    pool.load()
    ended = pool.server
    ended.process.kill()

    async def cancelled_and_again():
        waiting = asyncio.create_task(pool.process())
        await turns_until((tmp_path / "again").exists)
        waiting.cancel()
        await asyncio.wait([waiting])
        again = asyncio.create_task(pool.process())
        await turns_until(lambda: pool.restarts == 2)
        (tmp_path / "waited for").touch()
        return await again

    try:
        process = asyncio.run(cancelled_and_again())
    finally:
        pool.close()
    process.close()
    assert pool.server is process.server is not ended
    assert pool.restarts == 2  # the second one has found it loaded
