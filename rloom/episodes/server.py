"""The process that the environments' processes are forked from, and such a process.

The user's files are imported once, here. A process serves one episode at a time. When a call does not end in its time,
an error is raised in it, and if that has no effect the driver kills the process. Processes that it leaves behind become
children of this one, which kills them.
"""

import ctypes
import json
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rloom.episodes.agents.process import FAILED, RESULT, RUN, AgentFailed, AgentSetup, LoadedAgent, load_agent
from rloom.episodes.base import ACT, BEGIN, END, Environment, Setup, ToolSchema
from rloom.episodes.contracts.table import KEY, UserCode, load_code
from rloom.episodes.stand_ins import install_stand_ins
from rloom.errors import RloomError
from rloom.interrupts import outlive_sigterm
from rloom.rewards.framing import framed, read_frame, write_all
from rloom.runtime.fork_server import end_with_parent

NICENESS = 5  # generation gets most of a core that both want
SET_CHILD_SUBREAPER = 36  # of prctl, on Linux


def main() -> None:
    """Started with its connection to the driver as stdin."""
    os.nice(NICENESS)
    outlive_sigterm()
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    setup: Setup | AgentSetup = pickle.loads(read_frame(control.recv))
    install_stand_ins()
    if isinstance(setup, AgentSetup):
        main_of_agents(control, setup)
        return
    try:
        code = load_code(setup)
        tools = code.schemas()
    except Exception as error:
        reason = str(error) if isinstance(error, RloomError) else f"{KEY}={setup.reference}: {one_line(error)}"
        reply(control, {"failed": reason})
        return
    reply(control, {"tools": tools})
    serve(control, partial(serve_episodes, code=code, tools=tools))


def main_of_agents(control: socket.socket, setup: AgentSetup) -> None:
    try:
        agent = load_agent(setup)
    except Exception as error:
        reply(control, {"failed": str(error) if isinstance(error, RloomError) else one_line(error)})
        return
    reply(control, {"by_url": agent.by_url, "loops": agent.loops})
    serve(control, partial(serve_agent, agent=agent))


def serve_agent(connection: socket.socket, agent: LoadedAgent) -> None:
    """One episode. The driver kills the process after its reply."""
    what, task = pickle.loads(read_frame(connection.recv))
    assert what == RUN
    try:
        answer = {RESULT: agent.run(connection, task)}
    except AgentFailed as failed:
        answer = {FAILED: str(failed)}
    except BaseException as error:  # of the user's code, which may also exit
        answer = {FAILED: one_line(error)}
    reply(connection, answer)
    connection.recv(1)


def serve(control: socket.socket, serve_one: Callable[[socket.socket], None]) -> None:
    """Fork a process for every connection that the driver sends, until the driver ends."""
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([control], [], [], 0.5)
        if ready:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                break
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                try:
                    control.close()
                    end_with_parent(server)
                    os.setsid()  # a kill of its process group ends what it has started
                    serve_one(socket.socket(fileno=fds[0]))
                except (EOFError, OSError):
                    pass  # the driver closed the connection
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            children.add(pid)
            for fd in fds:
                os.close(fd)
            control.sendall(pid.to_bytes(4, "big"))
        reap(children)
    for pid in children:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    kill_left_behind(set())


def reap(children: set[int]) -> None:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            children.discard(pid)
    kill_left_behind(children)


def kill_left_behind(children: set[int]) -> None:
    """Processes whose parent, an environment's process, has ended."""
    with suppress(OSError):
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in map(int, listed):
            if pid not in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def serve_episodes(connection: socket.socket, code: UserCode, tools: tuple[ToolSchema, ...]) -> None:
    """`tools`: those that episodes have, unless their beginning says something else."""
    environment: Environment | None = None
    try:
        while True:
            what, *arguments = pickle.loads(read_frame(connection.recv))
            try:
                answer: dict[str, Any]
                if what == BEGIN:
                    row, messages = arguments
                    environment = code.environment(row)
                    answer = {"messages": environment.begin(row, messages)}
                    answer["tools"] = None if environment.tools == tools else environment.tools
                elif what == ACT:
                    assert environment is not None
                    answer = environment.act(*arguments).to_json()
                else:
                    assert what == END and environment is not None
                    answer = {"reward": environment.end(), **asdict(environment.report())}
                    ended, environment = environment, None
                    closed(ended)
            except Exception as error:  # of the user's code
                answer = {"failed": one_line(error)}
            reply(connection, answer)
    finally:
        if environment is not None:
            closed(environment)


def closed(environment: Environment) -> None:
    """An error here changes no result."""
    try:
        environment.close()
    except Exception:
        traceback.print_exc()


def reply(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    write_all(connection.fileno(), framed(json.dumps(answer).encode(errors="replace")))


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:500]


if __name__ == "__main__":
    main()
