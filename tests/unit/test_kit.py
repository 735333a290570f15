"""train.sh's flags and environment variables become keys."""

import pytest

from rloom.config.dialects.kit import KEYS, VARIABLES, translate
from rloom.config.keys import all_keys
from rloom.config.load import load_config
from rloom.errors import ConfigError

OUTPUT = "trainer.default_local_dir=outputs/checkpoints/embedded"


def test_without_flags_only_the_output_directory_is_set() -> None:
    assert translate([], {}) == [OUTPUT]


@pytest.mark.parametrize(
    ("flag", "given", "overrides"),
    [
        ("epochs", "20", ["trainer.total_epochs=20"]),
        ("lr", "5e-7", ["actor_rollout_ref.actor.optim.lr=5e-7"]),
        ("n_gpus", "1", ["trainer.n_gpus_per_node=1"]),
        ("kl_coef", "0.01", ["algorithm.kl_ctrl.kl_coef=0.01", "algorithm.use_kl_in_reward=True"]),
        ("batch_size", "128", ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]),
        ("batch_size", "6", ["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6"]),
    ],
)
def test_a_flag_becomes_its_key_and_what_follows_from_it(flag: str, given: str, overrides: list[str]) -> None:
    assert translate([f"--{flag}", given], {}) == [OUTPUT, *overrides]
    assert translate([f"--{flag}={given}"], {}) == [OUTPUT, *overrides]


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_becomes_its_key(variable: str) -> None:
    assert translate([], {variable: "1"}) == [OUTPUT, f"{VARIABLES[variable]}=1"]


def test_an_empty_variable_is_none() -> None:
    assert translate([], {"CLIP_RATIO": "", "MODEL_PATH": ""}) == [OUTPUT]


def test_a_flag_wins_over_its_variable_and_a_key_over_both() -> None:
    environment = {"MODEL_PATH": "from/variable", "KL_COEF": "0.5"}
    assert translate([], environment)[1:] == [
        "actor_rollout_ref.model.path=from/variable",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.use_kl_in_reward=True",
    ]
    config = load_config(translate(["--model", "from/flag"], environment))
    assert config.actor_rollout_ref.model.path == "from/flag"
    own = ["algorithm.kl_ctrl.kl_coef=0.7", "--model", "from/flag", "actor_rollout_ref.model.path=from/key"]
    config = load_config(translate(own, environment))
    assert config.actor_rollout_ref.model.path == "from/key"
    assert config.algorithm.kl_ctrl.kl_coef == 0.7


def test_the_command_of_the_document_composes() -> None:
    config = load_config(translate(["--model", "Qwen/Qwen2.5-7B", "--epochs", "20", "--lr", "5e-7"], {}))
    assert config.trainer.total_epochs == 20
    assert config.actor_rollout_ref.actor.optim.lr == 5e-7
    assert config.trainer.default_local_dir == "outputs/checkpoints/Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "embedded"),
        (["--model", "Qwen/Qwen2.5-7B"], "Qwen/Qwen2.5-7B"),
        (["--model", "gpt2"], "gpt2"),
        (["--model", "/models/my model/"], "my_model"),
        (["--model", "../Qwen2.5-7B"], "Qwen2.5-7B"),
        (["--model", "~/Qwen2.5-7B"], "Qwen2.5-7B"),
        (["--model", "one", "actor_rollout_ref.model.path='two'"], "two"),
    ],
)
def test_each_model_has_a_folder_of_its_own(arguments: list[str], folder: str) -> None:
    """`./train.sh` and then `./train.sh --model M` are two runs, in any order."""
    assert translate(arguments, {})[0] == f"trainer.default_local_dir=outputs/checkpoints/{folder}"


def test_the_output_directory_can_be_moved() -> None:
    assert load_config(translate(["trainer.default_local_dir=elsewhere"], {})).trainer.default_local_dir == "elsewhere"


@pytest.mark.parametrize("arguments", [["--reward_model", "some/model"], ["--batchsize", "4"], ["--use_api_reward"]])
def test_an_unknown_flag_is_an_error_that_lists_the_flags(arguments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(arguments, {})
    assert arguments[0] in str(caught.value)
    assert "it takes --model, --epochs, --lr, --batch_size, --kl_coef, --n_gpus and key=value" in str(caught.value)


def test_a_flag_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.sh: argument --lr: expected one argument"):
        translate(["--lr"], {})


def test_a_flag_is_not_guessed_from_its_beginning() -> None:
    with pytest.raises(ConfigError, match="--epoch"):
        translate(["--epoch", "3"], {})


def test_a_reward_model_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ConfigError, match=r"REWARD_MODEL_PATH=some/model: .*custom_reward_function\.path.*unset it"):
        translate([], {"REWARD_MODEL_PATH": "some/model"})


def test_every_flag_and_variable_ends_in_a_real_key() -> None:
    named = [*VARIABLES.values(), *(key for _, key in KEYS.values())]
    assert [key for key in named if key not in all_keys()] == []
