"""Answers that are interrupted and go on, for tests of rollout engines."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random

from rloom.rollout.base import Begun, Completion, InterruptAll, Request, Rollout


def phase(rollout: Rollout, asked: Mapping[int, Request], polls: int | None) -> dict[int, Completion]:
    """Interrupted after so many polls; with 0, before the first. None: all answers come to their end. By row."""
    rows, found = list(asked), list[tuple[int, Completion]]()
    with closing(rollout.generate_stream(report_every_s=0.0)) as stream:
        next(stream)
        found += stream.send([*asked.values(), InterruptAll()] if polls == 0 else list(asked.values()))
        while len(found) < len(asked) if polls is None else polls > 1:
            found += stream.send(())
            polls = None if polls is None else polls - 1
        if polls:
            last = stream.send([InterruptAll()])
            assert [index for index, _ in last] == sorted(set(range(len(asked))) - {index for index, _ in found})
            found += last
        assert sorted(index for index, _ in found) == list(range(len(asked))), "each once"
        assert stream.send(()) == [], "nothing is unfinished"
    return {rows[index]: completion for index, completion in found}


def continued(request: Request, completion: Completion) -> Request:
    begun = Begun(tuple(completion.tokens_L.tolist()), tuple(completion.logprobs_L.tolist()))
    return replace(request, begun=begun)


def in_phases(rollout: Rollout, requests: Sequence[Request], polls: Sequence[int]) -> tuple[list[Completion], int]:
    """The answers, all of them interrupted after so many polls each time, and the number of begun answers that went on.

    What was sampled before is in each answer, unchanged to the bit.
    """
    asked, done, begun_answers = dict(enumerate(requests)), dict[int, Completion](), 0
    for count in [*polls, None]:
        if not asked:
            break
        for row, completion in phase(rollout, asked, count).items():
            request = asked[row]
            begun = request.begun or Begun((), ())
            kept = len(begun.tokens)
            assert tuple(completion.tokens_L[:kept].tolist()) == begun.tokens
            assert tuple(completion.logprobs_L[:kept].tolist()) == begun.logprobs
            assert len(completion.tokens_L) == len(completion.logprobs_L)
            if completion.interrupted:
                assert not completion.finished and len(completion.tokens_L) < request.sampling.max_new_tokens
                asked[row] = continued(request, completion)
                begun_answers += len(completion.tokens_L) > 0
            else:
                done[row] = completion
                del asked[row]
    return [done[row] for row in range(len(requests))], begun_answers


def random_polls(seed: int, most: int) -> list[int]:
    draws = Random(seed)
    return [draws.randint(0, most) for _ in range(draws.randint(1, 4))]
