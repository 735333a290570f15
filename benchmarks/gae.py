"""GAE over many answers at once, beside a Python loop over each answer.

    python benchmarks/gae.py [--sequences 4096] [--tokens 1024]

All start from the same packed tensors and end with one. The loop comes in its quickest form, over Python floats, and
in its usual one, over the elements of tensors; of that one a few sequences are timed and scaled up.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, gae
from rloom.batch import Batch

PROMPT = 16  # tokens of each sample that are not the policy's
SETTINGS = AdvantageSettings(gamma=0.99, lam=0.95)
GOAL = 20


def make_evidence(sequences: int, tokens: int) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)
    length = PROMPT + tokens
    mask = torch.ones(sequences, length, dtype=torch.bool)
    mask[:, :PROMPT] = False
    batch = Batch(
        tokens_T=torch.zeros(sequences * length, dtype=torch.long),
        mask_T=mask.flatten(),
        rollout_logprobs_T=torch.zeros(sequences * length),
        length_N=torch.full((sequences,), length),
        group_N=torch.arange(sequences),
        score_N=torch.zeros(sequences),
        valid_N=torch.ones(sequences, dtype=torch.bool),
    )
    rewards_T, values_T = torch.randn(2, sequences * length, generator=generator)
    return AdvantageInputs(batch, rewards_T, values_T)


def loop_over_sequences(inputs: AdvantageInputs, *, floats: bool) -> Tensor:
    batch, values_T = inputs.batch, inputs.values_T
    assert values_T is not None
    lengths = batch.length_N.tolist()
    parts = []
    for reward_L, value_L, mask_L in zip(
        inputs.rewards_T.split(lengths), values_T.split(lengths), batch.loss_mask_T.split(lengths), strict=True
    ):
        if floats:
            parts.append(torch.tensor(one_sequence(reward_L.tolist(), value_L.tolist(), mask_L.tolist())))
        else:
            parts.append(torch.stack([torch.as_tensor(a) for a in one_sequence(reward_L, value_L, mask_L)]))
    return torch.cat(parts)


def one_sequence(rewards: Any, values: Any, mask: Any) -> list[Any]:
    gamma, decay = SETTINGS.gamma, SETTINGS.gamma * SETTINGS.lam
    found: list[Any] = [0.0] * len(rewards)
    next_value = advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if mask[t]:
            advantage = rewards[t] + gamma * next_value - values[t] + decay * advantage
            next_value = values[t]
            found[t] = advantage
    return found


def fastest(work: Callable[[], Tensor], times: int) -> tuple[float, Tensor]:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    sequences, tokens = arguments.sequences, arguments.tokens
    few = min(sequences, 16)
    inputs, sample = make_evidence(sequences, tokens), make_evidence(few, tokens)
    floats_s, expected_T = fastest(lambda: loop_over_sequences(inputs, floats=True), times=2)
    tensors_s, _ = fastest(lambda: loop_over_sequences(sample, floats=False), times=2)
    tensors_s *= sequences / few
    ours_s, found_T = fastest(lambda: gae(inputs, SETTINGS).advantages_T, times=10)
    print(f"GAE, {sequences} sequences x {tokens} tokens, {torch.get_num_threads()} threads; goal {GOAL} times as fast")
    print(f"  vectorised over sequences               {ours_s * 1000:10.1f} ms")
    for name, peer_s in (("floats", floats_s), ("tensor elements", tensors_s)):
        print(f"  loop over {name:<15} of each sequence {peer_s * 1000:8.1f} ms: {peer_s / ours_s:.1f} times as long")
    print(f"  largest difference {float((found_T - expected_T).abs().max()):.2e}")


if __name__ == "__main__":
    main()
