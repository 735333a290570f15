"""An episode whose agent asks the gateway, with an engine that answers from a script."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from rloom.episodes.base import EpisodeLimits
from rloom.episodes.gateway.server import Gateway
from rloom.episodes.record import EpisodeRecord
from rloom.episodes.runner import EpisodeRow, EpisodeRunner, RunningEpisode, Turns
from rloom.episodes.session import AgentSession, Sessions
from rloom.rollout.base import Completion, Request, Sampling
from rloom.types import Prompt
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.engines import answer_all, completed, texts_for

Script = Sequence[str] | Callable[[str], str]  # answers in the order of their requests, or to the text of a prompt


class OneSession:
    """A driver whose episode lasts until `over` is set."""

    def __init__(self, prompt_tokens: int | None) -> None:
        self.sessions, self.opened = Sessions(prompt_tokens), Future[AgentSession]()

    async def run(self, run: RunningEpisode) -> None:
        self.over = asyncio.Event()
        with self.sessions.open(run) as session:
            self.opened.set_result(session)
            await self.over.wait()

    async def end(self) -> None:
        return

    def close(self) -> None:
        return


@dataclass
class GatewayRun:
    """What an agent needs, and what the engine sampled."""

    gateway: Gateway
    driver: OneSession
    runner: EpisodeRunner
    session: AgentSession
    sampled: list[list[int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    records: list[EpisodeRecord] = field(default_factory=list)
    released: Event = field(default_factory=Event)  # the engine answers only while it is set
    ended: Event = field(default_factory=Event)

    @property
    def url(self) -> str:
        return self.gateway.session_url(self.session)

    @property
    def nodes(self) -> list[Any]:
        return self.session.run.writer.episode.nodes

    def end(self) -> EpisodeRecord:
        self.runner.loop.loop.call_soon_threadsafe(self.driver.over.set)
        assert self.ended.wait(60)
        return self.records[0]

    def check(self) -> EpisodeRecord:
        """Ends the episode; what is recorded is what the engine sampled, in one branch."""
        record = self.end()
        [branch] = record.episode.branches()
        tokens = [branch.tokens_L[turn.start : turn.stop].tolist() for turn in branch.turns]
        assert tokens == self.sampled and (record.branched, record.rewritten) == (0, 0)
        logprobs = [branch.logprobs_L[turn.start : turn.stop].tolist() for turn in branch.turns]
        assert logprobs == [[-0.5 * (place + 1) for place in range(len(answer))] for answer in tokens]
        return record


def run_engine(run: GatewayRun, turns: Turns, script: Script, name: str) -> None:
    stop_token = encode(TEMPLATES[name][1], name)

    def answer(number: int, request: Request) -> Completion:
        run.released.wait(60)
        prompt = tokenizer_for(name).decode(request.tokens)
        text = script(prompt) if callable(script) else script[number]
        completion = completed(number, request, [*encode(text, name), *stop_token], -0.5, 7)
        run.sampled.append(completion.tokens_L.tolist())
        run.requests.append(request)
        return completion

    run.records += answer_all(turns, answer).values()
    run.ended.set()


@contextmanager
def serving(
    script: Script,
    *,
    name: str = "chatml",
    limits: EpisodeLimits | None = None,
    sampling: Sampling | None = None,
    prompt_tokens: int | None = None,
) -> Iterator[GatewayRun]:
    driver, gateway = OneSession(prompt_tokens), Gateway()
    prompt = Prompt(0, ({"role": "user", "content": "guess"},), "", (), "game")
    row = EpisodeRow(0, 0, prompt, lambda turn: turn)
    with (
        closing(EpisodeRunner(driver, texts_for(name), limits or EpisodeLimits(20_000))) as runner,
        ExitStack() as stack,
    ):
        runner.loop.run(gateway.start(driver.sessions, 0))
        stack.callback(lambda: runner.loop.run(gateway.stop()))
        with runner.started([row], sampling or Sampling(20_000), shares=1) as turns:
            run = GatewayRun(gateway, driver, runner, driver.opened.result(60))
            run.released.set()
            engine = Thread(target=run_engine, args=(run, turns, script, name))
            engine.start()
            try:
                yield run
            finally:
                run.released.set()
                run.end()
                engine.join()
