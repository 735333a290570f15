"""An agent file of OpenRLHF: `--agent_func_path` names it. OpenRLHF need not be installed."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def reset(self, states: dict, **kwargs) -> dict:
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict:
        self.turns += 1
        right = states["action_text"].strip().endswith(str(states["label"]))
        # OpenRLHF appends the feedback as it is, so it has the marks of the chat template.
        feedback = "\n<|im_start|>user\nCompute it again.<|im_end|>\n<|im_start|>assistant\n"
        done = right or self.turns == 2
        return {"rewards": float(right), "environment_feedback": "" if done else feedback, "done": done}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
