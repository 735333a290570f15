"""`rloom COMMAND`, as far as it goes without training."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rloom import __version__, cli
from rloom.config.schema import Config
from rloom.config.sources import default_tree
from rloom.console import run_safely, split_hydra_flags
from rloom.errors import ConfigError, DataError, RloomError
from rloom.trainer import main_ppo


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command sets up logging and warnings for its process; the tests share theirs."""
    handlers = logging.root.handlers[:]
    with warnings.catch_warnings():
        yield
    logging.root.handlers[:] = handlers


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    for command in ("train", "kit", "eval", "export", "config", "data prepare", "data check"):
        assert f"\n  {command} " in said


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rloom {__version__}\n"


def test_an_unknown_command_is_named_beside_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rloom: there is no command 'trian'\n\nrloom COMMAND\n")


def test_config_prints_a_tree_that_is_the_default_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0
    said = capsys.readouterr().out
    tree = yaml.safe_load(said.replace("1e-06", "0.000001").replace("1e-05", "0.00001"))
    assert tree == default_tree()
    assert (
        "  # Prompts per step. A step trains on this many times `rollout.n` samples.\n  train_batch_size: 1024" in said
    )


def test_config_explains_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "algorithm.lam"]) == 0
    assert capsys.readouterr().out == (
        "algorithm.lam (float, default 0.95): GAE's lambda. 0: one-step TD errors; 1: Monte Carlo returns.\n"
    )


def test_config_finds_a_key_by_a_part_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "optim.lr"]) == 0
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "actor_rollout_ref.actor.optim.lr",
        "critic.optim.lr",
    ]


def test_config_shows_a_section_with_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "kl_ctrl"]) == 0
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "algorithm.kl_ctrl:",
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl",
    ]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("algorithm.lamb", "algorithm.lamb: there is no such key; did you mean algorithm.lam?"),
        ("nonsense", "nonsense: there is no such key"),
    ],
)
def test_config_of_no_key_is_an_error(name: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", name]) == 2
    assert capsys.readouterr() == ("", f"rloom: configuration error: {answer}\n")


def test_hydras_flags_say_where_the_configuration_is() -> None:
    assert split_hydra_flags(["data.seed=1", "--config-path", "my", "--config-name=mine", "trainer.nnodes=1"]) == (
        ["data.seed=1", "trainer.nnodes=1"],
        {"config_path": "my", "config_name": "mine"},
    )
    assert split_hydra_flags(["-cp=my", "-cn", "mine"]) == ([], {"config_path": "my", "config_name": "mine"})


@pytest.mark.parametrize("argument", ["--multirun", "-m", "--lr", "--lr=3"])
def test_any_other_flag_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument.split('=')[0]} is not a flag of this command; use key=value"):
        split_hydra_flags([argument])


@pytest.mark.parametrize("argument", ["--config-name", "--config-path="])
def test_a_flag_without_its_value_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument.strip('=')} needs a value"):
        split_hydra_flags([argument])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("data.seed=x: no"), "rloom: configuration error: data.seed=x: no\n"),
        (DataError("a.parquet: no"), "rloom: data error: a.parquet: no\n"),
    ],
)
def test_a_users_error_is_one_line_without_a_traceback(
    error: RloomError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert run_safely(command) == 2
    assert capsys.readouterr() == ("", said)


def test_what_an_error_carries_beside_it_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        error = DataError("a.parquet: no")
        error.add_note("Everything up to step 3 is saved")
        raise error

    assert run_safely(command) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "Everything up to step 3 is saved"


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    def command() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_safely(command)


def test_an_interrupt_ends_with_the_shells_code() -> None:
    def command() -> int:
        raise KeyboardInterrupt

    assert run_safely(command) == 130


def test_an_export_takes_keys_beside_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from rloom.trainer import export

    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(export, "export", lambda *given, **named: seen.append((*given, named)))
    trust = "actor_rollout_ref.model.trust_remote_code=True"
    assert cli.main(["export", "global_step_1", "--dtype", "bfloat16", "folder", trust]) == 0
    assert seen == [(Path("global_step_1"), Path("folder"), [trust], {"adapter": False, "dtype": "bfloat16"})]


def test_the_kits_flags_reach_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def train(config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(main_ppo, "train", train)
    monkeypatch.setenv("GAE_LAMBDA", "0.9")
    assert cli.main(["kit", "--lr", "1e-4", "data.seed=3"]) == 0
    keys = ["data.seed=3", "algorithm.lam=0.9", "actor_rollout_ref.actor.optim.lr=1e-4"]
    assert cli.main(["train", *keys, "trainer.default_local_dir=outputs/checkpoints/embedded"]) == 0
    kit, plain = seen
    assert (kit.algorithm.lam, kit.actor_rollout_ref.actor.optim.lr, kit.data.seed) == (0.9, 1e-4, 3)
    assert kit.model_dump() == plain.model_dump()


def test_the_help_of_the_kit_names_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["kit", "--help"])
    assert ended.value.code == 0
    assert "--batch_size" in capsys.readouterr().out


def test_torchs_stack_trace_on_a_cpu_without_bfloat16_is_not_shown() -> None:
    def multiply() -> int:
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: ...", stacklevel=1)
        return 0

    warnings.simplefilter("error")
    assert run_safely(multiply) == 0
