"""The table of usual values: extreme ones are named, those of rloom's own examples never."""

import os
import re
from pathlib import Path

import pytest

from rloom.algos.ranges import RANGES, parameters, unusual_values
from rloom.config.keys import all_keys
from rloom.config.load import load_config, load_sft_config
from rloom.doctor.run.answers import context
from rloom.doctor.run.history import History
from rloom.errors import RloomError
from rloom.language import to_chinese
from rloom.runs.run_folder import flat_config
from tests.architecture.test_guides import PAGES, commands
from tests.documents.shell import Command, start
from tests.documents.test_commands import COMMANDS, configured
from tests.unit.config.test_config_examples import SCRIPTS, command_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def of(*overrides: str) -> list[str]:
    """The sentences about a configuration."""
    return [value.sentence for value in unusual_values(flat_config(load_config(overrides).model_dump(mode="json")))]


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus", "remax", "opo"])
@pytest.mark.parametrize("model", ["embedded", "Qwen/Qwen2.5-7B-Instruct"])
def test_defaults_are_usual(estimator: str, model: str) -> None:
    keys = ["algorithm.adv_estimator=" + estimator, f"actor_rollout_ref.model.path={model}", f"{ROLLOUT}.n=4"]
    assert of(*keys, *(["data.train_files=x.parquet"] if model != "embedded" else [])) == []
    assert unusual_values(flat_config(load_sft_config([f"model.path={model}"]).model_dump(mode="json"))) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_values_of_the_examples_are_usual(script: str, tmp_path: Path) -> None:
    assert of(*command_of(script, tmp_path)[2:]) == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name[:60])
def test_values_of_the_users_documents_are_usual(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        config = configured(command, start(command, tmp_path), monkeypatch)
    except RloomError:  # its own test says why
        return
    assert unusual_values(flat_config(config.model_dump(mode="json"))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_values_of_the_guides_are_usual(page: Path) -> None:
    for arguments in commands(page.read_text(encoding="utf-8"), "rloom train", "rloom plan"):
        assert of(*arguments) == []


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            [f"{ACTOR}.optim.lr=0.02"],
            f"{ACTOR}.optim.lr=0.02 is 100 times the usual 0.0002 for a model of this size: the policy is damaged "
            "within a few updates",
        ),
        ([f"{ACTOR}.grad_clip=1e-6"], f"{ACTOR}.grad_clip=1e-06 is 1,000,000 times lower than the usual 1: "),
        ([f"{ROLLOUT}.temperature=3"], f"{ROLLOUT}.temperature=3 is 3 times the usual 1: answers are mostly random"),
        ([f"{ACTOR}.entropy_coeff=1"], f"{ACTOR}.entropy_coeff=1 is not the usual 0: the policy learns to be random"),
        (["critic.optim.lr=0"], "critic.optim.lr=0 is not the usual 0.001 for a model of this size: the critic does"),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=100"], f"{ACTOR}.kl_loss_coef=100 is 100,000 times the"),
        (
            ["trainer.total_training_steps=10", f"{ACTOR}.optim.lr_warmup_steps=100"],
            f"{ACTOR}.optim.lr_warmup_steps=100 is not the usual 0: the learning rate is near 0 for the whole run",
        ),
    ],
)
def test_an_extreme_value_is_named_with_the_usual_one(keys: list[str], sentence: str) -> None:
    [found] = of("algorithm.adv_estimator=gae", *keys)
    assert found.startswith(sentence) and re.search("[一-鿿]", to_chinese(found))


@pytest.mark.parametrize(
    ("model", "keys", "named"),
    [
        ("Qwen2.5-Coder-1.5B-Instruct", ["1e-5"], 1),  # this run gained a third of what one with 4e-6 gained
        ("Qwen2.5-Coder-1.5B-Instruct", ["4e-6"], 0),
        ("Qwen2.5-Coder-1.5B-Instruct", ["1e-5", "actor_rollout_ref.model.lora_rank=32"], 0),
        ("Qwen2.5-0.5B-Instruct", ["1e-5"], 0),
    ],
)
def test_large_models_are_trained_with_small_rates(model: str, keys: list[str], named: int) -> None:
    rate, *others = keys
    path = f"actor_rollout_ref.model.path=Qwen/{model}"
    assert len(of(path, "data.train_files=x.parquet", f"{ACTOR}.optim.lr={rate}", *others)) == named


def test_a_value_counts_only_where_it_is_used() -> None:
    assert of("algorithm.adv_estimator=grpo", f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio=3e-4") == []
    assert len(of("algorithm.adv_estimator=grpo", f"{ACTOR}.clip_ratio=3e-4")) == 1
    assert len(of("algorithm.adv_estimator=gae", "algorithm.lam=0.1")) == 1


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("embedded", 1e6),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.5e9),
        ("meta-llama/Llama-3.2-1B", 1e9),
        ("HuggingFaceTB/SmolLM2-135M", 1.35e8),
        ("my/model", None),
    ],
)
def test_the_size_of_a_model_is_read_from_its_name(model: str, size: float | None) -> None:
    assert parameters(model) == size


def test_the_size_of_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 360}')
    assert parameters(str(tmp_path)) == 12 * 4 * 128**2 + 360 * 128


def test_the_keys_of_the_table_exist() -> None:
    sft = flat_config(load_sft_config([]).model_dump(mode="json"))
    assert {row.key for row in RANGES} <= {*all_keys(), *sft}


@pytest.mark.parametrize("value", ["x", "8", [1], {}, True, -1, float("nan"), float("inf"), 10**400, None])
def test_values_of_any_type_are_read(value: object) -> None:
    usual = flat_config(load_config([f"{ROLLOUT}.n=4", "algorithm.adv_estimator=grpo"]).model_dump(mode="json"))
    numbers = [row.key for row in RANGES] + [
        f"{ROLLOUT}.n",
        "actor_rollout_ref.model.lora_rank",
        "trainer.total_training_steps",
    ]
    for key in numbers:
        found = unusual_values({**usual, "reward_model.overlong_buffer.enable": True, key: value})
        assert all(one.key for one in found)
    assert unusual_values({**usual, **dict.fromkeys(numbers, "8")}) == []


@pytest.mark.parametrize("path", ["~nouser-of-this-machine/m-7b", "a\0b-7b", "x" * 5000 + "/-7b"])
def test_a_path_that_cannot_be_read_is_a_name(path: str) -> None:
    assert parameters(path) == 7e9


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", '{"hidden_size": 1e999, "num_hidden_layers": 1, "vocab_size": 1}', " " * (1 << 23)]
)
def test_a_config_json_of_any_content_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert parameters(str(tmp_path)) is None


def test_a_config_json_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert parameters(str(tmp_path)) is None
    assert context(History([], {"actor_rollout_ref.model.path": str(tmp_path)})) == float("inf")
