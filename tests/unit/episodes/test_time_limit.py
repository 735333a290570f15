"""The time limit of an episode while its environment is in a call."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rloom.episodes.base import BEGIN, END, EpisodeLimits
from rloom.episodes.contracts.table import UserCode
from rloom.episodes.pool import RunningEnvironment
from rloom.episodes.record import Ending, episode_sample, episode_trajectories
from rloom.episodes.runner import EnvironmentDriver, EpisodeRunner
from rloom.launch.episodes import score_of
from rloom.types import Score
from tests.unit.episodes.test_limits import ScriptedTurns, running
from tests.unit.episodes.test_result_lengths import Gym, Reader, SkyRl


class Process:
    """The first steps have replies, and then the environment is busy."""

    def __init__(self, reward_of_steps, steps) -> None:
        self.reward_of_steps, self.steps = reward_of_steps, list(steps)

    async def call(self, request, limit_s):
        assert request[0] != END  # nothing can be asked
        if request[0] == BEGIN:
            messages = [dict(one) for one in request[2]]
            return {"messages": messages, "tools": None, "reward_of_steps": self.reward_of_steps}
        if not self.steps:
            await asyncio.sleep(60)
        message = {"role": "user", "content": "on"}
        return {"messages": [message], "reward": self.steps.pop(0), "done": False, "calls": []}


def recorded(reward_of_steps, *steps, at_limit="score"):
    limits = EpisodeLimits(400, episode_s=1.0, at_limit=at_limit)
    run = running(ScriptedTurns(lambda prompt: "7"), limits)

    class Pool:
        @asynccontextmanager
        async def episode(self):
            yield RunningEnvironment(Process(reward_of_steps, steps), limits, calls=2)

    runner = type("Runner", (), {"driver": EnvironmentDriver(Pool(), ())})()
    return run, asyncio.run(EpisodeRunner.record(runner, run))


@pytest.mark.parametrize(("steps", "reward"), [((), 0.0), ((0.25, None, 0.5), 0.75)])
def test_an_environment_with_steps_has_the_rewards_so_far(steps, reward):
    run, record = recorded(0.0, *steps)
    assert (record.ending, record.failure, record.reward) == (Ending.TIME, None, reward)
    score = score_of(episode_sample(run.row.prompt, record, ""))
    assert (score.value, score.ok) == (reward, True)


def test_a_reward_that_cannot_be_asked_for_has_its_reason():
    run, record = recorded(None, 0.25)
    assert (record.ending, record.failure, record.reward) == (Ending.TIME, None, None)
    score = score_of(episode_sample(run.row.prompt, record, ""))
    assert not score.ok and "episode_timeout_s ended the episode" in score.reason
    # the rules or another reward may score it
    assert episode_trajectories(record, run.row.prompt, 0, Score(1.0))[0].score.ok


def test_the_key_says_what_such_an_episode_is_worth():
    _, record = recorded(0.0, 0.25, at_limit="fail")
    assert record.no_score == "the episode ended at a limit: time limit"


def test_which_environments_know_their_reward_without_a_call():
    limits = EpisodeLimits(100)

    def read() -> str:
        """Read."""
        return ""

    known = [UserCode(limits, given).environment({}, seed=0).reward_of_steps for given in (Gym, SkyRl, Reader, [read])]
    assert known == [0.0, 0.0, None, None]
