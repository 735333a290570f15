"""The forms of `rollout_is_threshold`, `rollout_rs` and `rollout_rs_threshold`, rloom's and verl's. Imports no torch.

r is the ratio of the trainer's probability of a token to the rollout engine's. verl's criteria compare an estimate of
the divergence of a token, k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, or its sum, mean or maximum over an
answer. The bounds of k1 are those of exp(k1), so of 1 / r; k2 and k3 are at least 0 and have an upper bound alone.
"""

from dataclasses import dataclass

LEVELS = ("token", "sequence", "geometric")  # rloom's own forms: bounds of the ratio itself
CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
Threshold = float | str


@dataclass(frozen=True)
class RatioBounds:
    lower: float | None
    upper: float
    clamps: bool = False  # weights below the lower bound are raised to it; else they are 0


@dataclass(frozen=True)
class Criterion:
    name: str
    bounds: RatioBounds

    @property
    def over(self) -> str:
        """token, seq_sum, seq_mean or seq_max."""
        return self.name.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        return self.name.rpartition("_")[2]


def number(text: Threshold) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"{text} is no number") from None
    if not 0 < found < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return found


def bounds_of(threshold: Threshold) -> RatioBounds:
    """`2.0`: an upper bound; `0.5_2.0`: both."""
    lower, _, upper = str(threshold).rpartition("_")
    found = RatioBounds(number(lower) if lower else None, number(upper))
    if found.lower is not None and found.lower > found.upper:
        raise ValueError(f"{lower} is above {upper}; write LOWER_UPPER, such as 0.5_2.0")
    return found


def names(rollout_rs: str) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))


def criteria(rollout_rs: str, threshold: Threshold) -> list[Criterion]:
    """verl's criteria with a threshold each, or one for all. What one of them rejects is rejected."""
    listed, given = names(rollout_rs), [part.strip() for part in str(threshold).split(",") if part.strip()]
    unknown = [name for name in listed if name not in CRITERIA]
    if unknown or not listed:
        raise ValueError(f"{rollout_rs} is neither {', '.join(LEVELS)} nor a list of {', '.join(CRITERIA)}")
    if len(given) not in (1, len(listed)):
        raise ValueError(f"{threshold} has {len(given)} values for {len(listed)} criteria; write one, or one for each")
    return [
        with_bounds(name, bounds_of(text))
        for name, text in zip(listed, given * len(listed) if len(given) == 1 else given, strict=True)
    ]


def with_bounds(name: str, bounds: RatioBounds) -> Criterion:
    if name.endswith("_k1"):
        return Criterion(name, bounds if bounds.lower is not None else RatioBounds(1 / bounds.upper, bounds.upper))
    if bounds.lower is not None:
        raise ValueError(f"{name} has an upper bound alone, not {bounds.lower}_{bounds.upper}")
    return Criterion(name, bounds)


def multiplies_an_answer(rollout_is: str | None, rollout_rs: str | None) -> list[str]:
    """The settings that multiply the ratios of all tokens of an answer, or sum their divergences."""
    found = ["rollout_is=sequence"] if rollout_is == "sequence" else []
    listed = [] if rollout_rs is None else names(rollout_rs)
    return found + [f"rollout_rs={name}" for name in listed if name == "sequence" or name.startswith("seq_sum")]
