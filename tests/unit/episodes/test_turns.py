"""The hand-over between episodes and engines: nothing waits for other episodes, and answers reach theirs at once."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from rloom.episodes import runner
from rloom.episodes.episode import Episode, Node
from rloom.episodes.record import Ending, EpisodeRecord, episode_metrics, episode_trajectories
from rloom.episodes.runner import Turns
from rloom.episodes.template import RenderedConversation
from rloom.net.loop import EventLoop
from rloom.rollout import base
from rloom.rollout.base import (
    Begun,
    CancelledRequest,
    Completion,
    EndedConversation,
    InterruptAll,
    Request,
    Rollout,
    Sampling,
    StreamItem,
)
from rloom.types import Prompt, Score

NEVER_S = 10**6
PROMPT = Prompt(0, (), "", (), "")


class CountingRollout(Rollout):
    """An answer takes as many polls as it has tokens."""

    def __init__(self) -> None:
        self.ids, self.polls = count(), 0
        self.left: dict[int, int] = {}
        self.ended: list[int] = []

    def submit(self, request: Request) -> int:
        number = next(self.ids)
        self.left[number] = request.sampling.max_new_tokens
        return number

    def cancel(self, request: int) -> None:
        self.left.pop(request, None)

    def end_conversation(self, conversation: int) -> None:
        self.ended.append(conversation)

    def poll(self) -> list[Completion]:
        self.polls += 1
        self.left = {number: left - 1 for number, left in self.left.items()}
        done = [number for number, left in self.left.items() if not left]
        for number in done:
            del self.left[number]
        return [Completion(number, torch.zeros(1, dtype=torch.long), torch.zeros(1), True, 0) for number in done]


def ask(tokens: int, conversation: int | None) -> Request:
    return Request((1,), Sampling(tokens), 0, conversation)


def indices(found: list[tuple[int, Completion]]) -> list[int]:
    return [index for index, _ in found]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop("episodes")) as loop:
        yield loop
        loop.cancel_all()


def test_answers_of_conversations_are_reported_at_once_and_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TURN_REPORT_S", NEVER_S)
    for conversations, polls in (((4, 5), [3, 7]), ((None, None), [7])):
        rollout = CountingRollout()
        stream, found = rollout.generate_stream(report_every_s=NEVER_S), []
        next(stream)
        items: list[StreamItem] = [ask(3, conversations[0]), ask(7, conversations[1])]
        while len(found) < len(polls):
            stream.send(items)
            items = []
            found.append(rollout.polls)
        assert found == polls


def test_the_requests_of_an_ended_conversation_are_cancelled_and_its_cache_is_released() -> None:
    rollout = CountingRollout()
    stream = rollout.generate_stream()
    next(stream)
    assert indices(stream.send([ask(2, 4), ask(10**9, 5), ask(10**9, 5)])) == [0]
    assert list(rollout.left) == [1, 2]
    assert stream.send([EndedConversation(5)]) == [] and not rollout.left and rollout.ended == [5]
    assert indices(stream.send([ask(1, 6)])) == [3], "indices count requests only"


def test_a_request_that_nobody_waits_for_is_cancelled_and_its_conversation_goes_on() -> None:
    rollout = CountingRollout()
    stream = rollout.generate_stream()
    next(stream)
    assert indices(stream.send([ask(2, 4), ask(10**9, 5), ask(10**9, 5)])) == [0]
    assert stream.send([CancelledRequest(0), CancelledRequest(1)]) == [], "the first has finished"
    assert list(rollout.left) == [2] and not rollout.ended
    assert indices(stream.send([CancelledRequest(2), ask(1, 5)])) == [3]


def test_an_engine_without_partial_answers_reports_what_its_requests_began_with() -> None:
    """It does not know begun tokens, and cancels what it is told to interrupt."""
    rollout = CountingRollout()
    stream = rollout.generate_stream(report_every_s=0.0)
    next(stream)
    begun = replace(ask(9, None), begun=Begun((7, 8), (-0.5, -0.25)))
    assert stream.send([ask(9, None), ask(1, None), begun]) != []
    found = stream.send([ask(9, None), InterruptAll(), ask(2, None), InterruptAll()])
    assert indices(found) == [0, 2, 3, 4] and not rollout.left
    assert [one.tokens_L.tolist() for _, one in found] == [[], [7, 8], [], []]
    assert found[1][1].logprobs_L.tolist() == [-0.5, -0.25]
    assert all(one.interrupted and not one.finished for _, one in found)
    polls = rollout.polls
    assert stream.send([InterruptAll()]) == [] and stream.send([CancelledRequest(0)]) == []
    assert rollout.polls == polls, "nothing is unfinished"
    assert indices(stream.send([ask(1, None)])) == [5], "indices count requests only"


def test_an_engine_that_raises_while_it_is_interrupted_is_left_without_requests() -> None:
    class Failing(CountingRollout):
        def interrupt(self, request: int) -> Completion:
            raise RuntimeError("no more memory")

    rollout = Failing()
    stream = rollout.generate_stream()
    next(stream)
    with pytest.raises(RuntimeError, match="no more memory"):
        stream.send([ask(9, None), ask(9, None), InterruptAll()])
    assert not rollout.left


def test_an_engine_whose_episodes_all_wait_for_tools_is_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    rollout = CountingRollout()
    stream = rollout.generate_stream()
    next(stream)
    stream.send([ask(1, 4)])
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    for _ in range(3):
        assert stream.send([]) == []
    assert rollout.polls == 1 and slept == [base.TURN_REPORT_S] * 3


def test_the_first_request_is_sent_although_other_episodes_have_not_asked(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "IDLE_S", NEVER_S)
    turns = Turns(1, [0, 0, 0])
    answer = loop.start(turns.generate(0, ask(1, 1)))
    assert turns.next_requests(0) == [ask(1, 1)]
    turns.complete(0, 0, Completion(0, torch.tensor([7]), torch.zeros(1), True, 0))
    assert answer.result(timeout=60).tokens_L.tolist() == [7]


def test_a_request_ends_the_wait_of_engines_without_any(loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_S", NEVER_S)
    turns, found = Turns(2, [0, 1]), []
    waiting = threading.Thread(target=lambda: found.append(turns.next_requests(0)))
    waiting.start()
    loop.start(turns.generate(1, ask(1, 1)))
    waiting.join(timeout=60)
    assert found == [[]], "the request is for the other share"
    assert turns.next_requests(1) == [ask(1, 1)]
    assert turns.next_requests(0) == [], "the other share generates: its completions are not kept waiting"


def test_an_episode_that_ends_while_its_answer_is_generated_holds_up_nothing(loop: EventLoop) -> None:
    turns = Turns(1, [0, 0])
    cancelled = loop.start(turns.generate(0, ask(9, 0)))
    loop.run(asyncio.sleep(0))
    assert turns.next_requests(0) == [ask(9, 0)]
    turns.end(0, 0, EpisodeRecord(Episode(), Ending.TIME))
    assert turns.next_requests(0) == [EndedConversation(0)] and not turns.unfinished[0]
    turns.complete(0, 0, Completion(0, torch.tensor([7]), torch.zeros(1), True, 0))  # on its way when the episode ended
    assert not cancelled.done()
    turns.end(0, 1, EpisodeRecord(Episode(), Ending.DONE))
    assert turns.next_requests(0) is None
    assert [row for row, _ in turns.take_finished()] == [0, 1]


def record_of(requested: int, reused: int) -> EpisodeRecord:
    """An episode of one node."""
    episode = Episode()
    episode.add(Node(None, (), torch.tensor([1]), RenderedConversation((), (), "")))
    return EpisodeRecord(episode, Ending.DONE, requested_tokens=requested, reused_tokens=reused)


def test_the_share_of_reused_tokens_is_over_the_tokens_of_all_requests() -> None:
    found = [
        trajectory
        for number, (requested, reused) in enumerate(((100, 30), (300, 170)))
        for trajectory in episode_trajectories(record_of(requested, reused), PROMPT, number, Score(1.0))
    ]
    assert episode_metrics(found)["episode/kv_reused"] == 0.5
    idle = episode_trajectories(record_of(0, 0), PROMPT, 0, Score(1.0))
    assert episode_metrics(idle)["episode/kv_reused"] == 0.0
