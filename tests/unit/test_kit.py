"""train.sh's flags and environment variables become keys."""

import pytest

from rloom.config.dialects.kit import FLAGS, UNSUPPORTED_FLAGS, VARIABLES, translate
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
        ("kl_coef", "0.01", ["algorithm.kl_ctrl.kl_coef=0.01"]),
        ("batch_size", "128", ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]),
        ("batch_size", "6", ["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6"]),
    ],
)
def test_a_flag_becomes_its_key_and_what_follows_from_it(flag: str, given: str, overrides: list[str]) -> None:
    assert translate([f"--{flag}", given], {}) == [OUTPUT, *overrides]
    assert translate([f"--{flag}={given}"], {}) == [OUTPUT, *overrides]


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_becomes_its_key(variable: str) -> None:
    assert translate([], {variable: "1"}) == [OUTPUT, f"{VARIABLES[variable].key}=1"]


def test_an_empty_variable_is_none() -> None:
    assert translate([], {"CLIP_RATIO": "", "MODEL_PATH": ""}) == [OUTPUT]


def test_a_flag_wins_over_its_variable_and_a_key_over_both() -> None:
    environment = {"MODEL_PATH": "from/variable", "KL_COEF": "0.5"}
    assert translate([], environment)[1:] == [
        "actor_rollout_ref.model.path=from/variable",
        "algorithm.kl_ctrl.kl_coef=0.5",
    ]
    config = load_config(translate(["--model", "from/flag"], environment))
    assert config.actor_rollout_ref.model.path == "from/flag"
    own = ["algorithm.kl_ctrl.kl_coef=0.7", "--model", "from/flag", "actor_rollout_ref.model.path=from/key"]
    config = load_config(translate(own, environment))
    assert config.actor_rollout_ref.model.path == "from/key"
    assert config.algorithm.kl_ctrl.kl_coef == 0.7
    assert config.kl_in_reward
    assert not load_config(translate([], {})).kl_in_reward
    assert not load_config(translate([], {"KL_COEF": "0"})).uses_reference


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


def test_an_unknown_flag_is_an_error_that_lists_the_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(["--batchsize", "4"], {})
    assert "--batchsize" in str(caught.value)
    assert "it takes --model, --epochs, --lr, --batch_size, --kl_coef, --n_gpus and key=value" in str(caught.value)


def test_a_flag_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.sh: argument --lr: expected one argument"):
        translate(["--lr"], {})


def test_a_flag_is_not_guessed_from_its_beginning() -> None:
    with pytest.raises(ConfigError, match="--epoch"):
        translate(["--epoch", "3"], {})


@pytest.mark.parametrize("flag", UNSUPPORTED_FLAGS)
def test_a_flag_of_later_versions_says_so_with_its_own_value(flag: str) -> None:
    takes_value, later = UNSUPPORTED_FLAGS[flag]
    with pytest.raises(ConfigError) as caught:
        translate([f"--{flag}", *(["a value: {prompt}"] if takes_value else [])], {})
    asked = f"--{flag} a value: {{prompt}}" if takes_value else f"--{flag}"
    assert str(caught.value).startswith(f"{asked}: {later.what} not in this version of rloom; ")
    assert "custom_reward_function.path=FILE" in str(caught.value)


def test_the_documents_judge_command_names_every_flag_and_no_loose_value() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(["--use_api_reward", "--rm_api_type", "openai", "--rm_model", "gpt-4o-mini"], {})
    asked = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert asked == ["--use_api_reward", "--rm_api_type openai", "--rm_model gpt-4o-mini"]


def test_a_reward_model_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ConfigError, match=r"REWARD_MODEL_PATH=some/model: reward models are not in this version"):
        translate([], {"REWARD_MODEL_PATH": "some/model"})


@pytest.mark.parametrize(
    ("environment", "learning_rate"),
    [
        ({}, "learning rate of the policy"),
        ({"LANG": "en_US.UTF-8"}, "learning rate of the policy"),
        ({"LANG": "zh_CN.UTF-8"}, "策略（Actor）学习率"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN.UTF-8"}, "策略（Actor）学习率"),
    ],
)
def test_help_explains_every_flag_and_variable_in_the_users_language(
    environment: dict[str, str], learning_rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        translate(["--help"], environment)
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"--lr VALUE {learning_rate} (actor_rollout_ref.actor.optim.lr)" in said
    for name, found in {**VARIABLES, **{f"--{flag}": found for flag, found in FLAGS.items()}}.items():
        assert name in said and f"({found.key})" in said
    assert "MODEL_PATH" in said and "KL_COEF" in said and "N_GPUS" in said


def test_every_flag_and_variable_ends_in_a_real_key() -> None:
    named = [*VARIABLES.values(), *FLAGS.values()]
    assert [found.key for found in named if found.key not in all_keys()] == []
