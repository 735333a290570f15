"""Names of verl that users' agent loops import, where verl is not installed.

Imports no torch: the processes that run agents start in milliseconds.
"""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from rloom.episodes.tool_calls import parse_tool_calls, without_calls

F = TypeVar("F", bound=Callable[..., Any])
AGENT_LOOPS: dict[str, type] = {}  # by the name that @register gave


class TokenOutput(BaseModel):
    """What `server_manager.generate` returns."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None  # completed: with a stop token; length: at a limit; aborted: nothing was generated
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


class AgentLoopMetrics(BaseModel):
    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What `run` returns: the tokens of one branch, of which those with mask 1 are trained."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}


class DictConfigWrap:
    def __init__(self, config: Any) -> None:
        self.config = config


class AgentLoopBase(ABC):
    """One instance for each episode."""

    _class_initialized = False

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        self.dataset_config = self.config.data if dataset_config is None else dataset_config.config
        self.data_config = self.dataset_config
        self.apply_chat_template_kwargs = self.dataset_config.get("apply_chat_template_kwargs") or {}
        self.system_prompt = system_prompt(tokenizer, self.apply_chat_template_kwargs)
        self.loop = asyncio.get_running_loop()
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Loops written for earlier versions prepare their class here."""
        cls._class_initialized = True

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        if images or videos:
            raise ValueError("images and videos are not supported; use messages of text")
        tokens = encode_chat(self.tokenizer, messages, tools, self.apply_chat_template_kwargs)
        return tokens[len(self.system_prompt) :] if remove_system_prompt else tokens

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """The columns of the row are further arguments; `raw_prompt` has its messages."""


def register(agent_name: str) -> Callable[[type], type]:
    def registered(loop: type) -> type:
        AGENT_LOOPS[agent_name] = loop
        return loop

    return registered


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools or None, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
    )
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def system_prompt(tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    """The tokens that a template writes before the first message: what one message has more than a second one adds."""
    empty = {"role": "user", "content": ""}
    try:
        one, two = (
            encode_chat(tokenizer, [empty] * count, None, variables, add_generation_prompt=False) for count in (1, 2)
        )
    except Exception:  # of a template that refuses such messages, or a tokenizer without one
        return []
    return one[: 2 * len(one) - len(two)]


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


def rollout_trace_op(function: F) -> F:
    """Nothing is traced."""
    return function


def get_event_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


class FunctionCall(BaseModel):
    arguments: str
    name: str


class ToolParser:
    """The forms of calls that rloom reads, whatever the name of the parser."""

    stop_token_ids: Sequence[int] = ()  # an answer ends as the run says

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        return cls(tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] = ()
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(list(responses_ids), skip_special_tokens=True)
        calls = [call for call in parse_tool_calls(text) if call.error is None]
        found = [FunctionCall(name=call.name, arguments=json.dumps(call.arguments)) for call in calls]
        return without_calls(text) if found else text, found
