"""Every command of the users' documents, with nothing changed but the name of the package."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.plan_scaling import QWEN_7B
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.effects import without_effect
from rloom.config.frontends.train_sh import translate
from rloom.config.given_keys import entries, real_key
from rloom.config.keys import value_at
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.plan.batches import batches
from rloom.plan.make import make_plan
from rloom.plan.render import render
from tests.documents.printed import COPY, MISSION, copied, dumped, in_documents
from tests.documents.shell import Command, Started, commands, start

PRINTED = copied()
COMMANDS = list({command.name: command for command in commands(PRINTED)}.values())


@pytest.mark.skipif(not MISSION.is_dir(), reason="the documents are not beside this clone")
def test_the_copy_is_what_the_documents_print() -> None:
    assert COPY.read_text(encoding="utf-8") == dumped(in_documents()), "run python -m tests.documents.printed"


def test_nothing_that_trains_is_left_out() -> None:
    by_document = {document: 0 for document in ("001", "002", "003", "004")}
    for command in COMMANDS:
        by_document[command.document] += 1
    assert by_document == {"001": 14, "002": 17, "003": 5, "004": 1}


@pytest.fixture
def started(tmp_path: Path) -> Callable[[Command], Started]:
    return lambda command: start(command, tmp_path)


def configured(command: Command, started: Started, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("HOME", started.variables["HOME"])
    if command.is_kit:
        translated = translate(started.arguments, started.variables)
        return load_config(translated.overrides, translated.values)
    return load_config(started.arguments)


def last_values(arguments: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in arguments if not text.startswith("-")]
    return {key: value.strip("'") for key, equals, value in pairs if equals and "{" not in value}


def named(start_of_text: str) -> Command:
    [found] = [command for command in COMMANDS if command.text.startswith(start_of_text)]
    return found


SMALL_MEMORY = named("python3 -m rloom.trainer.main_ppo algorithm.adv_estimator=rloo data.train_batch_size=512 actor")
EXAMPLE_2 = next(c for c in COMMANDS if "tensor_model_parallel_size=2" in c.text)
EXAMPLE_6 = next(c for c in COMMANDS if "megatron_config" in c.text)
EXAMPLE_5 = next(c for c in COMMANDS if "72B" in c.text)


@pytest.mark.parametrize(
    ("command", "engines"),
    [
        (EXAMPLE_2, 4),  # 8 GPUs / 2
        (EXAMPLE_5, 8),  # 4 machines x 8 GPUs / 4
        (SMALL_MEMORY, 2),  # 8 GPUs / 4
    ],
    ids=["example 2", "example 5", "little memory"],
)
def test_tensor_parallelism_without_a_name_is_that_of_vllm(
    command: Command, engines: int, started: Callable[[Command], Started]
) -> None:
    arguments = started(command).arguments
    config = load_config(arguments)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert batches(config, critic=False).engines == engines
    native = load_config([*arguments, "actor_rollout_ref.rollout.name=native"])
    with pytest.raises(ConfigError, match=r"native engine holds a whole model in each worker; use 1, or .*name=vllm"):
        check(native, declared_needs(native))


def test_the_rloo_commands_get_the_reference_that_document_003_describes(
    started: Callable[[Command], Started],
) -> None:
    rloo = [command for command in COMMANDS if command.document == "003" and "data.train_files" in command.text]
    uses = {"kl_coef" in command.text: load_config(started(command).arguments).uses_reference for command in rloo}
    assert uses == {True: True, False: False}


JUDGE = "reward_model.api"
SYSTEM = "你是数学评分专家，请评估解答的正确性..."
SCORING = r"问题：{prompt}\n解答：{response}\n答案：{ground_truth}\n请评分1-10..."
MACHINES = {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "trainer.master_addr": "192.168.1.1"}
# The flags and variables of train.sh in a command -> the keys that they set.
KIT_KEYS: dict[str, dict[str, Any]] = {
    "--reward_model RLHFlow/ArmoRM-Llama3-8B-v0.1": {"reward_model.path": "RLHFlow/ArmoRM-Llama3-8B-v0.1"},
    "--model Qwen/Qwen2.5-7B": {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B"},
    "--epochs 20": {"trainer.total_epochs": 20},
    "--lr 5e-7": {"actor_rollout_ref.actor.optim.lr": 5e-7},
    "--use_api_reward": {f"{JUDGE}.enable": True},
    **{f"--rm_api_type {kind}": {f"{JUDGE}.type": kind} for kind in ("openai", "gemini", "claude")},
    **{
        f"--rm_model {model}": {f"{JUDGE}.model": model}
        for model in ("qwen-plus", "gpt-4o-mini", "gemini-1.5-flash", "claude-3-haiku-20240307")
    },
    **{f"--rm_prompt_preset {name}": {f"{JUDGE}.preset": name} for name in ("math", "code", "dialogue", "safety")},
    "--rm_system_prompt": {f"{JUDGE}.system_prompt": SYSTEM},
    "--rm_scoring_prompt": {f"{JUDGE}.scoring_prompt": SCORING},
    "lora_rank=8": {"actor_rollout_ref.model.lora_rank": 8},
    "lora_alpha=16": {"actor_rollout_ref.model.lora_alpha": 16},
    "--batch_size 128": {"data.train_batch_size": 128, "actor_rollout_ref.actor.ppo_mini_batch_size": 32},
    "--n_gpus 8": {"trainer.n_gpus_per_node": 8},
    "NODE_RANK=0": {**MACHINES, "trainer.node_rank": 0},
    "NODE_RANK=1": {**MACHINES, "trainer.node_rank": 1},
}


def assert_kit_keys(command: Command, config: Config) -> None:
    expected = {key: value for text, keys in KIT_KEYS.items() if text in command.text for key, value in keys.items()}
    assert {key: value_at(config, key) for key in expected} == expected
    assert bool(expected) == (command.is_kit and command.text != "./train.sh")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_passes_every_check_and_every_key_of_it_has_an_effect(
    command: Command, started: Callable[[Command], Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = started(command)
    config = configured(command, seen, monkeypatch)
    for key, given in last_values(seen.arguments).items():
        read = value_at(config, real_key(key))
        assert str(read) == given or read == yaml.safe_load(given) or read == float(given)
    needs = declared_needs(config)
    check(config, needs)
    assert without_effect(config, needs).notices == []
    assert_kit_keys(command, config)
    if command == EXAMPLE_6:
        return  # its plan needs a model: the test below
    plan = render(make_plan(config))
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert f"= {samples:,} samples" in plan


def test_the_critic_of_example_6_is_divided_as_the_actor_is(
    started: Callable[[Command], Started], tmp_path: Path
) -> None:
    """The command gives the critic no pipeline stages, and it shares the eight workers with the actor."""
    arguments = started(EXAMPLE_6).arguments
    config = load_config(arguments)
    check(config, declared_needs(config))
    for role in (config.actor_rollout_ref.actor, config.critic):
        assert (role.strategy, role.megatron.model_ranks) == ("megatron", 8)
        assert (role.megatron.tensor_model_parallel_size, role.megatron.pipeline_model_parallel_size) == (4, 2)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    larger = load_config([*arguments, f"actor_rollout_ref.model.path='{tmp_path}'"])
    for one in (config, larger):  # the command names no model: that of rloom
        plan = make_plan(one)
        assert render(plan).count("Megatron TP 4 × PP 2: one copy over 8 ranks") == 2


FRAGMENTS = [
    entry.renamed for entry in PRINTED if entry.language == "bash" and "." in entry.text.split("=")[0].split()[0]
    and "=" in entry.text.split()[0]
]  # fmt: skip


def batches_of_keys(fragments: Sequence[str]) -> list[list[str]]:
    """Keys that one command can take together: no key twice."""
    found: list[dict[str, str]] = []
    for fragment in dict.fromkeys(fragments):
        words = {word.split("=")[0]: word for word in shlex.split(fragment)}
        free = next((batch for batch in found if not batch.keys() & words.keys()), None)
        if free is None:
            found.append(free := {})
        free |= words
    return [list(batch.values()) for batch in found]


@pytest.mark.parametrize("words", batches_of_keys(FRAGMENTS), ids=lambda words: f"{len(words)} keys")
def test_keys_that_are_printed_alone_can_be_added_to_a_command(
    words: list[str], started: Callable[[Command], Started]
) -> None:
    """As answers to questions: added to example 2, whose 8 GPUs suffice for them."""
    config = load_config([*started(EXAMPLE_2).arguments, *words])
    check(config, declared_needs(config))
    for key, given in last_values(words).items():
        read = value_at(config, key)
        assert str(read) == given or read == yaml.safe_load(given) or read == float(given)


def test_every_key_that_is_printed_alone_is_found() -> None:
    assert len(FRAGMENTS) == 31


# The blocks of one page are parts of one file; each answer to a question is a file of its own.
WHOLE_PAGES = {
    "001": [entry.text for entry in PRINTED if entry.document == "001" and entry.language == "yaml"],
    "003": [entry.text for entry in PRINTED if entry.document == "003" and entry.language == "yaml"][:7],
}
ALONE = [
    entry.text
    for entry in PRINTED
    if entry.language == "yaml" and not any(entry.text in blocks for blocks in WHOLE_PAGES.values())
]


@pytest.mark.parametrize("page", WHOLE_PAGES)
def test_the_yaml_of_a_page_is_one_file_that_passes_every_check(page: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"defaults": ["ppo_trainer", "_self_"]}
    for block in WHOLE_PAGES[page]:
        tree = merged(tree, yaml.safe_load(block))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    config = load_config([], config_path=str(tmp_path), config_name="own")
    check(config, declared_needs(config))
    written = {"001": ("gae", 0.99, 2, ["console", "wandb"]), "003": ("rloo", 1.0, 8, ["console", "wandb"])}
    trainer, algorithm = config.trainer, config.algorithm
    assert (algorithm.adv_estimator, algorithm.gamma, trainer.n_gpus_per_node, trainer.loggers) == written[page]
    assert (config.actor_rollout_ref.actor.optim.lr, algorithm.kl_ctrl.kl_coef) == (1e-6, 0.001)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {name: merged(one[name], other[name]) for name in one.keys() & other.keys() if isinstance(one[name], dict)}
    return {**one, **other, **both}


def files_of_blocks(blocks: Sequence[str]) -> list[list[str]]:
    """Blocks that one file can have together: no key twice, in whatever spelling. To compose a file takes a second."""
    files: list[tuple[list[str], set[str]]] = []
    for block in dict.fromkeys(blocks):
        tree = yaml.safe_load(block)
        names = tree.keys() | {entry.path for entry in entries(tree)}
        free = next((file for file in files if not file[1] & names), None)
        if free is None:
            files.append(free := ([], set()))
        free[0].append(block)
        free[1].update(names)
    return [together for together, _ in files]


@pytest.mark.parametrize("blocks", files_of_blocks(ALONE), ids=lambda blocks: f"{len(blocks)} blocks")
def test_yaml_that_is_printed_alone_sets_its_keys(blocks: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("".join(["defaults: [ppo_trainer, _self_]\n", *blocks]))
    config = load_config([], config_path=str(tmp_path), config_name="own")
    for block in blocks:
        for entry in entries(yaml.safe_load(block)):
            read = value_at(config, entry.path)
            assert read == entry.value or read == float(entry.value)
