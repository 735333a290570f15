"""The table of environments: every entry works, its data can be written, and a run finds them by name."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rloom.cli.data import main
from rloom.config.checks import check
from rloom.config.derived import declared_needs, reward_parts
from rloom.config.load import load_config
from rloom.data.prepare import GENERATED, PREPARERS
from rloom.environments.kinds import ENVIRONMENTS, MULTI_TURN
from rloom.errors import ConfigError, DataError
from rloom.launch.inputs import UserObjects, read_data
from rloom.plugins import referenced
from tests.unit.config.test_config_examples import EXAMPLES, command_of

SCRIPTS = sorted(path.name for path in (EXAMPLES / "environments").glob("*.sh"))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_has_the_usual_keys_and_a_script(name: str) -> None:
    kind = ENVIRONMENTS[name]
    config = load_config([f"{MULTI_TURN}.environment={name}", *(f"{key}={value}" for key, value in kind.keys.items())])
    check(config, declared_needs(config))
    [part] = reward_parts(config)
    assert part.source == ("environment" if kind.rewards else "rules")
    assert callable(referenced(kind.made))
    assert any(name in script for script in SCRIPTS)
    assert set(kind.data) <= PREPARERS.keys() and (kind.rows is not None or kind.data)


def test_an_unknown_environment_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"guess_number.*calculator.*python.*sql.*search.*rooms"):
        load_config([f"{MULTI_TURN}.environment=chess"])


def test_no_environment_imports_torch() -> None:
    names = ", ".join(kind.made.partition(":")[0] for kind in ENVIRONMENTS.values())
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, {names}; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert found.stdout == "False\n", found.stderr


@pytest.mark.parametrize("name", GENERATED)
def test_the_data_are_the_same_each_time_and_their_splits_differ(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("one", "two"):
        assert main(["prepare", name, "--local_save_dir", str(tmp_path / folder)]) == 0
    assert f"{tmp_path}/one/train.parquet: {pq.read_metadata(tmp_path / 'one/train.parquet').num_rows} rows" in (
        capsys.readouterr().out
    )
    one, two = (
        [pq.read_table(tmp_path / folder / f"{split}.parquet").to_pylist() for split in ("train", "test")]
        for folder in ("one", "two")
    )
    assert one == two
    train, test = ([(row["prompt"], row["reward_model"], row["extra_info"]) for row in split] for split in one)
    assert all(row not in train[:500] for row in test)
    assert all(row[2]["split"] == "test" for row in test)


def test_generated_data_take_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sql is generated, not read; leave --source out"):
        referenced("rloom.data.prepare:prepare")("sql", tmp_path, tmp_path)


def test_without_files_a_run_trains_on_the_rows_of_its_environment() -> None:
    config = load_config([f"{MULTI_TURN}.environment=guess_number", "data.train_max_samples=-1"])
    data = read_data(config, UserObjects())
    assert (len(data.train), len(data.held_out)) == (4096, 7)
    assert data.train[0].read.messages == ({"role": "user", "content": "1-7?"},)
    assert read_data(load_config([f"{MULTI_TURN}.environment=python"]), UserObjects()).train[0].read.data_source == (
        "math_reasoning"
    )


def test_the_list_has_every_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments"]) == 0
    shown = capsys.readouterr().out
    for name, kind in ENVIRONMENTS.items():
        assert f"{name}\n  {kind.description}\n  rloom train {MULTI_TURN}.environment={name} " in shown
    assert "rloom data prepare gsm8k" in shown


@pytest.mark.parametrize(
    "script", [name for name in SCRIPTS if name not in ("run_guess_number.sh", "run_calculator.sh")]
)
def test_the_keys_of_a_script_exist_and_fit_together(script: str, tmp_path: Path) -> None:
    _, module, *keys = command_of(f"environments/{script}", tmp_path)
    assert module == "rloom.trainer.main_ppo"
    config = load_config(keys)
    check(config, declared_needs(config))
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 1024
