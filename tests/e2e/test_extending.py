"""Algorithms, engines, strategies, rewards and episodes from outside rloom: the code of docs/extending.md trains."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.config.from_checkpoint import EVALUATION, MODEL_ALONE, load_saved
from rloom.config.load import load_config
from rloom.doctor.machine import features
from rloom.doctor.machine.features import FeatureState
from rloom.errors import ConfigError
from rloom.plugins import load_plugin
from tests.e2e.runs import command, records, same, train, weights
from tests.unit.doctor.test_doctor_env import CPU, installation

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
ESTIMATOR, ENGINE, STRATEGY = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.actor.strategy",
)
RLOO = f"{ESTIMATOR}=rloo"
CENTRED = """
from rloom.algos import estimators
from rloom.algos.registry import Algorithm


def centred(inputs, settings):
    return estimators.rloo(inputs, settings)


CENTRED = Algorithm(centred, min_group=2, reads=frozenset())
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of the page, in a folder of their own."""
    folder = tmp_path_factory.mktemp("outside")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.S):
        (folder / name).write_text(code)
    (folder / "my_estimator.py").write_text(CENTRED)
    return folder


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with rloom's own estimator, engine and strategy."""
    run = tmp_path_factory.mktemp("usual")
    train(run, 2, RLOO)
    return run


def numbers(run: Path) -> list[dict[str, float]]:
    times = ("timing_", "perf/")
    return [{name: value for name, value in record.items() if not name.startswith(times)} for record in records(run)]


def same_training(one: Path, other: Path) -> bool:
    return numbers(one) == numbers(other) and all(same(weights(one, step), weights(other, step)) for step in (1, 2))


def source_of_rloom() -> str:
    found = subprocess.run(
        ["git", "status", "--porcelain", "--", "rloom"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout


def test_what_comes_from_files_trains_as_rlooms_own(tmp_path: Path, files: Path, usual: Path) -> None:
    before = source_of_rloom()
    engine, strategy = f"{ENGINE}={files}/my_engine.py:COUNTING", f"{STRATEGY}={files}/my_strategy.py:COUNTING"
    train(tmp_path / "estimator", 2, f"{ESTIMATOR}={files}/my_estimator.py:CENTRED")
    train(tmp_path / "engine", 2, RLOO, engine)
    train(tmp_path / "strategy", 2, RLOO, strategy)
    for name in ("estimator", "engine", "strategy"):
        assert same_training(tmp_path / name, usual), name
    built = load_plugin(ENGINE, engine.partition("=")[2]).build.__globals__["CountingRollout"]
    assert built.submitted == 2 * 4 * 2  # steps, prompts, answers
    trained = load_plugin(STRATEGY, strategy.partition("=")[2]).build.__globals__["CountingEngine"]
    assert trained.updates == 2 * 2  # steps, mini-batches
    dump = tmp_path / "dump"
    train(
        tmp_path / "reward",
        2,
        RLOO,
        f"reward_model.kinds=['{files}/my_reward.py:DIGITS']",
        f"trainer.rollout_data_dir={dump}",
    )
    answers = [json.loads(line) for step in (1, 2) for line in (dump / f"{step}.jsonl").read_text().splitlines()]
    assert [answer["score"] for answer in answers] == [float(answer["output"].count("3")) for answer in answers]
    assert source_of_rloom() == before


def test_a_kind_of_episodes_from_a_file_has_two_turns(tmp_path: Path, files: Path) -> None:
    kind = f"actor_rollout_ref.rollout.multi_turn.kind={files}/my_episodes.py:ASK_TWICE"
    train(tmp_path / "run", 1, RLOO, kind, "data.max_response_length=96")
    [step] = records(tmp_path / "run")
    assert (step["episode/turns/max"], step["episode/failed"], step["reward/failed"]) == (2.0, 0.0, 0.0)


@pytest.fixture
def package(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that is installed: its modules and its metadata are on the search path."""
    folder = tmp_path / "site-packages"
    shutil.copytree(files, folder, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    groups = re.search(r"```toml\n(.*?)```", PAGE, re.S)
    assert groups is not None
    registered = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", groups[1]).replace('"', "")
    strategies = "[rloom.strategies]\ncounting = my_strategy:COUNTING\nbroken = no_such_module:COUNTING\n"
    (metadata / "entry_points.txt").write_text(f"{registered}centred = my_estimator:CENTRED\n{strategies}")
    monkeypatch.syspath_prepend(folder)
    yield
    for name in ("my_algos", "my_engine", "my_estimator", "my_strategy"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("package")
def test_an_installed_package_registers_them_by_name(tmp_path: Path, usual: Path) -> None:
    train(tmp_path / "run", 2, f"{ESTIMATOR}=centred", f"{ENGINE}=counting", f"{STRATEGY}=counting")
    assert same_training(tmp_path / "run", usual)
    assert sys.modules["my_engine"].CountingRollout.submitted == 2 * 4 * 2
    assert features.engine(installation(CPU), "counting").state is FeatureState.WORKS


@pytest.mark.usefixtures("package")
def test_an_unknown_name_is_listed_with_those_of_installed_packages() -> None:
    with pytest.raises(ConfigError, match=r"'count'.*it takes native\|hf\|vllm\|sglang\|trtllm\|counting or file"):
        load_config([f"{ENGINE}=count"])
    with pytest.raises(ConfigError, match=r"'count'.*it takes fsdp\|fsdp2\|megatron\|counting\|broken or file"):
        load_config([f"{STRATEGY}=count"])


@pytest.mark.usefixtures("package")
def test_an_entry_point_that_cannot_be_imported_names_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, 1, RLOO, f"{STRATEGY}=broken") == 2
    said = capsys.readouterr().err
    assert "strategy=broken: the entry point no_such_module:COUNTING of the package outside cannot be loaded" in said


def test_another_object_than_a_declaration_is_named(
    tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, 1, RLOO, f"{ENGINE}={files}/my_engine.py:build") == 2
    assert "my_engine.py:build is a function; use a RolloutKind (docs/extending.md)" in capsys.readouterr().err
    assert command(tmp_path, 1, RLOO, f"{STRATEGY}={files}/my_strategy.py:build") == 2
    assert "my_strategy.py:build is a function; use a StrategyKind (docs/extending.md)" in capsys.readouterr().err


def test_the_code_that_a_checkpoint_names_is_not_loaded(tmp_path: Path, usual: Path) -> None:
    marker, evil = tmp_path / "loaded", tmp_path / "evil.py"
    evil.write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    saved = usual / "global_step_2" / "config.yaml"
    trusted = saved.read_text()
    for key, line in {ENGINE: "name: native", STRATEGY: "strategy: fsdp"}.items():
        assert trusted.count(f"    {line}\n") >= 1
        saved.write_text(trusted.replace(f"    {line}\n", f"    {line.split(':')[0]}: {json.dumps(f'{evil}:X')}\n"))
        try:
            for uses in (EVALUATION, MODEL_ALONE)[: 1 if key == ENGINE else 2]:
                with pytest.raises(ConfigError, match=rf"run code.*{re.escape(f'{key}={evil}:X')}"):
                    load_saved(usual / "global_step_2", uses=uses)
        finally:
            saved.write_text(trusted)
    assert not marker.exists()
