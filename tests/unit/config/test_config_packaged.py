"""Keys set on the packaged files give what Hydra composes of those files and keys, and Hydra reports the errors."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rloom.config.given_keys import default_tree
from rloom.config.load import PACKAGED, by_hydra, load_config, on_packaged_files, store_values
from rloom.config.schema import Config, SftConfig
from rloom.errors import ConfigError

SCHEMAS = {"ppo_trainer": default_tree(Config), "sft_trainer": default_tree(SftConfig)}
VALUES = {"trainer.project_name": "${", "data.seed": 9, "trainer.logger": ["console"]}


def contents(found: tuple[DictConfig, bool] | None) -> list[Any]:
    """As text, so that the order of the keys counts."""
    assert found is not None
    return [repr(OmegaConf.to_container(found[0], resolve=resolve)) for resolve in (True, False)] + [found[1]]


@pytest.mark.parametrize("values", [{}, VALUES], ids=["keys", "keys and values"])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["++data.train_batch_size=4", "++data.train_batch_size=8", "preset=embedded"],
        ["++trainer.experiment_name='a b'", "++trainer.default_local_dir=${trainer.experiment_name}/${oc.env:HOME}"],
        [
            "++actor_rollout_ref.model.override_config.a.b=[1,{c:null}]",
            "++actor_rollout_ref.model.override_config={d:x}",
        ],
        ["++data={seed:3,unknown:1}", "++data.other.name=1", "++critic.optim.lr=1e-4"],
        ["++trainer.logger=[tensorboard]", "++trainer.logger=null", "++data.train_files=[a,b]"],
    ],
    ids=str,
)
def test_the_tree_is_the_one_that_hydra_composes(overrides: list[str], values: dict[str, Any]) -> None:
    given, schema = [*(store_values(values) if values else ()), *overrides], SCHEMAS["ppo_trainer"]
    found = contents(on_packaged_files("ppo_trainer", given, schema))
    assert found == contents(by_hydra(PACKAGED, "ppo_trainer", given, schema))


def test_each_command_has_files_and_a_schema_of_its_own() -> None:
    for name, schema in SCHEMAS.items():
        found = contents(on_packaged_files(name, ["++data.train_batch_size=4"], schema))
        assert found == contents(by_hydra(PACKAGED, name, ["++data.train_batch_size=4"], schema))
    mixed = contents(on_packaged_files("sft_trainer", [], SCHEMAS["ppo_trainer"]))
    assert mixed == contents(by_hydra(PACKAGED, "sft_trainer", [], SCHEMAS["ppo_trainer"]))


def test_one_call_leaves_nothing_to_the_next() -> None:
    before = load_config()
    assert load_config(["data.seed=5", "actor_rollout_ref.model.override_config.a=1"]).data.seed == 5
    assert load_config() == before


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["frontends=x"], "force-add of config groups is not supported: '++frontends=x'"),
        (["data@trainer=x"], "looks like a config group override, but config group 'data' does not exist"),
        (["data=[1]"], "Error merging override ++data=[1]"),
    ],
)
def test_what_cannot_be_composed_is_reported_by_hydra(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match="the configuration cannot be read: ") as caught:
        load_config(overrides)
    assert reason in str(caught.value)
