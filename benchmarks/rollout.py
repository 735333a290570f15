"""Rollout speed: the native engine beside its peers, same shape, prompts and lengths, same run.

    python benchmarks/rollout.py --shape qwen2.5-0.5b --sequences 1024 --engines native hf --spread 50
    python benchmarks/rollout.py --shape qwen2.5-1.5b --new_tokens 8192 --skewed 100 --mixed_only --engines native
    python benchmarks/rollout.py [--model embedded] [--prompts 64]

With --shape: random weights and prompts, every answer as long as told. With --model: a real model and real prompts,
each answer as long as it is written. Every engine returns the log-prob of each token. vLLM: benchmarks/peers.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hf_peer import HfGenerate
from measuring import machine, note, outside_gib, peak_gib, pick_device, release, table
from profiling import profile_once
from shapes import (
    SHAPES,
    add_shape_arguments,
    decode_floor_seconds,
    prefill_floor_seconds,
    random_network,
    random_prompts,
    rates_of,
    skewed_lengths,
    spread_lengths,
)

from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.launch.inputs import TRAIN, as_prompts, read_rows, training_files
from rloom.launch.model_sources import policy_source
from rloom.launch.models import policy_engine, policy_network, rollout_engine
from rloom.launch.worker import ModelFiles
from rloom.models.load import load_tokenizer
from rloom.packing import MicroBatching
from rloom.rollout.base import Request, Rollout, Sampling
from rloom.rollout.native.engine import NativeRollout

ENGINES = ("native", "hf")
IN_TURN = ("hf", "native")  # native keeps its cache until the process ends
GRAPHS_KEY = "actor_rollout_ref.rollout.enforce_eager"


@dataclass(frozen=True)
class Case:
    """What every engine is asked to write."""

    name: str
    requests: Callable[[int], list[Request]]  # of each attempt: fresh prompts, as in training
    new_tokens: list[int] | None = None  # of each request, where the case decides them
    seed: int = 0
    floor_s: float | None = None  # None: not known

    @property
    def equal_lengths(self) -> bool:
        return self.new_tokens is None or len(set(self.new_tokens)) == 1


@dataclass(frozen=True)
class Result:
    engine: str
    case: Case
    tokens: int
    seconds: float
    warm_up_s: float
    peak_gib: float | None

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def write(engine: Rollout, requests: list[Request], case: Case) -> int:
    """Tokens written, each with its log-prob."""
    tokens = 0
    for index, completion in engine.generate(requests):
        length = len(completion.tokens_L)
        assert len(completion.logprobs_L) == length
        assert case.new_tokens is None or length == case.new_tokens[index]
        tokens += length
    return tokens


def measure(name: str, engine: Rollout, case: Case, repeat: int) -> Result:
    """The best of the repetitions. The first call warms up and has a column of its own."""
    seconds, tokens = [], 0
    for attempt in range(repeat + 1):
        requests = case.requests(attempt)
        engine.wake()
        started = time.perf_counter()
        tokens = write(engine, requests, case)  # on the CPU when they come: the device has finished
        seconds.append(time.perf_counter() - started)
        engine.sleep()
    result = Result(name, case, tokens, min(seconds[1:]), seconds[0], None)
    note(f"{name}, {case.name}: {result.speed:,.0f} tok/s (first call {seconds[0]:.1f} s)")
    return result


def measure_engine(
    name: str, build: Callable[[], Rollout], cases: Sequence[Case], given: argparse.Namespace
) -> list[Result]:
    device, _ = pick_device()
    release(device)
    before = outside_gib(device)
    engine = build()
    results = []
    for case in cases:
        if name == "hf" and not case.equal_lengths:
            note(f"hf, {case.name}: left out, generate() has one length for a whole batch")
            continue
        results.append(measure(name, engine, case, given.repeat if name == "native" else given.peer_repeat))
    peak = peak_gib(device) + outside_gib(device) - before  # nothing is given back between calls
    if given.profile and name == "native":
        requests = cases[0].requests(given.repeat + 1)
        engine.wake()
        print(f"{profile_once(lambda: write(engine, requests, cases[0]), device, given.profile)}\n")
        engine.sleep()
    return [replace(result, peak_gib=peak) for result in results]


def shape_cases(given: argparse.Namespace) -> list[Case]:
    shape, count = SHAPES[given.shape], given.sequences
    most = given.new_tokens
    lengths = {} if given.mixed_only else {f"all {most}": [most] * count}
    if given.spread:
        lengths[f"{given.spread} to {most}"] = spread_lengths(count, given.spread, most, seed=0)
    if given.skewed:
        lengths[f"{given.skewed} to {most}, most short"] = skewed_lengths(count, given.skewed, most, seed=0)
    cases = []
    for number, (name, new_tokens) in enumerate(lengths.items()):
        seed = 1000 * number  # no prompt comes twice: a prefix cache must not know it already
        floor_s = decode_floor_seconds(shape, given.prompt_tokens, new_tokens, rates_of(given))
        floor_s += prefill_floor_seconds(shape, given.prompt_tokens, count // given.answers, rates_of(given))
        cases.append(Case(name, partial(requests_of, given, new_tokens, seed), new_tokens, seed, floor_s))
    return cases


def requests_of(given: argparse.Namespace, new_tokens: list[int], seed: int, attempt: int) -> list[Request]:
    prompts = random_prompts(SHAPES[given.shape], given.sequences // given.answers, given.prompt_tokens, seed + attempt)
    asked = [prompt for prompt in prompts for _ in range(given.answers)]
    return [
        Request(tokens, Sampling(new, ignore_eos=True), row)
        for row, (tokens, new) in enumerate(zip(asked, new_tokens, strict=True))
    ]


def fixed(requests: list[Request], attempt: int) -> list[Request]:
    """The same in every attempt."""
    return requests


def native(given: argparse.Namespace) -> NativeRollout:
    device, dtype = pick_device()
    network = random_network(SHAPES[given.shape], device, dtype)
    owner = LocalEngine(
        network, Placement(device, dtype), scoring=MicroBatching(tokens=16384), compiled=not given.eager
    )
    return NativeRollout(
        network,
        owner=owner,
        max_sequences=given.sequences,
        max_prefill_tokens=given.prefill_tokens,
        memory_share=given.memory_share,
        free_cache=False,  # nothing trains in between
        eager=given.eager,
    )


def measure_shape(given: argparse.Namespace) -> list[Result]:
    device, dtype = pick_device()
    builders = {"native": lambda: native(given), "hf": lambda: HfGenerate(SHAPES[given.shape], device, dtype)}
    cases = shape_cases(given)
    results = []
    for name in (name for name in IN_TURN if name in given.engines):
        results += measure_engine(name, builders[name], cases, given)
    return results


def measure_model(given: argparse.Namespace) -> list[Result]:
    configs = {name: configure(given, name) for name in IN_TURN if name in given.engines}
    config = next(iter(configs.values()))
    tokenizer = load_tokenizer(policy_source(config))
    network = policy_network(config)
    owner = policy_engine(config, network, trained=False)
    rows = read_rows(config, training_files(config), given.prompts, TRAIN)
    prompts = as_prompts(config, tokenizer, rows, TRAIN)
    stops = ModelFiles(network, tokenizer).stop_ids()
    cases = []
    for name, ignored in (("as written", False), (f"all {given.new_tokens}", True)):
        sampling = Sampling(given.new_tokens, stop_ids=stops, ignore_eos=ignored)
        asked = enumerate(prompt for prompt in prompts for _ in range(given.answers))
        requests = [Request(prompt.tokens, sampling, seed) for seed, prompt in asked]
        cases.append(Case(name, partial(fixed, requests)))
    results = []
    for name, one in configs.items():
        results += measure_engine(name, partial(rollout_engine, one, network, owner, tokenizer), cases, given)
    return results


def configure(given: argparse.Namespace, engine: str) -> Config:
    return load_config(
        [
            f"actor_rollout_ref.model.path={given.model}",
            f"actor_rollout_ref.rollout.name={engine}",
            f"actor_rollout_ref.rollout.max_num_seqs={given.prompts * given.answers}",
            "actor_rollout_ref.rollout.free_cache_engine=False",  # nothing trains in between
            f"{GRAPHS_KEY}={given.eager}",
        ]
    )


def report(results: Sequence[Result], on_gpu: bool) -> str:
    """Case by case, native first; peers that were measured give a column each."""
    peers = [name for name in ENGINES[1:] if any(result.engine == name for result in results)]
    speed = {(result.engine, result.case.name): result.speed for result in results}
    cases = list(dict.fromkeys(result.case.name for result in results))
    columns = ["engine", "lengths", "tokens", "seconds", "warm-up s", "tok/s", "of the floor", "peak GiB"]
    rows = []
    for result in sorted(results, key=lambda one: (cases.index(one.case.name), ENGINES.index(one.engine))):
        known = on_gpu and result.case.floor_s is not None
        rows.append(
            [
                result.engine,
                result.case.name,
                f"{result.tokens:,}",
                f"{result.seconds:.2f}",
                f"{result.warm_up_s:.1f}",
                f"{result.speed:,.0f}",
                f"{(result.case.floor_s or math.nan) / result.seconds:.0%}" if known else "–",
                "–" if result.peak_gib is None else f"{result.peak_gib:.1f}",
                *(
                    f"{result.speed / speed[peer, result.case.name]:.2f}" if (peer, result.case.name) in speed else "–"
                    for peer in peers
                ),
            ]
        )
    return table([*columns, *(f"× {peer}" for peer in peers)], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser, None)
    parser.set_defaults(new_tokens=None)
    parser.add_argument("--model", default="embedded", help="where no --shape is given (%(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="with --model (%(default)s)")
    parser.add_argument("--sequences", type=int, default=1024, help="with --shape (%(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt (%(default)s)")
    parser.add_argument("--spread", type=int, metavar="LEAST", help="also answers of LEAST to --new_tokens tokens")
    parser.add_argument("--skewed", type=int, metavar="LEAST", help="the same with many short and few long answers")
    parser.add_argument("--mixed_only", action="store_true", help="leave out the case of equal lengths")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["native", "hf"])
    parser.add_argument("--peer_repeat", type=int, default=1, help="repetitions of the slower peers (%(default)s)")
    parser.add_argument("--prefill_tokens", type=int, default=16384, help="in one pass of native (%(default)s)")
    parser.add_argument("--memory_share", type=float, default=0.8, help="for the cache of native (%(default)s)")
    given = parser.parse_args()
    if given.new_tokens is None:
        given.new_tokens = 512 if given.shape else 48
    if given.mixed_only and not (given.spread or given.skewed):
        parser.error("--mixed_only leaves no case; add --spread or --skewed")
    if given.shape and given.sequences % given.answers:
        parser.error(f"--sequences {given.sequences} is no multiple of --answers {given.answers}")
    return given


def main() -> None:
    given = parse()
    device, dtype = pick_device()
    what = (
        f"{given.shape} ({SHAPES[given.shape].parameters / 1e6:,.1f} M parameters, random), "
        f"{given.sequences} sequences, {given.answers} to a prompt of {given.prompt_tokens} tokens"
        if given.shape
        else f"{given.model}, {given.prompts} prompts × {given.answers} answers"
    )
    results = measure_shape(given) if given.shape else measure_model(given)
    print(
        f"Rollout of {what}, {str(dtype).removeprefix('torch.')}, best of {given.repeat}, peers of {given.peer_repeat}"
    )
    print(f"{machine(device)}\n")
    print(report(results, on_gpu=device.type == "cuda"))
    if given.shape and device.type == "cuda":
        print(
            f"\nFloor: weights and cache read at {given.bandwidth / 1e12:.1f} TB/s, plus products at "
            f"{given.matrix_rate / 1e12:.0f} TFLOP/s, each prompt read once. Warm-up: the first call."
        )


if __name__ == "__main__":
    main()
