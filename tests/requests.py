"""Requests for rollout engines, and trajectories of their completions, for tests."""

from collections.abc import Sequence
from dataclasses import replace

from rloom.batch import Trajectory
from rloom.rollout.base import Completion, Request, Sampling
from rloom.training.scoring import PendingAnswer
from rloom.types import Prompt, Score

NO_LIMIT = 10**6


def ask(tokens: Sequence[int], seed: int = 0, limit: int | None = None) -> Request:
    """To be given its sampling by `sampled`; `limit` is one of its own, below the sampling's."""
    return Request(tuple(tokens), Sampling(limit or NO_LIMIT), seed)


def sampled(requests: Sequence[Request], sampling: Sampling) -> list[Request]:
    limits = [min(request.sampling.max_new_tokens, sampling.max_new_tokens) for request in requests]
    return [
        replace(request, sampling=replace(sampling, max_new_tokens=limit))
        for request, limit in zip(requests, limits, strict=True)
    ]


def trajectories(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Trajectory]:
    """Each in a group of its own, with score 1."""
    prompts = [Prompt(0, (), "", request.tokens, "s") for request in requests]
    pairs = enumerate(zip(prompts, completions, strict=True))
    return [
        PendingAnswer(prompt, row, completion, "", ()).trajectory(completion, Score(1.0))
        for row, (prompt, completion) in pairs
    ]
