"""Which keys the user set, in which spelling, and what follows from it."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rloom.config.derived import declared_needs
from rloom.config.describe import whole_tree
from rloom.config.effects import WithoutEffect, without_effect
from rloom.config.from_checkpoint import load_saved
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.launch.job import timetable
from rloom.launch.run import use_of_reference
from tests.helpers import configured

MODEL = "actor_rollout_ref.model.path=a/model"  # composed once; the embedded model is composed again for its preset
COEFFICIENT = "algorithm.kl_ctrl.kl_coef"
OFFLOADED = "actor_rollout_ref.ref.fsdp_config.param_offload"
ON_OURS = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {model: {path: a/model}}\n"
# The configuration of document 003, as it is printed there, engine and trackers left out.
DOCUMENT_003 = """
defaults: [ppo_trainer, _self_]
data:
  train_files: $HOME/data/gsm8k/train.parquet
  val_files: $HOME/data/gsm8k/test.parquet
  train_batch_size: 1024
  filter_overlong_prompts: True
  truncation: 'error'
actor_rollout_ref:
  model:
    path: Qwen/Qwen2-7B-Instruct
  actor:
    optim.lr: 5e-7
    ppo_mini_batch_size: 256
    use_kl_loss: False
  rollout:
    n: 5
algorithm:
  adv_estimator: rloo
  use_kl_in_reward: True
  kl_penalty: kl
  kl_ctrl.kl_coef: 0.005
"""


def own(folder: Path, text: str, *overrides: str) -> Config:
    (folder / "mine.yaml").write_text(text)
    return load_config(overrides, config_path=str(folder), config_name="mine")


def test_given_are_the_keys_of_the_command_line_even_at_their_default() -> None:
    config = load_config([MODEL, "data.seed=1", "algorithm.kl_ctrl={type: adaptive, target_kl: 0.2}"])
    assert config.given == {
        "actor_rollout_ref.model.path",
        "data.seed",
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.target_kl",
    }
    entry = "+actor_rollout_ref.model.override_config.rope_theta=5000"
    assert load_config([MODEL, entry]).is_given("actor_rollout_ref.model.override_config")


def test_presets_are_not_given() -> None:
    embedded = load_config(["data.seed=3"])
    assert (embedded.actor_rollout_ref.rollout.n, embedded.given) == (8, {"data.seed"})


def test_given_are_the_keys_of_a_yaml_file_and_of_the_files_it_names(tmp_path: Path) -> None:
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes" / "small.yaml").write_text("# @package _global_\ndata: {train_batch_size: 8}\n")
    text = "defaults: [ppo_trainer, sizes: small, _self_]\ncritic: {optim: {lr: 1e-5}}\n"
    config = own(tmp_path, text, MODEL)
    assert config.given == {"data.train_batch_size", "critic.optim.lr", "actor_rollout_ref.model.path"}
    assert config.data.train_batch_size == 8


def test_the_whole_tree_as_rloom_prints_it_gives_only_what_was_changed(tmp_path: Path) -> None:
    assert own(tmp_path, whole_tree()).given == frozenset()
    changed = own(tmp_path, whole_tree().replace("kl_coef: 0.001", "kl_coef: 0.5"))
    assert changed.given == {COEFFICIENT}
    assert changed.kl_in_reward


@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        ([], False),
        ([f"{COEFFICIENT}=0.001"], True),  # the default, but the user wrote it
        (["algorithm.kl_ctrl.type=adaptive"], True),
        (["algorithm.use_kl_in_reward=True"], True),
        (["algorithm.use_kl_in_reward=False", f"{COEFFICIENT}=0.5"], False),
        (["algorithm.use_kl_in_reward=null", f"{COEFFICIENT}=0.5"], True),
        ([f"{COEFFICIENT}=0"], False),  # asks for no KL: no reference is loaded for it
        ([f"{COEFFICIENT}=0", "algorithm.kl_ctrl.type=adaptive"], True),
    ],
)
def test_kl_is_in_the_reward_where_its_control_is_set_or_it_is_asked_for(overrides: list[str], on: bool) -> None:
    config = configured(*overrides)
    assert (config.kl_in_reward, config.uses_reference) == (on, on)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "no reference (algorithm.kl_metric=True measures the KL to it)"),
        (["algorithm.kl_metric=True"], "KL to the reference measured, without a penalty"),
        ([f"{COEFFICIENT}=0.002"], "KL to the reference in the reward (kl × 0.002)"),
        (["actor_rollout_ref.actor.use_kl_loss=True"], "KL to the reference in the loss (low_var_kl × 0.001)"),
        (
            [f"{COEFFICIENT}=0.002", "actor_rollout_ref.actor.use_kl_loss=True"],
            "KL to the reference in the reward (kl × 0.002) and in the loss (low_var_kl × 0.001)",
        ),
    ],
)
def test_the_first_line_of_a_run_says_what_the_reference_is_for(overrides: list[str], said: str) -> None:
    assert use_of_reference(configured(*overrides)) == said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((-1, -1, False), "checkpoint only at the end (trainer.save_freq=-1); validation never (trainer.test_freq=-1)"),
        (
            (5, -1, True),
            "checkpoint every 5 steps and at the end (trainer.save_freq); validation only before the first step "
            "(trainer.test_freq=-1)",
        ),
        (
            (105, 1, True),
            "checkpoint at the end (trainer.save_freq=105 steps); validation every 1 step and at the end "
            "(trainer.test_freq)",
        ),
    ],
)
def test_the_second_line_of_a_run_counts_checkpoints_and_validations_in_steps(
    keys: tuple[int, int, bool], said: str
) -> None:
    """1,024 of 7,473 prompts are 7 steps an epoch, and 15 epochs are 105."""
    save, test, first = keys
    settings = SimpleNamespace(
        total_steps=105, save_every=max(save, 0) or None, validate_every=max(test, 0) or None, validate_first=first
    )
    assert timetable(settings, 7473 // 1024, validates=True) == f"7 steps an epoch; {said}"
    assert timetable(settings, 1, validates=False) == f"1 step an epoch; {said.partition('; ')[0]}"


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        (["algorithm.kl_metric=True"], True),
        ([f"{OFFLOADED}=True"], True),  # whoever offloads a reference expects one
        ([f"{OFFLOADED}=True", "algorithm.kl_metric=False"], False),
        ([f"{OFFLOADED}=True", "actor_rollout_ref.actor.use_kl_loss=False"], False),  # verl's scripts without KL
        ([f"{OFFLOADED}=True", "algorithm.use_kl_in_reward=False"], False),
        ([f"{OFFLOADED}=True", f"{COEFFICIENT}=0"], False),
        (["algorithm.kl_metric=True", f"{COEFFICIENT}=0.01"], False),  # the penalty's own metric is there
    ],
)
def test_kl_is_only_measured_where_it_is_asked_for_or_a_reference_is_set_up(
    overrides: list[str], measured: bool, tmp_path: Path
) -> None:
    config = configured(*overrides)
    assert config.kl_only_measured == measured
    assert config.uses_reference == config.scores_reference == (measured or config.kl_in_reward)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_saved(tmp_path).kl_only_measured == measured


@pytest.mark.parametrize(
    ("overrides", "answers"),
    [
        (["algorithm.adv_estimator=gae"], 1),
        (["algorithm.adv_estimator=rloo"], 5),
        (["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=null"], 5),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"], 2),
        (["algorithm.adv_estimator=remax"], 1),
        (["algorithm.adv_estimator=mine.py:f"], 1),
    ],
)
def test_estimators_that_compare_answers_get_five_to_a_prompt(overrides: list[str], answers: int) -> None:
    config = load_config(["actor_rollout_ref.model.path=some/model", *overrides])
    assert config.actor_rollout_ref.rollout.n == answers


def test_a_saved_configuration_keeps_what_followed_from_the_given_keys(tmp_path: Path) -> None:
    config = load_config([MODEL, f"{COEFFICIENT}=0.001"])
    assert config.algorithm.use_kl_in_reward is None  # no key is rewritten
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    saved = load_saved(tmp_path)
    assert saved.algorithm.use_kl_in_reward is True
    assert (saved.kl_in_reward, saved.given) == (True, frozenset())
    assert saved.model_dump() == config.model_dump()


def test_a_worker_is_sent_what_the_user_set() -> None:
    sent = pickle.loads(pickle.dumps(configured(f"{COEFFICIENT}=0.001")))
    assert (sent.given, sent.kl_in_reward) == ({COEFFICIENT}, True)


def test_the_yaml_of_document_003_is_read_as_printed(tmp_path: Path) -> None:
    config = own(tmp_path, DOCUMENT_003)
    assert config.actor_rollout_ref.actor.optim.lr == 5e-7
    assert (config.kl_in_reward, config.algorithm.kl_ctrl.kl_coef) == (True, 0.005)
    assert {COEFFICIENT, "actor_rollout_ref.actor.optim.lr"} <= config.given
    assert without_effect(config, declared_needs(config)) == WithoutEffect()


def test_dotted_keys_at_the_top_are_read_too(tmp_path: Path) -> None:
    config = own(tmp_path, f"{ON_OURS}algorithm.use_kl_in_reward: True\nactor_rollout_ref.rollout.n: 8\n")
    assert (config.kl_in_reward, config.actor_rollout_ref.rollout.n) == (True, 8)
    section = own(tmp_path, f"{ON_OURS}algorithm.kl_ctrl: {{kl_coef: 0.2}}\n")
    assert (section.algorithm.kl_ctrl.kl_coef, section.algorithm.kl_ctrl.horizon) == (0.2, 10000)


def test_the_command_line_wins_over_a_dotted_key_and_that_over_the_preset(tmp_path: Path) -> None:
    text = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref.rollout.n: 3\nactor_rollout_ref.actor.optim.lr: 5e-5\n"
    config = own(tmp_path, text, "actor_rollout_ref.rollout.n=4")  # the embedded model, whose preset says 8 and 2e-4
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (4, 5e-5)


def test_a_key_written_both_ways_is_an_error(tmp_path: Path) -> None:
    text = f"{ON_OURS}algorithm:\n  kl_ctrl: {{kl_coef: 0.1}}\n  kl_ctrl.kl_coef: 0.2\n"
    with pytest.raises(ConfigError, match=rf"{COEFFICIENT}: written twice, in two spellings; keep one"):
        own(tmp_path, text)
    with pytest.raises(ConfigError, match=r"data\.seed: data is also set, to"):
        own(tmp_path, "data: 3\ndata.seed: 4\n")


def test_a_misspelt_dotted_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"algorithm\.kl_ctrl\.kl_cef: there is no such key; did you mean {COEFFICIENT}"
    ):
        own(tmp_path, f"{ON_OURS}algorithm: {{kl_ctrl.kl_cef: 0.1}}\n")


def test_a_list_of_loggers_may_be_text_as_document_001_prints_it(tmp_path: Path) -> None:
    config = own(tmp_path, f'{ON_OURS}trainer:\n  logger: \'["console","wandb"]\'\n')
    assert config.trainer.loggers == ["console", "wandb"]
