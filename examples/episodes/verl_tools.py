"""A tool of verl that is a class, and an interaction of verl. The YAML files beside this one list them."""

from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class CheckTool(BaseTool):
    """Says whether a number is the right one. Its state lives as long as the episode."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.truths = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        """`ground_truth` comes from extra_info.tools_kwargs of the row, if it has some."""
        instance_id = instance_id or str(uuid4())
        self.truths[instance_id] = ground_truth
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters.get("answer") == self.truths[instance_id]
        # the text that the policy reads, the reward of this call, metrics
        return ToolResponse(text="right" if right else "wrong"), float(right) * self.config["bonus"], {}

    async def release(self, instance_id, **kwargs):
        del self.truths[instance_id]


class TryAgain(BaseInteraction):
    """Answers in place of a user, after an answer without a call of a tool."""

    async def start_interaction(self, instance_id=None, **kwargs):
        self.turns = 0  # each episode has a process of its own, so an attribute belongs to one episode
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id, messages, **kwargs):
        self.turns += 1
        # whether the episode ends, the user's text, the score of this turn, further data
        return self.turns == 2, "Compute it again.", 0.0, {}
