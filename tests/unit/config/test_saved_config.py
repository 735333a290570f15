"""A checkpoint's own configuration is data: nothing in it runs code unless the user names it again."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.from_checkpoint import EVALUATION, MODEL_ALONE, config_text, load_saved, merge_trees
from rloom.config.given_keys import leaf_keys
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.runs.run_folder import CONFIG_FILE

MODEL, ESTIMATOR = "actor_rollout_ref.model.trust_remote_code", "algorithm.adv_estimator"
LOSS, REWARD = "actor_rollout_ref.actor.policy_loss.loss_mode", "custom_reward_function.path"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs"
CODE: list[tuple[str, Any]] = [
    (MODEL, True),
    (ESTIMATOR, "./mine.py:estimate"),
    (ESTIMATOR, "os.path:join"),
    (LOSS, "/a folder/it's.py:loss"),
    (REWARD, "reward.py"),
    ("reward_model.trust_remote_code", True),
    ("reward_model.model.trust_remote_code", True),
    ("reward_model.remote.urls", ["http://a:1/x", "https://b/y"]),
    ("reward_model.remote.token_env", "SECRET"),
    (ENGINE, {"custom_generate": "some/folder", "trust_remote_code": True}),
    ("actor_rollout_ref.rollout.server.command", "serve {model} --port {port}"),
    ("actor_rollout_ref.rollout.server.urls", ["http://a:1", "http://b:2"]),
    ("actor_rollout_ref.rollout.server.key_env", "SECRET"),
]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def write(folder: Path, changes: Mapping[str, Any]) -> Path:
    tree = merge_trees(Config().model_dump(mode="json"), changes)
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(tree))
    return folder


def value_of(config: Config, key: str) -> Any:
    found: Any = config.model_dump(mode="json")
    for name in key.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize(("key", "value"), CODE)
def test_what_runs_code_is_refused_with_the_words_that_allow_it(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, nested(key, value))
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path)
    said = str(caught.value)
    effects = "run code, contact a server, spend money or write files"
    assert said.startswith(
        f"{tmp_path / CONFIG_FILE} sets keys that {effects}: {key}={value}. A checkpoint is not trust"
    )
    allow = shlex.split(said.rpartition("add to the command: ")[2])
    assert value_of(load_saved(tmp_path, allow), key) == value


STRATEGY, CRITICS = "actor_rollout_ref.actor.strategy", "critic.strategy"


def test_no_file_of_a_checkpoint_is_loaded_by_checking_its_keys(tmp_path: Path) -> None:
    """Every key that can name a kind of the user's own, also where its section is switched off or nothing needs it."""
    mine = tmp_path / "mine.py"
    mine.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    named = f"{mine}:X"
    off = {"enable": False}
    for changes in (
        {"critic": {"strategy": named}},
        {"critic": {"strategy": named, **off}},
        {"reward_model": {"kinds": [named], **off}},
        {"actor_rollout_ref": {"rollout": {"name": named}}},
        {"actor_rollout_ref": {"actor": {"strategy": named}}},
    ):
        write(tmp_path, changes)
        with pytest.raises(ConfigError, match="A checkpoint is not trusted"):
            check(config := load_saved(tmp_path), declared_needs(config))
    assert not (tmp_path / "ran").exists()


def test_a_critic_with_the_actors_strategy_is_allowed_with_it(tmp_path: Path) -> None:
    write(
        tmp_path, {"actor_rollout_ref": {"actor": {"strategy": "./mine.py:X"}}, "critic": {"strategy": "./mine.py:X"}}
    )
    assert load_saved(tmp_path, [f"{STRATEGY}=./mine.py:X"]).critic.strategy == "./mine.py:X"


JUDGE = {
    "enable": True,
    "type": "openai",
    "model": "most-expensive",
    "base_url": "http://a:1/v1",
    "api_key_env": "SECRET",
    "cache_dir": "/anywhere",
}


def test_a_judge_spends_no_money_unless_all_that_it_depends_on_is_repeated(tmp_path: Path) -> None:
    write(tmp_path, nested("reward_model.api", JUDGE))
    words = [f"reward_model.api.{name}={value}" for name, value in JUDGE.items()]
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path)
    allow = shlex.split(str(caught.value).rpartition("add to the command: ")[2])
    assert [word.lower() for word in allow] == [word.lower() for word in words]
    for left_out in range(len(words)):
        with pytest.raises(ConfigError, match=f"write files: {words[left_out]}. A checkpoint"):
            load_saved(tmp_path, words[:left_out] + words[left_out + 1 :])
    assert load_saved(tmp_path, words).reward_model.api.model == "most-expensive"
    assert not load_saved(tmp_path, ["reward_model.api.enable=False"]).reward_model.api.enable
    write(tmp_path, nested("reward_model.api", {**JUDGE, "enable": False}))
    assert load_saved(tmp_path).reward_model.api.model == "most-expensive"  # without an effect


def test_a_part_of_a_mix_is_a_reward_of_its_own(tmp_path: Path) -> None:
    mix = nested("reward_model.composite", {"enable": True, "weights": {"rule_score": 0.5, "api_score": 0.5}})
    judge = {"enable": True, "type": "claude", "model": None, "cache_dir": None}
    write(tmp_path, merge_trees(mix, nested("reward_model.api", judge)))
    with pytest.raises(
        ConfigError, match=r"add to the command: reward_model.api.enable=true reward_model.api.type=claude$"
    ):
        load_saved(tmp_path)


def test_what_has_an_effect_outside_of_the_run_is_asked_for() -> None:
    """Names of fields that runs of others are made to do something with; their values need consent, or say why not."""
    names = re.compile(r"(urls?|_env|command|enable|trust_remote_code|logger|ray_init|_kwargs|_dir|path|loss_mode)$")
    harmless = {
        "reward_model.composite.enable": "of what else is configured",
        "actor_rollout_ref.rollout.multi_turn.enable": "of what else is configured",
        "reward_model.overlong_buffer.enable": "arithmetic",
        "reward_model.enable": "a model, as safetensors",
        "algorithm.filter_groups.enable": "arithmetic",
        "critic.enable": "a model, as safetensors",
        "trainer.default_local_dir": "of a run; `rloom eval` replaces it",
        "data.apply_chat_template_kwargs": "of a template, which runs in Jinja's sandbox",
        "custom_reward_function.reward_kwargs": "of the function, which needs consent",
        "actor_rollout_ref.rollout.multi_turn.environment_kwargs": "of the environment, which needs consent",
    }
    asked = {path for path, key in leaf_keys().items() if key.needs_consent is not None}
    found = {path for path in leaf_keys() if names.search(path)}
    models = {path for path in found if path.endswith((".path", "_path")) and path not in asked}  # safetensors only
    assert REWARD in asked
    assert found - asked - set(harmless) == models
    others = {path for path in asked if not path.startswith(("critic.", "trainer.", "ray_kwargs."))}
    assert others | {CRITICS} == set(EVALUATION)


def test_all_that_runs_code_is_named_at_once(tmp_path: Path) -> None:
    write(tmp_path, merge_trees(nested(REWARD, "a.py"), nested(ESTIMATOR, "b.py:f")))
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path, [f"{ESTIMATOR}=gae"])
    assert str(caught.value).endswith(f"add to the command: {REWARD}=a.py")
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path)
    assert str(caught.value).endswith(f"add to the command: {REWARD}=a.py {ESTIMATOR}=b.py:f")


def test_a_mapping_that_is_named_takes_nothing_from_the_file(tmp_path: Path) -> None:
    write(tmp_path, nested(ENGINE, {"custom_generate": "some/folder"}))
    with pytest.raises(ConfigError, match="sets keys that run code"):
        load_saved(tmp_path, [f"{ENGINE}={{repetition_penalty: 1.1}}"])


def test_an_export_runs_no_reward_and_no_algorithm(tmp_path: Path) -> None:
    write(tmp_path, merge_trees(nested(REWARD, "a.py"), nested(ESTIMATOR, "b.py:f")))
    load_saved(tmp_path, uses=MODEL_ALONE)
    write(tmp_path, nested(MODEL, True))
    with pytest.raises(ConfigError, match=rf"add to the command: {MODEL}=true"):
        load_saved(tmp_path, uses=MODEL_ALONE)
    assert load_saved(tmp_path, [f"{MODEL}=True"], uses=MODEL_ALONE).actor_rollout_ref.model.trust_remote_code


def test_every_key_that_is_asked_for_exists() -> None:
    config = Config()
    assert not any(value_of(config, key) for key in (MODEL, REWARD, ENGINE))
    assert {value_of(config, key) for key in EVALUATION if key in (ESTIMATOR, LOSS)} == {"gae", "vanilla"}


def test_an_interpolation_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "told")
    write(tmp_path, nested("actor_rollout_ref.model.path", "${oc.env:A_SECRET}"))
    assert load_saved(tmp_path).actor_rollout_ref.model.path == "${oc.env:A_SECRET}"
    own = load_saved(tmp_path, ["actor_rollout_ref.model.path='${oc.env:A_SECRET}'"])
    assert own.actor_rollout_ref.model.path == "told"  # the user's own words mean what they mean elsewhere


TAKES_ALIASES = "data: {prompt_key: &a prompt, reward_fn_key: *a}\n"
HOSTILE = {
    "defaults": ("defaults: [ppo_trainer, _self_]\n", "defaults"),
    "search path": ("hydra: {searchpath: ['file:///somewhere']}\n", "hydra"),
    "target": ("data: {_target_: os.system}\n", "_target_"),
    "python object": ("data: !!python/object/apply:os.system ['touch marker']\n", "python/object"),
    "python name": ("data: {seed: !!python/name:os.system }\n", "python/name"),
    "aliases": (TAKES_ALIASES, "alias"),
    "a circle": ("data: &a {extra: *a}\n", "alias"),
    "brackets": ("[" * 5000, "cannot be read"),
    "no mapping": ("- 1\n", "holds no configuration"),
    "numbers for names": ("1: 2\n", "holds no configuration"),
    "a section that is none": ("data: 5\n", "data=5"),
    "cut short": ("data: {seed: 1", "cannot be read"),
    "no text": ("\x00\x01", "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_no_run_wrote_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    text, said = HOSTILE[name]
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / CONFIG_FILE)) and said in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


def test_what_a_run_writes_holds_no_alias(tmp_path: Path) -> None:
    config = load_config(["data.seed=11", "data.train_files=[a.parquet]", "data.val_files=[a.parquet]"])
    (tmp_path / CONFIG_FILE).write_text(config_text(config))
    assert load_saved(tmp_path).model_dump() == config.model_dump()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path / CONFIG_FILE} cannot be read: .*No such file"):
        load_saved(tmp_path)


def test_an_override_is_checked_as_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, {})
    with pytest.raises(ConfigError, match=r"data\.sede: there is no such key; did you mean data\.seed\?"):
        load_saved(tmp_path, ["data.sede=1"])
    with pytest.raises(ConfigError, match=r"hydra: there is no such key|hydra\.searchpath: there is no such key"):
        load_saved(tmp_path, ["hydra.searchpath=[x]"])
