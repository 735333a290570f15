"""A short run of the embedded model with one fault, and how it is run. `ill_runs.py` has the table of them."""

import json
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rloom
from rloom.data.files import read_rows
from rloom.doctor.run.finding import Change, Finding
from rloom.errors import RloomError
from rloom.rollout.native.engine import NativeRollout
from rloom.runs.dumps.reader import Dumps
from rloom.runs.run_folder import RunFolder
from rloom.training import loop

Row = dict[str, Any]
Reward = Callable[[str, Any], Any]  # (answer, ground truth) -> score
ASSETS = Path(rloom.__file__).parent / "assets" / "embedded"
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
CRITIC = "critic"
STEPS = 12
LEARNED = 0.08  # of the validation accuracy
BASE: Mapping[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 16,
    "data.val_max_samples": 64,
    f"{ACTOR}.ppo_mini_batch_size": 8,  # two updates in each step
    f"{ROLLOUT}.n": 4,
    "trainer.device": "cpu",
    "trainer.save_freq": -1,
    "trainer.test_freq": 5,
    "trainer.total_training_steps": STEPS,
    "reward_model.num_workers": 1,
}
SFT_BASE: Mapping[str, Any] = {"data.train_batch_size": 16, "data.val_max_samples": 32, "trainer.device": "cpu"}


@dataclass(frozen=True)
class RunCase:
    """`found` and `names` are what the doctor must report first: the kind of the finding, and a text (a key, a word) in
    its evidence, first cause or first advice. A healthy run has neither.

    The first advice is tried on the run: with its key changed, the run must learn. Where it names something else than a
    key, such as the reward function, `fix` has what replaces it.
    """

    found: str | tuple[str, ...] = ()
    names: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    reward: Callable[[], Reward] | None = None  # makes the function: it may have a state. None: the built-in rule
    reward_file: str = ""  # instead: the source of a file with `compute_score`, which runs in processes of its own
    environment_file: str = ""  # the source of a file with an environment `Game`: answers of several turns
    train: Callable[[list[Row]], list[Row]] | None = None  # changes the rows
    validation: Callable[[list[Row]], list[Row]] | None = None
    model: Callable[[Path], Path] | None = None  # makes the model's folder
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    sft: bool = False
    fix: Mapping[str, Any] | None = None  # fields of this case
    learns: bool = True  # whether the accuracy must rise once it is fixed. Not so for faults of time and memory

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.found,) if isinstance(self.found, str) else self.found

    def with_keys(self, keys: Mapping[str, Any]) -> "RunCase":
        return replace(self, keys={**self.keys, **keys})


def run(case: RunCase, directory: Path, seed: int = 1) -> Path:
    own: dict[str, Any] = {"trainer.default_local_dir": str(directory), "data.seed": seed}
    if case.model is not None:
        own[f"{MODEL}.path"] = str(case.model(directory.with_name(f"{directory.name}-model")))
        own = {**SIZES, **own}
    if case.reward_file:
        own["custom_reward_function.path"] = str(directory.with_name(f"{directory.name}-reward.py"))
        Path(own["custom_reward_function.path"]).write_text(case.reward_file)
    if case.environment_file:
        file = directory.with_name(f"{directory.name}-environment.py")
        file.write_text(case.environment_file)
        own[f"{ROLLOUT}.multi_turn.environment"] = f"{file}:Game"
    given: dict[str, Any] = {} if case.reward is None else {"reward": as_rloom_calls_it(case.reward())}
    if case.train is not None or case.validation is not None:
        train, validation = (read_rows(ASSETS / f"{name}.parquet") for name in ("train", "test"))
        given["train"] = case.train(train) if case.train is not None else train[:2048]
        given["validation"] = case.validation(validation) if case.validation is not None else validation
    random.seed(seed)
    with ExitStack() as patches:
        patches.enter_context(patch("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture))
        if case.patch is not None:
            patches.enter_context(case.patch())
        try:
            if case.sft:
                fine_tune({**SFT_BASE, **case.keys, **own})
            else:
                rloom.train({**BASE, **case.keys, **own}, **given)
        except RloomError as error:
            if not case.kinds:
                raise
            print(f"{type(error).__name__}: {error}")
    return directory


# The embedded model's own sizes, for a copy of it in a folder
SIZES = {
    "data.max_prompt_length": 64,
    "data.max_response_length": 48,
    f"{ACTOR}.optim.lr": 2e-4,
    f"{MODEL}.enable_gradient_checkpointing": False,
}


def fine_tune(keys: Mapping[str, Any]) -> None:
    from rloom.trainer import sft_trainer

    own = {key: value for key, value in keys.items() if key != "data.seed"}
    sft_trainer.main([f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in own.items()])


def follow_first_advice(case: RunCase, finding: Finding, directory: Path, seed: int = 1) -> Path:
    """Continue the run with the key of the first advice, or begin again, as the finding says. Where the advice is not
    about a key, the case has what it asks for."""
    advice = finding.advice[0]
    again = directory.with_name(f"{directory.name}-again")
    if not isinstance(advice, Change):
        assert case.fix is not None, advice
        return run(replace(case, **case.fix), again, seed)
    changed = case.with_keys({advice.key: advice.value})
    if finding.begin_again:
        return run(changed, again, seed)
    steps = 2 * int(case.keys.get("trainer.total_training_steps", STEPS))
    return run(
        changed.with_keys({"trainer.resume_mode": "auto", "trainer.total_training_steps": steps}), directory, seed
    )


def learned(case: RunCase, directory: Path) -> bool:
    """Whether the validations, by the built-in rule and whatever reward the run has, are better than the first."""
    if case.sft:
        losses = [record["val/loss"] for record in RunFolder(directory).metrics if "val/loss" in record]
        return losses[-1] < 0.9 * losses[0]
    dumps = Dumps(directory)
    rows = [dumps.rows("validation", step) for step in dumps.steps("validation")]
    shares = [fmean(is_correct(row["output"], row["ground_truth"]) for row in step) for step in rows]
    return max(shares[1:]) > shares[0] + LEARNED


def as_rloom_calls_it(reward: Reward) -> Callable[..., Any]:
    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        return reward(solution_str, ground_truth)

    return score


# Rewards


def is_correct(answer: str, truth: Any) -> bool:
    return re.findall(r"-?\d+", answer)[-1:] == [str(truth)]


def rewarded(score: Reward) -> Callable[[], Reward]:
    """For a function without state."""
    return lambda: score


def failing() -> Reward:
    calls = iter(range(10**9))

    def score(answer: str, truth: Any) -> float:
        if next(calls) % 5 == 0:
            raise ValueError("no such unit")
        return float(is_correct(answer, truth))

    return score


def slow() -> Reward:
    def score(answer: str, truth: Any) -> float:
        time.sleep(0.04)
        return float(is_correct(answer, truth))

    return score


def leaking() -> Reward:
    kept: list[bytearray] = []

    def score(answer: str, truth: Any) -> float:
        block = bytearray(1_000_000)
        block[::4096] = b"x" * len(block[::4096])  # touch the pages, so that they are in memory
        kept.append(block)
        return float(is_correct(answer, truth))

    return score


def by_format(answer: str, truth: Any) -> dict[str, float]:
    """Pays for answers without line breaks, whatever they say."""
    plain = 1.0 / (1 + answer.count("\n"))
    return {"score": plain, "format": plain, "acc": float(is_correct(answer, truth))}


def of_the_answer_before() -> Reward:
    """Scores are those of another answer: a queue that is shifted by some places."""
    kept: list[float] = []

    def score(answer: str, truth: Any) -> float:
        kept.append(float(is_correct(answer, truth)))
        return kept[-8] if len(kept) > 7 else 0.0

    return score


# Rows


def with_truth(change: Callable[[str], str]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [
        {**row, "reward_model": {**row["reward_model"], "ground_truth": change(row["reward_model"]["ground_truth"])}}
        for row in rows
    ]


def with_prompt(change: Callable[[str], str]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [
        {**row, "prompt": [{**message, "content": change(message["content"])} for message in row["prompt"]]}
        for row in rows
    ]


def shuffled_truths(rows: list[Row]) -> list[Row]:
    other = [*rows[7:], *rows[:7]]
    return [{**row, "reward_model": source["reward_model"]} for row, source in zip(rows, other, strict=True)]


def repeated(count: int, times: int) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: rows[:count] * times


def multiplications(rows: list[Row]) -> list[Row]:
    """Problems that the model has never seen."""
    return [
        {
            **row,
            "prompt": [{"role": "user", "content": f"Compute {10 + i % 17} * {11 + i % 13}."}],
            "reward_model": {"style": "rule", "ground_truth": str((10 + i % 17) * (11 + i % 13))},
        }
        for i, row in enumerate(rows[:64])
    ]


# Models


def damaged_model(change: Callable[[str, Tensor], Tensor]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(ASSETS / "model", folder, dirs_exist_ok=True)
        weights = load_file(ASSETS / "model" / "model.safetensors")
        changed = {name: change(name, tensor).contiguous() for name, tensor in weights.items()}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def with_template(template: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(ASSETS / "model", folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


def noisy(name: str, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return tensor + 0.6 * tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.dim() > 1 else tensor


# Patches


def nan_rewards() -> AbstractContextManager[Any]:
    """From the third step on."""
    calls = iter(range(10**9))
    original = loop.token_rewards

    def with_nan(*given: Any) -> Tensor:
        rewards_T = original(*given)
        return rewards_T * torch.nan if next(calls) >= 2 else rewards_T

    return patch.object(loop, "token_rewards", with_nan)


def wrong_weights() -> AbstractContextManager[Any]:
    """After the first update the engine generates with a copy of the model whose logits are half as large."""
    load = NativeRollout.load_weights

    def load_wrongly(self: NativeRollout, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        load(self, weights, version)
        if version == 1:
            self.network = deepcopy(self.network)
            with torch.no_grad():
                self.network.module.model.norm.weight.mul_(0.5)

    return patch.object(NativeRollout, "load_weights", load_wrongly)


def memory_of_now() -> AbstractContextManager[Any]:
    """On a CPU the metric is the peak of the process, which may be that of tests before."""

    def now(device: torch.device) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    return patch("rloom.runs.metrics.peak_memory_bytes", now)
