"""What the process of an agent has: variables, seeds, and the processes that its file starts."""

import os
import random
import textwrap

import numpy
import pytest

from rloom.episodes.agents.process import Task, by_url_function, without_proxy
from rloom.episodes.record import Ending
from rloom.errors import ConfigError
from tests.unit.episodes.agent_runs import agent_driver, run, setup_of

ASKING = textwrap.dedent(
    """
    import json, os, sys, urllib.request

    def ask(base_url, messages):
        body = json.dumps({"messages": messages}).encode()
        return json.load(urllib.request.urlopen(base_url + "/chat/completions", body))

    def agent(base_url, row, **kwargs):
        return len(ask(base_url, row["prompt"])["choices"])

    if __name__ == "__main__":
        print(len(ask(os.environ["OPENAI_BASE_URL"], json.load(sys.stdin)["prompt"])["choices"]))
    """
)


@pytest.mark.parametrize("given", [{"path": "{}:agent"}, {"command": "python3 {}"}])
def test_an_agent_reaches_the_policy_where_the_cluster_has_a_proxy(given, tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "asking.py"
    file.write_text(ASKING)
    [record], _ = run(agent_driver(setup_of(**{key: value.format(file) for key, value in given.items()})))
    assert (record.ending, record.failure, record.reward) == (Ending.DONE, None, 1.0)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": ".corp"}, ".corp,127.0.0.1,localhost"),
        ({"NO_PROXY": ".corp", "no_proxy": "a.b"}, "a.b,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_the_policys_address_is_added_to_the_hosts_without_a_proxy(given, value):
    assert without_proxy(given) == {"NO_PROXY": value, "no_proxy": value}


def test_what_an_agent_draws_follows_from_the_seed_of_its_episode(tmp_path):
    file = tmp_path / "draws.py"
    file.write_text(ASKING + "import random, numpy\ndef draws(base_url, row):\n    agent(base_url, row)\n")
    with file.open("a") as more:
        more.write("    return {'reward': numpy.random.randint(10**6) + random.random()}\n")
    # the first numbers of the generators that are seeded with 0, 1000 and 2000: those of the episodes' first requests
    expected = [numpy.random.RandomState(n).randint(10**6) + random.Random(n).random() for n in (0, 1000, 2000)]
    for _ in range(2):  # as in a resumed run
        records, _ = run(agent_driver(setup_of(path=f"{file}:draws")), 3)
        assert [record.reward for record in records] == expected


def test_a_class_may_inherit_its_run(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets the variables of its process

    class Base:
        async def run(self, data, **extra):
            return 1.0

    class Mine(Base):
        pass

    run_one = by_url_function(setup_of(path="x:Mine"), Mine)
    assert run_one(None, Task({}, (), "", None, {}, 0, 0)) == {"reward": 1.0}
    with pytest.raises(ConfigError, match="is a class without `run`"):
        by_url_function(setup_of(path="x:Empty"), type("Empty", (), {}))
