"""The training commands of the documents in the printed order, in one folder, without RLOOM_SMOKE.

Small models and data have the printed names (`stand_ins.py`); SIZES is all that is changed, with native in place of
vLLM. The shell gives the arguments (`shell.py`), and one process runs the commands (`in_order.py`).
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray")

from rloom.config.frontends import openrlhf, train_sh
from rloom.config.given_keys import leaf_keys
from rloom.config.keys import value_at
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.engines.storage import read_weights
from rloom.models.source import EMBEDDED_FOLDER
from rloom.rewards.judge.settings import PROVIDERS
from tests.documents.in_order import BEGIN, END
from tests.documents.printed import ROOT, copied
from tests.documents.shell import Command, start
from tests.documents.stand_ins import save_data, save_models, snapshot
from tests.documents.test_commands import COMMANDS
from tests.documents.test_runs import START
from tests.e2e.runs import records
from tests.judge_server import Body, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # DeBERTa's
]

Reduce = Callable[[Any], Any]


def at_most(limit: int, value: int | None) -> int | None:
    return None if value is None else min(value, limit)


def limited_to(limit: int, value: int | None) -> int:
    """For keys without a limit by default."""
    return limit if value is None or value < 0 else min(value, limit)


def sixteenth(value: int | None) -> int | None:
    return None if value is None else max(1, min(value // 16, 8))


ACTOR, ROLLOUT, SIZE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "model_parallel_size"
SIZES: Mapping[str, Reduce] = {
    "data.train_batch_size": sixteenth,
    "data.train_max_samples": partial(limited_to, 8),
    "data.val_max_samples": partial(limited_to, 2),
    "data.max_prompt_length": partial(at_most, 256),
    "data.max_response_length": partial(at_most, 32),
    f"{ACTOR}.ppo_mini_batch_size": sixteenth,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": partial(at_most, 4),
    f"{ROLLOUT}.n": partial(at_most, 2),
    f"{ROLLOUT}.tensor_{SIZE}": partial(at_most, 1),
    f"{ROLLOUT}.name": lambda name: "native" if name == "vllm" else name,  # vLLM is tested by tests/vllm
    **{f"{role}.megatron.tensor_{SIZE}": partial(at_most, 2) for role in (ACTOR, "critic")},
    **{f"{role}.megatron.pipeline_{SIZE}": partial(at_most, 1) for role in (ACTOR, "critic")},
    "reward_model.num_workers": partial(at_most, 1),
    "trainer.n_gpus_per_node": partial(at_most, 2),
    "trainer.device": lambda device: "cpu",  # several workers need it where there is no GPU
    "trainer.nnodes": partial(at_most, 1),
    "trainer.total_training_steps": partial(limited_to, 1),
}

FLAGS = next(entry.text for entry in copied() if entry.document == "000")
# Not here: the second machine of a run whose first one is, and the page that prints run_gemma.sh of document 001 again.
PRINTED = [
    Command("000", FLAGS),
    *(command for command in COMMANDS if command.document != "004" and "NODE_RANK=1" not in command.text),
]
DIRECTORIES = [
    "./ckpt/checkpoints_ppo_ray",
    "checkpoints/gemma2b_function_rm",
    "checkpoints/gemma2b_function_rm-2",
    "checkpoints/rloom_examples/qwen2.5-0.5b-instruct_gae_gsm8k",
    "checkpoints/rloom_ppo/qwen2_7b_seq_balance",
    "checkpoints/rloom_examples/qwen2.5-7b-instruct_gae_hh_rlhf",
    "checkpoints/rloom_ppo/qwen2_7b_rm",
    "checkpoints/rloom_examples/qwen2.5-0.5b-instruct_gae_gsm8k",  # with the older key of the micro-batch
    "checkpoints/rloom_examples/qwen2-7b-instruct_gae_gsm8k",
    "checkpoints/rloom_examples/qwen2.5-7b-instruct_gae_hh_rlhf-2",
    "checkpoints/rloom_examples/qwen2.5-7b-instruct_gae_gsm8k",
    "checkpoints/rloom_examples/qwen2-72b-instruct_gae_gsm8k",
    "checkpoints/rloom_ppo/qwen2_7b_math_megatron",
    "checkpoints/rloom_examples/embedded_gae_embedded",
    "checkpoints/Qwen2.5-0.5B-Instruct_function_rm",
    "outputs/checkpoints/embedded",
    "outputs/checkpoints/embedded-2",
    "outputs/checkpoints/Qwen/Qwen2.5-7B",
    *(f"outputs/checkpoints/embedded-{number}" for number in range(3, 15)),  # the last: of before, on 8 GPUs
    "outputs/checkpoints/embedded-14",  # and on two machines: as many workers, in a smoke run
    "checkpoints/rloom_rloo_example_gsm8k/qwen2_7b_function_rm",
    "checkpoints/rloom_examples/qwen2-7b-instruct_rloo_gsm8k",
    "checkpoints/rloom_examples/qwen2-7b-instruct_rloo_math",
    "checkpoints/rloom_examples/qwen2-7b-instruct_rloo_gsm8k-math",
    "checkpoints/rloom_examples/embedded_rloo_embedded",
]
# Flags of OpenRLHF, PPO, a reward model, a judge, several workers, RLOO on two data sets. The long test has all;
# test_commands.py checks the keys of all, and e2e/test_examples.py trains with scripts.
KINDS = ("--reward_model", "qwen-plus", "--n_gpus", 'train_files="$train_files"')
QUICK_START = next(command for command in PRINTED if command.text.startswith("python3"))
SHORT = [
    command
    for command in PRINTED
    if command.document == "000" or command == QUICK_START or any(kind in command.text for kind in KINDS)
]


@dataclass(frozen=True)
class Given:
    """A command as the shell starts it."""

    program: str
    arguments: Sequence[str]
    variables: Mapping[str, str]

    def config(self, more: Sequence[str] = ()) -> Config:
        if self.program == "train":
            return load_config([*self.arguments, *more])
        if self.program == "kit":
            command = train_sh.translate(self.arguments, self.variables)
            return load_config([*command.overrides, *more], command.values)
        flags = openrlhf.translate(self.arguments)
        return load_config([*flags.overrides, *more], flags.values)

    def reductions(self) -> list[str]:
        config = self.config()
        smaller = {key: reduce(value_at(config, key)) for key, reduce in SIZES.items()}
        more = [f"{key}={value}" for key, value in smaller.items() if value != value_at(config, key)]
        reduced = self.config(more)
        changed = {path for path in leaf_keys() if value_at(config, path) != value_at(reduced, path)}
        assert changed <= SIZES.keys()
        return more


@dataclass(frozen=True)
class Ended:
    status: int
    text: str

    @property
    def directory(self) -> str:
        found = re.search(r"answers a step · (?:\d+ workers(?: on the CPU)? · )?(\S+) · loading", self.text)
        assert found is not None, self.text
        return found[1]


@dataclass(frozen=True)
class World:
    """A home directory with the data, a cache with the models, the addresses of a judge, and a current directory."""

    home: Path
    variables: Mapping[str, str]

    @property
    def folder(self) -> Path:
        return self.home / "work"

    def given(self, command: Command) -> Given:
        if command.document == "000":
            return Given("openrlhf", shlex.split(command.text), {})
        started = start(command, self.home)
        names = {"N_GPUS", "NNODES", "NODE_RANK", "MASTER_ADDR"} & started.variables.keys()
        return Given(
            "kit" if command.is_kit else "train", started.arguments, {name: started.variables[name] for name in names}
        )

    def run(self, commands: Sequence[Given], further: Sequence[str] = ()) -> list[Ended]:
        """`further`: keys of the last command."""
        lines = [[one.program, [*one.arguments, *one.reductions()], one.variables] for one in commands]
        lines[-1][1] += further
        done = subprocess.run(
            [sys.executable, "-m", "tests.documents.in_order"],
            input=json.dumps(lines),
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ended = re.findall(rf"{BEGIN}\n(.*?){END} (\d+)\n", done.stdout, re.S)
        assert len(ended) == len(commands), done.stdout
        return [Ended(int(status), text) for text, status in ended]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def say(body: Body, user: str) -> str:
        return json.dumps({"reason": "by its length", "score": 1 + len(user) % 10})

    save_models(tmp_path / "hf")
    save_data(tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "work")
    keys = {entry.text.removeprefix("export ").split("=")[0] for entry in copied() if "_API_KEY=" in entry.text}
    assert keys == {"DASHSCOPE_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "ANTHROPIC_API_KEY"}
    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
    own = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with serving(say=say, key="your_api_key") as server:
        addresses = {kind.address_variables[0]: server.base_url(provider) for provider, kind in PROVIDERS.items()}
        yield World(tmp_path, {**own, **offline, **addresses, **dict.fromkeys(keys, "your_api_key")})


def assert_trained(world: World, given: Given, ended: Ended) -> None:
    directory, config = world.folder / ended.directory, given.config()
    step = next(record for record in records(directory) if "critic/score/mean" in record)
    assert (step["step"], step["reward/failed"]) == (1, 0)
    assert step["actor/grad_norm"] > 0
    if "critic.strategy=megatron" in given.arguments:  # two workers divide each layer of all models
        log = (directory / "logs" / "worker_0.log").read_text()
        engines = dict(re.findall(r"(\w+): [\d,]+ parameters, (\w+ \([\w ,]+\))", log))
        assert {"actor", "critic"} <= engines.keys()
        assert set(engines.values()) == {"Megatron (tensor 2)"}
    saved = directory / "global_step_1" / "actor"
    model = config.actor_rollout_ref.model
    if model.has_lora:
        adapter = load_file(saved / "lora.safetensors")
        assert any(bool(adapter[name].any()) for name in adapter if "lora_B" in name)  # zero at the start
        return
    first = EMBEDDED_FOLDER / "model" if model.path == "embedded" else snapshot(world.home / "hf", model.path)
    before = load_file(first / "model.safetensors")
    after = {name: tensor.clone() for name, tensor in before.items()}
    read_weights(saved, "model", after)  # also of several workers
    assert not all(torch.equal(before[name], after[name]) for name in before)


def assert_start(text: str, *, has_critic: bool) -> None:
    """With several workers, as document 001 shows the start of a run."""
    if "worker 1: process" in text:
        lines = [line for line in START if has_critic or "Critic" not in line]
        assert all(line in text for line in lines), text
        places = [text.index(line) for line in lines]
        assert places == sorted(places)


def check_in_order(world: World, commands: Sequence[Command]) -> list[str]:
    """The directories of the runs, in which every command trained; then the quick start is resumed with more steps."""
    given = [world.given(command) for command in commands]
    repeated = commands.index(QUICK_START)
    *ended, again = world.run([*given, given[repeated]], further=["trainer.total_training_steps=2"])
    seen: set[str] = set()
    for command, one, end in zip(commands, given, ended, strict=True):
        assert end.status == 0, f"{command.name}\n{end.text}"
        if end.directory in seen:  # only keys without an effect on what is learned differ
            assert "This run has already ended" in end.text
            continue
        assert_start(end.text, has_critic=one.config().algorithm.adv_estimator == "gae")
        assert_trained(world, one, end)
        seen.add(end.directory)
    assert again.directory == ended[repeated].directory
    assert "Going on from" in again.text and "step 2/2" in again.text
    return [end.directory for end in ended]


def without_number(directory: str) -> str:
    return re.sub(r"-\d+$", "", directory)


def test_commands_of_every_kind_train_one_after_the_other(world: World) -> None:
    expected = dict(zip(PRINTED, DIRECTORIES, strict=True))
    found = check_in_order(world, SHORT)
    assert [*map(without_number, found)] == [without_number(expected[command]) for command in SHORT]


@pytest.mark.long
def test_all_commands_train_one_after_the_other(world: World) -> None:
    assert check_in_order(world, PRINTED) == DIRECTORIES
