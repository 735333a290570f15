"""Steps of long-tailed answers: synchronous, and with answers begun ahead of their step, in the same call.

    python benchmarks/ahead.py --shape qwen2.5-1.5b --new_tokens 8192 --ahead 0 1 2
    python benchmarks/ahead.py --shape qwen2.5-1.5b --new_tokens 8192 --ahead 1 --kv refill keep
    python benchmarks/ahead.py --shape qwen2.5-0.5b --new_tokens 512 --slow_share 0.002 --slow_s 10

Random weights and prompts, and random scores, of which `--slow_share` need `--slow_s` seconds and the others none; the
length of each answer is drawn from a log-uniform distribution and is the same in all cases. With 0 batches ahead the
queue computes what a synchronous run does. A step is GRPO's: one update, token weights where answers come from older
weights. `decode`: tokens a second while the engine generates. `thin`: the share of the step in which the engine runs
fewer than an eighth of its step's answers.

`--kv`: what happens to the caches of unfinished answers at an update (trainer.v1.kv_on_update). `gap`: the mean
distance of the engine's log-probs from those of the trainer's weights, over all tokens of a step; `gap behind`: over
those that the weights of the step sampled behind tokens of older weights, so that only their cache differs.
"""

import argparse
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from measuring import Stopwatch, machine, note, peak_gib, pick_device, release, table
from shapes import SHAPES, Shape, add_shape_arguments, random_prompts
from step import RandomScores, grpo_train_batch, no_text, nobody
from torch import Tensor
from training import LEARNING_RATE, OBJECTIVE, add_training_arguments, make_engine

from rloom.algos.correction import CorrectionSettings
from rloom.batch import Batch, Trajectory
from rloom.engines.weight_sync import WeightSync
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.native.engine import NativeRollout
from rloom.runtime.group import LocalGroup
from rloom.training.ahead import AheadSampler, AheadSettings, QueuedGroup
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching
from rloom.training.sampling import Sampler
from rloom.types import Prompt, SampleGroup, Score

THIN = 8  # a step's answers, divided by this: fewer leave most of the GPU idle


class WatchedRollout(NativeRollout):
    """Counts the seconds of generation, and of those in which few answers are left."""

    few = 0  # answers
    busy_s = thin_s = 0.0

    def poll(self) -> list[Completion]:
        started = time.perf_counter()
        found = super().poll()
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        self.thin_s += seconds if len(self.unfinished) < self.few else 0.0
        return found


class SlowScores(RandomScores):
    """Some are late, as those of programs that run into their limit of time."""

    def __init__(self, share: float, seconds: float) -> None:
        super().__init__(seed=0)
        self.share, self.seconds = share, seconds

    def submit(self, groups: Sequence[SampleGroup]) -> Future[list[list[Score]]]:
        found = super().submit(groups)
        slow = [self.draw.random() < self.share for group in groups for _ in group]
        if not any(slow):
            return found
        late: Future[list[list[Score]]] = Future()
        threading.Timer(self.seconds, lambda: late.set_result(found.result())).start()
        return late


@dataclass
class Prompts:
    """A stream of random prompts."""

    shape: Shape
    prompts: int
    tokens: int
    taken: int = 0

    def next(self) -> list[Prompt]:
        first, self.taken = self.taken, self.taken + self.prompts
        texts = random_prompts(self.shape, self.prompts, self.tokens, seed=first)
        return [Prompt(first + row, (), "", tokens, "random") for row, tokens in enumerate(texts)]


class LongTailed(AheadSampler):
    """Answers of drawn lengths."""

    shortest = 1

    def request(self, group: QueuedGroup, member: int) -> Request:
        request = super().request(group, member)
        return replace(request, sampling=replace(self.sampling, max_new_tokens=self.length(group.rows[member])))

    def length(self, row: int) -> int:
        draw, longest = random.Random(row), self.sampling.max_new_tokens
        return round(math.exp(draw.uniform(math.log(self.shortest), math.log(longest))))


class Run:
    """The models of all cases, and the queue of one."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.shape = given, SHAPES[given.shape]
        self.device, _ = pick_device()
        self.engine = make_engine(given)
        self.rollout = WatchedRollout(
            self.engine.network,
            owner=self.engine,
            max_sequences=given.sequences,
            max_prefill_tokens=given.prefill_tokens,
            memory_share=given.memory_share,
            free_cache="keep" not in given.kv,  # alike in all cases
            eager=given.eager,
        )
        self.rollout.few = given.prompts * given.answers // THIN
        self.sync = LocalGroup([WeightSync(None, self.rollout)])
        self.sync.call("sync", 0)

    @contextmanager
    def queue(self, ahead: int, kv: str) -> Iterator[LongTailed]:
        self.rollout.end_session()
        self.rollout.keeps_cache = kv == "keep"
        given, sampling = self.given, Sampling(self.given.new_tokens, ignore_eos=True)
        reward = CompositeReward([MixedPart("rule_score", SlowScores(given.slow_share, given.slow_s))])
        sampler = Sampler(LocalGroup([self.rollout]), self.sync, reward, no_text, seed=0)
        staleness = min(ahead, 1) * (given.staleness or ahead)
        settings = AheadSettings(given.prompts, ahead, staleness, keeps_cache=self.rollout.keeps_cache)
        stream = Prompts(self.shape, given.prompts, given.prompt_tokens)
        queue = LongTailed(sampler, stream, settings, sampling, given.answers, total_steps=10**6)  # type: ignore[arg-type]
        queue.shortest = given.shortest
        with queue:
            yield queue

    def learner(self, ahead: int) -> Learner:
        return Learner(
            "actor",
            LocalGroup([self.engine]),
            objective=replace(OBJECTIVE, correction=CorrectionSettings(rollout_is="token") if ahead else None),
            mini_batching=MiniBatching(self.given.prompts, 1, shuffle=False, seed=0, horizon=self.given.new_tokens),
            schedule=LearningRateSchedule(self.given.learning_rate),
            balance=True,
            max_nonfinite=1,
        )


@dataclass
class Case:
    """What was measured of some steps."""

    generation_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    thin_s: float = 0.0
    decoded: int = 0
    trained: int = 0  # tokens of answers
    carried: float = 0.0
    worst: float = 0.0  # staleness
    steps: int = 0
    gaps: list[Tensor] = field(default_factory=list)  # of tokens
    gaps_behind: list[Tensor] = field(default_factory=list)  # of those behind tokens of older weights

    @property
    def total_s(self) -> float:
        return self.generation_s + self.update_s + self.other_s

    def row(self, ahead: int, kv: str) -> list[str]:
        steps = self.steps
        return [
            str(ahead),
            kv,
            f"{self.total_s / steps:.2f}",
            f"{self.generation_s / steps:.2f}",
            f"{self.update_s / steps:.2f}",
            f"{self.other_s / steps:.2f}",
            f"{self.trained / self.total_s:,.0f}",
            f"{self.decoded / self.generation_s:,.0f}",
            f"{self.thin_s / self.total_s:.0%}",
            f"{self.carried / steps:.0f}",
            f"{self.worst:.0f}",
            *(f"{float(torch.cat(gaps).mean()):.5f}" if gaps else "" for gaps in (self.gaps, self.gaps_behind)),
        ]

    def compare(self, trajectories: list[Trajectory], batch: Batch, score_T: Tensor, version: int) -> None:
        gap_T, first = (score_T.cpu() - batch.rollout_logprobs_T).abs(), 0
        self.gaps.append(gap_T[batch.mask_T.bool()])
        for trajectory in trajectories:
            for turn in trajectory.turns:
                if turn.earlier and turn.version == version:
                    self.gaps_behind.append(gap_T[first + turn.earlier[-1][0] : first + turn.stop])
            first += len(trajectory.tokens_L)


HEAD = [
    *("ahead", "kv", "step s", "generation", "update", "other", "trained tok/s", "decode tok/s", "thin", "carried"),
    *("worst", "gap", "gap behind"),
]


def take(run: Run, queue: LongTailed, learner: Learner, step: int, case: Case) -> None:
    watch, before, thin_s = Stopwatch.on(run.device), tokens_in(queue), run.rollout.thin_s
    with watch.stage("generation"):
        queue.generate(step, nobody)
    with watch.stage("other"):
        pending, metrics = queue.take(step)
        trajectories = pending.scored(nobody)
        batch = Batch.pack(trajectories)
        train_batch = grpo_train_batch(batch)
    if len(run.given.kv) > 1:
        case.compare(trajectories, batch, run.engine.score(batch), step - 1)  # its time is not counted
    with watch.stage("update"):
        assert learner.apply(run.given.learning_rate, train_batch, learner.accumulate(train_batch)).applied
    with watch.stage("other"):
        queue.sampler.sync_weights(step)
    trained = int(batch.mask_T.sum())
    case.generation_s += watch.seconds["generation"]
    case.update_s += watch.seconds["update"]
    case.other_s += watch.seconds["other"]
    case.thin_s += run.rollout.thin_s - thin_s
    case.trained += trained
    case.decoded += tokens_in(queue) + trained - before
    case.carried += metrics["rollout/carried_answers"]
    case.worst = max(case.worst, metrics["training/off_policy/trajectory_staleness_worst/max"])
    case.steps += 1
    seconds = " · ".join(f"{name} {value:.2f} s" for name, value in watch.seconds.items())
    kv = "keep" if queue.settings.keeps_cache else "refill"
    note(f"ahead {queue.settings.batches_ahead}, {kv}, step {step}: {seconds}, {trained:,} tokens")


def tokens_in(queue: LongTailed) -> int:
    answers = (answer for group in queue.groups.values() for answer in group.answers)
    return sum(len(answer.so_far.tokens_L) for answer in answers if answer.so_far is not None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser, "qwen2.5-1.5b")
    add_training_arguments(parser)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=100, help="answer; the longest has --new_tokens (%(default)s)")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1], help="batches, one case each (%(default)s)")
    parser.add_argument("--staleness", type=int, help="bound, in steps (as many as batches ahead)")
    parser.add_argument("--slow_share", type=float, default=0.0, help="of the scores (%(default)s)")
    parser.add_argument("--slow_s", type=float, default=10.0, help="seconds of those (%(default)s)")
    parser.add_argument("--kv", choices=["refill", "keep"], nargs="+", default=["refill"], help="(%(default)s)")
    parser.add_argument("--learning_rate", type=float, default=LEARNING_RATE, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured, behind the warm-up (%(default)s)")
    parser.add_argument("--warm_up", type=int, default=2, help="steps, in which the queue fills (%(default)s)")
    parser.add_argument("--sequences", type=int, default=1024, help="that the engine runs at a time (%(default)s)")
    parser.add_argument("--prefill_tokens", type=int, default=16384, help="in one pass (%(default)s)")
    parser.add_argument("--memory_share", type=float, default=0.5, help="of the GPU for the cache (%(default)s)")
    return parser.parse_args()


def main() -> None:
    given, rows = parse(), []
    device, dtype = pick_device()
    release(device)
    run = Run(given)
    for ahead, kv in [(batches, kv) for batches in given.ahead for kv in (given.kv if batches else given.kv[:1])]:
        case, learner = Case(), run.learner(ahead)
        run.sync.call("sync", 0)
        with run.queue(ahead, kv) as queue:
            for step in range(1, 1 + given.warm_up + given.steps):
                if step == 1 + given.warm_up:
                    case = Case()
                take(run, queue, learner, step, case)
        rows.append(case.row(ahead, kv))
    print(
        f"GRPO steps of {given.shape} with {given.prompts} prompts × {given.answers} answers of {given.shortest} to "
        f"{given.new_tokens} tokens (log-uniform), prompts of {given.prompt_tokens}, {dtype}"
    )
    print(f"{machine(device)}; peak of torch's allocator {peak_gib(device):.1f} GiB\n")
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
