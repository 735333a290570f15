"""Names of verl that users' tools and interactions import, where verl is not installed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from rloom.episodes.schema import tool_schema
from rloom.rewards.rules import gsm8k


class OpenAIFunctionPropertySchema(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool's `execute` returns first."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """A tool of a YAML file. One object serves all episodes; `create` returns the id of an episode's instance."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "the tool has no tool_schema"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return


class BaseInteraction:
    """Answers the policy in place of a user."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the episode ends, the user's next message, the score of this turn, metrics)"""
        raise NotImplementedError

    async def calculate_score(self) -> float:
        return 0.0

    async def finalize_interaction(self) -> None:
        return


@dataclass
class FunctionTool:
    name: str
    fn: Callable[..., Any]
    tool_schema: Any  # OpenAIFunctionToolSchema, or its dict


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Mark a function as a tool: `@function_tool`, `@function_tool("name")` or `@function_tool(schema={...})`."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        own = name if isinstance(name, str) else function.__name__
        found = schema
        if found is None:
            found = tool_schema(function)
            found["function"]["name"] = own
        FUNCTION_TOOL_REGISTRY[own] = FunctionTool(own, function, found)
        return function

    return marked(name) if callable(name) else marked


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Of an answer to a question of GSM8K. `format_score`: of a number that is wrong."""
    found = gsm8k.compute_score("openai/gsm8k", solution_str, ground_truth, method=method)
    if found["score"] == 1.0:
        return score
    return 0.0 if found["pred"] is None else format_score


class Gsm8kTool(BaseTool):
    """Tells the policy whether its answer to a question of GSM8K is right."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.instances: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance = instance_id or str(uuid4())
        truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self.instances[instance] = {"truth": truth, "response": "", "reward": 0.0}
        return instance, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """The reward of a call: -0.05 for an answer that is no better than the last one."""
        answer = parameters.get("answer", "")
        answer = answer if isinstance(answer, str) else json.dumps(answer)
        own = self.instances[instance_id]
        own["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward, before = await self.calc_reward(instance_id), own["reward"]
        own["reward"] = reward
        return ToolResponse(text=f"answer={answer} reward={reward}"), 0.0 if reward > before else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        own = self.instances[instance_id]
        return compute_score(own["response"], own["truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.instances[instance_id]
