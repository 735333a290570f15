"""What an engine sampled is what is recorded and trained: every token once, after the context it was sampled in."""

import random
from contextlib import closing
from dataclasses import dataclass, field, replace

import pytest
import torch

from rloom.episodes.base import EpisodeLimits
from rloom.episodes.runner import EpisodeRow, EpisodeRunner, LimitReached
from rloom.episodes.writer import EpisodeWriter
from rloom.launch.episodes import marked_decoder
from rloom.rollout.base import Completion, Request, Sampling
from rloom.types import Prompt
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.engines import SampledAnswers, answer_all, texts_for

EPISODES = 2000
PIECES = [
    "7",
    " the number",
    "<think>hm</think>",
    "</think>",
    "\n",
    " ",
    "日",
    "🙂",
    "<|im_end|>",
    "é",
    "higher",
    "[INST]",
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@dataclass
class RandomEngine:
    """Answers with random tokens, which need not be those of any text."""

    name: str
    stop: int
    vocabulary: int
    sampled: SampledAnswers = field(default_factory=SampledAnswers)

    def answer(self, number: int, request: Request) -> Completion:
        draw = random.Random(request.seed)
        tokens = [token for token in self.tokens(draw) if token != self.stop] + [self.stop] * (draw.random() < 0.9)
        return self.sampled.add(number, request, tokens or [self.stop], self.stop, version=draw.randrange(3))

    def tokens(self, draw: random.Random) -> list[int]:
        if draw.random() < 0.2:
            return [draw.randrange(self.vocabulary) for _ in range(draw.randrange(8))]
        if draw.random() < 0.2:
            return encode(CALL, self.name)
        return [token for _ in range(draw.randrange(5)) for token in encode(draw.choice(PIECES), self.name)]


@dataclass(frozen=True)
class RandomDriver:
    """Episodes with environments, with agents that send messages and change their history, or that send tokens."""

    name: str

    async def run(self, run) -> None:
        draw = random.Random(run.row.row)
        try:
            await draw.choice([self.with_environment, self.with_messages, self.with_tokens])(run, draw)
        except LimitReached as reached:
            run.ending = reached.ending

    async def with_environment(self, run, draw) -> None:
        leaf = run.writer.begin([{"role": "user", "content": draw.choice(PIECES) + "?"}])
        for _ in range(draw.randrange(1, 6)):
            answer = await run.answer(leaf)
            leaf = run.writer.add(answer, self.replies(draw, run.writer.text(answer)))

    async def with_messages(self, run, draw) -> None:
        messages = [{"role": "user", "content": draw.choice(PIECES) + "?"}]
        for _ in range(draw.randrange(1, 7)):
            answer = await run.answer(run.writer.read(messages), draw.choice([None, None, 3]))
            if draw.random() < 0.15:  # asks again
                continue
            messages = [*messages, *run.writer.episode.nodes[answer].messages, *self.replies(draw, "")]
            if draw.random() < 0.15:  # shortens its history
                messages = [{"role": "user", "content": "summary"}]
            elif draw.random() < 0.15:  # goes back
                messages = messages[: 1 + 2 * draw.randrange((len(messages) + 1) // 2)]

    async def with_tokens(self, run, draw) -> None:
        tokens = [draw.randrange(50) for _ in range(5)]
        for _ in range(draw.randrange(1, 6)):
            leaf = run.writer.read_tokens(tokens)
            assert run.writer.episode.tokens(leaf) == tokens  # what the agent sent, whatever of it was recorded before
            answer = await run.answer(leaf)
            if draw.random() < 0.2:
                continue
            tokens = [*run.writer.episode.tokens(answer), *(draw.randrange(50) for _ in range(draw.randrange(4)))]
            if draw.random() < 0.1:
                tokens = tokens[len(tokens) // 2 :]

    def replies(self, draw, answer):
        if self.name != "turns" and "<tool_call>" in answer:
            return [{"role": "tool", "name": "add", "content": draw.choice(PIECES)}]
        return [{"role": "user", "content": draw.choice(PIECES)}]

    async def end(self) -> None: ...

    def close(self) -> None: ...


def run_episodes(name: str, count: int):
    """Records and prompts of the episodes, and what the engine sampled."""
    tokenizer, texts = tokenizer_for(name), texts_for(name)
    texts = replace(texts, decode_marked=marked_decoder(tokenizer, texts.template.source))
    (stop_id,) = texts.stop_texts
    limits = EpisodeLimits(300, turns=5, turn_tokens=40, episode_tokens=700)
    runner = EpisodeRunner(RandomDriver(name), texts, limits)
    prompts = [Prompt(n, ({"role": "user", "content": "?"},), "", (), "") for n in range(count)]
    rows = [EpisodeRow(n, n % 2, prompt, lambda request, n=n: (n << 64) + request) for n, prompt in enumerate(prompts)]
    engine = RandomEngine(name, stop_id, len(tokenizer))
    with closing(runner), runner.started(rows, Sampling(100), shares=2) as turns:
        records = answer_all(turns, engine.answer, shares=2)
    return [records[n] for n in range(count)], prompts, engine


def check(records, prompts, engine: RandomEngine) -> int:
    """Every sampled token is trained once, after the tokens that the engine had before it. Returns the tokens."""
    trajectories, left = engine.sampled.check(records, prompts)
    assert left == []
    assert sum(map(len, (trajectory.answer_tokens for trajectory in trajectories))) == engine.sampled.drawn
    return engine.sampled.drawn


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_sampled_token_is_trained_once_in_its_context(name):
    records, prompts, engine = run_episodes(name, -(-EPISODES // len(TEMPLATES)))
    assert check(records, prompts, engine) > 1000
    assert sum(record.branched for record in records) > 10
    assert len({record.ending for record in records}) >= 3


def test_branches_of_rewritten_pasts_are_among_them():
    records, prompts, engine = run_episodes("drops reasoning", 100)
    assert sum(record.rewritten for record in records) > 5
    assert sum(len(list(record.episode.branches())) > 1 for record in records) > 20
    check(records, prompts, engine)


def test_a_planted_re_encoding_is_found(monkeypatch):
    """An answer that is decoded and encoded again has other tokens, and the check says so."""
    answer = EpisodeWriter.answer

    def re_encoded(self, parent, completion, *rest):
        tokenizer = self.texts.template.tokenizer
        text = tokenizer.decode(completion.tokens_L)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"][: len(completion.tokens_L)]
        tokens += [0] * (len(completion.tokens_L) - len(tokens))
        tokens[-1] = int(completion.tokens_L[-1])
        return answer(self, parent, replace(completion, tokens_L=torch.tensor(tokens)), *rest)

    monkeypatch.setattr(EpisodeWriter, "answer", re_encoded)
    with pytest.raises(AssertionError):
        check(*run_episodes("chatml", 100))
