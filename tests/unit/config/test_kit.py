"""train.sh's flags and environment variables become keys."""

import re

import pytest

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.frontends.train_sh import FLAGS, VARIABLES, KitCommand, translate
from rloom.config.keys import all_keys, value_at
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError

OUTPUT = {"trainer.default_local_dir": "outputs/checkpoints/embedded", "trainer.number_runs": True}
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def loaded(command: KitCommand) -> Config:
    return load_config(command.overrides, command.values)


def test_without_flags_only_the_output_directory_is_set() -> None:
    """The files beside train.sh set nothing until they are edited."""
    rules = "Reward: rules, selected by the data_source of each row"
    assert translate([], {}) == KitCommand(OUTPUT, [], "embedded", "embedded", rules)


@pytest.mark.parametrize(
    ("flag", "given", "values"),
    [
        ("epochs", "20", {"trainer.total_epochs": "20"}),
        ("lr", "5e-7", {"actor_rollout_ref.actor.optim.lr": "5e-7"}),
        ("n_gpus", "1", {"trainer.n_gpus_per_node": "1"}),
        ("kl_coef", "0.01", {"algorithm.kl_ctrl.kl_coef": "0.01"}),
        ("batch_size", "128", {"data.train_batch_size": "128", MINI_BATCH: 32}),
        ("batch_size", "6", {"data.train_batch_size": "6", MINI_BATCH: 6}),
        ("reward_model", "a/model", {"reward_model.path": "a/model"}),
    ],
)
def test_a_flag_becomes_its_key_and_what_follows_from_it(flag: str, given: str, values: dict[str, object]) -> None:
    assert translate([f"--{flag}", given], {}).values == OUTPUT | values
    assert translate([f"--{flag}={given}"], {}).values == OUTPUT | values


DEFAULTS = {
    name: found
    for name, found in {**FLAGS, **VARIABLES}.items()
    if found.default and name not in ("model", "batch_size")
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_the_help_are_those_of_a_run(name: str) -> None:
    """As document 002 lists them with a model; the embedded task has its own."""
    found = DEFAULTS[name]
    with_model, embedded = (loaded(translate(given, {})) for given in (["--model", "Qwen/Qwen2.5-0.5B"], []))
    assert effective(with_model, found.key) == float(found.default)
    assert effective(embedded, found.key) == float(found.embedded or found.default)


def effective(config: Config, key: str) -> float:
    if key == "algorithm.kl_ctrl.kl_coef":
        return config.algorithm.kl_ctrl.kl_coef if config.kl_in_reward else 0
    if key == "critic.ppo_epochs":
        return config.critic_updates[1]
    return float(value_at(config, key))


@pytest.mark.parametrize(
    ("arguments", "kl", "in_loss"),
    [
        ([], True, False),
        (["--kl_coef", "0.01"], True, False),
        (["--kl_coef", "0"], False, False),
        (["algorithm.use_kl_in_reward=False"], False, False),
        (["actor_rollout_ref.actor.use_kl_loss=True"], False, True),
    ],
)
def test_a_model_of_ones_own_has_a_kl_unless_another_is_chosen(arguments: list[str], kl: bool, in_loss: bool) -> None:
    config = loaded(translate(["--model", "Qwen/Qwen2.5-7B", *arguments], {}))
    check(config, declared_needs(config))
    assert (config.kl_in_reward, config.actor_rollout_ref.actor.use_kl_loss) == (kl, in_loss)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_becomes_its_key(variable: str) -> None:
    other = {"critic.ppo_epochs": 1} if variable == "PPO_EPOCHS" else {}
    assert translate([], {variable: "1"}).values == OUTPUT | other | {VARIABLES[variable].key: "1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "epochs"),
    [
        ([], {"PPO_EPOCHS": "2"}, 1),
        (["actor_rollout_ref.actor.ppo_epochs=2"], {}, 1),
        ([], {"PPO_EPOCHS": "2", "CRITIC_EPOCHS": "3"}, 3),
        (["critic.ppo_epochs=4"], {"PPO_EPOCHS": "2"}, 4),
    ],
)
def test_the_critics_epochs_are_1_whatever_those_of_the_actor(
    arguments: list[str], environment: dict[str, str], epochs: int
) -> None:
    config = loaded(translate(arguments, environment))
    assert (config.actor_rollout_ref.actor.ppo_epochs, config.critic_updates[1]) == (2, epochs)


def test_without_a_critic_its_epochs_are_not_set() -> None:
    """They would be reported as a key without effect."""
    command = translate(["algorithm.adv_estimator=rloo"], {"PPO_EPOCHS": "2"})
    assert not loaded(command).is_given("critic.ppo_epochs")


def test_data_of_ones_own_bring_the_defaults_of_the_document() -> None:
    config = loaded(translate(["--data", "a.json", "--val", "b.json"], {}))
    assert (config.data.train_files, config.data.val_files) == ("a.json", "b.json")
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B" and config.kl_in_reward
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (1024, 1)
    own = loaded(translate(["--data", "flag.json", "--model", "embedded"], {"TRAIN_DATA": "variable.json"}))
    assert (own.data.train_files, own.actor_rollout_ref.model.path) == ("flag.json", "embedded")
    assert loaded(translate([], {"TRAIN_DATA": "a.json, b.jsonl"})).data.train_files == ["a.json", "b.jsonl"]


def test_an_empty_variable_is_none() -> None:
    assert translate([], {"CLIP_RATIO": "", "MODEL_PATH": "", "REWARD_MODEL_PATH": ""}).values == OUTPUT


def test_a_flag_wins_over_its_variable_and_a_key_over_both() -> None:
    environment = {"MODEL_PATH": "from/variable", "KL_COEF": "0.5", "REWARD_MODEL_PATH": "reward/variable"}
    config = loaded(translate([], environment))
    assert config.actor_rollout_ref.model.path == "from/variable"
    assert config.algorithm.kl_ctrl.kl_coef == 0.5
    assert config.reward_model.path == "reward/variable"
    config = loaded(translate(["--model", "from/flag", "--reward_model", "reward/flag"], environment))
    assert (config.actor_rollout_ref.model.path, config.reward_model.path) == ("from/flag", "reward/flag")
    own = ["algorithm.kl_ctrl.kl_coef=0.7", "--model", "from/flag", "actor_rollout_ref.model.path=from/key"]
    config = loaded(translate(own, environment))
    assert config.actor_rollout_ref.model.path == "from/key"
    assert config.algorithm.kl_ctrl.kl_coef == 0.7
    assert config.kl_in_reward
    assert not loaded(translate([], {})).kl_in_reward
    assert not loaded(translate([], {"KL_COEF": "0"})).uses_reference


def test_a_value_of_a_flag_is_not_read_by_hydra() -> None:
    config = loaded(translate(["--model", "my models/a,b=[c] ${HOME} #1"], {}))
    assert config.actor_rollout_ref.model.path == "my models/a,b=[c] ${HOME} #1"


def test_a_wrong_value_of_a_flag_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.total_epochs='many': .*; it takes int"):
        loaded(translate(["--epochs", "many"], {}))


def test_the_command_of_the_document_composes() -> None:
    config = loaded(translate(["--model", "Qwen/Qwen2.5-7B", "--epochs", "20", "--lr", "5e-7"], {}))
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
    assert translate(arguments, {}).values["trainer.default_local_dir"] == f"outputs/checkpoints/{folder}"


def test_the_output_directory_can_be_moved() -> None:
    assert loaded(translate(["trainer.default_local_dir=elsewhere"], {})).trainer.default_local_dir == "elsewhere"


def test_an_unknown_flag_is_an_error_that_lists_the_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(["--batchsize", "4"], {})
    assert "--batchsize" in str(caught.value)
    assert (
        "it takes --model, --data, --val, --epochs, --lr, --batch_size, --kl_coef, --n_gpus, --reward_model, "
        in str(caught.value)
    )


def test_a_flag_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.sh: argument --lr: expected one argument"):
        translate(["--lr"], {})


def test_a_flag_is_not_guessed_from_its_beginning() -> None:
    with pytest.raises(ConfigError, match="--epoch"):
        translate(["--epoch", "3"], {})


def test_a_flag_of_the_judge_without_the_judge_names_the_missing_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(["--rm_api_type", "openai", "--rm_model", "gpt-4o-mini"], {})
    assert str(caught.value) == (
        "--rm_api_type, --rm_model: no effect without --use_api_reward, which enables the API judge; add it"
    )


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
    environment: dict[str, str],
    learning_rate: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.setenv(name, environment.get(name, ""))
    with pytest.raises(SystemExit) as ended:
        translate(["--help"], environment)
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"--lr VALUE {learning_rate} (actor_rollout_ref.actor.optim.lr)" in said
    for name, found in {**VARIABLES, **{f"--{flag}": found for flag, found in FLAGS.items()}}.items():
        assert name in said and f"({found.key})" in said
    for file in ("reward_model_config.yaml", "api_reward_config.yaml", "common/reward_functions.py"):
        assert file in said
    assert "MODEL_PATH" in said and "KL_COEF" in said and "N_GPUS" in said
    assert said.startswith("用法：" if "策略" in learning_rate else "Usage: ")
    assert not re.search("usage:|options:|in two", said)  # words of argparse, which are not translated
    other = {"--model, MODEL_PATH": "Qwen/Qwen2.5-0.5B embedded", "--epochs": "30 1", "--lr": "1e-6 2e-4"}
    other |= {"--batch_size": "1024 64", "--kl_coef, KL_COEF": "0.001 0", "CRITIC_LR": "1e-5 1e-3", "ROLLOUT_N": "1 8"}
    assert " ".join(f"{name} {values}" for name, values in other.items()) in said  # the table of the embedded task


def test_every_flag_and_variable_ends_in_a_real_key() -> None:
    named = [*VARIABLES.values(), *FLAGS.values()]
    assert [found.key for found in named if found.key not in all_keys()] == []
