"""The process that the environments' processes are forked from, and such a process.

The user's files are imported once, here. A process serves one episode, and closes its environment at the end, also when
the driver has ended. When a call does not end in its time, an error is raised in it, and if that has no effect the
driver has the process killed. Processes that it leaves behind become children of this one, which kills them. Those that
the user's files started while they were imported serve all episodes, and end with this process.
"""

import ctypes
import io
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rloom.episodes.agents.load import load_agent
from rloom.episodes.agents.process import FAILED, RESULT, RUN, AgentFailed, AgentSetup, LoadedAgent
from rloom.episodes.base import (
    ACT,
    BEGIN,
    CLOSE_S,
    COMMAND_BYTES,
    END,
    FORK,
    NO_PROCESS,
    NUMBER,
    Environment,
    EnvironmentSetup,
    ToolSchema,
)
from rloom.episodes.contracts.calls import CallTimeout
from rloom.episodes.contracts.table import UserCode, load_code
from rloom.episodes.stand_ins import install_stand_ins
from rloom.episodes.user_errors import note_failure, one_line, with_noted
from rloom.interrupts import outlive_sigterm
from rloom.rewards.framing import exactly, framed, read_frame, write_all
from rloom.runtime.fork_server import SET_PARENT_DEATH_SIGNAL, end_with_parent

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
        prctl = ctypes.CDLL(None).prctl
        prctl(SET_CHILD_SUBREAPER, 1)
        # when the driver has died, a process that was stopped goes on, finds that and ends
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines of several processes do not mix
    setup: EnvironmentSetup | AgentSetup = pickle.loads(read_frame(control.recv))
    install_stand_ins()
    try:
        loaded, serve_one = load_agents(setup) if isinstance(setup, AgentSetup) else load_environment(setup)
        answer = as_reply(loaded)
    except BaseException as error:  # also an exit
        note_failure(error)
        reason = one_line(error)
        if isinstance(error, TypeError) and setup.kwargs:
            reason += f"; it is called with {setup.kwargs_key}: {', '.join(setup.kwargs)}"
        write_all(control.fileno(), as_reply({"failed": reason}))
        return
    write_all(control.fileno(), answer)
    serve(control, serve_one)


ServeOne = Callable[[socket.socket], None]


def load_environment(setup: EnvironmentSetup) -> tuple[Mapping[str, Any], ServeOne]:
    code = load_code(setup)
    tools, names = code.described()
    return {"tools": tools, "names": asdict(names)}, partial(serve_episode, code=code, tools=tools)


def load_agents(setup: AgentSetup) -> tuple[Mapping[str, Any], ServeOne]:
    agent = load_agent(setup)
    return {"by_url": agent.by_url, "loops": agent.loops}, partial(serve_agent, agent=agent)


def serve_agent(connection: socket.socket, agent: LoadedAgent) -> None:
    """One episode. The driver has the process killed after its reply."""
    number, what, task = pickle.loads(read_frame(connection.recv))
    assert what == RUN
    set_seed(task.seed)
    try:
        answer = as_reply({RESULT: agent.run(connection, task), NUMBER: number})
    except AgentFailed as failed:
        answer = as_reply({FAILED: str(failed), NUMBER: number})
    except BaseException as error:  # of the user's code; also an exit
        note_failure(error)
        answer = as_reply({FAILED: one_line(error), NUMBER: number})
    write_all(connection.fileno(), answer)
    connection.recv(1)


def serve(control: socket.socket, serve_one: ServeOne) -> None:
    """Fork a process for every connection that the driver sends, and kill those that it names, until it ends."""
    children: set[int] = set()
    helpers = own_children()  # that the user's file has started, for all episodes; they end with this process
    while True:
        ready, _, _ = select.select([control], [], [], 0.5)
        if ready:
            what, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not what:
                break
            number = exactly(COMMAND_BYTES, control.recv)  # of the request, or of the process
            if what == FORK:
                os.set_inheritable(fds[0], False)  # programs that a tool starts must not write replies
                pid = forked(control, fds[0], serve_one, children)
                control.sendall(number + pid.to_bytes(COMMAND_BYTES, "big"))
            elif (pid := int.from_bytes(number, "big")) in children:
                kill_group(pid)
        reap(children, helpers)
    end_s = time.monotonic() + CLOSE_S  # the processes find that the driver has ended, and close their environments
    while children and time.monotonic() < end_s:
        time.sleep(0.02)
        reap(children, helpers)
    for pid in children:
        kill_group(pid)
    with suppress(ChildProcessError):
        while True:  # killed processes leave further ones behind
            kill(own_children())
            os.waitpid(-1, 0)


def forked(control: socket.socket, connection: int, serve_one: ServeOne, children: set[int]) -> int:
    sys.stdout.flush()  # what the user's file has printed is not each process's
    sys.stderr.flush()
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # no memory, or more processes than are allowed
        os.close(connection)
        return NO_PROCESS
    if pid == 0:
        try:
            control.close()
            # takes effect once the memory of a killed parent is free, up to some hundredths of a second later
            end_with_parent(server)
            os.setsid()  # a kill of its process group ends what it has started
            serve_one(socket.socket(fileno=connection))
        except (EOFError, OSError):
            pass  # the driver closed the connection
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(0)
    children.add(pid)
    os.close(connection)
    return pid


def kill_group(pid: int) -> None:
    for signal_group in (os.killpg, os.kill):  # before it is the leader of a group, the first one fails
        with suppress(ProcessLookupError, PermissionError):
            signal_group(pid, signal.SIGKILL)


def reap(children: set[int], helpers: set[int]) -> None:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            children.discard(pid)
            helpers.discard(pid)
    kill(own_children() - children - helpers)  # their parent, an environment's process, has ended


def own_children() -> set[int]:
    with suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def serve_episode(connection: socket.socket, code: UserCode, tools: tuple[ToolSchema, ...]) -> None:
    """`tools`: those that episodes have, unless their beginning says something else."""
    environment: Environment | None = None

    def answer_to(what: str, *arguments: Any) -> Mapping[str, Any]:
        nonlocal environment
        if what == BEGIN:
            row, messages, seed = arguments
            set_seed(seed)
            environment = code.environment(row, seed)
            begun = environment.begin(row, messages)
            own_tools = None if environment.tools == tools else environment.tools
            return {"messages": begun, "tools": own_tools, "reward_of_steps": environment.reward_of_steps}
        assert environment is not None
        if what == ACT:
            return environment.act(*arguments).to_json()
        assert what == END
        return {"reward": environment.end(), **asdict(environment.report())}

    what = BEGIN
    try:
        while what != END:
            number, what, *arguments = pickle.loads(read_frame(connection.recv))
            try:
                answer = as_reply({**answer_to(what, *arguments), NUMBER: number})
            except BaseException as error:  # of the user's code; also an exit
                note_failure(error)
                in_time = not isinstance(error, CallTimeout)
                answer = as_reply({"failed": one_line(error), "in_time": in_time, NUMBER: number})
            write_all(connection.fileno(), answer)
    finally:
        if environment is not None:
            closed(environment)


def set_seed(seed: int) -> None:
    """What an environment or an agent draws is a function of its episode: a resumed run draws the same. Forked
    processes begin with copies of the generators of numpy and torch."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed % 2**63)


def closed(environment: Environment) -> None:
    """An error here changes no result. The driver has a process killed that does not end."""
    try:
        environment.close()
    except BaseException:
        traceback.print_exc()


def as_reply(answer: Mapping[str, Any]) -> bytes:
    return framed(json.dumps(with_noted(answer)).encode(errors="replace"))


if __name__ == "__main__":
    main()
