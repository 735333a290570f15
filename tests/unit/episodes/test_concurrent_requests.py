"""Requests of an agent that run at the same time: their order, their budgets, and answers that nobody got."""

import asyncio

import pytest

from rloom.episodes.base import EpisodeLimits
from rloom.episodes.gateway.fields import Asked
from rloom.episodes.gateway.server import ask
from rloom.episodes.session import DROPPED, EpisodeEnded
from tests.unit.episodes.conversations import tokenizer_for
from tests.unit.episodes.test_limits import NAME, agent, user


@pytest.mark.parametrize("slow", ["left", "right"])
def test_a_shared_answer_is_trained_in_the_branch_that_was_asked_for_first(slow: str) -> None:
    run, session, _ = agent(EpisodeLimits(400), wait=lambda prompt: 0.1 if slow in prompt else 0.0)

    async def talk() -> None:
        answer = await session.chat([user("guess")])
        past = [user("guess"), answer.message]
        await asyncio.gather(session.chat([*past, user("left")]), session.chat([*past, user("right")]))

    asyncio.run(talk())
    branches = list(run.record().episode.branches())
    texts = [tokenizer_for(NAME).decode(branch.tokens_L) for branch in branches]
    assert ["left" in text for text in texts] == [True, False]
    assert [len(branch.turns) for branch in branches] == [2, 1]


class OpenRequest:
    """A request whose client waits."""

    async def disconnected(self) -> None:
        await asyncio.sleep(60)


def test_answers_that_wait_for_others_when_the_episode_ends_are_not_trained() -> None:
    run, session, turns = agent(EpisodeLimits(400))

    async def talk() -> None:
        await asyncio.wait_for(ask(Asked("policy", (user("first"),)), OpenRequest(), session), 60)

    async def ends() -> None:
        answers = asyncio.create_task(ask(Asked("policy", (user("guess"),), count=3), OpenRequest(), session))
        while run.answers < 2:
            await asyncio.sleep(0.01)
        session.close()
        with pytest.raises(EpisodeEnded):
            await answers

    turns.wait = lambda prompt: 0.0
    asyncio.run(talk())
    turns.wait = lambda prompt: 60.0 if len(turns.requests) == 4 else 0.0
    asyncio.run(ends())
    record = run.record()
    assert (record.turns, run.counts[DROPPED]) == (1, 3)
    assert [message["content"] for message in record.messages] == ["first", "7"]


def tokens_after_the_first_prompt(run) -> int:
    return sum(len(node.tokens_L) for node in run.record().episode.nodes[1:])


def test_concurrent_answers_stay_within_the_tokens_of_the_episode() -> None:
    run, session, turns = agent(EpisodeLimits(200, episode_tokens=120), lambda prompt: "word " * 200)
    turns.wait = lambda prompt: 0.01

    async def talk() -> None:
        await asyncio.gather(*(session.chat([user(f"q{n}")], max_tokens=10) for n in range(8)), return_exceptions=True)

    asyncio.run(talk())
    # 6 answers of 10 tokens, and 5 prompts of 12 beside the first one, fill the 120
    assert [len(node.tokens_L) for node in run.record().episode.nodes] == [12] * 6 + [10] * 6
    assert tokens_after_the_first_prompt(run) == 120
    assert run.record().ending.value == "episode token limit"


def test_a_short_answer_leaves_its_tokens_to_one_that_waits_for_them() -> None:
    run, session, turns = agent(EpisodeLimits(60, episode_tokens=120), wait=lambda prompt: 0.01)

    async def talk() -> None:
        await asyncio.gather(*(session.chat([user(f"q{n}")]) for n in range(4)))

    asyncio.run(talk())
    record = run.record()
    assert (record.turns, record.ending.value) == (4, "done")
    # 60 tokens are reserved for the first one, which leaves too few for another
    assert turns.requests[0].sampling.max_new_tokens == 60


def test_an_answer_that_is_cancelled_returns_its_tokens() -> None:
    run, session, turns = agent(EpisodeLimits(100, episode_tokens=100))
    turns.wait = lambda prompt: 60.0 if "first" in prompt else 0.0

    async def talk() -> None:
        first = asyncio.create_task(session.chat([user("first")]))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(session.chat([user("other")]))
        await asyncio.sleep(0.01)
        assert len(turns.requests) == 1  # the second one waits
        first.cancel()
        assert (await second).message["content"] == "7"

    asyncio.run(talk())
    assert run.record().turns == 1
