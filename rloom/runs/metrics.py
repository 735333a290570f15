"""Metrics of a step. Pure functions; all results are finite.

A metric that does not exist (the mean score of a batch whose scores all failed) is left out, never NaN.
Shapes are named in `rloom.batch`.
"""

import math
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from rloom.batch import Batch, TokenMoments, TrainBatch, masked_blocks, sample_returns, sum_by_episode, token_ends
from rloom.types import Score

# Dense bf16 FLOP/s by a word in the device's name; the first match is used.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}

# For `rollout/repetition`, which takes a few milliseconds at any batch size.
REPETITION_ANSWERS, REPETITION_TOKENS, FOUR = 64, 512, 4
HASH_FACTOR = 6364136223846793005


def batch_metrics(
    batch: TrainBatch, rewards_T: Tensor, *, finished: Sequence[bool] | None = None, shaped_N: Tensor | None = None
) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of one step.

    Scores and rewards are over valid samples, advantages, returns and values over the tokens in the loss, lengths over
    all samples; branches of one episode are one sample. `finished`: which samples ended before a limit.
    Length of a response: the tokens that the policy sampled, in all turns and branches; those of an environment are in
    no length. Length of a prompt: the tokens before the first sampled one. `shaped_N`: the scores with penalties and
    limits, which are in the rewards; None: they are the scores.
    """
    loss_mask_T, counted_N = batch.loss_mask_T, batch.counted_N
    response_N = sum_by_episode(batch.counts(batch.mask_T), batch)[counted_N]
    shaped = batch if shaped_N is None else replace(batch, score_N=shaped_N)
    reward_N = sample_returns(shaped, rewards_T)
    valid_N = batch.valid_N & counted_N
    metrics = {
        **_spread_with_std("critic/score", batch.score_N[valid_N]),
        **_spread_with_std("critic/rewards", reward_N[valid_N]),
        **_spread_of_tokens("critic/advantages", loss_mask_T, batch.advantages_T),
        **_spread("response_length", response_N),
        **_spread("prompt_length", _first_sampled(batch)[counted_N]),
        "reward/failed": float((~batch.valid_N & counted_N).sum()),
    }
    if batch.returns_T is not None:
        metrics |= _spread_of_tokens("critic/returns", loss_mask_T, batch.returns_T)
    if batch.values_T is not None:
        metrics |= _spread_of_tokens("critic/values", loss_mask_T, batch.values_T)
    if batch.values_T is not None and batch.returns_T is not None:
        metrics |= _explained_variance(loss_mask_T, batch.values_T, batch.returns_T)
    if finished:
        metrics["response_length/clip_ratio"] = finished.count(False) / len(finished)
    return _finite(metrics | equal_groups(shaped) | repetition(batch))


def equal_groups(batch: Batch) -> dict[str, float]:
    """`rollout/equal_groups`: share of the prompts whose answers all have the same score; in groups they have no
    advantage. Of the prompts with two valid answers or more."""
    compared_N = batch.valid_N & batch.counted_N
    score_N = batch.score_N[compared_N]
    groups, group_N = batch.group_N[compared_N].unique(return_inverse=True)
    ends_G = [
        score_N.new_zeros(len(groups)).scatter_reduce(0, group_N, score_N, reduce=end, include_self=False)
        for end in ("amin", "amax")
    ]
    compared_G = group_N.bincount(minlength=len(groups)) > 1
    if not compared_G.any():
        return {}
    return {"rollout/equal_groups": float((ends_G[0] == ends_G[1])[compared_G].double().mean())}


def repetition(batch: Batch) -> dict[str, float]:
    """`rollout/repetition`: share of the groups of four tokens that occurred before in the same answer.

    Mean over at most 64 answers, of the last 512 tokens of each: loops are at the end. An episode is one answer, and no
    group reaches over the end of a turn.
    """
    first_N = batch.counted_N.nonzero().squeeze(1)
    some_N = first_N[:: max(1, -(-len(first_N) // REPETITION_ANSWERS))]
    chosen_N = torch.zeros_like(batch.length_N).index_fill(0, some_N, 1)
    part = batch.select((sum_by_episode(chosen_N, batch) > 0).nonzero().squeeze(1))
    place_T = part.mask_T.nonzero().squeeze(1)
    token_T, sample_T = part.tokens_T[place_T], part.episode_T[place_T]
    count_N = sample_T.bincount(minlength=len(part))
    number_T = torch.arange(len(sample_T)) - (count_N.cumsum(0) - count_N)[sample_T]
    late_T = number_T >= (count_N - REPETITION_TOKENS)[sample_T]
    token_T, sample_T, place_T = token_T[late_T], sample_T[late_T], place_T[late_T]
    gram_T = torch.zeros_like(token_T[FOUR - 1 :])
    for start in range(FOUR):  # a hash modulo 2^64: equal groups have equal numbers
        gram_T = gram_T * HASH_FACTOR + token_T[start : len(token_T) - FOUR + 1 + start]
    sample_G = sample_T[FOUR - 1 :]
    inside_G = (sample_T[: len(sample_G)] == sample_G) & (place_T[FOUR - 1 :] - place_T[: len(sample_G)] == FOUR - 1)
    total_N = sample_G[inside_G].bincount(minlength=len(part))
    if not total_N.any():
        return {}
    # the number of the answer in the upper bits, so that one sort finds the different groups of all answers
    keys_G = (sample_G[inside_G] << 56) | (gram_T[inside_G] & ((1 << 56) - 1))
    different_N = (keys_G.unique() >> 56).bincount(minlength=len(part))
    share_N = 1 - different_N[total_N > 0].double() / total_N[total_N > 0]
    return {"rollout/repetition": float(share_N.mean())}


def part_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """The further values that reward functions return, `reward/{name}`, averaged over the samples that have them."""
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(f"reward/{name}", []).append(value)
    return _finite({name: sum(values) / len(values) for name, values in parts.items()})


@dataclass(frozen=True)
class ModelWork:
    """What a token costs in a model: the parameters it is multiplied with, and the keys and values it attends to."""

    active: float  # parameters of a token: of experts, the chosen ones; without an input embedding that is looked up
    trained: float  # those of them that have a gradient
    # window of a layer (None: all tokens before) -> heads × (size of a key + size of a value), summed over such layers
    attention: Mapping[int | None, int]

    def update_flops(self, length_N: Tensor) -> Tensor:
        """For samples of these lengths, FLOPs of a forward and a backward pass, without recomputed activations.

        A parameter and token: 2 for the forward pass, 2 for the gradient of the input and, if it is trained, 2 for its
        own. A number of a key or value that a token attends to: 2 forward, 4 backward.
        """
        flops_N = (4 * self.active + 2 * self.trained) * length_N.double()
        for window, numbers in self.attention.items():
            flops_N += 6 * numbers * attended_tokens(length_N.double(), window)
        return flops_N


def attended_tokens(length_N: Tensor, window: int | None) -> Tensor:
    """Over the tokens of a sample: how many tokens each attends to: itself and those before it, within the window."""
    inside_N = length_N if window is None else length_N.clamp(max=window)
    return inside_N * (inside_N + 1) / 2 + (length_N - inside_N) * inside_N


def throughput(*, tokens: int, seconds: float, device: torch.device, devices: int) -> dict[str, float]:
    """`tokens`: of all prompts and answers of the step. The throughput is per device, the memory of this process."""
    metrics = {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/max_memory_allocated_gb": peak_memory_bytes(device) / 1024**3,
    }
    if seconds > 0:
        metrics["perf/throughput"] = tokens / seconds / devices
    return _finite(metrics)


def utilisation(role: str, *, flops: float, seconds: float, peak_flops: float | None) -> dict[str, float]:
    """`perf/mfu/{role}`: model FLOP/s as a share of the peak of all devices; empty if the peak is unknown."""
    if peak_flops is None or seconds <= 0:
        return {}
    return _finite({f"perf/mfu/{role}": flops / seconds / peak_flops})


def device_peak_flops(device: torch.device) -> float | None:
    return peak_flops_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_by_name(device_name: str) -> float | None:
    for name, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", device_name):
            return flops
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak allocated memory on a GPU; peak resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes on Linux


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if len(values) == 0:
        return {}
    values = values.double()
    mean, largest, smallest = torch.stack([values.mean(), values.max(), values.min()]).tolist()
    return {f"{name}/mean": mean, f"{name}/max": largest, f"{name}/min": smallest}


def _spread_with_std(name: str, values: Tensor) -> dict[str, float]:
    """With the unbiased standard deviation (n - 1), which a single value does not have."""
    std = {f"{name}/std": float(values.double().std())} if len(values) > 1 else {}
    return _spread(name, values) | std


def _first_sampled(batch: TrainBatch) -> Tensor:
    """Tokens of each sample before the first that the policy sampled."""
    masks = [batch.mask_T.numpy()[start:stop] for start, stop in pairwise(token_ends(batch.length_N))]
    return torch.tensor([int(mask.argmax()) if mask.any() else len(mask) for mask in masks])


def _spread_of_tokens(name: str, mask_T: Tensor, values_T: Tensor) -> dict[str, float]:
    found = TokenMoments()
    for (values,) in masked_blocks(mask_T, values_T):
        found.add(values)
    if found.count == 0:
        return {}
    return {f"{name}/mean": found.mean, f"{name}/max": found.largest, f"{name}/min": found.smallest}


def _explained_variance(mask_T: Tensor, values_T: Tensor, returns_T: Tensor) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that predicts the mean."""
    spread, unexplained = TokenMoments(correction=0), TokenMoments(correction=0)
    for values, returns in masked_blocks(mask_T, values_T, returns_T):
        spread.add(returns)
        unexplained.add(returns - values)
    if spread.count == 0 or spread.variance == 0:  # undefined for equal returns
        return {}
    return {"critic/vf_explained_var": 1 - unexplained.variance / spread.variance}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
