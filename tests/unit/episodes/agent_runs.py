"""Episodes of agents in processes of their own, with an engine that answers from a script."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rloom.episodes.agents.driver import AgentDriver, AgentLoopDriver, OneTurnDriver
from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.record import EpisodeRecord
from rloom.episodes.runner import Driver, EpisodeRow, EpisodeRunner
from rloom.net.loop import EventLoop
from rloom.rollout.base import Completion, Request, Sampling
from rloom.types import Prompt
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.engines import answer_all, completed, texts_for

NAME = "chatml"
MAX_PROMPT = 200
QUESTION = ({"role": "user", "content": "guess"},)
LIMITS = EpisodeLimits(400, turns=8, call_s=20.0)


class Letters(str):
    """A text that is sampled with other tokens than those of its encoding."""

    tokens: list[int]

    def __new__(cls, tokens: list[int]) -> "Letters":
        made = super().__new__(cls, tokenizer_for(NAME).decode(tokens))
        made.tokens = tokens
        return made


def agent_driver(setup: AgentSetup, most: int = 8) -> AgentDriver:
    pool = EnvironmentPool(setup, most)
    found = pool.loaded()
    vocabulary = max(tokenizer_for(NAME).get_vocab().values()) + 1
    return AgentDriver(pool, found["by_url"], vocabulary, MAX_PROMPT, loops=tuple(found["loops"]))


def setup_of(**given: Any) -> AgentSetup:
    data = {"max_response_length": 400, "apply_chat_template_kwargs": {}, "tool_config_path": None}
    rollout = {"prompt_length": MAX_PROMPT, "response_length": 400}
    config = {"data": data, "actor_rollout_ref": {"rollout": rollout}}
    return AgentSetup(config=config, tokenizer=pickle.dumps(tokenizer_for(NAME)), **given)


def loop_driver(default: str, **given: Any) -> AgentLoopDriver:
    own: dict[str, Driver] = {"single_turn_agent": OneTurnDriver()}
    return AgentLoopDriver(agent_driver(setup_of(**given)), own, default)


@dataclass(frozen=True)
class KeptDriver:
    """Runs the episodes of several tests, as those of a run's steps: its process loads the user's file once."""

    driver: Driver
    loop: EventLoop


@contextmanager
def kept(driver: Driver) -> Iterator[KeptDriver]:
    loop = EventLoop("episodes")
    with closing(EpisodeRunner(driver, texts_for(NAME), LIMITS, loop)):
        yield KeptDriver(driver, loop)


def run(
    driver: Driver | KeptDriver,
    episodes: int = 1,
    *,
    answer: Callable[[int, int], str] = lambda number, turn: f"{turn}",
    limits: EpisodeLimits = LIMITS,
    rows: Mapping[int, Mapping[str, Any]] | None = None,
) -> tuple[list[EpisodeRecord], list[list[list[int]]]]:
    """The records in their order, and the tokens of all answers to each. `answer(episode, turn)`: their texts."""
    texts, stop = texts_for(NAME), encode(TEMPLATES[NAME][1], NAME)
    if isinstance(driver, KeptDriver):
        runner = EpisodeRunner(driver.driver, texts, limits, driver.loop)
    else:
        runner = EpisodeRunner(driver, texts, limits)
    text = texts.template.render(QUESTION)
    tokens = tuple(encode(text, NAME))
    prompts = [
        Prompt(n, QUESTION, text, tokens, "game", ground_truth="7", columns=(rows or {}).get(n, {}))
        for n in range(episodes)
    ]
    planned = [EpisodeRow(n, 0, prompt, lambda turn, n=n: 1000 * n + turn) for n, prompt in enumerate(prompts)]
    sampled: list[list[list[int]]] = [[] for _ in prompts]

    def complete(index: int, request: Request) -> Completion:
        number = request.conversation
        assert number is not None
        turn = len(sampled[number])
        text = answer(number, turn)
        own = text.tokens if isinstance(text, Letters) else encode(text, NAME)
        completion = completed(index, request, [*own, *stop], -1.0, turn)
        sampled[number].append(completion.tokens_L.tolist())
        return completion

    kept_open = isinstance(driver, KeptDriver)
    with nullcontext() if kept_open else closing(runner), runner.started(planned, Sampling(100), shares=1) as turns:
        records = answer_all(turns, complete)
    return [records[n] for n in range(episodes)], sampled


def trained(record: EpisodeRecord) -> list[list[int]]:
    """The tokens of all turns that are trained, in the order of the branches."""
    return [
        branch.tokens_L[turn.start : turn.stop].tolist()
        for branch in record.episode.branches()
        for turn in branch.turns
    ]


def texts_of(record: EpisodeRecord) -> list[str]:
    return [tokenizer_for(NAME).decode(branch.tokens_L) for branch in record.episode.branches()]


def flat(answers: Sequence[Sequence[int]]) -> list[int]:
    return [token for answer in answers for token in answer]
