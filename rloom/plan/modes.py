"""What a step takes in each trainer mode, by a simulation of generation whose answers differ in length.

Where a step needs all of its answers, its engines generate the last ones almost alone. With answers begun ahead, others
fill these decode steps. The lengths are assumed, and the same in each mode; scores take no time.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp, log

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.load import replaced
from rloom.config.schema import Config
from rloom.errors import ConfigError, ModelError
from rloom.plan.architecture import actor_plan, critic_plan
from rloom.plan.batches import batches
from rloom.plan.memory import memory
from rloom.plan.timing import GENERATION, TO_ENGINE, generation, step_time

MODE, POOL = "trainer.v1.trainer_mode", "trainer.pools.rollout"
SYNC, COLOCATED, SEPARATE = "sync", "colocate_async", "separate_async"
SPREAD = 64  # the longest answer, in the shortest one
MEAN = (1 - 1 / SPREAD) / log(SPREAD)  # of log-uniform lengths, in the longest
GROUPS, FIRST, LAST = 64, 4, 12  # of an engine at most; steps from which and to which the mean is taken
LEAST_GAIN = 0.05  # a smaller one is within the error of the model


@dataclass(frozen=True)
class ModeTime:
    mode: str
    seconds: float | None  # of a step; None: the run cannot use the mode
    fault: str = ""  # why not
    engines: int | None = None  # workers that generate; None: all


def mode_times(config: Config, gpu_bytes: float) -> list[ModeTime]:
    return [mode_time(config, mode, gpu_bytes) for mode in (SYNC, COLOCATED, SEPARATE)]


def mode_time(config: Config, mode: str, gpu_bytes: float) -> ModeTime:
    """With the fastest number of workers that generate, where none is given."""
    found: list[ModeTime] = []
    fault = "the models do not fit on the GPUs that train"
    for engines in pools(config, mode):
        try:
            other = replaced(config, {MODE: mode, POOL: engines}, config.given)
            check(other, declared_needs(other))
            seconds = step_seconds(other, gpu_bytes)
        except (ConfigError, ModelError) as error:
            fault = str(error).splitlines()[0]
            continue
        if seconds is not None:
            found.append(ModeTime(mode, seconds, engines=engines if isinstance(engines, int) else None))
    return min(found, key=lambda one: one.seconds or 0.0, default=ModeTime(mode, None, fault))


def pools(config: Config, mode: str) -> Iterator[int | list[int] | None]:
    """Values of trainer.pools.rollout."""
    given, workers = config.trainer.pools.rollout, config.workers
    if mode != SEPARATE:
        yield None if config.trainer.v1.is_separate else given
    elif given is not None or workers < 2 or config.actor_rollout_ref.rollout.uses_servers:
        yield given
    else:
        yield from sorted({max(1, workers // 8), max(1, workers // 4), workers // 2, max(1, 3 * workers // 4)})


def step_seconds(config: Config, gpu_bytes: float) -> float | None:
    """None: what trains does not fit on its GPUs."""
    needs, rollout, v1 = declared_needs(config), config.actor_rollout_ref.rollout, config.trainer.v1
    sizes = batches(config, critic=needs.estimator.needs_critic)
    actor, critic = actor_plan(config, sizes), critic_plan(config, sizes)
    held = memory(config, sizes, actor, critic, gpu_bytes)
    trains = memory(config, sizes, actor, critic, gpu_bytes, generates=False) if v1.is_separate else held
    if held.cache is None or not trains.fits:
        return None
    ahead = min(v1.batches_ahead, v1.max_staleness) if config.generates_ahead else 0
    usual = replace(sizes, answer_tokens=round(MEAN * sizes.answer_tokens))
    fitting = max(1, held.cache.room // usual.longest)
    running = min(rollout.sequences("cuda"), (1 + ahead) * sizes.samples_per_engine, fitting)
    steps = sizes.answer_tokens * longest_answers(sizes.prompts_per_engine, rollout.n, running, ahead)
    time = step_time(config, needs, usual, actor, critic, held)
    generating_s = generation(config, needs, usual, actor, held, decode_steps=steps).seconds
    sending_s, training_s = time.of(TO_ENGINE), time.seconds - time.of(GENERATION)
    if v1.is_separate and v1.max_staleness:
        return max(generating_s, training_s - sending_s) + sending_s
    return generating_s + training_s


def longest_answers(groups: int, answers: int, running: int, ahead: int) -> float:
    """Decode steps of an engine in a training step, in those of the longest answer.

    `running` answers are generated at a time, in the order of their groups, and each that ends makes place for the
    next. A training step ends with the group that completes its number; `ahead` times that number are in the queue
    beside them.
    """
    scale = min(1.0, GROUPS / groups)
    size, places = max(1, round(scale * groups)), max(1, round(scale * running))
    draw, clock, complete, ends = random.Random(0), 0.0, 0, [0.0]
    left: list[int] = []  # answers of each group that are not complete
    waiting: deque[tuple[float, int]] = deque()  # length and group
    generated: list[tuple[float, int]] = []  # when it will be complete, and its group
    while len(ends) <= LAST:
        while len(left) < (len(ends) + ahead) * size:
            waiting.extend((exp(-draw.random() * log(SPREAD)), len(left)) for _ in range(answers))
            left.append(answers)
        while waiting and len(generated) < places:
            length, group = waiting.popleft()
            heappush(generated, (clock + length, group))
        clock, group = heappop(generated)
        left[group] -= 1
        complete += left[group] == 0
        if complete == len(ends) * size:
            ends.append(clock)
    return (ends[LAST] - ends[FIRST]) / (LAST - FIRST)
