"""Short runs of the embedded model: each of the faulty ones has one planted fault, the healthy ones have none."""

import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rloom
from rloom.errors import RloomError
from rloom.rollout.native.engine import NativeRollout
from rloom.training import loop

Reward = Callable[[str, Any], Any]  # (answer, ground truth) -> score
EMBEDDED = Path(rloom.__file__).parent / "assets" / "embedded" / "model"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE: Mapping[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 4,
    f"{ACTOR}.ppo_mini_batch_size": 4,  # one update in each step
    f"{ROLLOUT}.n": 4,
    "trainer.device": "cpu",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "reward_model.num_workers": 1,
}
GAE = {"algorithm.adv_estimator": "gae"}
FIVE = 6  # steps for a check of levels, which need five
TREND = 12  # steps for a check of trends


@dataclass(frozen=True)
class RunCase:
    """A run; `finding` is the kind that names its planted fault. Healthy: None."""

    finding: str | None
    keys: Mapping[str, Any] = field(default_factory=dict)
    steps: int = FIVE
    reward: Callable[[], Reward] | None = None  # makes the function: it may have a state
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    damages_the_model: bool = False


def run(case: RunCase, directory: Path, seed: int = 1) -> Path:
    own = {"trainer.default_local_dir": directory, "trainer.total_training_steps": case.steps, "data.seed": seed}
    if case.damages_the_model:
        own["actor_rollout_ref.model.path"] = damaged_model(directory.with_name(f"{directory.name}-model"))
    given = {} if case.reward is None else {"reward": as_rloom_calls_it(case.reward())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
        if case.patch is not None:
            case.patch(patch)
        try:
            rloom.train({**BASE, **case.keys, **own}, **given)
        except RloomError:
            assert case.finding == "nonfinite"  # the only one that stops the run
    return directory


def as_rloom_calls_it(reward: Reward) -> Callable[..., Any]:
    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        return reward(solution_str, ground_truth)

    return score


# Rewards


def is_correct(answer: str, truth: Any) -> bool:
    return re.findall(r"-?\d+", answer)[-1:] == [str(truth)]


def always(value: float) -> Callable[[], Reward]:
    return lambda: lambda answer, truth: value


def of_the_prompt() -> Reward:
    """The same for all answers to a prompt."""
    return lambda answer, truth: float(int(truth) % 2)


def thousands() -> Reward:
    return lambda answer, truth: 5000.0 * is_correct(answer, truth)


def failing() -> Reward:
    calls = iter(range(10**9))

    def score(answer: str, truth: Any) -> float:
        if next(calls) % 5 == 0:
            raise ValueError("no such unit")
        return float(is_correct(answer, truth))

    return score


def slow() -> Reward:
    def score(answer: str, truth: Any) -> float:
        time.sleep(0.05)
        return float(is_correct(answer, truth))

    return score


def leaking() -> Reward:
    kept: list[bytearray] = []

    def score(answer: str, truth: Any) -> float:
        block = bytearray(3_000_000)
        block[::4096] = b"x" * len(block[::4096])  # touch the pages, so that they are in memory
        kept.append(block)
        return float(is_correct(answer, truth))

    return score


def short() -> Reward:
    return lambda answer, truth: -float(len(answer))


def by_format() -> Reward:
    """Pays for answers without line breaks, whatever they say."""

    def score(answer: str, truth: Any) -> dict[str, float]:
        plain = 1.0 / (1 + answer.count("\n"))
        return {"score": plain, "format": plain, "acc": float(is_correct(answer, truth))}

    return score


# Stand-ins


def damaged_model(folder: Path) -> Path:
    """The embedded model without attention: a token depends on the one before alone, so that answers loop."""
    shutil.copytree(EMBEDDED, folder, dirs_exist_ok=True)
    weights = load_file(EMBEDDED / "model.safetensors")
    save_file(
        {name: tensor * ("self_attn.o_proj" not in name) for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def nan_rewards(patch: pytest.MonkeyPatch) -> None:
    """From the third step on."""
    calls = iter(range(10**9))
    original = loop.token_rewards

    def with_nan(*given: Any) -> Tensor:
        rewards_T = original(*given)
        return rewards_T * torch.nan if next(calls) >= 2 else rewards_T

    patch.setattr(loop, "token_rewards", with_nan)


def wrong_weights(patch: pytest.MonkeyPatch) -> None:
    """After the first update the engine generates with a copy of the model whose logits are half as large."""
    load = NativeRollout.load_weights

    def load_wrongly(self: NativeRollout, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        load(self, weights, version)
        if version == 1:
            self.network = deepcopy(self.network)
            with torch.no_grad():
                self.network.module.model.norm.weight.mul_(0.5)

    patch.setattr(NativeRollout, "load_weights", load_wrongly)


def memory_of_now(patch: pytest.MonkeyPatch) -> None:
    """On a CPU the metric is the peak of the process, which may be that of tests before."""

    def now(device: torch.device) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    patch.setattr("rloom.runs.metrics.peak_memory_bytes", now)


FAULTY: Mapping[str, RunCase] = {
    "reward function returns 0": RunCase("reward_zero", reward=always(0.0)),
    "reward function returns 0.5": RunCase("reward_constant", reward=always(0.5)),
    "reward depends on the prompt alone": RunCase("equal_groups", reward=of_the_prompt),
    "one reward in five raises": RunCase("reward_failures", reward=failing),
    "rewards of 5,000, not normalised": RunCase(
        "gradient_explosion", {"algorithm.adv_estimator": "rloo"}, reward=thousands
    ),
    "rewards become NaN": RunCase("nonfinite", patch=nan_rewards),
    "engine has other weights": RunCase("rollout_mismatch", patch=wrong_weights),
    "answers of at most 8 tokens": RunCase("answers_cut", {"data.max_response_length": 8}),
    "model without attention": RunCase(
        "repetition",
        {"data.max_prompt_length": 64, "data.max_response_length": 72, f"{ROLLOUT}.temperature": 0.3},
        damages_the_model=True,
    ),
    "temperature of 0.01": RunCase(
        "entropy_collapse", {"algorithm.adv_estimator": "reinforce_plus_plus", f"{ROLLOUT}.temperature": 0.01}
    ),
    "KL without weight, high learning rate": RunCase(
        "kl_high", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0, f"{ACTOR}.optim.lr": 2e-3}
    ),
    "four passes over each batch": RunCase(
        "clip_high", {f"{ACTOR}.ppo_epochs": 4, f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.optim.lr": 3e-3}
    ),
    "learning rate of 1e-10": RunCase(
        "policy_static", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.optim.lr": 1e-10}, steps=9
    ),
    "slow reward function": RunCase("slow_stage", reward=slow),
    "lam of 0.3": RunCase("credit_decay", {**GAE, "algorithm.lam": 0.3}, steps=TREND),
    "critic with a learning rate of 1e-10": RunCase("critic_stuck", {**GAE, "critic.optim.lr": 1e-10}, steps=TREND),
    "reward for short answers": RunCase("length_drift", {f"{ACTOR}.optim.lr": 1e-3}, steps=20, reward=short),
    "reward for the format": RunCase("reward_hacked", {f"{ACTOR}.optim.lr": 1e-3}, steps=16, reward=by_format),
    "reward function keeps memory": RunCase("memory_growth", steps=TREND, reward=leaking, patch=memory_of_now),
    "learning rate 25 times too high": RunCase("reward_collapse", {f"{ACTOR}.optim.lr": 5e-3}, steps=8),
}
HEALTHY: Mapping[str, RunCase] = {
    "gae": RunCase(None, GAE, steps=10),
    "grpo": RunCase(None, {f"{ACTOR}.use_kl_loss": True}, steps=10),
    "rloo": RunCase(None, {"algorithm.adv_estimator": "rloo"}, steps=10),
    "reinforce_plus_plus": RunCase(
        None, {"algorithm.adv_estimator": "reinforce_plus_plus", f"{ACTOR}.ppo_mini_batch_size": 2}, steps=10
    ),
    "dapo": RunCase(
        None,
        {
            "algorithm.filter_groups.enable": True,
            f"{ACTOR}.clip_ratio_high": 0.28,
            "reward_model.overlong_buffer.enable": True,
            "reward_model.overlong_buffer.len": 8,
        },
        steps=10,
    ),
}
