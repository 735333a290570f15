"""Agents that ask at a URL: unmodified code of the SDKs in processes of their own, and what can go wrong there."""

import asyncio
import dataclasses
import json
import shlex
import sys
import textwrap
import time

import pytest

from rloom.episodes.agents.process import command_words
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.record import Ending
from rloom.errors import ConfigError, RloomError
from rloom.launch.episodes import EnvironmentReward
from rloom.types import Sample, SampledEpisode, Score
from tests.unit.episodes.agent_runs import LIMITS, agent_driver, kept, run, setup_of, texts_of, trained
from tests.waiting import is_running, wait_until

# a program that the policy wrote
THIEF = """
import json, os, urllib.error, urllib.request
found = []
for key in (os.environ["OPENAI_API_KEY"], "", os.environ["OPENAI_BASE_URL"].split("/")[-2]):
    for body in ({"reward": 100}, {"reward": 100, "id": os.environ["OPENAI_BASE_URL"].split("/")[-2] + "-1"}):
        url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/rl/set_reward"
        headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        try:
            urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
        except urllib.error.HTTPError as error:
            found.append(error.code)
with open(os.environ["FILE"], "w") as file:
    json.dump(found, file)
"""
# agents on the SDKs; one process loads them for all tests, and the row names the agent
AGENTS = f"THIEF = {THIEF!r}\n" + textwrap.dedent(
    """
    import inspect, os, subprocess, sys
    import anthropic
    from openai import AsyncOpenAI, OpenAI

    async def named(base_url, row, **kwargs):
        found = globals()[row["agent"]](base_url, row, **kwargs)
        return await found if inspect.isawaitable(found) else found

    async def counts(base_url, row, **kwargs):
        client = AsyncOpenAI(base_url=base_url, api_key=kwargs["api_key"])
        messages = list(row["prompt"])
        for _ in range(3):
            found = await client.chat.completions.create(model="policy", messages=messages)
            messages += [found.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        return len(found.choices[0].message.content) / 4

    def runs_what_the_policy_wrote(base_url, row, **kwargs):
        assert "reward_key" not in kwargs and not any("rloom-reward" in value for value in os.environ.values())
        OpenAI().chat.completions.create(model="policy", messages=row["prompt"])
        subprocess.run([sys.executable, "-c", THIEF], check=True, env={**os.environ, "FILE": row["file"]})
        return row["returns"]

    async def imports(base_url, row, **kwargs):
        before = set(sys.modules)
        OpenAI().chat.completions.create(model="policy", messages=row["prompt"])
        await AsyncOpenAI().responses.create(model="policy", input="x")
        await anthropic.AsyncAnthropic().messages.create(model="policy", max_tokens=5, messages=row["prompt"])
        loaded = sorted(set(sys.modules) - before)
        assert not loaded, loaded
        return len(loaded)

    async def on_anthropic(base_url, row, **kwargs):
        client = anthropic.AsyncAnthropic()
        messages = list(row["prompt"])
        for _ in range(2):
            found = await client.messages.create(model="policy", max_tokens=50, messages=messages)
            messages += [{"role": "assistant", "content": found.content[0].text}, {"role": "user", "content": "go on"}]
        return 1

    def says_nothing(base_url, row, **kwargs):
        OpenAI().chat.completions.create(model="policy", messages=row["prompt"])

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
    """
)
# without an SDK: importing one takes longer than an episode
FAULTY = textwrap.dedent(
    """
    import json, os, subprocess, sys, time, urllib.error, urllib.request

    def post(url, body, key=""):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

    def takes_turns(base_url, row, turns=3, **kwargs):
        for _ in range(turns):
            found = post(base_url + "/chat/completions", {"messages": row["prompt"]})
        return len(found["choices"][0]["message"]["content"]) / 4

    def by_variables(base_url, row):
        for name, path in (("OPENAI_BASE_URL", "/chat/completions"), ("ANTHROPIC_BASE_URL", "/v1/messages")):
            found = post(os.environ[name] + path, {"messages": row["prompt"], "max_tokens": 9})
        return {"reward": 0.5, "found": found["content"][0]["text"]}

    async def sets_reward(base_url, row, reward_key):
        found = post(base_url + "/chat/completions", {"messages": row["prompt"]}, os.environ["OPENAI_API_KEY"])
        url = base_url.removesuffix("/v1") + "/rl/set_reward"
        post(url, {"reward": 0.5}, reward_key)
        post(url, {"reward": 0.25, "id": found["id"]}, reward_key)
        return row.get("returns")

    def faulty(base_url, row, **kwargs):
        what = row["what"]
        if what == "never calls":
            return 1.0
        body = json.dumps({"model": "p", "messages": row["prompt"]}).encode()
        ask = lambda body=body: urllib.request.urlopen(base_url + "/chat/completions", body).read()
        if what == "refused":
            try:
                ask(json.dumps({"messages": row["prompt"], "response_format": {"type": "json"}}).encode())
            except urllib.error.HTTPError:
                return 1.0
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
                except urllib.error.HTTPError:
                    time.sleep(0.05)
        if what == "leaves":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            open(row["file"], "w").write(str(child.pid))
            return 1.0
        if what == "drops":
            import socket
            host, port = base_url.split("/")[2].split(":")
            with socket.create_connection((host, int(port))) as dropped:
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
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "my_agents.py").write_text(AGENTS)
    (folder / "faulty.py").write_text(FAULTY)
    return folder


def of(folder, file, name, **given):
    return agent_driver(setup_of(path=f"{folder / file}:{name}", **given))


@pytest.fixture(scope="module")
def agents(folder):
    with kept(of(folder, "my_agents.py", "named")) as driver:
        yield lambda name, episodes=1, *, answer=lambda number, turn: f"{turn}", **row: run(
            driver, episodes, answer=answer, rows={n: {"agent": name, **row} for n in range(episodes)}
        )


@pytest.fixture(scope="module")
def faulty(folder):
    with kept(of(folder, "faulty.py", "faulty")) as driver:
        yield driver


def test_an_agent_of_the_openai_sdk_is_one_branch_with_the_sampled_tokens(agents):
    records, sampled = agents("counts", 3, answer=lambda number, turn: "7" * (number + turn))
    assert [record.reward for record in records] == [0.5, 0.75, 1.0]
    for record, answers in zip(records, sampled, strict=True):
        assert (record.ending, record.failure, record.branched) == (Ending.DONE, None, 0)
        assert trained(record) == answers and len(answers) == 3
    [text] = texts_of(records[1])
    assert text.startswith(
        "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\ngo"
    )


def test_arguments_of_the_agent_come_from_the_configuration(folder):
    [record], [sampled] = run(of(folder, "faulty.py", "takes_turns", kwargs={"turns": 1}))
    assert len(sampled) == 1 and record.reward == 0.25


def test_a_plain_function_finds_the_addresses_in_its_variables(folder):
    [record], [sampled] = run(of(folder, "faulty.py", "by_variables"))
    assert (record.reward, trained(record)) == (0.5, sampled) and len(sampled) == 2


def test_an_agent_of_anthropics_sdk(agents):
    [record], [sampled] = agents("on_anthropic")
    assert (record.reward, record.branched, trained(record)) == (1.0, 0, sampled) and len(sampled) == 2


def test_a_class_with_run_gives_a_reward_to_each_answer(folder):
    [record], [sampled] = run(of(folder, "my_agents.py", "Workflow", kwargs={"reward": 0.5}))
    assert record.reward == 0.75
    assert [node.reward for node in record.episode.nodes if node.sampled] == [0.5, 0.25]
    assert trained(record) == sampled


def test_a_reward_can_be_sent_and_none_is_none(agents, folder, caplog):
    """A returned one replaces those that were sent."""
    rows = {1: {"returns": 0.125}, 2: {"returns": 0.125}}
    [sent, *returned], _ = run(of(folder, "faulty.py", "sets_reward"), 3, rows=rows)
    assert (sent.reward, sent.failure) == (0.75, None)
    assert [node.reward for node in sent.episode.nodes if node.sampled] == [0.25]
    assert (sent.counts["rewards_over_http"], sent.counts["without_reward"]) == (2, 0)
    for record in returned:
        assert (record.reward, record.counts["rewards_over_http"]) == (0.125, 2)
        assert [node.reward for node in record.episode.nodes if node.sampled] == [None]
    [said] = [one.getMessage() for one in caplog.records if "set_reward" in one.getMessage()]
    assert "the agent returned a reward, and others were sent to /rl/set_reward" in said
    [record], _ = agents("says_nothing")
    assert (record.reward, record.failure, record.counts["without_reward"]) == (None, None, 1)


def test_episodes_without_a_reward_are_scored_by_the_rule_which_is_said_once(caplog):
    class Rule:
        async def score(self, groups):
            return [[Score(3.0) for _ in group] for group in groups]

    def sample(reward, ending):
        return Sample("game", "", "", "7", {}, episode=SampledEpisode((), "", (), reward, {"ending": ending.value}))

    reward = EnvironmentReward(Rule())
    failed, done = sample(None, Ending.FAILED), sample(None, Ending.DONE)
    assert asyncio.run(reward.score([(failed, sample(0.5, Ending.DONE))])) == [[Score(3.0), Score(0.5)]]
    assert not caplog.records
    assert asyncio.run(reward.score([(done,), (done,)])) == [[Score(3.0)], [Score(3.0)]]
    [said] = caplog.records
    # also true of rloom's own agent loops, of which no agent is counted
    assert said.getMessage() == (
        "Note: the rule of the data source scores the episodes that have no reward of their own. agent/without_reward "
        "counts those of your agents"
    )


@pytest.mark.parametrize("returns", [None, 0.0])
def test_a_program_that_the_policy_wrote_cannot_set_the_reward(agents, tmp_path, returns):
    file = tmp_path / "found"
    [record], _ = agents("runs_what_the_policy_wrote", returns=returns, file=str(file))
    assert (record.reward, record.failure, record.counts["rewards_over_http"]) == (returns, None, 0)
    assert json.loads(file.read_text()) == [403] * 6 and record.counts["refused_requests"] == 6


def test_clients_import_their_modules_once_and_not_in_each_process(agents):
    [record], [sampled] = agents("imports")
    assert (record.failure, record.reward, len(sampled)) == (None, 0.0, 3)


def program(tmp_path, text, **given):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(text))
    return agent_driver(setup_of(command=f"{sys.executable} {file}", **given))


ASKS = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
def post(path, body, key=""):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    url = os.environ["OPENAI_BASE_URL"] + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
answer = post("/chat/completions", {"messages": row["prompt"]})
"""


def test_a_program_reads_the_row_and_prints_its_reward(tmp_path):
    printed = "print('x' * 10_000_000)\nprint(json.dumps({'reward': len(text) + row['extra']}))"
    driver = program(tmp_path, f"{ASKS}text = answer['choices'][0]['message']['content']\n{printed}")
    records, sampled = run(
        driver, 2, answer=lambda number, turn: "7" * (number + 1), rows={0: {"extra": 1}, 1: {"extra": 2}}
    )
    assert [record.reward for record in records] == [2.0, 4.0]
    assert [trained(record) for record in records] == sampled


# the end of a program -> its reward, or why there is none
PROGRAM_ENDINGS = {
    "print(0.5)": (0.5, None),
    "print(True)": (1.0, None),
    "print('false')": (0.0, None),
    "print('{\"score\": 0.25}')": (0.25, None),
    "print(json.dumps({'rewards': {answer['id']: 0.75}}))": (0.75, None),
    "print('reward=1.0')": (None, None),
    "print('[1.0]')": (None, None),
    "sys.exit('no such file')": (None, "the program ended with exit code 1: no such file"),
    "os.kill(os.getpid(), 9)": (None, "the program ended with signal SIGKILL"),
    'print(\'{"reward": "good"}\')': (None, "the agent returned {'reward': 'good'}"),
    "print('NaN')": (None, "the agent returned nan; return a finite number"),
    "print('1' * 400)": (None, "the agent returned 1111"),
    "print({'reward_key'} <= {*row})": (0.0, None),
}


def test_the_end_of_a_program_says_its_reward_or_why_there_is_none(tmp_path, caplog):
    rows = {n: {"ending": ending} for n, ending in enumerate(PROGRAM_ENDINGS)}
    records, _ = run(program(tmp_path, f"{ASKS}exec(row['ending'])"), len(rows), rows=rows)
    for (ending, (reward, failure)), record in zip(PROGRAM_ENDINGS.items(), records, strict=True):
        assert record.reward == reward, ending
        assert (record.failure or "").startswith(failure or "") and bool(record.failure) == bool(failure), ending
        assert record.counts["without_reward"] == (reward is None and failure is None), ending
    [said] = [one.getMessage() for one in caplog.records if "gives no reward" in one.getMessage()]
    assert "reward=1.0" in said or "[1.0]" in said  # the line


def test_a_program_gets_the_reward_key_with_its_row_if_a_key_says_so(tmp_path):
    given = 'assert row["reward_key"] not in str(os.environ)\npost("/rl/set_reward", {"reward": 3}, row["reward_key"])'
    driver = program(tmp_path, f"{ASKS}{given}", rewards_over_http=True)
    [record], _ = run(driver)
    assert (record.reward, record.failure, record.counts["rewards_over_http"]) == (3.0, None, 1)


def faults(faulty, *whats, limits=LIMITS, answer=lambda number, turn: "7", **columns):
    rows = {n: {"what": what, **columns} for n, what in enumerate(whats)}
    return run(faulty, len(whats), limits=limits, rows=rows, answer=answer)


def test_a_fault_ends_its_own_episode_with_its_reason(faulty):
    whats = (
        "right",
        "raise",
        "exit",
        "dies",
        "text",
        "other answer",
        "never calls",
        "prints",
        "drops",
        "nan",
        "refused",
    )
    records, sampled = faults(faulty, *whats)
    found = {what: (record.reward, record.failure) for what, record in zip(whats, records, strict=True)}
    assert found["right"] == found["prints"] == (1.0, None)
    assert found["raise"] == (None, "ValueError: no such move (faulty.py:38 in faulty)")
    assert found["exit"] == (None, "SystemExit: 3 (faulty.py:40 in faulty)")
    assert found["dies"] == (None, "its process ended")
    assert found["text"][1].startswith("the agent returned 'very good'; return a finite number")
    assert found["other answer"][1].startswith(
        "the agent returned a reward of 'nothing', which is none of its answers; return a finite number"
    )
    assert found["never calls"] == (
        None,
        "the agent asked for no answer; send its requests to base_url (OPENAI_BASE_URL, ANTHROPIC_BASE_URL)",
    )
    assert [record.counts["without_answer"] for record in records] == [0] * 6 + [1] + [0] * 3 + [1]
    assert records[6].ending is Ending.FAILED and not trained(records[6])
    assert found["refused"] == (None, "the agent got no answer: 1 of its requests were refused")
    assert found["drops"] == (1.0, None) and len(trained(records[8])) in (1, 2)  # answered before the drop, or not
    assert found["nan"][1].startswith("the agent returned nan; return a finite number")
    for record, answers in zip(records, sampled, strict=True):
        assert trained(record) == answers[: len(trained(record))]


def test_an_agent_that_hangs_is_ended_while_others_go_on(faulty):
    began = time.monotonic()
    records, _ = faults(faulty, "hang", "right", limits=dataclasses.replace(LIMITS, call_s=5.0))
    assert records[0].failure == "the agent asked for no answer and returned nothing for 5 s (tool_timeout_s)"
    assert records[1].reward == 1.0 and time.monotonic() - began < 60


def test_the_time_of_an_episode_ends_it(faulty):
    [record], _ = faults(faulty, "hang", limits=EpisodeLimits(400, call_s=60.0, episode_s=5.0))
    assert (record.ending, record.failure, record.reward) == (Ending.TIME, None, None)


def test_an_agent_that_asks_for_ever_ends_at_the_limit_of_turns(faulty):
    [record], [sampled] = faults(faulty, "for ever", limits=EpisodeLimits(400, turns=4, call_s=20.0))
    assert (record.ending, record.failure, len(sampled)) == (Ending.TURNS, None, 4)  # the SDK's error is not its fault
    [record], [sampled] = faults(faulty, "for ever after errors", limits=EpisodeLimits(400, turns=4, call_s=5.0))
    assert (record.ending, record.failure, len(sampled)) == (Ending.TURNS, None, 4)


def test_processes_that_an_agent_leaves_behind_are_ended(faulty, tmp_path):
    file = tmp_path / "child"
    [record], _ = faults(faulty, "leaves", file=str(file))
    assert record.reward == 1.0
    pid = int(file.read_text())
    wait_until(lambda: not is_running(pid))


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


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("nothing-of-that-name 1", "there is no program 'nothing-of-that-name'; give its path"),
        ("cd /tmp && python3 x.py", "'&&' would be an argument of the program. No shell runs it; with one: "),
        ("cd /tmp", "there is no program 'cd'; give its path. No shell runs it"),
        ("python3 'x.py", "No closing quotation; close it"),
        ("python3 -u /nothing/x.py --turns 3", "/nothing/x.py does not exist; correct the path"),
        ("", "there is no program ''"),
    ],
)
def test_a_program_that_cannot_start_is_an_error_before_training(command, sentence):
    with pytest.raises(ConfigError) as error:
        command_words(command)
    assert str(error.value).startswith(f"actor_rollout_ref.rollout.agent.command={command}: {sentence}")


def test_arguments_of_a_program_are_no_operators_and_no_files():
    for command in ("python3 -m x.py", "python3 -c 'print(1)|x.py'", "python3 --sep '|'", "bash -c 'cd x && y.py'"):
        assert command_words(command) == shlex.split(command)


def test_arguments_that_the_agent_does_not_take_are_an_error(tmp_path):
    file = tmp_path / "short.py"
    file.write_text("def agent(base_url, row): ...")
    with pytest.raises(RloomError, match="unexpected keyword argument 'turns'"):
        agent_driver(setup_of(path=f"{file}:agent", kwargs={"turns": 2}))
