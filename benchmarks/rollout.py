"""Rollout speed: the native engine beside `generate()` of transformers, same model, prompts and lengths, same run.

python benchmarks/rollout.py [--model embedded] [--prompts 64] [--answers 8] [--new_tokens 48] [--repeat 3]
"""

import argparse
import platform
import time

import torch

from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.models.load import load_tokenizer
from rloom.rollout.base import Request, Rollout, Sampling
from rloom.trainer.assemble.inputs import policy_source, train_prompts
from rloom.trainer.assemble.models import policy_engine, policy_network, rollout_engine
from rloom.trainer.assemble.parts import stop_ids


def measure(engine: Rollout, requests: list[Request], sampling: Sampling, repeat: int) -> tuple[float, int]:
    """(best seconds, tokens written). The first call warms up and does not count."""
    best, tokens = float("inf"), 0
    for attempt in range(repeat + 1):
        engine.wake()
        started = time.perf_counter()
        tokens = sum(len(completion.tokens_L) for _, completion in engine.generate(requests, sampling))
        if attempt:
            best = min(best, time.perf_counter() - started)
        engine.sleep()
    return best, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    configs = {name: configure(given, name) for name in ("hf", "native")}
    config = configs["hf"]
    tokenizer = load_tokenizer(policy_source(config))
    network = policy_network(config)
    host = policy_engine(config, network, trained=False)
    prompts = train_prompts(config, tokenizer)[: given.prompts]
    requests = [Request(p.tokens, seed) for seed, p in enumerate(p for p in prompts for _ in range(given.answers))]
    machine = torch.cuda.get_device_name() if host.device.type == "cuda" else f"{platform.machine()} CPU"
    print(f"{given.model} on {machine}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{given.prompts} prompts × {given.answers} answers, up to {given.new_tokens} tokens, best of {given.repeat}\n"
    )
    print("| engine | lengths | tokens | seconds | tok/s | × hf |\n| --- | --- | --- | --- | --- | --- |")
    for lengths, ignore_eos in (("as written", False), ("all full", True)):
        sampling = Sampling(given.new_tokens, stop_ids=stop_ids(network, tokenizer), ignore_eos=ignore_eos)
        speed: dict[str, float] = {}
        for name in configs:
            engine = rollout_engine(configs[name], network, host, tokenizer)
            seconds, tokens = measure(engine, requests, sampling, given.repeat)
            speed[name] = tokens / seconds
            ratio = speed[name] / speed["hf"]
            print(f"| {name} | {lengths} | {tokens:,} | {seconds:.2f} | {speed[name]:,.0f} | {ratio:.2f} |")


def configure(given: argparse.Namespace, engine: str) -> Config:
    return load_config(
        [
            f"actor_rollout_ref.model.path={given.model}",
            f"actor_rollout_ref.rollout.name={engine}",
            f"actor_rollout_ref.rollout.max_num_seqs={given.prompts * given.answers}",
        ]
    )


if __name__ == "__main__":
    main()
