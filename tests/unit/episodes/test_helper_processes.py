"""The process that others are forked from: what the user's file started, and commands that it cannot read in time."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from rloom.episodes import pool as pools
from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.pool import EnvironmentPool
from rloom.net.loop import EventLoop
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
FILE = textwrap.dedent(
    """
    import subprocess, sys

    def sleeper():
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    HELPER = sleeper()

    class Game:
        def reset(self, **row):
            return str(HELPER)

        def step(self, text):
            return str(sleeper()), 1.0, True
    """
)
QUESTION = ({"role": "user", "content": ""},)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def opened(tmp_path: Path) -> EnvironmentPool:
    file = tmp_path / "helped.py"
    file.write_text(FILE)
    pool = EnvironmentPool(EnvironmentSetup(f"{file}:Game", {}, EpisodeLimits(100)), most=4)
    pool.load()
    return pool


async def one_episode(pool: EnvironmentPool) -> tuple[int, int]:
    """The processes that the file and the episode started."""
    async with pool.episode() as environment:
        [message] = await environment.begin({}, QUESTION, 0)
        seen = await environment.act("x")
        await environment.end()
    return int(message["content"]), int(seen.messages[0]["content"])


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_the_file_started_serves_all_episodes_and_ends_with_their_server(tmp_path, is_killed):
    pool, loop = opened(tmp_path), EventLoop("test")
    try:
        for _ in range(2):
            helper, own = loop.run(one_episode(pool))
            wait_until(lambda own=own: not is_running(own))  # it is found and killed; the helper is not
            assert is_running(helper)
        if is_killed:
            os.kill(pool.server.process.pid, signal.SIGKILL)
    finally:
        loop.close()
        pool.close()
    wait_until(lambda: not is_running(helper))


def test_a_burst_of_commands_waits_until_the_server_reads_them(tmp_path):
    pool, loop = opened(tmp_path), EventLoop("test")
    server, most_pid = pool.server, 1 << 30  # no process has it

    async def burst() -> None:
        os.kill(server.process.pid, signal.SIGSTOP)
        for _ in range(3_000):
            server.kill(most_pid)
        assert server.unsent and server.process.poll() is None
        forked = asyncio.create_task(server.fork(60.0))
        await asyncio.sleep(0.1)
        assert not forked.done()  # it is sent after them
        os.kill(server.process.pid, signal.SIGCONT)
        process = await forked
        assert process is not None and not server.unsent and server.sending is None
        process.close()

    try:
        loop.run(burst())
        assert loop.run(one_episode(pool))[0] > 0
        assert pool.restarts == 0
    finally:
        loop.close()
        pool.close()


def test_a_server_that_reads_no_command_for_a_long_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "STUCK_S", 0.3)
    pool, loop = opened(tmp_path), EventLoop("test")

    async def burst() -> None:
        server = pool.server
        os.kill(server.process.pid, signal.SIGSTOP)
        for _ in range(3_000):
            server.kill(1 << 30)
        async with asyncio.timeout(60):
            while server.process.poll() is None:
                await asyncio.sleep(0.05)
        assert server.process.returncode == -signal.SIGKILL

    try:
        loop.run(burst())
        loop.run(one_episode(pool))  # another one was started
        assert pool.restarts == 1
    finally:
        loop.close()
        pool.close()
