"""Metrics of a step, and accuracies of a validation per data source. Pure functions; all results are finite.

A metric that does not exist (the mean score of a batch whose scores all failed) is left out, never NaN.
Shapes are named in `rloom.batch`; those of a validation are

    P  prompts
    n  answers to each prompt
    S  subsets of those answers
    C  different predictions among the answers to one prompt

Accuracies are exact and vectorised, without bootstrap. Failed scores (NaN) are left out: the metrics of a prompt use
its valid answers, and a prompt without valid answers is ignored. With fewer than k valid answers, all of them are used.
"""

import math
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rloom.batch import Batch, TrainBatch
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

# of `rollout/repetition`: a few milliseconds at any batch size
REPETITION_ANSWERS, REPETITION_TOKENS, FOUR = 64, 512, 4
HASH_FACTOR = 6364136223846793005


def batch_metrics(batch: TrainBatch, rewards_T: Tensor, *, finished: Sequence[bool] | None = None) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of one step.

    Scores and rewards are over valid samples, advantages, returns and values over the tokens in the loss, lengths over
    all samples. `finished`: which samples ended before the length limit.
    """
    loss_mask_T = batch.loss_mask_T
    response_N = _sum_by_sample(batch, batch.mask_T.double())
    metrics = {
        **_spread_with_std("critic/score", batch.score_N[batch.valid_N]),
        **_spread_with_std("critic/rewards", _sum_by_sample(batch, rewards_T.double())[batch.valid_N]),
        **_spread("critic/advantages", batch.advantages_T[loss_mask_T]),
        **_spread("response_length", response_N),
        **_spread("prompt_length", batch.length_N - response_N),
        "reward/failed": float((~batch.valid_N).sum()),
    }
    if batch.returns_T is not None:
        metrics |= _spread("critic/returns", batch.returns_T[loss_mask_T])
    if batch.values_T is not None:
        metrics |= _spread("critic/values", batch.values_T[loss_mask_T])
    if batch.values_T is not None and batch.returns_T is not None:
        metrics |= _explained_variance(batch.values_T[loss_mask_T], batch.returns_T[loss_mask_T])
    if finished:
        metrics["response_length/clip_ratio"] = finished.count(False) / len(finished)
    return _finite(metrics | equal_groups(batch) | repetition(batch))


def equal_groups(batch: Batch) -> dict[str, float]:
    """`rollout/equal_groups`: share of the prompts whose answers all have the same score; in groups they have no
    advantage. Of the prompts with two valid answers or more."""
    score_N = batch.score_N[batch.valid_N]
    groups, group_N = batch.group_N[batch.valid_N].unique(return_inverse=True)
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

    Mean over at most 64 answers, of the last 512 tokens of each: loops are at the end.
    """
    rows = torch.arange(0, len(batch), max(1, -(-len(batch) // REPETITION_ANSWERS)))
    part = batch.select(rows)
    token_T, sample_T = part.tokens_T[part.mask_T], part.sample_T[part.mask_T]
    count_N = sample_T.bincount(minlength=len(part))
    place_T = torch.arange(len(sample_T)) - (count_N.cumsum(0) - count_N)[sample_T]
    late_T = place_T >= (count_N - REPETITION_TOKENS)[sample_T]
    token_T, sample_T = token_T[late_T], sample_T[late_T]
    gram_T = torch.zeros_like(token_T[FOUR - 1 :])
    for start in range(FOUR):  # a hash modulo 2^64: equal groups have equal numbers
        gram_T = gram_T * HASH_FACTOR + token_T[start : len(token_T) - FOUR + 1 + start]
    sample_G = sample_T[FOUR - 1 :]
    inside_G = sample_T[: len(sample_G)] == sample_G
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

    def update_flops(self, length_N: Tensor) -> float:
        """Of a forward and a backward pass over samples of these lengths; recomputed activations do not count.

        A parameter and token: 2 for the forward pass, 2 for the gradient of the input and, if it is trained, 2 for its
        own. A number of a key or value that a token attends to: 2 forward, 4 backward.
        """
        matrices = (4 * self.active + 2 * self.trained) * float(length_N.sum())
        attended = (numbers * attended_tokens(length_N, window) for window, numbers in self.attention.items())
        return matrices + 6 * sum(attended)


def attended_tokens(length_N: Tensor, window: int | None) -> float:
    """Over all tokens: how many tokens each attends to, which are itself and those before it, within the window."""
    length_N = length_N.double()
    inside_N = length_N if window is None else length_N.clamp(max=window)
    return float((inside_N * (inside_N + 1) / 2 + (length_N - inside_N) * inside_N).sum())


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


def _sum_by_sample(batch: TrainBatch, values_T: Tensor) -> Tensor:
    return values_T.new_zeros(len(batch)).index_add(0, batch.sample_T, values_T)


def _explained_variance(values_T: Tensor, returns_T: Tensor) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that predicts the mean."""
    if len(returns_T) == 0:
        return {}
    spread = float(returns_T.double().var(correction=0))
    if spread == 0:  # undefined for equal returns
        return {}
    unexplained = float((returns_T.double() - values_T.double()).var(correction=0))
    return {"critic/vf_explained_var": 1 - unexplained / spread}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


Floats = NDArray[np.float64]

# A score above this counts as correct. Rules score 1 or 0; other rewards may score between.
CORRECT_ABOVE = 0.5

# All subsets are used if there are at most this many; otherwise this many are drawn with a fixed seed.
SUBSETS = 1_000

# Limits the votes of a chunk of prompts to about 32 MB.
CHUNK_NUMBERS = 4_000_000


def validation_metrics(
    data_sources: Sequence[str], scores: np.ndarray, predictions: Sequence[Sequence[str | None]]
) -> dict[str, float]:
    """`val-core/{source}/acc/mean@n` and, under `val-aux`, best@k, pass@k, maj@k for k = 1, 2, 4, ... n.

    mean@n   the mean score
    best@k   the expected best score of k answers drawn from the n without replacement
    pass@k   the probability that k such answers contain a correct one: 1 - C(n-c, k) / C(n, k)
    maj@k    the expected score of the prediction that most of k such answers share

    An answer without a prediction has no vote; a source without any prediction has no maj@k.
    """
    assert len(data_sources) == len(scores) == len(predictions)
    metrics: dict[str, float] = {}
    sources = np.asarray(data_sources, dtype=object)
    for source in dict.fromkeys(data_sources):
        rows = np.flatnonzero(sources == source).tolist()
        metrics |= _source_metrics(source, np.asarray(scores[rows], np.float64), [predictions[row] for row in rows])
    return metrics


def _source_metrics(source: str, score_Pn: Floats, predictions: list[Sequence[str | None]]) -> dict[str, float]:
    n = score_Pn.shape[1]
    valid_Pn = np.isfinite(score_Pn)
    metrics: dict[str, float] = {}
    if valid_Pn.any():
        answers = [
            _Answers.pack(score_Pn, valid_Pn, predictions, left)
            for left in np.unique(valid_Pn.sum(axis=1)).tolist()
            if left > 0
        ]
        metrics[f"val-core/{source}/acc/mean@{n}"] = _mean([a.score_Pn.mean(axis=1) for a in answers])
        voted = any((a.class_Pn >= 0).any() for a in answers)
        for k in _powers_of_two_and(n):
            metrics[f"val-aux/{source}/acc/best@{k}"] = _mean([_expected_best(a.score_Pn, k) for a in answers])
            metrics[f"val-aux/{source}/acc/pass@{k}"] = _mean([_pass_probability(a.score_Pn, k) for a in answers])
            if voted:
                metrics[f"val-aux/{source}/acc/maj@{k}"] = _mean([_majority(a, k, n) for a in answers])
    metrics[f"val-aux/{source}/failed"] = float((~valid_Pn).sum())
    return metrics


@dataclass(frozen=True)
class _Answers:
    """The valid answers of the prompts that have the same number of them."""

    score_Pn: Floats
    class_Pn: NDArray[np.int64]  # equal for equal predictions, numbered as first seen; -1 where there is none

    @classmethod
    def pack(
        cls,
        score_Pn: Floats,
        valid_Pn: NDArray[np.bool_],
        predictions: list[Sequence[str | None]],
        left: int,
    ) -> "_Answers":
        rows = np.flatnonzero(valid_Pn.sum(axis=1) == left)
        places = [np.flatnonzero(valid_Pn[row]).tolist() for row in rows]
        kept = [[predictions[row][i] for i in place] for row, place in zip(rows, places, strict=True)]
        return cls(
            score_Pn=score_Pn[rows][valid_Pn[rows]].reshape(len(rows), left),
            class_Pn=np.array([_numbered(row) for row in kept], dtype=np.int64),
        )


def _numbered(predictions: Sequence[str | None]) -> list[int]:
    """['7', None, '3', '7'] -> [0, -1, 1, 0]"""
    numbers: dict[str, int] = {}
    return [-1 if p is None else numbers.setdefault(p, len(numbers)) for p in predictions]


def _powers_of_two_and(n: int) -> list[int]:
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def _mean(parts: list[Floats]) -> float:
    return float(np.concatenate(parts).mean())


def _expected_best(score_Pn: Floats, k: int) -> Floats:
    """The i-th smallest of m numbers is the largest of C(i-1, k-1) of the C(m, k) subsets."""
    m = score_Pn.shape[1]
    k = min(k, m)
    share_n = np.array([comb(i, k - 1) / comb(m, k) for i in range(m)])
    best_P: Floats = np.sort(score_Pn, axis=1) @ share_n
    return best_P


def _pass_probability(score_Pn: Floats, k: int) -> Floats:
    """With 1 for correct and 0 for wrong, the expected best is the unbiased pass@k."""
    return _expected_best((score_Pn > CORRECT_ABOVE).astype(np.float64), k)


def _majority(answers: _Answers, k: int, n: int) -> Floats:
    if k == n:
        return _majority_of_all(answers)
    return _expected_majority(answers, min(k, answers.score_Pn.shape[1]))


def _majority_of_all(answers: _Answers) -> Floats:
    """The score of the most frequent prediction, the first seen of equals; without votes, that of the first answer."""
    classes = np.arange(answers.score_Pn.shape[1])
    votes_PC = (answers.class_Pn[:, :, None] == classes).sum(axis=1)
    winner_P = np.where(votes_PC.any(axis=1), votes_PC.argmax(axis=1), -1)
    first_P = (answers.class_Pn == winner_P[:, None]).argmax(axis=1)
    score_P: Floats = answers.score_Pn[np.arange(len(first_P)), first_P]
    return score_P


def _expected_majority(answers: _Answers, k: int) -> Floats:
    """The mean over subsets of k answers and over all orders of their answers.

    Over all orders, each of several tied predictions is the first equally often, and so is each answer with the same
    prediction: the result is their mean. (So maj@1 is the mean score.)
    """
    member_Sn = _subsets(answers.score_Pn.shape[1], k)
    width = 1 + int(answers.class_Pn.max(initial=0))
    rows = max(1, CHUNK_NUMBERS // (len(member_Sn) * width))
    starts = range(0, len(answers.score_Pn), rows)
    return np.concatenate(
        [
            _majorities(answers.score_Pn[start : start + rows], answers.class_Pn[start : start + rows], member_Sn)
            for start in starts
        ]
    )


def _majorities(score_Pn: Floats, class_Pn: NDArray[np.int64], member_Sn: Floats) -> Floats:
    classes = np.arange(1 + int(class_Pn.max(initial=0)))
    voted_PnC = (class_Pn[:, :, None] == classes).astype(np.float64)
    votes_PSC = member_Sn @ voted_PnC
    total_PSC = member_Sn @ (voted_PnC * score_Pn[:, :, None])
    most_PS = votes_PSC.max(axis=2)
    won_PSC = (votes_PSC == most_PS[:, :, None]) & (votes_PSC > 0)
    mean_PSC = total_PSC / np.maximum(votes_PSC, 1)
    shared_PS = (mean_PSC * won_PSC).sum(axis=2) / np.maximum(won_PSC.sum(axis=2), 1)
    unvoted_PS = score_Pn @ member_Sn.T / member_Sn.sum(axis=1)
    score_P: Floats = np.where(most_PS > 0, shared_PS, unvoted_PS).mean(axis=1)
    return score_P


@cache
def _subsets(n: int, k: int) -> Floats:
    """Which answers are in which subset: all subsets of k if there are at most SUBSETS, else a fixed draw."""
    if comb(n, k) <= SUBSETS:
        picked_Sk = np.array(list(combinations(range(n), k)))
    else:
        picked_Sk = np.random.default_rng(0).random((SUBSETS, n)).argsort(axis=1)[:, :k]
    member_Sn = np.zeros((len(picked_Sk), n))
    np.put_along_axis(member_Sn, picked_Sk, 1.0, axis=1)
    return member_Sn
