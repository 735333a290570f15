"""Accuracy metrics of a validation, per data source. Exact, vectorised, no bootstrap.

Shapes are part of names:
    P  prompts
    n  answers to each prompt
    S  subsets of those answers
    C  different predictions among the answers to one prompt

Failed scores (NaN) are left out: the metrics of a prompt use its valid answers, and a prompt without valid answers is
ignored. With fewer than k valid answers, all of them are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

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
