"""Agents that ask at a URL: unmodified code of the SDKs in processes of their own, and what can go wrong there."""

import dataclasses
import os
import sys
import textwrap
import time

import pytest

from rloom.episodes.base import EpisodeLimits
from rloom.episodes.record import Ending
from rloom.errors import RloomError
from tests.unit.episodes.agent_runs import LIMITS, agent_driver, run, setup_of, texts_of, trained

AGENTS = textwrap.dedent(
    """
    import asyncio, json, os, subprocess, sys, time, urllib.request
    import anthropic, openai
    from openai import AsyncOpenAI, OpenAI

    async def counts(base_url, row, turns=3, **kwargs):
        client = AsyncOpenAI(base_url=base_url, api_key=kwargs["api_key"])
        messages = list(row["prompt"])
        for _ in range(turns):
            found = await client.chat.completions.create(model="policy", messages=messages)
            messages += [found.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        return len(found.choices[0].message.content) / 4

    def by_variables(base_url, row):
        client = OpenAI()
        found = client.chat.completions.create(model="policy", messages=row["prompt"])
        return {"reward": 0.5, "found": found.choices[0].message.content}

    async def on_anthropic(base_url, row, **kwargs):
        client = anthropic.AsyncAnthropic()
        messages = list(row["prompt"])
        for _ in range(2):
            found = await client.messages.create(model="policy", max_tokens=50, messages=messages)
            messages += [{"role": "assistant", "content": found.content[0].text}, {"role": "user", "content": "go on"}]
        return 1

    class Workflow:
        def __init__(self, reward=0.0):
            self.reward = reward

        async def run(self, data, **extra):
            client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
            ids = []
            for _ in range(2):
                found = await client.chat.completions.create(model="policy", messages=data["messages"])
                ids.append(found.id)
            return {ids[0]: self.reward, ids[1]: 0.25}

    async def sets_reward(base_url, row, **kwargs):
        client = AsyncOpenAI()
        await client.chat.completions.create(model="policy", messages=row["prompt"])
        post(base_url, kwargs["api_key"], {"reward": 0.75})

    def post(base_url, key, body):
        url = base_url.removesuffix("/v1") + "/rl/set_reward"
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()

    def says_nothing(base_url, row, **kwargs):
        OpenAI().chat.completions.create(model="policy", messages=row["prompt"])

    def faulty(base_url, row, **kwargs):
        what = row["what"]
        if what == "never calls":
            return 1.0
        ask = lambda messages=None: OpenAI().chat.completions.create(model="p", messages=messages or row["prompt"])
        ask()
        if what == "raise":
            raise ValueError("no such move")
        if what == "exit":
            sys.exit(3)
        if what == "dies":
            os._exit(3)
        if what == "hang":
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass
        if what == "text":
            return "very good"
        if what == "other answer":
            return {"nothing": 1.0}
        if what == "nan":
            return float("nan")
        if what == "for ever":
            while True:
                ask()
        if what == "for ever after errors":
            while True:
                try:
                    ask()
                except openai.BadRequestError:
                    pass
        if what == "leaves":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            open(row["file"], "w").write(str(child.pid))
            return 1.0
        if what == "drops":
            import socket
            host, port = base_url.split("/")[2].split(":")
            with socket.create_connection((host, int(port))) as dropped:
                body = json.dumps({"model": "p", "messages": row["prompt"]}).encode()
                path = base_url.split(":" + port)[1] + "/chat/completions"
                head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
                dropped.sendall(head.encode() + body)
                time.sleep(0.2)
            return 1.0
        if what == "prints":
            for _ in range(100):
                os.write(1, b"x" * 1000)
            return 1.0
        assert what == "right"
        return 1.0
    """
)


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    file = tmp_path_factory.mktemp("agents") / "my_agents.py"
    file.write_text(AGENTS)
    return file


def of(agents, name, **given):
    return agent_driver(setup_of(path=f"{agents}:{name}", **given))


def test_an_agent_of_the_openai_sdk_is_one_branch_with_the_sampled_tokens(agents):
    records, sampled = run(of(agents, "counts"), 3, answer=lambda number, turn: "7" * (number + turn))
    assert [record.reward for record in records] == [0.5, 0.75, 1.0]
    for record, answers in zip(records, sampled, strict=True):
        assert (record.ending, record.failure, record.branched) == (Ending.DONE, None, 0)
        assert trained(record) == answers and len(answers) == 3
    [text] = texts_of(records[1])
    assert text.startswith(
        "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\ngo"
    )


def test_arguments_of_the_agent_come_from_the_configuration(agents):
    [record], [sampled] = run(of(agents, "counts", kwargs={"turns": 1}))
    assert len(sampled) == 1 and record.reward == 0.25


def test_a_plain_function_finds_the_address_in_its_variables(agents):
    [record], [sampled] = run(of(agents, "by_variables"))
    assert (record.reward, trained(record)) == (0.5, sampled)


def test_an_agent_of_anthropics_sdk(agents):
    [record], [sampled] = run(of(agents, "on_anthropic"))
    assert (record.reward, record.branched, trained(record)) == (1.0, 0, sampled) and len(sampled) == 2


def test_a_class_with_run_gives_a_reward_to_each_answer(agents):
    [record], [sampled] = run(of(agents, "Workflow", kwargs={"reward": 0.5}))
    assert record.reward == 0.75
    assert [node.reward for node in record.episode.nodes if node.sampled] == [0.5, 0.25]
    assert trained(record) == sampled


def test_a_reward_can_be_sent_and_none_is_none(agents):
    [record], _ = run(of(agents, "sets_reward"))
    assert (record.reward, record.failure) == (0.75, None)
    [record], _ = run(of(agents, "says_nothing"))
    assert (record.reward, record.failure) == (None, None)


def program(tmp_path, text):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(text))
    return agent_driver(setup_of(command=f"{sys.executable} {file}"))


def test_a_program_reads_the_row_and_prints_its_reward(tmp_path):
    driver = program(
        tmp_path,
        """
        import json, sys
        from openai import OpenAI
        row = json.load(sys.stdin)
        found = OpenAI().chat.completions.create(model="p", messages=row["prompt"])
        print("x" * 10_000_000)
        print(json.dumps({"reward": len(found.choices[0].message.content) + row["extra"]}))
        """,
    )
    records, sampled = run(
        driver, 2, answer=lambda number, turn: "7" * (number + 1), rows={0: {"extra": 1}, 1: {"extra": 2}}
    )
    assert [record.reward for record in records] == [2.0, 4.0]
    assert [trained(record) for record in records] == sampled


@pytest.mark.parametrize(
    ("ending", "reward", "failure"),
    [
        ("print(0.5)", 0.5, None),
        ("print('done')", None, None),
        ("print('true')", None, None),
        ("sys.exit('no such file')", None, "the program ended with exit code 1: no such file"),
        ("os.kill(os.getpid(), 9)", None, "the program ended with signal SIGKILL"),
        ('print(\'{"reward": "good"}\')', None, "the agent returned {'reward': 'good'}"),
    ],
)
def test_the_end_of_a_program_says_its_reward_or_why_there_is_none(tmp_path, ending, reward, failure):
    [record], _ = run(program(tmp_path, f"import os, sys\n{ending}"))
    assert record.reward == reward
    assert (record.failure or "").startswith(failure or "") and bool(record.failure) == bool(failure)


def faults(agents, *whats, limits=LIMITS, answer=lambda number, turn: "7", **columns):
    rows = {n: {"what": what, **columns} for n, what in enumerate(whats)}
    return run(of(agents, "faulty"), len(whats), limits=limits, rows=rows, answer=answer)


def test_a_fault_ends_its_own_episode_with_its_reason(agents):
    whats = ("right", "raise", "exit", "dies", "text", "other answer", "never calls", "prints", "drops", "nan")
    records, sampled = faults(agents, *whats)
    found = {what: (record.reward, record.failure) for what, record in zip(whats, records, strict=True)}
    assert found["right"] == found["prints"] == (1.0, None)
    assert found["raise"] == (None, "ValueError: no such move (my_agents.py:59 in faulty)")
    assert found["exit"] == (None, "SystemExit: 3 (my_agents.py:61 in faulty)")
    assert found["dies"] == (None, "its process ended")
    assert found["text"][1].startswith("the agent returned 'very good'; return a number")
    assert found["other answer"][1] == "the agent returned a reward of 'nothing', which is none of its answers"
    assert found["never calls"] == (1.0, None) and not trained(records[6])
    assert found["drops"] == (1.0, None) and len(trained(records[8])) in (1, 2)  # answered before the drop, or not
    assert found["nan"][0] != found["nan"][0]
    for record, answers in zip(records, sampled, strict=True):
        assert trained(record) == answers[: len(trained(record))]


def test_an_agent_that_hangs_is_ended_while_others_go_on(agents):
    began = time.monotonic()
    records, _ = faults(agents, "hang", "right", limits=dataclasses.replace(LIMITS, call_s=5.0))
    assert records[0].failure == "the agent asked for no answer and returned nothing for 5 s (tool_timeout_s)"
    assert records[1].reward == 1.0 and time.monotonic() - began < 60


def test_the_time_of_an_episode_ends_it(agents):
    [record], _ = faults(agents, "hang", limits=EpisodeLimits(400, call_s=60.0, episode_s=4.0))
    assert (record.ending, record.failure, record.reward) == (Ending.TIME, None, None)


def test_an_agent_that_asks_for_ever_ends_at_the_limit_of_turns(agents):
    [record], [sampled] = faults(agents, "for ever", limits=EpisodeLimits(400, turns=4, call_s=20.0))
    assert (record.ending, record.failure, len(sampled)) == (Ending.TURNS, None, 4)  # the SDK's error is not its fault
    [record], [sampled] = faults(agents, "for ever after errors", limits=EpisodeLimits(400, turns=4, call_s=4.0))
    assert (record.ending, record.failure, len(sampled)) == (Ending.TURNS, None, 4)


def test_processes_that_an_agent_leaves_behind_are_ended(agents, tmp_path):
    file = tmp_path / "child"
    [record], _ = faults(agents, "leaves", file=str(file))
    assert record.reward == 1.0
    pid, deadline = int(file.read_text()), time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("def agent(base_url): ...", "agent", "has the signature (base_url)"),
        ("agent = 3", "agent", "is a int; use a function"),
        ("class agent: ...", "agent", "is a class without `run`"),
        ("import nothing_of_that_name", "agent", "cannot be loaded"),
        ("def agent(base_url, row): ...", "other", "has no 'other'"),
    ],
)
def test_an_agent_that_cannot_run_is_an_error_before_training(tmp_path, text, name, sentence):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(RloomError, match=r"agent\.path=") as error:
        agent_driver(setup_of(path=f"{file}:{name}"))
    assert sentence in str(error.value)


def test_a_program_that_does_not_exist_is_an_error_before_training():
    with pytest.raises(RloomError, match=r"agent\.command=nothing-of-that-name 1: there is no program"):
        agent_driver(setup_of(command="nothing-of-that-name 1"))


def test_arguments_that_the_agent_does_not_take_are_an_error(tmp_path):
    file = tmp_path / "short.py"
    file.write_text("def agent(base_url, row): ...")
    with pytest.raises(RloomError, match="unexpected keyword argument 'turns'"):
        agent_driver(setup_of(path=f"{file}:agent", kwargs={"turns": 2}))
