"""Names of OpenRLHF that users' agents import, where OpenRLHF is not installed.

Imports no torch: the processes that run agents start in milliseconds.
"""

import logging
from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any


class AgentInstanceBase(ABC):
    """An environment of one episode."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class AgentExecutorBase(ABC):
    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """{"reward", "observation_tokens", "action_ranges", ...}: all tokens, and which of them the policy sampled."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Answers and steps of an environment in turn. Its feedback is encoded as it is, without a chat template."""

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        instance = self.agent_instance_cls()
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        tokens = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        ranges: list[tuple[int, int]] = []
        reward = 0.0
        scores: Any = None
        logs: Any = {}
        while (left := max_length - len(tokens)) > 0:
            sampling_params.max_tokens = left
            [answer] = (await llm_engine.generate(tokens, deepcopy(sampling_params))).outputs
            if not answer.token_ids:  # a limit of the episode
                break
            ranges.append((len(tokens), len(tokens) + len(answer.token_ids)))
            states = {
                "observation_text": text,
                "action_text": answer.text,
                "label": label,
                "sampling_params": sampling_params,
            }
            step = await instance.step(states)
            if step.get("environment_images"):
                raise ValueError("environment_images: images are not supported; describe them as text")
            reward += float(step["rewards"])
            scores, logs = step.get("scores", reward), step.get("extra_logs", {})
            feedback = step["environment_feedback"]
            text += answer.text + feedback
            tokens = [*tokens, *answer.token_ids, *hf_tokenizer(feedback, add_special_tokens=False)["input_ids"]]
            sampling_params = step.get("sampling_params") or sampling_params
            if step["done"]:
                break
        return {
            "prompt": prompt,
            "label": label,
            "reward": reward,
            "scores": scores,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "extra_logs": logs,
        }


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)
