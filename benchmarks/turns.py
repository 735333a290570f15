"""Episodes of several turns on the native engine: tokens a second, and how long the engine waits for tools.

    python benchmarks/turns.py --shape qwen2.5-0.5b --episodes 256       # on a GPU
    python benchmarks/turns.py --shape tiny --episodes 32 --turn_tokens 8 24

Random weights, prompts and observations; a tool takes as long as told, and answers are as long as told, so every case
samples equally many tokens. One JSON line for each case:

- "continuous": rloom's hand-over between episodes and engine; an episode goes on as soon as its tool has returned. With
  and without reuse of the cache of earlier turns.
- "lock-step": all episodes generate, then the tools of all rows run one after the other, then all generate again, as in
  TRL 1.x. It is measured on the same engine without tools; their time is added, since it is known.
- "lock-step, parallel tools": the same with the tools of a round at the same time.

`idle`: the share of the time in which the engine has no request. `reused`: the share of the requests' tokens whose keys
and values were in the cache.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from measuring import machine, note, pick_device
from shapes import SHAPES, random_network, random_prompts

from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.episodes.episode import Episode
from rloom.episodes.record import Ending, EpisodeRecord
from rloom.episodes.runner import Turns
from rloom.net.loop import EventLoop
from rloom.packing import MicroBatching
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native.engine import NativeRollout


class TimedRollout(NativeRollout):
    """Counts the seconds in which it generates."""

    busy_s = 0.0

    def poll(self) -> list[Completion]:
        started = time.perf_counter()
        found = super().poll()
        self.busy_s += time.perf_counter() - started
        return found


@dataclass(frozen=True)
class Plan:
    """What every case computes."""

    prompts: list[tuple[int, ...]]  # of each episode
    lengths: list[list[int]]  # of the answers, by episode and turn
    observations: list[list[tuple[int, ...]]]  # after each answer but the last
    turns: int

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def response_tokens(self) -> int:
        """Of an episode, at most."""
        seen = [sum(map(len, own)) for own in self.observations]
        return max(sum(answers) + own for answers, own in zip(self.lengths, seen, strict=True))

    def request(self, row: int, turn: int, past: Sequence[int], *, reuse: bool) -> Request:
        sampling = Sampling(self.lengths[row][turn], ignore_eos=True)
        return Request(tuple(past), sampling, 1000 * row + turn, conversation=row if reuse else None)


@dataclass
class Count:
    """Tokens of all requests of a case."""

    requested: int = 0
    reused: int = 0

    def add(self, request: Request, completion: Completion) -> None:
        assert len(completion.tokens_L) == request.sampling.max_new_tokens
        self.requested += len(request.tokens)
        self.reused += completion.reused_tokens


def plan_of(given: argparse.Namespace, seed: int) -> Plan:
    draw, (least, most) = random.Random(seed), given.turn_tokens
    shape, episodes = SHAPES[given.shape], given.episodes
    prompts = random_prompts(shape, episodes // given.answers, given.prompt_tokens, seed)
    seen = random_prompts(shape, episodes * (given.turns - 1), given.observation_tokens, seed + 1)
    return Plan(
        [prompt for prompt in prompts for _ in range(given.answers)],
        [[draw.randint(least, most) for _ in range(given.turns)] for _ in range(episodes)],
        [seen[row * (given.turns - 1) : (row + 1) * (given.turns - 1)] for row in range(episodes)],
        given.turns,
    )


async def run_episode(plan: Plan, row: int, turns: Turns, tool_s: float, reuse: bool, count: Count) -> None:
    try:
        await converse(plan, row, turns, tool_s, reuse, count)
    except Exception as error:
        turns.fail(error)
    else:
        turns.end(0, row, EpisodeRecord(Episode(), Ending.DONE))


async def converse(plan: Plan, row: int, turns: Turns, tool_s: float, reuse: bool, count: Count) -> None:
    past = list(plan.prompts[row])
    for turn in range(plan.turns):
        request = plan.request(row, turn, past, reuse=reuse)
        completion = await turns.generate(0, request)
        count.add(request, completion)
        if turn + 1 < plan.turns:
            await asyncio.sleep(tool_s)
            past += [*completion.tokens_L.tolist(), *plan.observations[row][turn]]


def continuous(rollout: TimedRollout, plan: Plan, tool_s: float, *, reuse: bool) -> Count:
    count, turns = Count(), Turns(1, [0] * len(plan.prompts))
    with closing(EventLoop("episodes")) as loop, closing(rollout.generate_stream()) as stream:
        next(stream)
        for row in range(len(plan.prompts)):
            loop.start(run_episode(plan, row, turns, tool_s, reuse, count))
        while (items := turns.next_requests(0)) is not None:
            for index, completion in stream.send(items):
                turns.complete(0, index, completion)
    return count


def lock_step(rollout: TimedRollout, plan: Plan) -> Count:
    """Without the tools: they run while the engine has no request."""
    count, past = Count(), [list(prompt) for prompt in plan.prompts]
    for turn in range(plan.turns):
        requests = [plan.request(row, turn, tokens, reuse=False) for row, tokens in enumerate(past)]
        for row, completion in rollout.generate(requests):
            count.add(requests[row], completion)
            if turn + 1 < plan.turns:
                past[row] += [*completion.tokens_L.tolist(), *plan.observations[row][turn]]
    return count


def timed(rollout: TimedRollout, plan: Plan, run: Callable[[], Count]) -> tuple[Count, float]:
    """Also the seconds. The engine counts those in which it generates."""
    rollout.expect(len(plan.prompts), len(set(plan.prompts)), plan.response_tokens)
    rollout.busy_s, started = 0.0, time.perf_counter()
    count = run()
    seconds = time.perf_counter() - started
    rollout.sleep()
    return count, seconds


def measured(rollout: TimedRollout, plan: Plan, tool_s: float, *, reuse: bool) -> dict:
    count, seconds = timed(rollout, plan, lambda: continuous(rollout, plan, tool_s, reuse=reuse))
    return line("continuous", plan, tool_s, seconds, rollout.busy_s, reuse, count)


def line(run: str, plan: Plan, tool_s: float, seconds: float, busy_s: float, reuse: bool, count: Count) -> dict:
    return {
        "case": run,
        "tool_s": tool_s,
        "reuse": reuse,
        "tokens": plan.tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(plan.tokens / seconds),
        "idle": round(1 - busy_s / seconds, 3),
        "reused": round(count.reused / count.requested, 3),
    }


def cases(rollout: TimedRollout, given: argparse.Namespace) -> Iterator[dict]:
    for attempt in range(given.warm_up):  # compiles, and captures graphs of most batch sizes
        found = measured(rollout, plan_of(given, 10 * attempt), 0.02 * attempt, reuse=bool(attempt % 2))
        note(f"warm-up: {found['seconds']} s")
    plan = plan_of(given, 1000)
    for tool_s in given.tools:
        for reuse in (True, False):
            yield measured(rollout, plan, tool_s, reuse=reuse)
    count, own_s = timed(rollout, plan, lambda: lock_step(rollout, plan))
    busy_s, rounds = rollout.busy_s, given.turns - 1
    for tool_s in given.tools:
        for name, calls in (("lock-step", given.episodes), ("lock-step, parallel tools", 1)):
            yield line(name, plan, tool_s, own_s + rounds * calls * tool_s, busy_s, False, count)


def rollout_of(given: argparse.Namespace) -> TimedRollout:
    device, dtype = pick_device()
    network = random_network(SHAPES[given.shape], device, dtype)
    owner = LocalEngine(
        network, Placement(device, dtype), scoring=MicroBatching(tokens=16384), compiled=not given.eager
    )
    return TimedRollout(
        network,
        owner=owner,
        max_sequences=given.episodes if given.sequences is None else given.sequences,
        max_prefill_tokens=given.prefill_tokens,
        memory_share=given.memory_share,
        free_cache=False,  # nothing trains in between
        eager=given.eager,
        longest_prompt=given.prompt_tokens,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="random weights (%(default)s)")
    parser.add_argument("--episodes", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="episodes of a prompt (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of an episode (%(default)s)")
    parser.add_argument("--tools", type=float, nargs="+", default=[0.0, 0.1, 1.0, 5.0], metavar="SECONDS")
    parser.add_argument("--prompt_tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--turn_tokens", type=int, nargs=2, default=[64, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--observation_tokens", type=int, default=64, help="after each answer (%(default)s)")
    parser.add_argument("--sequences", type=int, help="that run at a time; the default is all episodes")
    parser.add_argument("--prefill_tokens", type=int, default=16384, help="in one pass (%(default)s)")
    parser.add_argument("--memory_share", type=float, default=0.8, help="for the cache (%(default)s)")
    parser.add_argument("--warm_up", type=int, default=2, help="runs before the measured ones (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="no compiled layers, no captured graphs")
    given = parser.parse_args()
    if given.episodes % given.answers:
        parser.error(f"--episodes {given.episodes} is no multiple of --answers {given.answers}")
    return given


def main() -> None:
    given = parse()
    device, _ = pick_device()
    note(machine(device))
    rollout = rollout_of(given)
    for found in cases(rollout, given):
        print(json.dumps({"shape": given.shape, "episodes": given.episodes, "turns": given.turns} | found))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
