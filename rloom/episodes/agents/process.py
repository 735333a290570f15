"""Agents that ask for their answers, in the processes that run them.

| what the user gives | known from | how it asks |
| --- | --- | --- |
| `async def agent(base_url, row, **kwargs)` | | at a URL |
| a class with `run(self, data, **extra)` | AReaL | at a URL |
| a program | | at a URL |
| a class of AgentLoopBase | verl | with tokens |
| a class of AgentExecutorBase or AgentInstanceBase | OpenRLHF | with tokens |

Imports no torch. A process runs one episode, and is killed after it, with all that it has started.
driver → process: (number, "run", task), then ("answer", number, answer) for each question, as pickles.
process → driver, as JSON: {"ask": [number, tokens, max_tokens, stop texts, stop tokens]} any number of times, then
{"result": ...} or {"failed": reason} with the number of the task.
"""

import asyncio
import inspect
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rloom.episodes.base import WITHHELD
from rloom.episodes.kinds import AGENT
from rloom.errors import ConfigError
from rloom.types import Message, is_usable

RUN, ANSWER, ASK, RESULT, FAILED = "run", "answer", "ask", "result", "failed"
PATH_KEY, COMMAND_KEY, KWARGS_KEY = f"{AGENT}.path", f"{AGENT}.command", f"{AGENT}.kwargs"
LOOPS = ("agent_loop_config_path", "default_agent_loop")  # a YAML file, file.py:name
UNREAD = "unread"  # of a result: the last line of a program that gives no reward
SHELL = frozenset(("|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1"))
OWN_HOSTS = ("127.0.0.1", "localhost")  # of the policy's address
MOST_OUTPUT = 1 << 16  # bytes of a program's output that are kept, from its end
RETURNS = "return a finite number, {'reward': ...}, {'rewards': {answer id: ...}} or None"


@dataclass(frozen=True)
class AgentSetup:
    """What agents are made of. The first three exclude each other."""

    path: str | None = None  # file.py:name or module:name
    command: str | None = None
    loops: tuple[str, ...] = ()  # YAML files of agent loops, and file.py:name of one
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rewards_over_http: bool = False  # the row of a program has the reward key
    config: Mapping[str, Any] = field(default_factory=dict)  # of the run, as agent loops read it
    tokenizer: bytes = b""  # pickled
    withheld: tuple[str, ...] = WITHHELD  # variables that its processes do not get

    noun, plural, kwargs_key = "agent", "agents", KWARGS_KEY  # in sentences

    @property
    def key(self) -> str:
        """What selects the user's code, in sentences."""
        given = {PATH_KEY: self.path, COMMAND_KEY: self.command}
        loops = {f"{AGENT}.{LOOPS[':' in loop]}": loop for loop in self.loops}
        return " and ".join(f"{key}={value}" for key, value in {**given, **loops}.items() if value is not None)


@dataclass(frozen=True)
class Task:
    """One episode."""

    row: Mapping[str, Any]  # the columns of the data, `prompt` as messages
    messages: tuple[Message, ...]
    text: str  # of the messages, as the chat template writes them
    ground_truth: Any
    sampling: Mapping[str, Any]  # temperature, top_p, top_k
    max_tokens: int  # after the prompt
    max_length: int  # of prompt and answers
    base_url: str = ""
    api_key: str = ""
    reward_key: str = ""  # for /rl/set_reward
    loop: str = ""  # the name of the agent loop
    seed: int = 0  # of what the agent draws

    @property
    def variables(self) -> dict[str, str]:
        """Where SDKs look for the address and the key."""
        openai, key = f"{self.base_url}/v1", self.api_key
        return {
            "OPENAI_BASE_URL": openai,
            "OPENAI_API_BASE": openai,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": key,
        }


def without_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """NO_PROXY and no_proxy with the policy's address. A proxy of the cluster cannot reach it, and would get prompts
    and keys. Clients prefer one of the two names each, so both have the same value."""
    given = variables.get("no_proxy") or variables.get("NO_PROXY")
    # a * beside other names is no wildcard
    value = "*" if given == "*" else ",".join(filter(None, (given, *OWN_HOSTS)))
    return {"NO_PROXY": value, "no_proxy": value}


@dataclass(frozen=True)
class TokenAnswer:
    """What an agent that asks with tokens gets. Without tokens: a limit of the episode is reached."""

    tokens: list[int]  # with the stop token
    logprobs: list[float]
    finished: bool  # with a stop token


class AgentFailed(Exception):
    """With the reason as its text."""


@dataclass(frozen=True)
class LoadedAgent:
    """The user's agent, in the process that the others are forked from. `run` returns the result, as JSON can have it.

    `loops`: the names of the agent loops.
    """

    run: Callable[[socket.socket, Task], Any]
    by_url: bool
    loops: tuple[str, ...] = ()


def by_url_function(setup: AgentSetup, found: Callable[..., Any]) -> Callable[[socket.socket, Task], Any]:
    """Of a function, or of a class with `run(data, **extra)`."""
    is_class = inspect.isclass(found)
    called = getattr(found, "run", None) if is_class else found
    if called is None:
        raise ConfigError(
            f"{PATH_KEY}={setup.path} is a class without `run`; write `async def run(self, data, **extra)`"
        )
    own = {} if is_class else setup.kwargs
    accepted = inspect.signature(called).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())

    def given(task: Task) -> dict[str, Any]:
        """Of what rloom gives: the arguments that it takes. The reward key only by its name."""
        found: dict[str, Any] = {"api_key": task.api_key}
        if is_class:
            found |= {"base_url": f"{task.base_url}/v1", "http_client": None}
        found = {name: value for name, value in found.items() if takes_all or name in accepted} | dict(own)
        return found | {"reward_key": task.reward_key} if "reward_key" in accepted else found

    nothing = Task({}, (), "", None, {}, 0, 0)
    try:
        inspect.signature(called).bind(None, None, **given(nothing))
    except TypeError as error:
        raise ConfigError(
            f"{PATH_KEY}={setup.path} has the signature {inspect.signature(called)} ({error}); write "
            f"`async def agent(base_url, row, **kwargs)`, with the names of {KWARGS_KEY}"
        ) from error

    def run(task: Task) -> Any:
        os.environ.update(task.variables)
        if is_class:
            return call(found(**setup.kwargs).run, dict(task.row), **given(task))
        return call(found, f"{task.base_url}/v1", dict(task.row), **given(task))

    return lambda connection, task: as_result(run(task))


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function may be a coroutine."""

    async def awaited() -> Any:
        return await found

    found = function(*arguments, **named)
    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def as_result(found: Any) -> dict[str, Any]:
    """What an agent returned: {"reward": ...}, {"rewards": {answer id: ...}}, both, or nothing."""
    try:
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            return {"reward": number(found)}
        named = [found[name] for name in ("reward", "score") if name in found]
        of_answers = found.get("rewards") if named or "rewards" in found else found
        reward = next((one for one in named if one is not None), None)
        result: dict[str, Any] = {} if reward is None else {"reward": number(reward)}
        if of_answers:
            result["rewards"] = {str(name): number(value) for name, value in of_answers.items()}
        return result
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError):
        raise AgentFailed(f"the agent returned {repr(found)[:100]}; {RETURNS}") from None


def number(found: Any) -> float:
    """Of a number, or of a tensor or an array that has one. A text is none."""
    if isinstance(found, str | bytes):
        raise TypeError(f"{found[:100]!r} is not a number")
    value = float(found)
    if not is_usable(value):
        raise ValueError(f"{value} is not a finite number of usual size")
    return value


def by_url_program(command: str, rewards_over_http: bool) -> Callable[[socket.socket, Task], Any]:
    words = command_words(command)

    def run(connection: socket.socket, task: Task) -> dict[str, Any]:
        # not in the environment, which programs that it starts inherit
        return run_command(words, task, {"reward_key": task.reward_key} if rewards_over_http else {})

    return run


def command_words(command: str) -> list[str]:
    """The program and its arguments. ConfigError: it cannot be started."""
    shell = f"No shell runs it; with one: {COMMAND_KEY}=\"bash -c '...'\""
    try:
        words, quoted = shlex.split(command), shlex.split(command, posix=False)
    except ValueError as error:
        raise ConfigError(f"{COMMAND_KEY}={command}: {error}; close it") from None
    if operators := SHELL.intersection(quoted):
        raise ConfigError(f"{COMMAND_KEY}={command}: {min(operators)!r} would be an argument of the program. {shell}")
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"{COMMAND_KEY}={command}: there is no program {words[0] if words else ''!r}; give its path. {shell}"
        )
    file = next((word for word in words[1:] if not word.startswith("-") or word in ("-c", "-m")), "")
    if os.path.basename(words[0]).startswith("python") and file.endswith(".py") and not os.path.isfile(file):
        raise ConfigError(f"{COMMAND_KEY}={command}: {os.path.abspath(file)} does not exist; correct the path")
    return words


def run_command(command: list[str], task: Task, extra: Mapping[str, str]) -> dict[str, Any]:
    """The row and `extra` are its standard input. Its last line says the reward."""
    row = json.dumps({**task.row, **extra}, default=str).encode()
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, env={**os.environ, **task.variables}, **pipes)
    assert process.stdin and process.stdout and process.stderr
    tails = {process.stdout: bytearray(), process.stderr: bytearray()}
    threads = [threading.Thread(target=read_tail, args=pair, daemon=True) for pair in tails.items()]
    threads.append(threading.Thread(target=feed, args=(process.stdin, row), daemon=True))
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join(1.0)  # a process that it left behind may hold the pipe open
    written, errors = (last_line(bytes(tail)) for tail in tails.values())
    if code:
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise AgentFailed(f"the program ended with {ending}{f': {errors}' if errors else ''}")
    return reward_in(written)


def reward_in(line: str) -> dict[str, Any]:
    """A number, true, false, or JSON as a function returns it. Any other line gives no reward, and is shown once."""
    try:
        found = json.loads(line.lower() if line in ("True", "False") else line)
    except ValueError:
        found = None
    has_reward = isinstance(found, dict) and not found.keys().isdisjoint(("reward", "rewards", "score"))
    return as_result(found) if has_reward or isinstance(found, int | float) else {UNREAD: line}


def read_tail(pipe: Any, kept: bytearray) -> None:
    while part := os.read(pipe.fileno(), 1 << 16):
        kept += part
        del kept[:-MOST_OUTPUT]


def feed(pipe: Any, data: bytes) -> None:
    try:
        pipe.write(data)
        pipe.close()
    except OSError:
        pass  # it does not read its input


def last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:500] if lines else ""
