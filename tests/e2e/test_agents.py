"""Runs whose agents ask for their answers: at a URL, as a program, as verl's loop and as OpenRLHF's executor."""

import sys
from pathlib import Path

import pytest

from tests.e2e.runs import records, same, train, weights

# the process of the agents imports what the file imports: each has its own
FUNCTION = """
from openai import OpenAI


def agent(base_url, row, **kwargs):
    messages = list(row["prompt"])
    for _ in range(2):
        found = OpenAI().chat.completions.create(model="policy", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": found.choices[0].message.content or ""}]
        messages += [{"role": "user", "content": "+"}]
    return 0.25
"""
ON_ANTHROPIC = """
from anthropic import Anthropic


def agent(base_url, row, **kwargs):
    messages = list(row["prompt"])
    for _ in range(2):
        found = Anthropic().messages.create(model="policy", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": found.content}, {"role": "user", "content": "+"}]
    return {"reward": 0.25}
"""
LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


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
"""
EXECUTOR = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        return {"rewards": 0.125, "environment_feedback": "+", "done": self.turns == 2}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
PROGRAM = """
import json, os, sys, urllib.request

messages = list(json.load(sys.stdin)["prompt"])
for _ in range(2):
    body = json.dumps({"messages": messages, "max_tokens": 8}).encode()
    found = json.load(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
    messages += [found["choices"][0]["message"], {"role": "user", "content": "+"}]
print(0.25)
"""
SECTION = "actor_rollout_ref.rollout.agent"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("path={}:agent", FUNCTION),
        pytest.param("path={}:agent", ON_ANTHROPIC, marks=pytest.mark.long),
        pytest.param("default_agent_loop={}:Loop", LOOP, marks=pytest.mark.long),
        pytest.param("path={}:AgentExecutor", EXECUTOR, marks=pytest.mark.long),
        (f"command={sys.executable} {{}}", PROGRAM),
    ],
    ids=["openai", "anthropic", "loop", "executor", "program"],
)
def test_an_agent_trains(tmp_path: Path, key: str, text: str) -> None:
    directory, file = tmp_path / "run", tmp_path / "agents.py"
    file.write_text(text)
    turn = "actor_rollout_ref.rollout.multi_turn.max_turn_length=8"
    train(directory, 2, f"{SECTION}.{key.format(file)}", "data.max_response_length=48", turn)
    steps = [record for record in records(directory) if "episode/turns/mean" in record]
    assert len(steps) == 2
    for step in steps:
        assert (step["critic/score/mean"], step["reward/failed"]) == (0.25, 0)
        assert 1 <= step["episode/turns/mean"] <= 2 and step["episode/branched"] == 0
    assert not same(weights(directory, 1), weights(directory, 2))
