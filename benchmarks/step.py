"""A whole GRPO step by stage: generation, rewards, advantages, update and optimizer, with the trainer's own pieces.

    python benchmarks/step.py --shape qwen2.5-0.5b [--prompts 128] [--answers 8] [--engine vllm] [--dump]

Random weights, so the reward is a stand-in (a random 0 or 1 at once) and no text is decoded. No KL, exactly on-policy,
one update a step. With --engine vllm, vLLM generates in the same process and sleeps while the policy is trained.
With --dump, as many steps again follow that write their answers as trainer.log_rollouts=True does, with a stand-in for
each text.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from measuring import Stopwatch, machine, note, outside_gib, peak_gib, pick_device, release, table, used_gib
from profiling import profile_once
from shapes import (
    SHAPES,
    Shape,
    add_shape_arguments,
    decode_floor_seconds,
    prefill_floor_seconds,
    random_prompts,
    rates_of,
    training_flops,
)
from training import LEARNING_RATE, OBJECTIVE, add_training_arguments, make_engine

from rloom.algos.estimators import AdvantageInputs, AdvantageSettings
from rloom.algos.kl import token_rewards
from rloom.algos.objectives import Metrics
from rloom.algos.registry import ALGORITHMS
from rloom.batch import Batch, TokenRecord, TrainBatch
from rloom.engines.local import LocalEngine
from rloom.engines.weight_sync import WeightSync
from rloom.models.checkpoint_format import CheckpointFormat
from rloom.models.network import PolicyNetwork
from rloom.models.source import ModelSource
from rloom.rewards.base import ScoringUnit
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Rollout, Sampling
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.vllm.environment import set_environment
from rloom.runs.dumps.index import Index
from rloom.runs.dumps.writer import DumpWriter, training_table
from rloom.runtime.group import LocalGroup
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching
from rloom.training.sampling import Sampler
from rloom.types import Prompt, SampleGroup, Score

STAGES = ("generation", "reward and pack", "advantages", "update", "weights", "dump")
TEXT = "The answer is 42, since 6 times 7 is 42. " * 50  # 2,050 characters: 512 tokens of English


class RandomScores:
    """Scores that are there at once: what is left is the cost of the loop itself."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)

    unit = ScoringUnit.ANSWER

    def submit(self, groups: Sequence[SampleGroup]) -> Future[list[list[Score]]]:
        found: Future[list[list[Score]]] = Future()
        found.set_result([[Score(float(self.draw.randrange(2))) for _ in group] for group in groups])
        return found

    def metrics(self) -> dict[str, float]:
        return {}


def no_text(answers: Sequence[Sequence[int]]) -> list[str]:
    return [f"{number} {TEXT}" for number in range(len(answers))]


def nobody(done: int, total: int) -> None:
    """Nobody watches the progress."""


class Step:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.shape = given, SHAPES[given.shape]
        self.device, _ = pick_device()
        self.outside_before, self.cache_gib = outside_gib(self.device), 0.0
        self.awake_gib, self.asleep_gib = 0.0, 0.0  # in use on the GPU
        self.engine = make_engine(given)
        self.sampling = Sampling(given.new_tokens, ignore_eos=True)
        network = self.engine.network
        own_model = given.engine == "vllm"
        rollout = vllm_rollout(given, network) if own_model else native_rollout(given, network, self.engine)
        sync = LocalGroup([WeightSync(self.engine if own_model else None, rollout)])
        sync.call("sync", 0)
        self.sampler = Sampler(
            LocalGroup([rollout]),
            sync,
            CompositeReward([MixedPart("rule_score", RandomScores(seed=0))]),
            no_text,
            seed=0,
        )
        self.learner = Learner(
            "actor",
            LocalGroup([self.engine]),
            objective=OBJECTIVE,
            mini_batching=MiniBatching(given.prompts, epochs=1, shuffle=False, seed=0, horizon=given.new_tokens),
            schedule=LearningRateSchedule(LEARNING_RATE),
            balance=True,
            max_nonfinite=1,
        )
        self.dumps: DumpWriter | None = None

    def start_dumping(self, folder: Path) -> None:
        """From here on each step writes its answers."""
        self.learner.objective = replace(OBJECTIVE, records_tokens=True)
        self.dumps = DumpWriter(folder, limit=math.inf, seed=1, report=note)

    def look_at_memory(self, done: int, total: int) -> None:
        """With the first answer: while the cache is there. It is given back before the update."""
        if done == 1:
            self.awake_gib = used_gib(self.device)
            self.cache_gib = max(self.cache_gib, outside_gib(self.device) - self.outside_before)

    def take(self, number: int) -> tuple[dict[str, float], Metrics]:
        watch, given = Stopwatch.on(self.device), self.given
        texts = random_prompts(self.shape, given.prompts, given.prompt_tokens, seed=number)
        prompts = [Prompt(row, (), "", tokens, "random") for row, tokens in enumerate(texts)]
        with watch.stage("generation"):
            pending = self.sampler.generate(
                prompts, given.answers, self.sampling, f"train/{number}", self.look_at_memory
            )
        if number == 0:
            release(self.device)  # what torch's allocator caches would hide what the engine has released
            self.asleep_gib = used_gib(self.device)
        with watch.stage("reward and pack"):
            trajectories = pending.scored(nobody)
            batch = Batch.pack(trajectories)
        with watch.stage("advantages"):
            train_batch = grpo_train_batch(batch)
        with watch.stage("update"):
            shares = self.learner.accumulate(train_batch)
            record = None if self.dumps is None else TokenRecord.empty(train_batch)
            done = self.learner.apply(LEARNING_RATE, train_batch, shares, record)
            assert done.applied
        with watch.stage("weights"):
            self.sampler.sync_weights(number)
        with watch.stage("dump"):
            if self.dumps is not None:
                self.dumps.write("train", number, partial(training_table, trajectories, train_batch, record))
        return watch.seconds, done.metrics


def native_rollout(given: argparse.Namespace, network: PolicyNetwork, owner: LocalEngine) -> Rollout:
    return NativeRollout(
        network,
        owner=owner,
        max_sequences=given.prompts * given.answers,
        max_prefill_tokens=given.prefill_tokens,
        memory_share=given.memory_share,
        free_cache=True,
        eager=given.eager,
    )


def vllm_rollout(given: argparse.Namespace, network: PolicyNetwork) -> Rollout:
    set_environment()
    from rloom.rollout.vllm.arguments import VllmSettings
    from rloom.rollout.vllm.engine import VllmRollout

    folder = Path(tempfile.mkdtemp(prefix="rloom_shape_"))
    (folder / "config.json").write_text(json.dumps(SHAPES[given.shape].config()))
    device, dtype = pick_device()
    settings = VllmSettings(
        source=ModelSource(str(folder)),
        device=device,
        dtype=dtype,
        max_sequences=given.prompts * given.answers,
        max_batched_tokens=given.prefill_tokens,
        max_model_tokens=given.prompt_tokens + given.new_tokens,
        memory_share=given.memory_share,
        free_memory=True,
        eager=given.eager,
        temperature=1.0,
        reads_weights=False,
    )
    return VllmRollout(settings, CheckpointFormat(network))


def grpo_train_batch(batch: Batch) -> TrainBatch:
    inputs = AdvantageInputs(batch, token_rewards(batch, None, 0.0))
    return TrainBatch(
        **vars(batch),
        advantages_T=ALGORITHMS["grpo"].advantage(inputs, AdvantageSettings()).advantages_T,
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )


def rates(given: argparse.Namespace, shape: Shape, seconds: dict[str, float]) -> str:
    """The two long stages beside what the chip could do."""
    known, new_tokens = rates_of(given), [given.new_tokens] * (given.prompts * given.answers)
    floor_s = decode_floor_seconds(shape, given.prompt_tokens, new_tokens, known)
    floor_s += prefill_floor_seconds(shape, given.prompt_tokens, given.prompts, known)
    flops = training_flops(shape, len(new_tokens) * (given.prompt_tokens + given.new_tokens))
    reached = flops / seconds["update"]
    return (
        f"Best of each: generation {sum(new_tokens) / seconds['generation']:,.0f} tok/s, "
        f"{floor_s / seconds['generation']:.0%} of an H200's floor; update {reached / 1e12:.1f} TFLOP/s, "
        f"{reached / known.peak:.1%} of its peak."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser, "qwen2.5-0.5b")
    add_training_arguments(parser)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--prefill_tokens", type=int, default=16384, help="in one pass (%(default)s)")
    parser.add_argument("--dump", action="store_true", help="further steps that write their answers")
    parser.add_argument("--memory_share", type=float, default=0.5, help="of the GPU for the cache (%(default)s)")
    return parser.parse_args()


def main() -> None:
    given = parse()
    device, dtype = pick_device()
    release(device)
    step = Step(given)
    rows, metrics, best = [], Metrics(), {stage: math.inf for stage in STAGES}
    folder = Path(tempfile.mkdtemp(prefix="rloom_dumps_"))
    for number in range(given.repeat * (2 if given.dump else 1) + 1):
        if number == given.repeat + 1:
            step.start_dumping(folder)
        seconds, metrics = step.take(number)
        name = "warm-up" if number == 0 else f"{number}{', dumped' if step.dumps is not None else ''}"
        if number:
            best = {stage: min(best[stage], seconds[stage]) for stage in STAGES}
        rows.append([name, *(f"{seconds[stage]:.2f}" for stage in STAGES), f"{sum(seconds.values()):.2f}"])
        note(" · ".join([f"step {name}", *(f"{stage} {seconds[stage]:.2f} s" for stage in STAGES)]))
    if step.dumps is not None:
        step.dumps.close()
    peak = peak_gib(device)
    if given.profile:
        print(f"{profile_once(lambda: step.take(given.repeat + 1), device, given.profile)}\n")
    tokens = given.prompts * given.answers * given.new_tokens
    print(
        f"GRPO step of {given.shape} with {given.engine} ({step.shape.parameters / 1e6:,.1f} M parameters, random), "
        f"{given.prompts} prompts × {given.answers} answers × {given.new_tokens} tokens ({tokens:,}), "
        f"prompts of {given.prompt_tokens}, {str(dtype).removeprefix('torch.')}, "
        f"gradient checkpointing {'on' if given.checkpointing else 'off'}"
    )
    print(f"{machine(device)}\n")
    print(table(["step", *STAGES, "total"], rows))
    print(f"\n{rates(given, step.shape, best)}" if device.type == "cuda" else "")
    gaps = [f"{name} {value:.2e}" for name, value in metrics.items() if "rollout" in name]
    print(
        f"Seconds. In use on the GPU: {step.awake_gib:.1f} GiB while generating, {step.asleep_gib:.1f} GiB when the "
        "engine sleeps, before the first update."
    )
    print(
        f"Peak of torch's allocator {peak:.1f} GiB; while generating, {step.cache_gib:.1f} GiB of cache and "
        f"graphs beside it. Rollout beside trainer: {', '.join(gaps)}."
    )
    sizes = [entry.bytes / 2**20 for entry in Index(folder).entries.values()]
    if sizes:
        print(f"A dump has {max(sizes):.2f} MiB, {max(sizes) * 2**20 / tokens:.2f} bytes a token.")


if __name__ == "__main__":
    main()
