"""Agents that ask with tokens, in the processes that run them: verl's agent loops, and OpenRLHF's executors."""

import asyncio
import inspect
import json
import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rloom.episodes.agents.process import (
    ANSWER,
    ASK,
    AgentFailed,
    AgentSetup,
    LoadedAgent,
    Task,
    TokenAnswer,
    number,
)
from rloom.episodes.kinds import AGENT
from rloom.episodes.stand_ins.openrlhf import MultiTurnAgentExecutor
from rloom.episodes.stand_ins.verl_agent_loops import AGENT_LOOPS, DictConfigWrap, TokenOutput
from rloom.errors import ConfigError
from rloom.import_path import add_folder_of
from rloom.plugins import load_listed, load_plugin, type_and_message
from rloom.rewards.framing import framed

LOOPS_KEY, DEFAULT_KEY = f"{AGENT}.agent_loop_config_path", f"{AGENT}.default_agent_loop"
VERL_REGISTRY = "verl.experimental.agent_loop.agent_loop"
LENGTHS = ("max_tokens", "max_new_tokens")
STOPS = ("stop", "stop_token_ids")
# what the agent reads of an answer, not which one it gets
OUTPUTS = (
    *("logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens", "output_kind"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "output_text_buffer_length"),
)
# values of other parameters that change nothing
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_tokens": (0, 1),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "ignore_eos": (False,),
}
WHOLE_VOCABULARY = (-1, 0)  # as top_k
OUTPUT_FIELDS = {"prompt_ids", "response_ids", "response_mask", "reward_score"}
_LENGTH = struct.Struct("!Q")


class PolicyClient:
    """Asks the driver for answers. Several questions can be open at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sampling: Mapping[str, Any]) -> None:
        self.reader, self.writer, self.sampling = reader, writer, sampling
        self.waiting: dict[int, asyncio.Future[TokenAnswer]] = {}
        self.numbers = count()

    async def ask(self, tokens: Sequence[int], sampling: Mapping[str, Any]) -> TokenAnswer:
        """`sampling`: as the agent gave it. It can say where an answer ends; all else is as the run samples."""
        for name, value in sampling.items():
            same = NEUTRAL.get(name, (self.sampling.get(name),))
            if name == "top_k" and same[0] in WHOLE_VOCABULARY:
                same = WHOLE_VOCABULARY
            if name not in (*LENGTHS, *STOPS, *OUTPUTS) and value not in (None, [], {}, *same):
                raise ValueError(
                    f"sampling_params: {name}={value!r}, and the run samples with {same[0]!r}; the log-probs would be "
                    "those of another distribution. Set it for the run, or leave it out"
                )
        limits = [int(sampling[name]) for name in LENGTHS if sampling.get(name) is not None]
        number = next(self.numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        stop_tokens = [int(token) for token in sampling.get("stop_token_ids") or ()]
        asked = [number, [int(token) for token in tokens], min(limits, default=None), stop_texts(sampling), stop_tokens]
        question = json.dumps({ASK: asked})
        self.writer.write(framed(question.encode()))
        return await self.waiting[number]

    async def read_answers(self) -> None:
        while True:
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            what, number, answer = pickle.loads(await self.reader.readexactly(length))
            assert what == ANSWER
            waiting = self.waiting.pop(number)
            if not waiting.done():
                waiting.set_result(answer)


def stop_texts(sampling: Mapping[str, Any]) -> list[str]:
    found = sampling.get("stop") or []
    return [found] if isinstance(found, str) else [str(one) for one in found]


Agent = Callable[[PolicyClient, Task], Awaitable[dict[str, Any]]]  # returns the outputs, as the driver checks them


def run_with_policy(agent: Agent, connection: socket.socket, task: Task) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(sock=connection.dup(), limit=1 << 24)
        policy = PolicyClient(reader, writer, task.sampling)
        answers = asyncio.create_task(policy.read_answers())
        try:
            return await agent(policy, task)
        finally:
            answers.cancel()

    try:
        return asyncio.run(run())
    finally:
        connection.setblocking(True)  # asyncio has changed it, for both descriptors


@dataclass
class ServerManager:
    """verl's AsyncLLMServerManager."""

    policy: PolicyClient

    async def generate(
        self,
        request_id: str = "",
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        if image_data or video_data:
            raise ValueError("image_data and video_data are not supported; use prompts of text")
        answer = await self.policy.ask(prompt_ids, sampling_params)
        reason = "completed" if answer.finished else "length" if answer.tokens else "aborted"
        return TokenOutput(token_ids=answer.tokens, log_probs=answer.logprobs, stop_reason=reason)


@dataclass(frozen=True)
class Loop:
    """A class of AgentLoopBase, and its arguments."""

    made_by: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def load_loops(setup: AgentSetup) -> LoadedAgent:
    """From a YAML file that lists them, and one class as file.py:name."""
    loops: dict[str, Loop] = {}
    for place in setup.loops:
        is_class = ":" in place
        loops |= {place: Loop(load_plugin(DEFAULT_KEY, place))} if is_class else listed_loops(place)
    loops = registered_loops() | loops
    return LoadedAgent(loop_runner(setup, loops), by_url=False, loops=tuple(loops))


def loop_runner(setup: AgentSetup, loops: Mapping[str, Loop]) -> Callable[[socket.socket, Task], Any]:
    tokenizer, config = load_tokenizer(setup), OmegaConf.create(dict(setup.config))

    async def agent(policy: PolicyClient, task: Task) -> dict[str, Any]:
        loop = loops[task.loop]
        instance = loop.made_by(
            trainer_config=DictConfigWrap(config),
            server_manager=ServerManager(policy),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            dataset_config=DictConfigWrap(config.data),
            data_config=DictConfigWrap(config.data),
            **loop.kwargs,
        )
        sampling = {**task.sampling, "repetition_penalty": 1.0, "logprobs": True}
        extra = task.row.get("extra_info") or {}
        row = {
            **{name: extra.get(name, {}) for name in ("tools_kwargs", "interaction_kwargs")},
            "index": extra.get("index", 0),
            **{name: value for name, value in task.row.items() if name != "agent_name"},
            "raw_prompt": [dict(message) for message in task.messages],
        }
        found = await awaited(instance, instance.run(sampling, **row))
        outputs = list(found) if isinstance(found, list | tuple) else [found]
        for output in outputs:
            if not {*dir(output)} >= OUTPUT_FIELDS:
                raise AgentFailed(
                    f"run of {type(instance).__name__} returned {repr(output)[:100]}; return an AgentLoopOutput"
                )
        rewards = [output.reward_score for output in outputs]
        return {
            "outputs": [
                [[*map(int, output.prompt_ids), *map(int, output.response_ids)], mask_of(output)] for output in outputs
            ],
            "reward": None if not rewards or rewards[-1] is None else number(rewards[-1]),
        }

    return partial(run_with_policy, agent)


async def awaited(instance: Any, found: Any) -> Any:
    if not inspect.isawaitable(found):
        raise AgentFailed(f"run of {type(instance).__name__} is not asynchronous; write `async def run`")
    return await found


def mask_of(output: Any) -> list[int]:
    mask = [int(one) for one in output.response_mask]
    if len(mask) != len(output.response_ids):
        raise ValueError(f"response_mask has {len(mask)} entries for {len(output.response_ids)} response_ids")
    return [*[0] * len(output.prompt_ids), *mask]


def listed_loops(place: str) -> dict[str, Loop]:
    """[{name, _target_, further arguments}], as verl has it."""
    add_folder_of(place)
    sys.path.append(os.getcwd())  # verl's own commands are run where their modules are found
    loops: dict[str, Loop] = {}
    for entry in read_loops(place):
        name, target = entry.pop("name"), entry.pop("_target_")
        loops[name] = Loop(load_listed(LOOPS_KEY, place, "_target_", target), entry)
    return loops


def read_loops(place: str) -> list[dict[str, Any]]:
    """The entries of a YAML file that lists agent loops, each with `name` and `_target_`."""
    file = Path(place)
    if not file.is_file():
        raise ConfigError(f"{LOOPS_KEY}={place}: {file.absolute()} does not exist; give a YAML file")
    form = "it is a list of `- name: NAME` with `_target_: module.Class`"
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:  # of the file's text
        raise ConfigError(f"{LOOPS_KEY}={place} cannot be read ({type_and_message(error)}); {form}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{LOOPS_KEY}={place} has a {type(entries).__name__}; {form}")
    for place_of, entry in enumerate(entries, start=1):
        missing = [name for name in ("name", "_target_") if not isinstance(entry, dict) or name not in entry]
        if missing:
            has = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
            raise ConfigError(f"{LOOPS_KEY}={place}: entry {place_of} has no {missing[0]}; it has {has}: {form}")
    return entries


def registered_loops() -> dict[str, Loop]:
    """Those that @register named while the files were loaded, also that of an installed verl."""
    real = vars(sys.modules[VERL_REGISTRY]).get("_agent_loop_registry", {}) if VERL_REGISTRY in sys.modules else {}
    found = {name: entry["_target_"].rpartition(".") for name, entry in real.items()}
    own = {name: vars(sys.modules[module])[kind] for name, (module, _, kind) in found.items() if module in sys.modules}
    return {name: Loop(kind) for name, kind in (own | AGENT_LOOPS).items()}


@dataclass
class SamplingParams:
    """The attributes of vLLM's that agents read."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    min_tokens: int = 1
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str  # stop, or length


@dataclass(frozen=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass
class TokenEngine:
    """OpenRLHF's llm_engine."""

    policy: PolicyClient
    tokenizer: Any

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        if multi_modal_data:
            raise ValueError("multi_modal_data: images are not supported; use prompts of text")
        params = vars(sampling_params) if isinstance(sampling_params, SamplingParams) else public(sampling_params)
        answer = await self.policy.ask(prompt_token_ids, params)
        logprobs = [{token: Logprob(value)} for token, value in zip(answer.tokens, answer.logprobs, strict=True)]
        reason = "stop" if answer.finished else "length"
        text = self.text(answer, stop_texts(params), bool(params.get("include_stop_str_in_output")))
        return RequestOutput(list(prompt_token_ids), [CompletionOutput(answer.tokens, text, logprobs, reason)])

    def text(self, answer: TokenAnswer, stops: Sequence[str], includes_stop: bool) -> str:
        """As vLLM has it: without what ended the answer, a stop token or, unless it is included, a stop text."""
        whole: str = self.tokenizer.decode(answer.tokens)
        ends = [(place, place + len(stop) * includes_stop) for stop in stops if (place := whole.find(stop)) >= 0]
        if ends:
            return whole[: min(ends)[1]]
        return self.tokenizer.decode(answer.tokens[:-1]) if answer.finished else whole


def public(params: Any) -> dict[str, Any]:
    """The fields of vLLM's own SamplingParams: those that every run sets, and others that are not the default."""
    names, default = getattr(params, "__struct_fields__", None) or list(vars(params)), type(params)()
    return {
        name: getattr(params, name)
        for name in names
        if not name.startswith("_")
        and (name in ("temperature", "top_p", "top_k", "max_tokens") or getattr(params, name) != getattr(default, name))
    }


def load_executor(setup: AgentSetup, found: Any) -> LoadedAgent | None:
    """None: the user's object is no class of verl's or OpenRLHF's."""
    if not inspect.isclass(found):
        return None
    names = {name for kind in found.__mro__ for name in vars(kind)}
    if "execute" in names:
        return LoadedAgent(executor_runner(setup, found), by_url=False)
    if {"reset", "step"} <= names:
        return LoadedAgent(executor_runner(setup, partial(MultiTurnAgentExecutor, found)), by_url=False)
    if any(kind.__name__ == "AgentLoopBase" for kind in found.__mro__):
        runner = loop_runner(setup, {"": Loop(found, setup.kwargs)})
        return LoadedAgent(runner, by_url=False)
    return None


def executor_runner(setup: AgentSetup, made_by: Callable[..., Any]) -> Callable[[socket.socket, Task], Any]:
    tokenizer = load_tokenizer(setup)

    async def agent(policy: PolicyClient, task: Task) -> dict[str, Any]:
        executor = made_by(**setup.kwargs)
        given: dict[str, Any] = {
            "prompt": task.text,
            "label": task.ground_truth,
            "sampling_params": SamplingParams(**task.sampling, max_tokens=task.max_tokens),
            "max_length": task.max_length,
            "hf_tokenizer": tokenizer,
            "llm_engine": TokenEngine(policy, tokenizer),
        }
        found = await executor.execute(**given)
        tokens = [int(token) for token in found["observation_tokens"]]
        mask = [0] * len(tokens)
        for start, stop in found["action_ranges"]:
            mask[start:stop] = [1] * (min(stop, len(mask)) - start)
        reward = found.get("reward")
        return {"outputs": [[tokens, mask]], "reward": None if reward is None else number(reward)}

    return partial(run_with_policy, agent)


def load_tokenizer(setup: AgentSetup) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    tokenizer = pickle.loads(setup.tokenizer)
    # agents were written for versions that return a list of tokens here
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer
