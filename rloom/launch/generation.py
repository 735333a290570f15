"""A model that answers prompts without a run: for `rloom chat` and `rloom.generate`."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloom.config.schema import Config
from rloom.data.chat import as_messages, render_chat, tokenize
from rloom.episodes.runner import Driver, EpisodeRow, EpisodeRunner, RunningEpisode
from rloom.errors import ConfigError, DataError
from rloom.language import translate
from rloom.launch.model_sources import policy_source, policy_tokenizer
from rloom.launch.models import (
    check_policy_family,
    pick_device,
    policy_engine,
    policy_network,
    rollout_engine,
)
from rloom.launch.worker import ModelFiles
from rloom.models.load import read_config
from rloom.models.source import check_folder
from rloom.rollout.base import Completion, Request, Rollout, Sampling
from rloom.rollout.kinds import ROLLOUTS
from rloom.training.sampling import draw_seed
from rloom.types import Prompt

INCOMPLETE = "\ufffd"  # how a tokenizer decodes a character of which some bytes are missing


@dataclass(frozen=True)
class TextGenerator:
    rollout: Rollout
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    context: int | None  # tokens of prompt and answer together that the model supports, if known
    max_new_tokens: int  # data.max_response_length
    max_length: int | None  # data.max_length

    def answers(self, prompts: Sequence[Any], sampling: Sampling, seed: int) -> list[str]:
        """One answer to each prompt: text, or a list of chat messages."""
        requests = [self.request(prompt, sampling, draw_seed(seed, "generate", n)) for n, prompt in enumerate(prompts)]
        found = dict(self.rollout.generate(requests))
        return self.decode([found[index].tokens_L.tolist() for index in range(len(requests))])

    def stream(self, prompt: Any, sampling: Sampling, seed: int) -> Iterator[str]:
        """The answer in pieces, as it is generated. Closed early, generation ends."""
        yield from self.pieces(self.request(prompt, sampling, seed))

    def pieces(self, request: Request) -> Generator[str, None, Completion]:
        number, shown, done = self.rollout.submit(request), "", list[Completion]()
        try:
            while not done:
                done = self.rollout.poll()
                tokens_L = done[0].tokens_L if done else self.rollout.tokens_so_far(number)
                [text] = self.decode([tokens_L.tolist()])
                if done or not text.endswith(INCOMPLETE):
                    yield text[len(shown) :]
                    shown = text
        finally:
            if not done:
                self.rollout.cancel(number)
        return done[0]

    def episode(
        self, runner: EpisodeRunner, prompt: Prompt, sampling: Sampling, seed: int
    ) -> Generator[str, None, None]:
        """An episode, as text: turns in pieces as they are generated, and what is between them.

        `sampling.max_new_tokens` bounds each turn.
        """
        watched, limits = Watched(runner.driver), runner.limits
        turn_tokens = min(sampling.max_new_tokens, limits.turn_tokens or sampling.max_new_tokens)
        runner = replace(runner, driver=watched, limits=replace(limits, turn_tokens=turn_tokens))
        row = EpisodeRow(0, 0, prompt, lambda turn: draw_seed(seed, "chat", turn))
        with ExitStack() as stack:
            turns = stack.enter_context(runner.started([row], sampling, shares=1))
            stack.callback(self.rollout.end_conversation, row.row)
            answers = 0
            while (requests := turns.next_requests(0)) is not None:
                yield from watched.new_lines()
                for request in requests:
                    if not isinstance(request, Request):
                        continue  # the end of the conversation
                    answers += 1
                    yield translate(f"[turn {answers}]") + " "
                    completion = yield from self.pieces(request)
                    yield "\n"
                    turns.complete(0, answers - 1, completion)
            [(_, record)] = turns.take_finished()
        yield from watched.new_lines()
        reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
        ending = translate(record.ending.value) + ("" if record.failure is None else f": {record.failure}")
        yield translate(f"[end] {ending}; turns: {record.turns}, {reward}") + "\n"

    def request(self, prompt: Any, sampling: Sampling, seed: int) -> Request:
        text = render_chat(as_messages(prompt), self.tokenizer)
        [tokens] = tokenize([text], self.tokenizer)
        sampling = sampling.after(tokens)
        if self.context is not None and len(tokens) + sampling.max_new_tokens > self.context:
            raise DataError(
                f"the prompt has {len(tokens)} tokens and the answer up to {sampling.max_new_tokens}; the model "
                f"supports {self.context} together: shorten the prompt, or allow fewer tokens for the answer"
            )
        return Request(tokens, sampling, seed)

    def decode(self, answers: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True) if answers else []


@dataclass
class Watched:
    """A driver whose running episode is shown."""

    driver: Driver
    running: RunningEpisode | None = None
    shown: int = 1  # nodes; the first is the prompt

    async def run(self, run: RunningEpisode) -> None:
        self.running = run
        await self.driver.run(run)

    async def end(self) -> None:
        await self.driver.end()

    def close(self) -> None:
        self.driver.close()

    def new_lines(self) -> Iterator[str]:
        """Of the nodes since the last call: calls, rewards and messages; turns are shown while they are generated."""
        if self.running is None:
            return
        nodes = self.running.writer.episode.nodes
        for node in nodes[self.shown :]:
            for call in node.calls:
                failed = "" if call.error is None else translate(f"[error] {call.error}")
                yield f"[{call.name} {call.seconds:.2g} s] {call.arguments} -> {failed or call.result}\n"
            if node.reward:
                yield translate(f"[reward] {node.reward:g}") + "\n"
            if node.rewritten:
                yield translate("[branch] the chat template wrote the conversation so far in another way") + "\n"
            elif not node.sampled:
                yield from (f"[{message['role']}] {message['content']}\n" for message in node.messages)
        self.shown = len(nodes)


def context_of(config: Config) -> int | None:
    """Tokens of prompt and answer together that the model supports, if its configuration has the number."""
    source = policy_source(config)
    check_folder(source)
    try:
        found = getattr(read_config(source), "max_position_embeddings", None)
    except Exception:  # transformers raises many types; loading the model reports what is wrong
        return None
    return found if isinstance(found, int) else None


@contextmanager
def open_generator(config: Config, checkpoint: Path | None) -> Iterator[TextGenerator]:
    """`checkpoint`: replaces the weights of the model that the configuration names."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kind.own_model or rollout.uses_servers:
        reads_actor = ", ".join(name for name, kind in ROLLOUTS.items() if not kind.own_model)
        raise ConfigError(f"actor_rollout_ref.rollout.name={rollout.name}: use one of {reads_actor} here")
    pick_device(config)
    tokenizer = policy_tokenizer(config)
    check_policy_family(config)
    network = policy_network(config)
    engine = policy_engine(config, network, trained=False)
    if checkpoint is not None:
        engine.load(checkpoint / "actor", frozenset({"model"}))
    built = rollout_engine(config, network, engine, tokenizer)
    try:
        yield TextGenerator(
            rollout=built,
            tokenizer=tokenizer,
            stop_ids=ModelFiles(network, tokenizer).stop_ids(),
            context=context_of(config),
            max_new_tokens=config.data.max_response_length,
            max_length=config.data.max_length,
        )
    finally:
        built.close()
