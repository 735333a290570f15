"""The range in which the value of a key is known to work, and what happens outside of it. Imports no torch.

`rloom plan` and the start of a run print values outside of it; `rloom doctor` names them before general causes.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rloom.algos.needs import ESTIMATOR_KEY, ESTIMATORS, LOSS_KEY, EstimatorNeeds

ACTOR, ROLLOUT, CRITIC, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "critic",
    "actor_rollout_ref.model",
)
EMBEDDED = "embedded"
MOST_CONFIG = 1 << 22  # bytes of a config.json
LARGEST = 1e300  # a larger number cannot be computed with
SMALL = 1e8  # parameters; smaller models are trained with far higher learning rates
LARGE = 7e8  # by the estimate of parameters(): between models called 0.5B and 1B

Keys = Mapping[str, Any]  # with dotted names
UNSTABLE = frozenset(
    {
        *("nonfinite", "gradient_explosion", "clip_high", "kl_high", "reward_collapse", "reward_falls", "no_progress"),
        *("entropy_explosion", "entropy_collapse", "repetition", "answers_cut", "length_drift", "equal_groups"),
        *("low_score", "loss_not_falling", "reward_hacked"),
    }
)
IDLE = frozenset({"policy_static", "no_progress", "learning_rate_zero", "loss_not_falling", "credit_decay"})
SAME_ANSWERS = frozenset({"equal_groups", "entropy_collapse", "reward_constant", "repetition", "no_progress"})
RANDOM_ANSWERS = frozenset(
    {"sampling_random", "low_score", "reward_zero", "equal_groups", "answers_cut", "no_progress", "entropy_explosion"}
)
CREDIT = frozenset({"credit_decay", "critic_stuck", "no_progress"})
CRITIC_KINDS = frozenset({"critic_stuck", "no_progress", "reward_falls", "reward_collapse"})
CUT = frozenset({"answers_cut", "reward_zero", "low_score", "equal_groups"})


@dataclass(frozen=True)
class Side:
    """What a value on one side of the range does, and the findings that it explains."""

    effect: str
    explains: frozenset[str]


@dataclass(frozen=True)
class Bounds:
    low: float
    usual: Any
    high: float
    whom: str = ""  # whose usual value it is


@dataclass(frozen=True)
class KeyRange:
    key: str
    bounds: Bounds | Callable[[Keys], Bounds]
    below: Side | None
    above: Side | None
    used: Callable[[Keys], bool] = lambda keys: True


@dataclass(frozen=True)
class Unusual:
    """A value outside of its range."""

    key: str
    value: Any
    usual: Any
    sentence: str
    explains: frozenset[str]


def estimator(keys: Keys) -> EstimatorNeeds:
    return ESTIMATORS.get(str(keys.get(ESTIMATOR_KEY, "")), EstimatorNeeds())


# What reading config.json raises: it is missing, no JSON, nested too deeply or lacks an entry, or ~USER is unknown.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RuntimeError)


def model_entries(path: str) -> dict[str, Any]:
    """The config.json of a model's folder. UNREADABLE: there is none.

    A run that others have written names the folder: a FIFO would block for ever.
    """
    if not path:
        raise FileNotFoundError("no model")
    handle = os.open(Path(path).expanduser() / "config.json", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("config.json is not a regular file")
        found = json.loads(file.read(MOST_CONFIG))
    if not isinstance(found, dict):
        raise TypeError("config.json is not an object")
    return found


@cache
def parameters(path: str) -> float | None:
    """Of the model at `path`, about: by its config.json if it is a folder, else by its name ("Qwen2.5-1.5B")."""
    if path == EMBEDDED:
        return 1e6
    try:
        fields = model_entries(path)
        hidden, layers = int(fields["hidden_size"]), int(fields["num_hidden_layers"])
        return 12.0 * layers * hidden**2 + float(fields["vocab_size"]) * hidden
    except UNREADABLE:
        found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", path.casefold().replace("_", "-"))
        return None if found is None else float(found[1]) * (1e9 if found[2] == "b" else 1e6)


def model_path(keys: Keys) -> str:
    return str(keys.get(f"{MODEL}.path") or keys.get("model.path") or "")


def learning_rate(small: Bounds, small_lora: Bounds, large: Bounds, large_lora: Bounds) -> Callable[[Keys], Bounds]:
    def of(keys: Keys) -> Bounds:
        size = parameters(model_path(keys))
        section = MODEL if f"{MODEL}.path" in keys else "model"
        lora = bool(keys.get(f"{section}.lora_rank") or keys.get(f"{section}.lora_adapter_path"))
        tiny, big = (small_lora, large_lora) if lora else (small, large)
        if size is None:  # of any size
            return Bounds(big.low, big.usual, tiny.high, big.whom)
        return tiny if size < SMALL else big

    return of


def actor_rate(keys: Keys) -> Bounds:
    """With all weights of 1.5B, 1e-5 gained 4.6 points on GSM8K, and 4e-6 12.7 (docs/measurements/learning.md)."""
    found, size = ACTOR_RATE(keys), parameters(model_path(keys))
    return replace(found, high=8e-6) if found.whom == OF_SIZE and size is not None and size >= LARGE else found


def number(keys: Keys, key: str, default: float) -> float:
    """Of a key whose numbers are positive. `default`: it has another value; a config.yaml may have any."""
    value = keys.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return value if 0 < value <= LARGEST else default


def total_steps(keys: Keys) -> float:
    """inf: as many as the data have."""
    return number(keys, "trainer.total_training_steps", float("inf"))


def has_critic(keys: Keys) -> bool:
    return estimator(keys).needs_critic


def reads(name: str) -> Callable[[Keys], bool]:
    return lambda keys: ESTIMATOR_KEY in keys and name in estimator(keys).reads


def clips(keys: Keys) -> bool:
    return keys.get(LOSS_KEY, "vanilla") in ("vanilla", None)


def on(key: str) -> Callable[[Keys], bool]:
    return lambda keys: keys.get(key) is True


OF_SIZE, OF_LORA = "for a model of this size", "for LoRA"
TOO_FAST = Side("the policy is damaged within a few updates", UNSTABLE)
TOO_SLOW = Side("the policy hardly moves", IDLE)
NO_CHOICE = Side("all answers to a prompt are the same, so none is better than another", SAME_ANSWERS)
NOISE = Side("answers are mostly random tokens", RANDOM_ANSWERS)
OUTWEIGHS = Side(
    "the KL outweighs the reward: the policy stays at the reference", IDLE | {"gradient_explosion", "critic_stuck"}
)
NO_END = float("inf")
OVERLONG = "reward_model.overlong_buffer"
RANK = f"{MODEL}.lora_rank"
ACTOR_RATE = learning_rate(
    Bounds(1e-5, 2e-4, 1e-3, OF_SIZE), Bounds(1e-4, 1e-3, 1e-2, OF_LORA),
    Bounds(5e-8, 1e-6, 3e-5, OF_SIZE), Bounds(5e-7, 2e-5, 2e-3, OF_LORA),
)  # fmt: skip
CRITIC_RATE = learning_rate(
    Bounds(1e-5, 1e-3, 2e-2, OF_SIZE), Bounds(1e-5, 1e-3, 2e-2, OF_LORA),
    Bounds(5e-7, 1e-5, 1e-3, OF_SIZE), Bounds(5e-7, 1e-5, 5e-3, OF_LORA),
)  # fmt: skip
SFT_RATE = learning_rate(
    Bounds(1e-5, 5e-4, 1e-2, OF_SIZE), Bounds(1e-5, 1e-3, 5e-2, OF_LORA),
    Bounds(1e-7, 1e-5, 1e-3, OF_SIZE), Bounds(1e-6, 1e-4, 5e-3, OF_LORA),
)  # fmt: skip


def answer_length(keys: Keys) -> Bounds:
    size = parameters(model_path(keys))
    return Bounds(8, 48 if size is not None and size < SMALL else 512, NO_END)


WARMUP = Side("the learning rate is near 0 for the whole run", IDLE)
DECAY = Side("the weights shrink faster than they learn", UNSTABLE)
CLIPPED = Side("updates are scaled down to almost nothing", IDLE | {"gradient_explosion"})
NARROW = Side("tokens are clipped at their first change", IDLE | {"clip_high"})
WIDE = Side("updates are hardly limited", UNSTABLE)
CRITIC_IDLE = Side("the critic does not learn", CRITIC_KINDS)
CRITIC_WILD = Side("the critic's values are noise", CRITIC_KINDS)
BONUS = Side("the policy learns to be random instead of right", UNSTABLE | RANDOM_ANSWERS)
MALUS = Side("the policy stops exploring", SAME_ANSWERS | {"reward_falls"})
FEW_TOKENS = Side("answers end before they are complete", CUT)
SHORT_SIGHT = Side("the reward does not reach the first tokens of an answer", CREDIT)
FIRST = Side("only the critic is trained, the policy never", IDLE | {"low_score"})
PENALTY = Side("the penalty outweighs the reward", frozenset({"length_drift", "no_progress", "reward_hacked"}))
PATIENCE = Side("an answer that hangs stops the step for this long", frozenset({"slow_stage", "reward_failures"}))
HASTE = Side("rewards fail before they are computed", frozenset({"reward_failures", "run_failed"}))

FEW = Side("advantages are noise: too few answers in a step", UNSTABLE)
FULL = Side("almost every answer is penalised for its length", PENALTY.explains | CUT)


def few_answers(keys: Keys) -> Bounds:
    return Bounds(8 / max(1, number(keys, f"{ROLLOUT}.n", 1)), 64, NO_END)


def overlong_part(keys: Keys) -> Bounds:
    longest = number(keys, "data.max_response_length", NO_END)
    return Bounds(0, longest // 4 if longest < NO_END else 1024, 0.75 * longest)


def adapter_scale(keys: Keys) -> Bounds:
    rank = number(keys, RANK, 1)
    return Bounds(rank / 32, rank, 32 * rank, OF_LORA)


RANGES = (
    KeyRange(f"{ACTOR}.optim.lr", actor_rate, TOO_SLOW, TOO_FAST),
    KeyRange(f"{CRITIC}.optim.lr", CRITIC_RATE, CRITIC_IDLE, CRITIC_WILD, has_critic),
    KeyRange("optim.lr", SFT_RATE, TOO_SLOW, TOO_FAST),
    *(
        KeyRange(f"{prefix}optim.weight_decay", Bounds(0, 0.01, 2), None, DECAY, used)
        for prefix, used in ((f"{ACTOR}.", bool), (f"{CRITIC}.", has_critic), ("", bool))
    ),
    *(
        KeyRange(f"{prefix}optim.lr_warmup_steps", lambda keys: Bounds(0, 0, total_steps(keys) / 2), None, WARMUP)
        for prefix in (f"{ACTOR}.", "")
    ),
    *(
        KeyRange(f"{prefix}optim.lr_warmup_steps_ratio", Bounds(0, 0.0, 0.5), None, WARMUP)
        for prefix in (f"{ACTOR}.", "")
    ),
    *(
        KeyRange(key, Bounds(1e-3, 1.0, NO_END), CLIPPED, None, used)
        for key, used in ((f"{ACTOR}.grad_clip", bool), (f"{CRITIC}.grad_clip", has_critic), ("optim.clip_grad", bool))
    ),
    KeyRange(f"{ACTOR}.clip_ratio", Bounds(0.01, 0.2, 1), NARROW, WIDE, clips),
    KeyRange(f"{ACTOR}.clip_ratio_low", Bounds(0.01, 0.2, 1), NARROW, WIDE, clips),
    KeyRange(f"{ACTOR}.clip_ratio_high", Bounds(0.01, 0.28, 10), NARROW, WIDE, clips),
    KeyRange(f"{ACTOR}.ppo_epochs", Bounds(1, 1, 8), None, Side("one batch is learned by heart", UNSTABLE)),
    KeyRange(f"{ACTOR}.entropy_coeff", Bounds(-0.02, 0.0, 0.05), MALUS, BONUS),
    KeyRange(f"{ACTOR}.kl_loss_coef", Bounds(0, 0.001, 1), None, OUTWEIGHS, on(f"{ACTOR}.use_kl_loss")),
    KeyRange("algorithm.kl_ctrl.kl_coef", Bounds(0, 0.001, 1), None, OUTWEIGHS, on("algorithm.use_kl_in_reward")),
    KeyRange("algorithm.gamma", Bounds(0.9, 1.0, 1), SHORT_SIGHT, None, reads("gamma")),
    KeyRange("algorithm.lam", Bounds(0.8, 1.0, 1), SHORT_SIGHT, None, reads("lam")),
    KeyRange("data.train_batch_size", few_answers, FEW, None, lambda keys: ESTIMATOR_KEY in keys),
    KeyRange(f"{MODEL}.lora_alpha", adapter_scale, TOO_SLOW, TOO_FAST, lambda keys: number(keys, RANK, 0) > 0),
    KeyRange(f"{ROLLOUT}.temperature", Bounds(0.2, 1.0, 1.5), NO_CHOICE, NOISE),
    KeyRange(f"{ROLLOUT}.top_p", Bounds(0.3, 1.0, 1), NO_CHOICE, None),
    KeyRange(f"{ROLLOUT}.top_k", Bounds(2, -1, NO_END), NO_CHOICE, None, lambda keys: keys[f"{ROLLOUT}.top_k"] > 0),
    KeyRange(f"{ROLLOUT}.ignore_eos", Bounds(0, False, 0), None, Side("answers never end", CUT | {"repetition"})),
    KeyRange("data.max_response_length", answer_length, FEW_TOKENS, None),
    KeyRange("trainer.critic_warmup", lambda keys: Bounds(0, 0, total_steps(keys) - 1), None, FIRST, has_critic),
    KeyRange(f"{CRITIC}.cliprange_value", Bounds(0.01, 0.5, NO_END), CRITIC_IDLE, None, has_critic),
    KeyRange(f"{OVERLONG}.len", overlong_part, None, FULL, on(f"{OVERLONG}.enable")),
    KeyRange(f"{OVERLONG}.penalty_factor", Bounds(0, 1.0, 10), None, PENALTY, on(f"{OVERLONG}.enable")),
    KeyRange("reward_model.timeout_s", Bounds(0.1, 10.0, 3600), HASTE, PATIENCE),
)  # fmt: skip


def unusual_values(keys: Keys) -> list[Unusual]:
    """The values of a run's keys that are outside of their range, in the order of the table."""
    return list(_unusual_values(keys))


def _unusual_values(keys: Keys) -> Iterator[Unusual]:
    for row in RANGES:
        value = keys.get(row.key)
        if not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST or not row.used(keys):
            continue
        bounds = row.bounds(keys) if callable(row.bounds) else row.bounds
        side = row.below if value < bounds.low else row.above if value > bounds.high else None
        if side is not None:
            sentence = compared(f"{row.key}={shown(value)}", value, bounds, side.effect)
            yield Unusual(row.key, value, bounds.usual, sentence, side.explains)


def compared(setting: str, value: float, bounds: Bounds, effect: str) -> str:
    """`...optim.lr=0.02 is 100 times the usual 0.0002 for a model of this size: the policy is damaged ...`"""
    usual = f"{shown(bounds.usual)} {bounds.whom}".rstrip()
    factor = 0.0 if isinstance(value, bool) or min(value, bounds.usual) <= 0 else value / bounds.usual
    if factor > 1.5:
        return f"{setting} is {times(factor)} times the usual {usual}: {effect}"
    if 0 < factor < 0.7:
        return f"{setting} is {times(1 / factor)} times lower than the usual {usual}: {effect}"
    return f"{setting} is not the usual {usual}: {effect}"


def times(factor: float) -> str:
    """Two digits: 2.5, 100, 20,000."""
    return f"{factor:.2g}" if factor < 10 else f"{float(f'{factor:.2g}'):,.0f}"


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
