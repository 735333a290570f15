"""Episodes whose agents ask for their answers: at a URL, or with tokens over the connection of their process."""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rloom.episodes.agents.outputs import episode_of
from rloom.episodes.agents.process import (
    ANSWER,
    ASK,
    FAILED,
    RESULT,
    RETURNS,
    RUN,
    UNREAD,
    Task,
    TokenAnswer,
    number,
)
from rloom.episodes.episode import Node
from rloom.episodes.gateway.server import Gateway
from rloom.episodes.pool import EnvironmentPool, EnvironmentProcess
from rloom.episodes.record import Ending
from rloom.episodes.replies import LONGEST_REASON, READ_ERRORS, EnvironmentFailed, WrongReply
from rloom.episodes.runner import Driver, LimitReached, RunningEpisode
from rloom.episodes.session import MOST_OPEN, REFUSED, WITHOUT_ANSWER, WITHOUT_REWARD, AgentSession, Sessions
from rloom.episodes.template import RenderedConversation
from rloom.types import plain_text

EPISODE_S = 3600.0  # of an agent's episode without a limit of its own: an agent may begin a new history for ever
log = logging.getLogger(__name__)
NO_FORM = "the agent's process sent what its agent cannot have returned"


@dataclass
class AgentDriver:
    """One process for each episode, in which the user's agent runs."""

    pool: EnvironmentPool
    by_url: bool  # else with tokens
    vocabulary: int  # tokens
    max_prompt: int
    port: int = 0
    loops: tuple[str, ...] = ()  # names of agent loops
    gateway: Gateway = field(default_factory=Gateway)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.max_prompt)
        self.starting = asyncio.Lock()
        self.said: set[str] = set()  # warnings

    async def run(self, run: RunningEpisode, loop: str = "") -> None:
        began = time.monotonic()
        async with self.pool.agent() as process:
            await self.start()
            with self.sessions.open(run) as session:
                found: Any = None
                run.idle_since = time.monotonic()
                try:
                    async with asyncio.timeout(run.limits.episode_s or EPISODE_S):
                        found = await self.converse(session, process, self.task(run, session, loop))
                except TimeoutError:
                    run.ending = Ending.TIME
                except EnvironmentFailed:
                    if run.ending is Ending.DONE:
                        raise
                    # an error that follows from a limit is not the agent's: SDKs raise one for a refused request
                if found is not None:
                    self.finish(run, session, found)
        waited = sum(node.seconds for node in run.writer.episode.nodes if node.sampled)
        run.environment_seconds = max(time.monotonic() - began - waited, 0.0)

    async def start(self) -> None:
        async with self.starting:
            if self.by_url and not self.gateway.url:
                await self.gateway.start(self.sessions, self.port)

    def task(self, run: RunningEpisode, session: AgentSession, loop: str) -> Task:
        prompt, sampling = run.row.prompt, run.sampling
        messages = [dict(message) for message in prompt.messages]
        given = {
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        return Task(
            row={"messages": messages, **given, **prompt.columns, "prompt": messages},
            messages=prompt.messages,
            text=prompt.text,
            ground_truth=prompt.ground_truth,
            sampling={"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
            max_tokens=run.limits.response_tokens,
            max_length=min(self.max_prompt + run.limits.response_tokens, run.limits.total_tokens or sys.maxsize),
            base_url=self.gateway.session_url(session) if self.by_url else "",
            api_key=session.key,
            reward_key=session.reward_key,
            loop=loop,
            seed=run.row.seed(0),
        )

    async def converse(self, session: AgentSession, process: EnvironmentProcess, task: Task) -> Any:
        """Answer the agent's questions, until its result."""
        await process.request((RUN, task))
        received = asyncio.create_task(process.receive())
        pending: set[asyncio.Task[Any]] = {received, asyncio.create_task(end_idle(session.run))}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task_done in done - {received}:
                    task_done.result()
                if received in done:
                    message = received.result()
                    if FAILED in message or RESULT in message:
                        process.check_number(message)
                    if FAILED in message:
                        raise EnvironmentFailed(plain_text(str(message[FAILED])[:LONGEST_REASON]))
                    if RESULT in message:
                        return message[RESULT]
                    if len(pending) > MOST_OPEN:
                        raise EnvironmentFailed(f"the agent asked for more than {MOST_OPEN} answers at a time")
                    pending.add(asyncio.create_task(self.answer(session, process, message)))
                    received = asyncio.create_task(process.receive())
                    pending.add(received)
        finally:
            for left in pending:
                left.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def answer(self, session: AgentSession, process: EnvironmentProcess, message: Mapping[str, Any]) -> None:
        number, tokens, max_tokens, stops, stop_tokens = self.question(message)
        run = session.run

        def read() -> int:
            leaf = run.writer.read_tokens(tokens)
            self.describe(run, leaf, tokens)
            return leaf

        try:
            answer = run.writer.episode.nodes[(await session.generate(read, max_tokens, stops, stop_tokens))[1]]
            assert answer.logprobs_L is not None
            given = TokenAnswer(answer.tokens_L.tolist(), answer.logprobs_L.tolist(), answer.finished)
        except LimitReached:
            given = TokenAnswer([], [], False)
        await process.send((ANSWER, number, given))

    def describe(self, run: RunningEpisode, leaf: int, tokens: Sequence[int]) -> None:
        """The messages of a node that an agent's tokens began: those of the prompt, or the text as the user's."""
        node, prompt = run.writer.episode.nodes[leaf], run.row.prompt
        if node.parent is None and tuple(tokens) == prompt.tokens:
            run.writer.episode.replace(leaf, messages=prompt.messages)
        elif not node.messages:
            text = run.writer.texts.decode(node.tokens_L.tolist())
            run.writer.episode.replace(leaf, messages=({"role": "user", "content": text},))

    def are_tokens(self, found: Any) -> bool:
        return isinstance(found, list) and all(type(token) is int and 0 <= token < self.vocabulary for token in found)

    def question(self, message: Mapping[str, Any]) -> tuple[int, list[int], int | None, list[str], list[int]]:
        try:
            number, tokens, max_tokens, stops, stop_tokens = message[ASK]
        except READ_ERRORS:
            raise WrongReply(NO_FORM) from None
        known = self.are_tokens(tokens)
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise EnvironmentFailed("the agent's sampling_params: stop is not a list of texts")
        if not self.are_tokens(stop_tokens):
            raise EnvironmentFailed("the agent's sampling_params: stop_token_ids has unknown tokens")
        if not tokens or not known:
            raise EnvironmentFailed(f"the agent asked with a prompt of {'unknown' if tokens else 'no'} tokens")
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens > 0):
            raise EnvironmentFailed(f"the agent asked for an answer of {max_tokens} tokens")
        return number, tokens, max_tokens, stops, stop_tokens

    def finish(self, run: RunningEpisode, session: AgentSession, found: Any) -> None:
        """The rewards that the agent returned, and the outputs of one that asks with tokens."""
        self.check_answered(run)
        try:
            rewards = dict(found.get("rewards") or {})
            if found.get("reward") is not None:
                rewards[None] = found["reward"]
            if rewards and session.rewards:
                self.say(
                    "the agent returned a reward, and others were sent to /rl/set_reward for the same episode: those "
                    "do not count. Return None where they should; agent/rewards_over_http counts them"
                )
                session.remove_rewards()
            for name, reward in rewards.items():
                if name is not None and name not in session.nodes:
                    raise EnvironmentFailed(
                        f"the agent returned a reward of {name[:80]!r}, which is none of its answers; {RETURNS}"
                    )
                session.set_reward(number(reward), name)
            if run.reward is None:
                run.counts[WITHOUT_REWARD] += 1
                if UNREAD in found:
                    self.say(
                        f"the last line of the agent's program gives no reward: {plain_text(str(found[UNREAD]))!r}; "
                        'print a number or {"reward": ...}. Without one, the rule of the data source scores'
                    )
            if not self.by_url and run.writer.episode.nodes:  # else its first request was over a limit
                outputs = [([*tokens], [*mask]) for tokens, mask in found["outputs"]]
                run.in_loss = any(one for _, mask in outputs for one in mask)
                if run.in_loss or not outputs:
                    run.writer.episode = episode_of(run.writer.episode, outputs, run.writer.texts.decode)
        except READ_ERRORS:
            raise WrongReply(NO_FORM) from None

    def check_answered(self, run: RunningEpisode) -> None:
        """EnvironmentFailed: the agent has returned, and has got no answer. Its reward is not that of a sample."""
        if run.ending is not Ending.DONE or any(node.sampled for node in run.writer.episode.nodes):
            return
        run.counts[WITHOUT_ANSWER] += 1
        if refused := run.counts[REFUSED]:
            raise EnvironmentFailed(f"the agent got no answer: {refused} of its requests were refused")
        where = "base_url (OPENAI_BASE_URL, ANTHROPIC_BASE_URL)" if self.by_url else "the policy that it is given"
        raise EnvironmentFailed(f"the agent asked for no answer; send its requests to {where}")

    def say(self, sentence: str) -> None:
        """Once, whatever the values in it."""
        kind = sentence.partition(":")[0]
        if kind not in self.said:
            self.said.add(kind)
            log.warning(sentence)

    async def end(self) -> None:
        if self.gateway.url:
            await self.gateway.stop()

    def close(self) -> None:
        self.pool.close()


async def end_idle(run: RunningEpisode) -> None:
    """EnvironmentFailed when the agent has asked nothing and returned nothing for the time of a call."""
    while True:
        left = run.limits.call_s - (time.monotonic() - run.idle_since)
        if run.generating or left > 0:
            await asyncio.sleep(max(left, 0.05))
        else:
            raise EnvironmentFailed(
                f"the agent asked for no answer and returned nothing for {run.limits.call_s:g} s (tool_timeout_s)",
                Ending.NO_ANSWER,
            )


@dataclass(frozen=True)
class OneTurnDriver:
    """The prompt and one answer."""

    async def run(self, run: RunningEpisode) -> None:
        prompt = run.row.prompt
        conversation = RenderedConversation(prompt.messages, (), prompt.text)
        leaf = run.writer.episode.add(Node(None, prompt.messages, torch.tensor(prompt.tokens), conversation))
        try:
            await run.answer(leaf)
        except LimitReached as reached:
            run.ending = reached.ending

    async def end(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class AgentLoopDriver:
    """Each row names its agent loop: the user's, or one of rloom's."""

    agents: AgentDriver | None  # the user's loops
    own: Mapping[str, Driver]
    default: str

    async def run(self, run: RunningEpisode) -> None:
        name = run.row.prompt.columns.get("agent_name") or self.default
        if self.agents is not None and name in self.agents.loops:
            return await self.agents.run(run, name)
        if name not in self.own:  # of a row that was not in the files
            raise EnvironmentFailed(f"agent_name={name!r}: the agent loops are {', '.join(self.names)}")
        await self.own[name].run(run)
        run.reward = (
            None  # the rules score it: rewards of tools are facts for reward functions, as in runs of tools alone
        )

    @property
    def names(self) -> list[str]:
        """What rows may name."""
        return [*self.own, *(self.agents.loops if self.agents is not None else ())]

    @property
    def drivers(self) -> list[Driver]:
        found = list({id(driver): driver for driver in self.own.values()}.values())
        return found if self.agents is None else [self.agents, *found]

    async def end(self) -> None:
        for driver in self.drivers:
            await driver.end()

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()
