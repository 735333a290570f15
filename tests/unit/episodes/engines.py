"""Engines that answer the requests of episodes from a script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rloom.batch import Batch, Trajectory
from rloom.episodes.record import EpisodeRecord, episode_trajectories
from rloom.episodes.runner import Turns
from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import Texts
from rloom.rollout.base import Completion, Request
from rloom.types import Prompt, Score
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for


def texts_for(name: str, call_format: str = "auto") -> Texts:
    """Of a template of `conversations.py`."""
    tokenizer, stop = tokenizer_for(name), TEMPLATES[name][1]
    (stop_token,) = encode(stop, name)
    return Texts(
        TurnTemplate(tokenizer, call_format=call_format),
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        {stop_token: stop},
    )


def completed(number: int, request: Request, tokens: list[int], logprob: float, version: int) -> Completion:
    """As many of the tokens as the request allows. The log-probs are multiples of one number."""
    most = request.sampling.max_new_tokens
    kept = tokens[:most]
    logprobs_L = logprob * torch.arange(1.0, len(kept) + 1)
    return Completion(number, torch.tensor(kept), logprobs_L, len(tokens) <= most, version)


def answer_all(turns: Turns, answer: Callable[[int, Request], Completion], shares: int = 1) -> dict[int, EpisodeRecord]:
    """Answer every request until all episodes have ended; returns their records by row.

    `answer(number, request)`: requests of a share are numbered from 0.
    """
    records: dict[int, EpisodeRecord] = {}
    sent, left = [0] * shares, list(range(shares))
    while left:
        for share in tuple(left):
            items = turns.next_requests(share)
            if items is None:
                left.remove(share)
            for item in items or ():
                if isinstance(item, Request):  # else the end of a conversation
                    turns.complete(share, sent[share], answer(sent[share], item))
                    sent[share] += 1
        records |= dict(turns.take_finished())  # the last ones, too: an episode is finished before its share ends
    return records


class Sampled(NamedTuple):
    request: Request
    completion: Completion


@dataclass
class SampledAnswers:
    """All answers of an engine. No two tokens have the same log-prob, so a trained token tells which one it is."""

    answers: list[Sampled] = field(default_factory=list)
    drawn: int = 0  # tokens

    def add(self, number: int, request: Request, tokens: Sequence[int], stop: int, version: int = 0) -> Completion:
        """As many of the tokens as the request allows."""
        kept = list(tokens[: request.sampling.max_new_tokens])
        logprobs_L = -torch.arange(self.drawn + 1, self.drawn + 1 + len(kept), dtype=torch.float32)
        self.drawn += len(kept)
        completion = Completion(number, torch.tensor(kept), logprobs_L, kept[-1] == stop, version)
        self.answers.append(Sampled(request, completion))
        return completion

    def check(
        self, records: Sequence[EpisodeRecord], prompts: Sequence[Prompt]
    ) -> tuple[list[Trajectory], list[Sampled]]:
        """Every trained token was sampled, once, after the tokens before it. Returns what is trained, and the answers
        that are not."""
        found = [
            trajectory
            for number, (record, prompt) in enumerate(zip(records, prompts, strict=True))
            for trajectory in episode_trajectories(record, prompt, number, Score(1.0))
        ]
        batch = Batch.pack(found)
        assert not batch.rollout_logprobs_T[~batch.mask_T].any()
        left = {float(one.completion.logprobs_L[0]): one for one in self.answers}
        trained = 0
        for trajectory, end in zip(found, batch.length_N.cumsum(0).tolist(), strict=True):
            start = end - len(trajectory.tokens_L)
            for turn in trajectory.turns:
                own = slice(start + turn.start, start + turn.stop)
                sampled = left.pop(float(batch.rollout_logprobs_T[own][0]))  # once
                assert torch.equal(batch.tokens_T[own], sampled.completion.tokens_L)
                assert torch.equal(batch.rollout_logprobs_T[own], sampled.completion.logprobs_L)
                assert turn.version == sampled.completion.version
                assert batch.tokens_T[start : own.start].tolist() == list(sampled.request.tokens)
                assert batch.mask_T[own].all()
                assert sampled.request.conversation == trajectory.group
                trained += turn.stop - turn.start
        assert int(batch.mask_T.sum()) == trained
        return found, list(left.values())
