"""Engines that answer the requests of episodes from a script."""

from collections.abc import Callable

import torch

from rloom.episodes.record import EpisodeRecord
from rloom.episodes.runner import Turns
from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import Texts
from rloom.rollout.base import Completion, Request
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for


def texts_for(name: str) -> Texts:
    """Of a template of `conversations.py`."""
    tokenizer, stop = tokenizer_for(name), TEMPLATES[name][1]
    (stop_token,) = encode(stop, name)
    return Texts(
        TurnTemplate(tokenizer),
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
