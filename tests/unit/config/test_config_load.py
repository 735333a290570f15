"""Composing the configuration: defaults, command lines, YAML files, presets."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.describe import whole_tree
from rloom.config.from_checkpoint import load_saved
from rloom.config.load import expand, load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.launch.episodes import limits_of

OWN_MODEL = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"  # no preset

DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.loss_agg_mode": None,  # token-mean, or what the policy loss is defined with
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "critic.enable": None,
    "critic.optim.lr": 1e-5,
    "critic.ppo_mini_batch_size": None,
    "critic.ppo_epochs": None,
    "critic.cliprange_value": 0.5,
    "critic.grad_clip": 1.0,
    "custom_reward_function.name": "compute_score",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 0.95,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.normalize_advantages": None,
    "algorithm.use_kl_in_reward": None,  # follows algorithm.kl_ctrl
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "trainer.val_before_train": True,
    "trainer.resume_mode": "auto",
    "trainer.device": "auto",
}


def value(config: Config, path: str) -> object:
    found: object = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.fixture(scope="module")
def plain() -> Config:
    return load_config([OWN_MODEL])


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_default_is_the_one_that_the_documents_give(plain: Config, key: str) -> None:
    assert value(plain, key) == DEFAULTS[key]


def test_several_files_are_a_list_of_paths_with_the_variables_left_to_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = "['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    config = load_config([OWN_MODEL, f"data.train_files={files}"])
    assert config.data.train_files == ["$HOME/data/gsm8k/train.parquet", "$HOME/data/math/train.parquet"]
    monkeypatch.setenv("HOME", "/somewhere")
    assert expand("$HOME/data/x.parquet") == expand("~/data/x.parquet") == Path("/somewhere/data/x.parquet")


@pytest.mark.parametrize("spelling", ["data.seed=7", "+data.seed=7", "++data.seed=7", "data.seed='7'", 'data.seed="7"'])
def test_a_key_may_be_added_forced_or_quoted_as_in_hydra(spelling: str) -> None:
    assert load_config([OWN_MODEL, spelling]).data.seed == 7


def test_the_last_of_two_values_counts() -> None:
    assert load_config([OWN_MODEL, "data.seed=5", "data.seed=6"]).data.seed == 6


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("~/data/train.parquet", "~/data/train.parquet"),
        ("'~/data/train.parquet'", "~/data/train.parquet"),
        ("a folder/train.parquet", "a folder/train.parquet"),
        ("'/data/lr=1(2)/train.parquet'", "/data/lr=1(2)/train.parquet"),
        ("[a.parquet, b.parquet]", ["a.parquet", "b.parquet"]),
        ('["~/a.parquet"]', ["~/a.parquet"]),
    ],
)
def test_a_path_arrives_as_it_was_typed(given: str, read: object) -> None:
    assert load_config([OWN_MODEL, f"data.train_files={given}"]).data.train_files == read


def test_null_unsets_and_a_dictionary_takes_any_entry() -> None:
    config = load_config(
        [OWN_MODEL, "trainer.total_training_steps=null", "+actor_rollout_ref.model.override_config.rope_theta=5000"]
    )
    assert config.trainer.total_training_steps is None
    assert config.actor_rollout_ref.model.override_config == {"rope_theta": 5000}


def test_the_run_directory_follows_project_and_experiment() -> None:
    config = load_config([OWN_MODEL, "trainer.project_name=p", "trainer.experiment_name=e"])
    assert config.trainer.default_local_dir == "checkpoints/p/e"


def test_a_logger_may_be_one_or_several() -> None:
    assert load_config(["trainer.logger=wandb"]).trainer.loggers == ["wandb"]
    assert load_config(['trainer.logger=["console","tensorboard"]']).trainer.loggers == ["console", "tensorboard"]


def test_the_embedded_preset_comes_with_the_embedded_model_alone() -> None:
    embedded, other = load_config(), load_config([OWN_MODEL])
    assert (embedded.data.train_batch_size, other.data.train_batch_size) == (64, 1024)
    assert (embedded.actor_rollout_ref.rollout.n, other.actor_rollout_ref.rollout.n) == (8, 1)
    assert (embedded.actor_rollout_ref.actor.optim.lr, other.actor_rollout_ref.actor.optim.lr) == (2e-4, 1e-6)
    check(embedded, declared_needs(embedded))


def test_the_embedded_model_on_other_data_reads_all_of_it() -> None:
    assert load_config().data.train_max_samples == 2048
    other = load_config(["data.train_files=mine.parquet"])
    assert (other.data.train_max_samples, other.data.train_batch_size) == (-1, 64)


def test_keys_of_later_versions_say_so_and_their_idle_values_pass() -> None:
    load_config(["reward_model.enable=False", "reward_model.reward_manager=naive", "trainer.node_rank=0"])
    for key, what in {
        "reward_model.reward_manager=rate_limited": "rate_limited: other reward managers are not in this version",
        "data.custom_cls.path=rows.py": "data.custom_cls.path='rows.py': a dataset class of your own is not in this",
    }.items():
        with pytest.raises(ConfigError, match=what):
            load_config([key])


def test_a_key_on_the_command_line_wins_over_the_preset() -> None:
    config = load_config(["actor_rollout_ref.rollout.n=3", "data.train_batch_size=32"])
    assert (config.actor_rollout_ref.rollout.n, config.data.train_batch_size) == (3, 32)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 32  # still the preset's


@pytest.fixture
def own_yaml(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data: {train_batch_size: 16}\n"
        "actor_rollout_ref:\n"
        "  actor: {ppo_mini_batch_size: 8, optim: {lr: 3e-6}}\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", ["mine", "mine.yaml"])
def test_a_yaml_of_ones_own_stands_on_the_packaged_one(own_yaml: Path, name: str) -> None:
    config = load_config(["data.seed=9", OWN_MODEL], config_path=str(own_yaml), config_name=name)
    assert (config.data.train_batch_size, config.data.seed, config.data.max_prompt_length) == (16, 9, 512)
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6


def test_a_yaml_of_ones_own_wins_over_the_preset_and_loses_to_the_command_line(own_yaml: Path) -> None:
    config = load_config(["data.train_batch_size=24"], config_path=str(own_yaml), config_name="mine")
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert config.data.train_batch_size == 24
    assert config.actor_rollout_ref.rollout.n == 8  # the preset's, as the model is the embedded one


def test_the_tree_that_rloom_config_prints_can_be_saved_and_used(tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text(whole_tree())
    config = load_config(["data.seed=4"], config_path=str(tmp_path), config_name="whole")
    assert config.data.train_batch_size == 1024  # it says so itself, though the model is the embedded one
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    expected = Config().model_dump()
    directory = "checkpoints/rloom_examples/embedded_gae_embedded"
    expected["trainer"] |= {"experiment_name": "embedded_gae_embedded", "default_local_dir": directory}
    expected["reward_model"]["api"]["cache_dir"] = f"{directory}/judge_cache"
    assert config.numbers_runs  # the file repeats the default
    assert config.model_copy(update={"data": Config().data}).model_dump() == expected


def test_a_yaml_without_a_list_of_defaults_stands_by_itself(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("data: {seed: 3}\n")
    assert load_config(config_path=str(tmp_path), config_name="bare").data.seed == 3


def test_a_missing_yaml_is_named_with_the_folder_searched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--config-name=mine: there is no such YAML file in {tmp_path}"):
        load_config(config_path=str(tmp_path), config_name="mine")


def test_a_misspelt_key_in_a_yaml_is_found_too(own_yaml: Path) -> None:
    (own_yaml / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {sede: 1}\n")
    with pytest.raises(ConfigError, match=r"data\.sede: there is no such key; did you mean data\.seed\?"):
        load_config(config_path=str(own_yaml), config_name="mine")


def test_a_yaml_that_does_not_parse_is_an_error_and_no_traceback(own_yaml: Path) -> None:
    (own_yaml / "mine.yaml").write_text("data: {seed: 1\n")
    with pytest.raises(ConfigError, match="the configuration cannot be read"):
        load_config(config_path=str(own_yaml), config_name="mine")


def test_a_saved_configuration_reads_the_model_from_its_checkpoint(tmp_path: Path) -> None:
    config = load_config(["data.seed=11"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_saved(tmp_path).model_dump() == config.model_dump()
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model.safetensors").touch()
    saved = load_saved(tmp_path, ["data.val_batch_size=5"])
    assert saved.actor_rollout_ref.model.path == str(tmp_path / "actor")
    assert (saved.data.seed, saved.data.val_batch_size, saved.data.train_batch_size) == (11, 5, 64)


def test_nothing_can_be_assigned(plain: Config) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        plain.data.seed = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        plain.data = plain.data  # type: ignore[misc]


def test_what_follows_from_several_keys_is_derived() -> None:
    config = load_config(
        [
            OWN_MODEL,
            "data.train_batch_size=512",
            "actor_rollout_ref.actor.ppo_mini_batch_size=128",
            "actor_rollout_ref.rollout.n=5",
        ]
    )
    assert (config.critic_updates, config.updates_once) == ((128, 1), False)
    whole = load_config([OWN_MODEL, "actor_rollout_ref.actor.ppo_mini_batch_size=1024"])
    assert (whole.updates_once, whole.uses_reference) == (True, False)
    assert not load_config(["actor_rollout_ref.actor.ppo_epochs=2", "data.train_batch_size=32"]).updates_once
    assert load_config(["algorithm.use_kl_in_reward=True"]).uses_reference
    assert load_config(["actor_rollout_ref.actor.use_kl_loss=True"]).uses_reference


def test_the_warm_up_is_a_number_of_steps_or_a_share_of_them() -> None:
    optim = "actor_rollout_ref.actor.optim"

    def warmup(*overrides: str) -> int:
        return load_config(overrides).actor_rollout_ref.actor.optim.warmup(total_steps=200)

    assert warmup() == 0
    assert warmup(f"{optim}.lr_warmup_steps_ratio=0.1") == 20
    assert warmup(f"{optim}.warmup_steps=7", f"{optim}.lr_warmup_steps_ratio=0.1") == 7
    assert warmup(f"{optim}.lr_warmup_steps=0", f"{optim}.lr_warmup_steps_ratio=0.1") == 0


def test_lengths_that_fit_the_model_by_their_total_are_not_lowered() -> None:
    config = load_config(["data.max_response_length=500", "data.max_length=512"])
    assert (config.data.max_prompt_length, config.data.longest_sample, config.data.longest_answer) == (64, 512, 500)
    assert limits_of(config).total_tokens == 512
