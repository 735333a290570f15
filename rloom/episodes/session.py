"""An episode whose agent asks for its answers: over HTTP (the gateway), or with tokens (an agent loop).

The agent sends the whole history with every request. What of it is recorded already is found, and the answer is
generated after the recorded tokens. Requests may run at the same time.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rloom.episodes.base import ToolSchema
from rloom.episodes.episode import Node
from rloom.episodes.record import Ending
from rloom.episodes.runner import LimitReached, RunningEpisode
from rloom.episodes.template import as_tool_call, opening_of, readable
from rloom.episodes.tool_calls import AUTO, parse_tool_calls, split_reasoning, without_calls
from rloom.episodes.writer import calls_of
from rloom.errors import DataError
from rloom.types import Message

ENDED = 65536  # sessions whose end is remembered
MOST_OPEN = 256  # answers that an agent may wait for at a time
# counts of one episode, a metric each: refused requests, answers that no client received, requests with ignored
# sampling parameters, rewards that were sent over HTTP, and 1 for an agent that ended without an answer or a reward
REFUSED, DROPPED, IGNORED, OVER_HTTP = "refused_requests", "dropped_answers", "ignored_sampling", "rewards_over_http"
WITHOUT_ANSWER, WITHOUT_REWARD = "without_answer", "without_reward"
COUNTS = (REFUSED, DROPPED, IGNORED, OVER_HTTP, WITHOUT_ANSWER, WITHOUT_REWARD)


@dataclass(frozen=True)
class AgentAnswer:
    """An answer, as an agent receives it."""

    id: str  # `set_reward` names it
    node: Node
    prompt: tuple[int, ...]  # the tokens before it
    stop: str | None = None  # which of the request's texts ended it

    @property
    def message(self) -> Message:
        """OpenAI's form, with the reasoning as `reasoning_content`."""
        assert self.node.shown is not None
        return self.node.shown[0]


class EpisodeEnded(Exception):
    """A request of an episode that has ended."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the episode has ended ({ending.value})")


class AgentSession:
    """One episode. `id` is a part of the agent's address, `key` its API key: either names the session.

    `reward_key` allows to set rewards. Programs that the policy wrote may find the other two in their environment.
    """

    def __init__(self, run: RunningEpisode) -> None:
        self.run = run
        self.id, self.key, self.reward_key = secrets.token_hex(16), new_id("rloom"), new_id("rloom-reward")
        self.nodes: dict[str, int] = {}  # id of an answer -> its node
        self.instructed: set[str] = set()  # answers to requests whose first message belongs to them alone
        self.closed = False
        self.rewards: dict[str | None, float] = {}  # of answers, and of the episode (None)
        self.unsent: list[list[AgentAnswer]] = []  # answers that their clients get once the others of the request end
        self._requests: set[asyncio.Task[object]] = set()
        self._limits_reached = 0  # times
        run.counts.update(dict.fromkeys(COUNTS, 0))

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        *,
        stops: Sequence[str] = (),
        reads_calls: bool = True,
    ) -> AgentAnswer:
        """DataError: the messages cannot be answered. LimitReached, EpisodeEnded: no further answer is possible.

        `stops`: texts that end the answer, and are not shown. `reads_calls`: calls of `tools` are apart from the text.
        Cancelled, it records no answer.
        """
        self.check_open()
        if len(self._requests) >= MOST_OPEN:
            raise DataError(f"the agent waits for {MOST_OPEN} answers already; ask for fewer at a time")
        writer = self.run.writer
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            leaf, node = await self.generate(partial(self.read, messages, tools), max_tokens, stops)
        except asyncio.CancelledError:
            self.check_open()
            self.run.counts[DROPPED] += 1
            raise
        finally:
            self._requests.discard(task)
        name = new_id("answer")
        self.nodes[name] = node
        conversation = writer.episode.nodes[node].conversation
        answer, opening = readable(conversation.messages[-1]), opening_of(conversation)
        made = sum(len(calls_of(message)) for message in writer.heard(leaf))
        read = tools if reads_calls else ()
        shown, stop = shown_message(answer, stops, read, made, writer.texts.template.call_format, len(opening))
        writer.episode.replace(node, shown=(shown,))
        return AgentAnswer(name, writer.episode.nodes[node], tuple(writer.episode.tokens(leaf)), stop)

    def read(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        self.run.check_length(messages)
        return self.run.writer.read(messages, tools)

    async def generate(
        self,
        read: Callable[[], int],
        max_tokens: int | None,
        stops: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
    ) -> tuple[int, int]:
        """`read` records what the agent sent, and returns its node. Returns this node and that of the answer, which may
        be cut short. LimitReached: there is none.

        An agent may go on after a limit, with a shorter history: an answer to a request that was sent after the limit
        was reached makes the ending DONE. One that was generated meanwhile does not, whichever ends first.
        """
        run, before = self.run, self._limits_reached
        try:
            leaf = read()
            texts = [re.compile(re.escape(stop)) for stop in stops]
            node = await run.answer(leaf, max_tokens, texts, frozenset(stop_tokens))
        except LimitReached as reached:
            self._limits_reached += 1
            run.ending = reached.ending
            if reached.answer is None:
                raise
            return leaf, reached.answer
        if before == self._limits_reached:
            run.ending = Ending.DONE
        return leaf, node

    def drop(self, answers: Iterable[AgentAnswer]) -> None:
        """Answers that the client did not get. They stay as text; nothing of them is trained."""
        for answer in answers:
            self.run.counts[DROPPED] += 1
            self.run.writer.episode.replace(self.nodes.pop(answer.id), sampled=False, logprobs_L=None)

    def set_reward(self, reward: float, answer: str | None = None) -> None:
        """Of the episode, or of one answer, placed at its last token; a later one replaces it. The reward of the
        episode is the sum. KeyError: there is no such answer."""
        self.check_open()
        if answer is not None:
            self.run.writer.episode.replace(self.nodes[answer], reward=reward)
        self.rewards[answer] = reward
        self.run.reward = sum(self.rewards.values())

    def remove_rewards(self) -> None:
        for answer in self.rewards:
            if answer is not None:
                self.run.writer.episode.replace(self.nodes[answer], reward=None)
        self.rewards.clear()
        self.run.reward = None

    def check_open(self) -> None:
        if self.closed:
            raise EpisodeEnded(self.run.ending)

    def close(self) -> None:
        """Requests that still run are cancelled: nothing is added to a finished episode. Their clients do not get the
        answers that have ended, either."""
        for answers in self.unsent:
            self.drop(answers)
        self.closed = True
        self.run.counts[DROPPED] += len(self._requests)
        for request in self._requests:
            request.cancel()


def new_id(kind: str) -> str:
    """Random: what the policy wrote can guess none."""
    return f"{kind}-{secrets.token_hex(16)}"


def shown_message(
    answer: Message, stops: Sequence[str], tools: Sequence[ToolSchema], made: int, form: str = AUTO, start: int = 0
) -> tuple[dict[str, Any], str | None]:
    """The message without the stop text that ended it, and that text.

    `tools`: whose calls are read. `made`: calls before it in the conversation. Ids are those that the chat template
    writes: equal in every run.
    `form`: of tool calls. `start`: where the sampled text begins; the template has written what is before it.
    """
    text: str = answer["content"]
    found = ((text.find(stop, start), stop) for stop in stops)
    place, stop = min((one for one in found if one[0] >= 0), default=(len(text), None))
    reasoning, text = split_reasoning(text[:place])
    shown: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning := answer.get("thinking") or reasoning:
        shown["reasoning_content"] = reasoning
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls_of(answer)]
    if tools and not calls:
        calls = [(call.name, call.arguments) for call in parse_tool_calls(text, form, tools) if call.error is None]
        shown["content"] = without_calls(text, form, tools) if calls else text
    if tools and calls:
        shown["tool_calls"] = [
            as_tool_call(made + number, name, arguments if isinstance(arguments, str) else json.dumps(arguments))
            for number, (name, arguments) in enumerate(calls)
        ]
    return shown, stop


@dataclass
class Sessions:
    """The sessions of running episodes.

    `prompt_tokens`: the longest prompt of the run. A branch of an agent's episode may have so many tokens and those of
    a response; without it, the first request of an episode determines what its prompt is.
    """

    prompt_tokens: int | None = None
    by_id: dict[str, AgentSession] = field(default_factory=dict)
    by_key: dict[str, AgentSession] = field(default_factory=dict)
    ended: dict[str, Ending] = field(default_factory=dict)  # id or key -> why the episode ended

    @contextmanager
    def open(self, run: RunningEpisode) -> Iterator[AgentSession]:
        """Requests that arrive after the end are refused."""
        session = AgentSession(run)
        run.prompt_tokens = self.prompt_tokens
        keys = session.key, session.reward_key
        self.by_id[session.id] = session
        self.by_key |= dict.fromkeys(keys, session)
        try:
            yield session
        finally:
            session.close()
            del self.by_id[session.id]
            for key in keys:
                del self.by_key[key]
            self.ended |= dict.fromkeys((session.id, *keys), run.ending)
            while len(self.ended) > 3 * ENDED:
                del self.ended[next(iter(self.ended))]

    def find(self, id: str | None, key: str | None) -> AgentSession | None:
        """By the address, else by the key."""
        return self.by_id.get(id) if id is not None else self.by_key.get(key or "")
