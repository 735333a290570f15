"""Requests of an agent that run at the same time: their order, their budgets, and answers that nobody got."""

import asyncio

import pytest

from rloom.episodes.base import EpisodeLimits
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
