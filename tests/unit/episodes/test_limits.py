"""What limits, dropped requests and concurrent requests leave in the record of an episode."""

import asyncio
import re
from collections.abc import Callable

import pytest
import torch

from rloom.batch import Batch
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.pool import EnvironmentFailed
from rloom.episodes.record import Ending, EpisodeRecord, episode_sample, episode_trajectories
from rloom.episodes.runner import STOP_CHECK_TOKENS, EpisodeRow, EpisodeRunner, LimitReached, RunningEpisode, Turns
from rloom.episodes.session import AgentSession, Sessions
from rloom.episodes.writer import EpisodeWriter
from rloom.launch.episodes import limits_of
from rloom.net.loop import EventLoop
from rloom.rollout.base import CancelledRequest, Completion, Request, Sampling
from rloom.types import Prompt, Score
from tests.helpers import configured
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.engines import completed, texts_for
from tests.waiting import wait_until

NAME = "chatml"
STOP = encode(TEMPLATES[NAME][1], NAME)
LONG = "word " * 200


class ScriptedTurns(Turns):
    """Answers each request with the text of `script(prompt)`, after `wait(prompt)`."""

    def __init__(self, script: Callable[[str], str], wait: Callable[[str], float] = lambda prompt: 0.0) -> None:
        super().__init__(1, [0])
        self.script, self.wait = script, wait
        self.requests: list[Request] = []

    async def generate(self, share: int, request: Request) -> Completion:
        self.requests.append(request)
        prompt = tokenizer_for(NAME).decode(request.tokens)
        await asyncio.sleep(self.wait(prompt))
        tokens = [*encode(self.script(prompt), NAME), *STOP]
        return completed(len(self.requests) - 1, request, tokens, -1.0, 0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def running(turns: Turns, limits: EpisodeLimits, first: str = "guess") -> RunningEpisode:
    messages = (user(first),)
    texts = texts_for(NAME)
    text = texts.template.render(messages)
    prompt = Prompt(0, messages, text, tuple(encode(text, NAME)), "game")
    return RunningEpisode(
        EpisodeRow(0, 0, prompt, lambda n: 1000 + n), Sampling(10**6), turns, limits, EpisodeWriter(texts)
    )


def agent(
    limits: EpisodeLimits, script: Callable[[str], str] = lambda prompt: "7", prompt_tokens: int = 50, **more
) -> tuple[RunningEpisode, AgentSession, ScriptedTurns]:
    turns = ScriptedTurns(script, **more)
    run = running(turns, limits)
    run.prompt_tokens = Sessions(prompt_tokens).prompt_tokens
    return run, AgentSession(run), turns


def lengths(record: EpisodeRecord) -> list[int]:
    prompt = Prompt(0, (), "", (), "game")
    return [len(one.tokens_L) for one in episode_trajectories(record, prompt, 0, Score(1.0))]


def test_a_refused_request_leaves_nothing_in_the_record_and_uses_no_budget() -> None:
    run, session, turns = agent(EpisodeLimits(200, episode_tokens=200))

    async def talk() -> None:
        await session.chat([user("guess")])
        with pytest.raises(LimitReached):
            await session.chat([user("guess"), {"role": "assistant", "content": "7"}, user(LONG)])
        with pytest.raises(LimitReached):
            await session.chat([user(LONG)])
        assert run.ending is Ending.EPISODE_TOKENS
        await session.chat([user("guess"), {"role": "assistant", "content": "7"}, user("shorter")])

    asyncio.run(talk())
    record = run.record()
    assert (record.turns, record.branched, record.ending, len(turns.requests)) == (2, 0, Ending.DONE, 2)
    [length] = lengths(record)
    assert length == len(turns.requests[1].tokens) + len(encode("7", NAME)) + 1
    assert [message["content"] for message in record.messages] == ["guess", "7", "shorter", "7"]


def test_a_request_that_the_limit_of_turns_refuses_is_not_recorded() -> None:
    run, session, _ = agent(EpisodeLimits(200, turns=1))

    async def talk() -> None:
        await session.chat([user("guess")])
        with pytest.raises(LimitReached):
            await session.chat([user("another")])

    asyncio.run(talk())
    record = run.record()
    assert (len(record.episode.nodes), record.branched, record.ending) == (2, 0, Ending.TURNS)


def test_a_first_prompt_over_the_limit_is_a_failed_episode_with_the_prompt_of_the_row() -> None:
    limits = EpisodeLimits(200, prompt_tokens=5)
    run = running(ScriptedTurns(lambda prompt: "7"), limits)

    class Driver:
        async def run(self, run: RunningEpisode) -> None:
            await run.answer(run.writer.begin([user(LONG)]))

    record = asyncio.run(EpisodeRunner.record(type("Runner", (), {"driver": Driver()})(), run))
    assert record.ending is Ending.PROMPT and "data.max_prompt_length=5" in record.failure
    [trajectory] = episode_trajectories(record, run.row.prompt, 0, Score(1.0))
    assert trajectory.tokens_L.tolist() == list(run.row.prompt.tokens[:5]) and not trajectory.turns
    assert not trajectory.score.ok


def test_an_observation_over_the_limit_is_not_in_the_sample() -> None:
    run = running(ScriptedTurns(lambda prompt: "7"), EpisodeLimits(50))

    async def converse() -> None:
        answer = await run.answer(run.writer.begin([user("guess")]))
        with pytest.raises(LimitReached):
            run.writer.add(answer, [user(LONG)])

    asyncio.run(converse())
    [trajectory] = episode_trajectories(run.record(), run.row.prompt, 0, Score(1.0))
    assert trajectory.turns[-1].stop == len(trajectory.tokens_L)


@pytest.mark.parametrize("score", [1.0, -1.0])
def test_an_episode_without_an_answer_has_no_score_and_moves_no_other(score: float) -> None:
    run = running(ScriptedTurns(lambda prompt: "7"), EpisodeLimits(50))
    run.ending, run.reward = Ending.TIME, score
    record = run.record()
    assert record.failure == "the episode has no answer, it ended before the first (time limit)"
    [trajectory] = episode_trajectories(record, run.row.prompt, 0, Score(score))
    assert not trajectory.score.ok and not Batch.pack([trajectory]).valid_N.any()


def asked(order: list[str], waits: dict[str, float]) -> tuple[RunningEpisode, dict[str, int]]:
    """The record and the seeds of concurrent requests that arrive in this order."""
    run, session, turns = agent(EpisodeLimits(400), wait=lambda prompt: waits[prompt.split("user\n")[1][0]])

    async def talk() -> None:
        tasks = [asyncio.create_task(session.chat([user(text)])) for text in order]
        await asyncio.gather(*tasks)

    asyncio.run(talk())
    seeds: dict[str, int] = {}
    for request in turns.requests:
        seeds.setdefault(tokenizer_for(NAME).decode(request.tokens).split("user\n")[1][0], request.seed)
    return run, seeds


def test_seeds_do_not_depend_on_the_order_of_arrival_and_the_last_turn_is_that_of_the_last_request() -> None:
    waits = {"a": 0.2, "b": 0.0}
    run, seeds = asked(["a", "b"], waits)
    other, others = asked(["b", "a"], waits)
    assert seeds == others and len(set(seeds.values())) == 2
    assert [message["content"] for message in run.record().messages] == ["b", "7"]
    assert [message["content"] for message in other.record().messages] == ["a", "7"]


def test_equal_requests_have_different_seeds_and_a_dropped_one_returns_its_seed() -> None:
    run, session, turns = agent(EpisodeLimits(400), wait=lambda prompt: 0.05)

    async def talk() -> None:
        await asyncio.gather(*(session.chat([user("a")]) for _ in range(3)))
        dropped = asyncio.create_task(session.chat([user("a")]))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        await session.chat([user("a")])

    asyncio.run(talk())
    seeds = [request.seed for request in turns.requests]
    assert len(set(seeds[:4])) == 4 and seeds[4] == seeds[3]
    assert run.answers == 4


def test_the_first_request_of_the_rows_prompt_has_the_seed_of_one_turn() -> None:
    _, session, turns = agent(EpisodeLimits(400))
    asyncio.run(session.chat([user("guess")]))
    assert turns.requests[0].seed == 1000
    asyncio.run(session.chat([user("other")]))
    assert turns.requests[1].seed != 1001


def test_a_stop_text_ends_the_request_within_a_piece() -> None:
    text = "word " * 40 + "Observation:" + " more" * 400
    tokens = [*encode(text, NAME), *STOP]
    begins: list[int] = []

    class Pieces(ScriptedTurns):
        async def generate(self, share: int, request: Request) -> Completion:
            self.requests.append(request)
            begin = len(request.tokens) - begins[0] if begins else begins.append(len(request.tokens)) or 0
            return completed(0, request, tokens[begin:], -1.0, 0)

    run = running(turns := Pieces(lambda prompt: ""), EpisodeLimits(10_000))

    async def talk(stops: tuple[re.Pattern[str], ...]) -> list[int]:
        node = await run.answer(run.writer.begin([user("guess")]), stops=stops)
        assert run.writer.episode.nodes[node].finished
        return run.writer.episode.nodes[node].tokens_L.tolist()

    found = asyncio.run(talk((re.compile("Observation:"),)))
    assert found == tokens[: len(found)] and tokenizer_for(NAME).decode(found).endswith("Observation:")
    assert len(turns.requests) == -(-len(found) // STOP_CHECK_TOKENS)
    begins.clear()
    assert asyncio.run(talk(())) == tokens and len(turns.requests[-1].tokens) == begins[0]


def test_a_request_that_nobody_waits_for_is_cancelled_in_the_engine() -> None:
    loop = EventLoop("episodes")
    turns = Turns(1, [0])
    request = Request((1,), Sampling(10**9), 0, 0)
    waiting = loop.start(turns.generate(0, request))
    loop.run(asyncio.sleep(0))
    assert turns.next_requests(0) == [request]
    queued = loop.start(turns.generate(0, request))
    loop.run(asyncio.sleep(0))
    waiting.cancel(), queued.cancel()
    wait_until(lambda: turns.ended[0] and all(one.answer.cancelled() for one in turns.queued[0]))
    assert turns.next_requests(0) == [CancelledRequest(0)] and not turns.unfinished[0]
    loop.cancel_all()
    loop.close()


def test_an_answer_without_tokens_is_a_failed_episode() -> None:
    class Empty(ScriptedTurns):
        async def generate(self, share: int, request: Request) -> Completion:
            return Completion(0, torch.empty(0, dtype=torch.long), torch.empty(0), False, 0)

    run = running(Empty(lambda prompt: ""), EpisodeLimits(50))
    with pytest.raises(EnvironmentFailed, match="without tokens"):
        asyncio.run(run.answer(run.writer.begin([user("guess")])))


def test_the_tokens_of_an_agents_episode_are_counted_after_its_first_prompt() -> None:
    run, session, turns = agent(EpisodeLimits(400, episode_tokens=20), lambda prompt: "word " * 100, prompt_tokens=300)
    asyncio.run(session.chat([user("guess")]))
    record = run.record()
    assert record.ending is Ending.EPISODE_TOKENS and turns.requests[0].sampling.max_new_tokens == 20


def test_agents_with_tokens_and_with_messages_count_the_same_branches() -> None:
    run, session, _ = agent(EpisodeLimits(400))
    seven = {"role": "assistant", "content": "7"}

    async def talk() -> None:
        await session.chat([user("guess")])
        await session.chat([user("guess"), seven, user("a")])
        await session.chat([user("guess"), seven, user("b")])

    asyncio.run(talk())
    by_tokens = running(ScriptedTurns(lambda prompt: "7"), EpisodeLimits(400))
    for leaf in [2, 4]:
        tokens = run.writer.episode.tokens(leaf)
        answer = len(run.writer.episode.tokens(1))
        if leaf == 2:
            first = by_tokens.writer.read_tokens(tokens[: len(run.writer.episode.tokens(0))])
            asyncio.run(by_tokens.answer(first))
            assert by_tokens.writer.episode.tokens(1) == tokens[:answer]
        asyncio.run(by_tokens.answer(by_tokens.writer.read_tokens(tokens)))
    assert run.record().branched == by_tokens.record().branched == 1


def test_rewards_read_the_messages_after_the_prompt_of_the_last_branch() -> None:
    run, session, _ = agent(EpisodeLimits(400))

    async def talk() -> None:
        await session.chat([{"role": "system", "content": "Be short."}, user("guess")])
        await session.chat([user("sub-agent")])

    asyncio.run(talk())
    record = run.record()
    sample = episode_sample(run.row.prompt, record, "7")
    assert [message["content"] for message in sample.messages] == ["sub-agent"]
    assert [message["content"] for message in sample.episode.messages] == ["7"]
    assert record.after_prompt == tuple(record.answer.tokens_L.tolist())


def test_a_rewritten_past_with_other_marks_keeps_its_earlier_turns_for_rewards() -> None:
    """The prompt ends with an empty reasoning block, which the rewritten past does not have."""
    name = "fills reasoning"
    texts = texts_for(name)
    writer = EpisodeWriter(texts)
    stop = encode(TEMPLATES[name][1], name)
    request = Request((), Sampling(1000), 0, 0)
    leaf = writer.begin([user("guess")])
    for number, text in enumerate(("<think>hm</think>7", "8")):
        answer = writer.answer(leaf, completed(0, request, [*encode(text, name), *stop], -1.0, 0), request=number)
        leaf = writer.add(answer, [user("again")])
    writer.answer(leaf, completed(0, request, [*encode("9", name), *stop], -1.0, 0), request=2)
    record = EpisodeRecord(writer.episode, Ending.DONE, rewritten=writer.rewritten)
    assert writer.rewritten
    after = tokenizer_for(name).decode(list(record.after_prompt))
    assert "guess" not in after and "7" in after and "8" in after and "again" in after and "9" in after
    assert record.prompt.messages == (user("guess"),)


def test_limits_are_those_of_the_configuration() -> None:
    prefix = "actor_rollout_ref.rollout.multi_turn."
    keys = ("environment=guess_number", "max_assistant_turns=3", "max_user_turns=2", "max_turn_length=7")
    more = ("max_episode_length=99", "episode_timeout_s=1.5", "at_limit=mask", "tool_timeout_s=4")
    config = configured(*(prefix + key for key in (*keys, *more)), "data.max_response_length=50")
    found = limits_of(config)
    assert (found.response_tokens, found.turns, found.user_turns, found.turn_tokens) == (50, 3, 2, 7)
    assert (found.episode_tokens, found.episode_s, found.at_limit, found.call_s) == (99, 1.5, "mask", 4.0)
