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
