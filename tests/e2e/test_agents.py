"""Runs whose agents ask for their answers: at a URL, as a program, as verl's loop and as OpenRLHF's executor."""

import sys
from pathlib import Path

import pytest

from tests.e2e.runs import records, same, train, weights

AGENTS = """
import json, sys
from anthropic import Anthropic
from openai import OpenAI
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


def agent(base_url, row, **kwargs):
    messages = list(row["prompt"])
    for _ in range(2):
        found = OpenAI().chat.completions.create(model="policy", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": found.choices[0].message.content or ""}]
        messages += [{"role": "user", "content": "+"}]
    return 0.25


def on_anthropic(base_url, row, **kwargs):
    messages = list(row["prompt"])
    for _ in range(2):
        found = Anthropic().messages.create(model="policy", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": found.content}, {"role": "user", "content": "+"}]
    return {"reward": 0.25}


class Loop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = await self.apply_chat_template(row["raw_prompt"])
        ids = list(prompt)
        for _ in range(2):
            asked = {**sampling_params, "max_tokens": 8}
            ids += (await self.server_manager.generate("1", prompt_ids=ids, sampling_params=asked)).token_ids
        mask = [1] * (len(ids) - len(prompt))
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt) :], response_mask=mask, reward_score=0.25, metrics={}
        )


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        return {"rewards": 0.125, "environment_feedback": "+", "done": self.turns == 2}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)


if __name__ == "__main__":
    print(agent("", json.load(sys.stdin)))
"""
SECTION = "actor_rollout_ref.rollout.agent"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "agents.py"
    file.write_text(AGENTS)
    return file


@pytest.mark.parametrize(
    "key", ["path={}:agent", "path={}:on_anthropic", "default_agent_loop={}:Loop", "path={}:AgentExecutor"]
)
def test_an_agent_trains(tmp_path: Path, file: Path, key: str) -> None:
    directory = tmp_path / "run"
    turn = "actor_rollout_ref.rollout.multi_turn.max_turn_length=8"
    train(directory, 2, f"{SECTION}.{key.format(file)}", "data.max_response_length=48", turn)
    steps = [record for record in records(directory) if "episode/turns/mean" in record]
    assert len(steps) == 2
    for step in steps:
        assert (step["critic/score/mean"], step["reward/failed"]) == (0.25, 0)
        assert 1 <= step["episode/turns/mean"] <= 2 and step["episode/branched"] == 0
    assert not same(weights(directory, 1), weights(directory, 2))


def test_a_program_is_an_agent(tmp_path: Path, file: Path) -> None:
    lines = file.read_text().replace("from verl", "# from verl").replace("from openrlhf", "# from openrlhf")
    program = lines.partition("class Loop")[0] + lines[lines.index("if __name__") :]
    file.write_text(program)
    directory = tmp_path / "run"
    train(directory, 1, f"{SECTION}.command={sys.executable} {file}", "data.max_response_length=48")
    [step] = [record for record in records(directory) if "episode/turns/mean" in record]
    assert (step["critic/score/mean"], step["episode/turns/mean"]) == (0.25, 2)
