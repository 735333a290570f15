"""Speed of one update: rloom's engine on packed samples beside a plain Hugging Face model, same samples, same run.

    python benchmarks/training.py --shape qwen2.5-0.5b [--samples 128] [--tokens_per_pass 32768] [--checkpointing]

rloom: float32 masters and moments, bfloat16 arithmetic, packed, log-probs in chunks. fsdp2 and megatron: the same
through the engines of several processes, as the only rank. The peer: transformers with sdpa attention in rows without
padding, all logits at once, weights, gradients and moments in bfloat16 (half the bytes of rloom's, and the faster way
for it).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from measuring import Stopwatch, held_gib, machine, note, peak_gib, pick_device, release, table
from profiling import profile_once
from shapes import SHAPES, Rates, Shape, add_shape_arguments, random_model, random_network, rates_of, training_flops

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TrainBatch
from rloom.engines.base import AdamW, Engine, Placement
from rloom.engines.distributed import join, rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.local import LocalEngine
from rloom.models.load import load_causal_lm
from rloom.models.network import Network, PolicyNetwork
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching

LEARNING_RATE = 1e-6
OPTIMIZER = AdamW(weight_decay=0.01, betas=(0.9, 0.999), grad_clip=1.0)
OBJECTIVE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "low_var_kl")


@dataclass(frozen=True)
class Result:
    name: str
    tokens_per_pass: int
    seconds: float
    median_s: float
    warm_up_s: float
    peak_gib: float
    held_gib: float | None


def random_batch(shape: Shape, samples: int, prompt_tokens: int, new_tokens: int) -> TrainBatch:
    """Answers with random advantages, exactly on-policy."""
    draw = torch.Generator().manual_seed(0)
    length = prompt_tokens + new_tokens
    written = (torch.arange(length) >= prompt_tokens).repeat(samples)
    advantage_N = torch.randn(samples, generator=draw)
    return TrainBatch(
        tokens_T=torch.randint(2, shape.vocabulary, (samples * length,), generator=draw),
        mask_T=written,
        rollout_logprobs_T=torch.zeros(samples * length),
        length_N=torch.full((samples,), length),
        group_N=torch.arange(samples),
        score_N=advantage_N,
        valid_N=torch.ones(samples, dtype=torch.bool),
        advantages_T=advantage_N.repeat_interleave(length) * written,
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )


def network_and_settings(given: argparse.Namespace) -> tuple[Network, Placement, dict[str, Any]]:
    device, dtype = pick_device()
    network = random_network(SHAPES[given.shape], device, torch.float32)  # as weights are loaded: the masters
    network.decoder.shares_prompts = not given.own_prompts
    if given.checkpointing:
        network.decoder.enable_checkpointing()
    budget = MicroBatching(tokens=given.tokens_per_pass)
    settings = {"scoring": budget, "training": budget, "optimizer": OPTIMIZER, "compiled": not given.eager}
    return network, Placement(device, dtype), settings


def make_engine(given: argparse.Namespace) -> LocalEngine:
    network, placement, settings = network_and_settings(given)
    return LocalEngine(network, placement, **settings)


def make_only_rank(given: argparse.Namespace) -> FSDPEngine:
    network, placement, settings = network_and_settings(given)
    join(0, 1, address="127.0.0.1:0", device=placement.device)
    return FSDPEngine(network, placement, rank_mesh(placement.device), **settings)


def make_megatron(given: argparse.Namespace) -> Engine:
    """It reads its weights from files."""
    from rloom.engines.megatron.engine import MegatronEngine
    from rloom.engines.megatron.sizes import ModelParallel

    network, placement, settings = network_and_settings(given)
    if not dist.is_initialized():
        join(0, 1, address="127.0.0.1:0", device=placement.device)
    with TemporaryDirectory() as folder:
        network.module.save_pretrained(folder)  # type: ignore[operator]
        described = PolicyNetwork(load_causal_lm(ModelSource(folder), empty=True), packed=True)
        del network
        release(placement.device)
        return MegatronEngine(
            described,
            ModelSource(folder),
            placement,
            ModelParallel(),
            key="--engines",
            recompute=given.checkpointing,
            **settings,
        )


class Ours:
    def __init__(self, engine: Engine, given: argparse.Namespace, batch: TrainBatch) -> None:
        self.engine = engine
        lengths = batch.length_N.tolist()
        passes = MicroBatching(tokens=given.tokens_per_pass).cut(lengths)
        self.tokens_per_pass = max(sum(lengths[row] for row in rows) for rows in passes)  # of the fullest
        self.batch, self.counts = batch, Counts.of(batch, given.new_tokens)

    def update(self) -> None:
        self.engine.forward_backward(self.batch, OBJECTIVE, self.counts)
        assert self.engine.optim_step(LEARNING_RATE).applied


class HuggingFace:
    """The usual way: rows of tokens in, all logits out, log-softmax, gather."""

    def __init__(self, given: argparse.Namespace, batch: TrainBatch) -> None:
        self.device, dtype = pick_device()
        self.model = random_model(SHAPES[given.shape], self.device, dtype, "sdpa").train()
        if given.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=OPTIMIZER.weight_decay, fused=True
        )
        self.length = given.prompt_tokens + given.new_tokens
        self.rows_per_pass = max(1, min(given.samples, given.tokens_per_pass // self.length))
        self.tokens = batch.tokens_T.view(-1, self.length)
        self.advantages = (batch.advantages_T / batch.mask_T.sum()).view(-1, self.length)

    @property
    def tokens_per_pass(self) -> int:
        return self.rows_per_pass * self.length

    def update(self) -> None:
        """Smaller passes where the memory does not suffice; the clock of the attempt that failed is the warm-up's."""
        while not self.try_passes():
            self.optimizer.zero_grad(set_to_none=True)
            release(self.device)
            note(f"hf: {self.rows_per_pass} rows at once do not fit the memory; {self.rows_per_pass // 2} now")
            self.rows_per_pass //= 2
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def try_passes(self) -> bool:
        try:
            for first in range(0, len(self.tokens), self.rows_per_pass):
                self.one_pass(slice(first, first + self.rows_per_pass))
        except torch.OutOfMemoryError:
            if self.rows_per_pass == 1:
                raise
            return False
        return True

    def one_pass(self, rows: slice) -> None:
        tokens, advantages = self.tokens[rows].to(self.device), self.advantages[rows].to(self.device)
        logits: Any = self.model(input_ids=tokens, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -((logprobs - logprobs.detach()).exp() * advantages[:, 1:]).sum()
        loss.backward()


def measure(name: str, build: Callable[[], Ours | HuggingFace], given: argparse.Namespace) -> Result:
    """The best of the repetitions, and their median."""
    device, _ = pick_device()
    release(device)
    trained = build()
    taken: list[float] = []
    for attempt in range(given.repeat + 1):
        watch = Stopwatch.on(device)
        with watch.stage(name):
            trained.update()
        taken.append(watch.seconds[name])
        note(f"{name}, {'warm-up' if attempt == 0 else attempt}: {taken[-1]:.3f} s")
    warm_up_s, *repeated = taken
    result = Result(
        name,
        trained.tokens_per_pass,
        min(repeated),
        median(repeated),
        warm_up_s,
        peak_gib(device),
        held_gib(device),
    )
    if given.profile and isinstance(trained, Ours):
        print(f"{profile_once(trained.update, device, given.profile)}\n")
    return result


def report(results: list[Result], tokens: int, shape: Shape, rates: Rates, on_gpu: bool) -> str:
    columns = ["engine", "tokens a pass", "s", "median s", "warm-up s", "tok/s", "TFLOP/s"]
    columns += [f"of {rates.peak / 1e12:.0f}", "peak GiB", "held GiB", "× hf", "memory × hf"]
    peer = next((result for result in results if result.name == "hf"), None)
    rows = []
    for result in results:
        rate = training_flops(shape, tokens) / result.seconds
        rows.append(
            [
                result.name,
                f"{result.tokens_per_pass:,}",
                f"{result.seconds:.3f}",
                f"{result.median_s:.3f}",
                f"{result.warm_up_s:.1f}",
                f"{tokens / result.seconds:,.0f}",
                f"{rate / 1e12:.2f}",
                f"{rate / rates.peak:.1%}" if on_gpu else "–",
                f"{result.peak_gib:.1f}",
                "–" if result.held_gib is None else f"{result.held_gib:.1f}",
                "–" if peer is None else f"{peer.seconds / result.seconds:.2f}",
                "–" if peer is None else f"{result.peak_gib / peer.peak_gib:.2f}",
            ]
        )
    return table(columns, rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser, "qwen2.5-0.5b")
    add_training_arguments(parser)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--engines", nargs="+", choices=("rloom", "fsdp2", "megatron", "hf"), default=["rloom", "hf"])
    return parser.parse_args()


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens_per_pass", type=int, default=32768, help="budget of a micro-batch (%(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--own_prompts", action="store_true", help="compute the prompt of each sample")


def main() -> None:
    given = parse()
    device, dtype = pick_device()
    shape = SHAPES[given.shape]
    batch = random_batch(shape, given.samples, given.prompt_tokens, given.new_tokens)
    builders: dict[str, Callable[[], Ours | HuggingFace]] = {
        "rloom": lambda: Ours(make_engine(given), given, batch),
        "fsdp2": lambda: Ours(make_only_rank(given), given, batch),
        "megatron": lambda: Ours(make_megatron(given), given, batch),
        "hf": lambda: HuggingFace(given, batch),
    }
    results = [measure(name, build, given) for name, build in builders.items() if name in given.engines]
    print(
        f"Update of {given.shape} ({shape.parameters / 1e6:,.1f} M parameters, random) on {given.samples} samples of "
        f"{given.prompt_tokens} + {given.new_tokens} tokens, {str(dtype).removeprefix('torch.')}, "
        f"gradient checkpointing {'on' if given.checkpointing else 'off'}, best of {given.repeat}"
    )
    print(f"{machine(device)}\n")
    print(report(results, len(batch.tokens_T), shape, rates_of(given), device.type == "cuda"))
    print(
        "\nTFLOP/s by 6 × parameters × tokens, prompts included. held: what stays allocated between updates. "
        "rloom keeps float32 masters and moments; hf keeps weights and moments in the arithmetic's type and all logits."
    )


if __name__ == "__main__":
    main()
