"""`rloom COMMAND`, as far as it goes without training."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rloom import __version__, cli
from rloom.cli import overview
from rloom.config.given_keys import default_tree
from rloom.config.keys import all_keys
from rloom.config.schema import Config
from rloom.console import run_safely, split_hydra_flags
from rloom.errors import ConfigError, DataError, RloomError, WorkerError
from rloom.trainer import main_ppo


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command sets up logging and warnings for its process; the tests share theirs."""
    handlers = logging.root.handlers[:]
    with warnings.catch_warnings():
        yield
    logging.root.handlers[:] = handlers


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_exit_code_and_variable(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    usages = [f"{name} {words}" for name, command in cli.COMMANDS.items() for words, *_ in command.usage]
    for first in (*usages, "0", "1", "2", "3", "130", "NO_COLOR", "HF_ENDPOINT", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"):
        assert f"\n  {first} " in said
    assert said.index("\nTrain:") < said.index("\n  train ") < said.index("\nUse a checkpoint:")
    assert max(map(len, said.splitlines())) <= 120


def test_every_grouped_command_exists_and_an_ungrouped_one_is_listed_too() -> None:
    assert {name for names in overview.GROUPS.values() for name in names} <= set(cli.COMMANDS)
    usages = {name: command.usage for name, command in cli.COMMANDS.items()}
    said = overview.render_overview({**usages, "new": [("FILE", "does something")]})
    assert said.index("More:") < said.index("\n  new FILE") and "does something" in said


@pytest.mark.parametrize("arguments", [["--version"], ["-V"]])
def test_the_version_is_the_packages(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"rloom {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["trian", "data.seed=1"],
            "rloom: there is no command 'trian'; did you mean 'train'?\n`rloom --help` lists the commands.\n",
        ),
        (["xyzzy"], "rloom: there is no command 'xyzzy'\n`rloom --help` lists the commands.\n"),
        (["help", "exprot"], "rloom help: there is no command 'exprot'; did you mean 'export'?\n"),
    ],
)
def test_an_unknown_command_is_named_with_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in ("help", "kit")])
def test_each_command_has_a_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    subcommands = {"data": ["check"], "reward": ["try"], "judge": ["try"], "doctor": ["env"]}
    try:
        status = cli.main(["help", command, *subcommands.get(command, [])])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    said = capsys.readouterr().out
    assert f"rloom {command}" in said
    if command != "data":
        assert f"\n  rloom {command} " in said or "rloom completion bash >" in said


@pytest.mark.parametrize(
    ("locale", "first", "codes"), [("C", "Trains a policy.", "Exit codes:"), ("zh_CN.UTF-8", "训练策略模型", "退出码")]
)
def test_the_help_of_train_has_ten_real_keys_in_the_users_language(
    locale: str, first: str, codes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    assert cli.main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert first in said and codes in said
    rows = [line.split("   ")[0].strip() for line in said.splitlines() if line.startswith("  ") and "   " in line[2:]]
    keys = [key for row in rows for key in row.split(", ") if "." in key and "=" not in key]
    assert len(rows) - 1 == 10 and [key for key in keys if key not in all_keys()] == []


def test_the_names_of_the_metrics_are_a_topic_of_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    assert cli.main(["help", "metrics"]) == 0
    *table, _, written = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[1]: line for line in table}
    assert "critic/vf_loss" in rows["critic_loss, value_loss"]
    assert "actor/pg_clipfrac" in rows["clip_fraction"]
    assert "reward_mean, kl, kl_divergence, actor_loss, policy_loss" in written


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


def test_a_full_disk_is_an_error_of_the_user_whatever_file_has_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        try:
            with open("/dev/full", "w") as file:
                file.write("a line")
        except OSError as error:
            error.add_note("The last good checkpoint is global_step_2; the same command goes on from it.")
            raise
        return 0

    assert run_safely(command) == 2
    assert capsys.readouterr().err == (
        "rloom: disk error: [Errno 28] No space left on device\n"
        "The last good checkpoint is global_step_2; the same command goes on from it.\n"
    )
    with pytest.raises(FileNotFoundError):  # a bug
        run_safely(lambda: len(Path("no_such_file").read_text()))


@pytest.mark.parametrize(("lost", "code"), [(True, 3), (False, 2)])
def test_a_lost_worker_has_an_exit_code_of_its_own(lost: bool, code: int) -> None:
    def command() -> int:
        raise WorkerError("worker 1 died", lost=lost)

    assert run_safely(command) == code


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


def test_an_export_takes_keys_beside_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rloom.launch import export

    monkeypatch.chdir(tmp_path)
    Path("global_step_1").mkdir()
    Path("global_step_1", "trainer_state.json").touch()

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
    keys += ["trainer.default_local_dir=outputs/checkpoints/embedded", "trainer.number_runs=True"]
    assert cli.main(["train", *keys]) == 0
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


@pytest.mark.parametrize("arguments", [["--help"], ["help", "metrics"]])
def test_a_reader_that_ends_early_is_no_error(arguments: list[str]) -> None:
    """`rloom --help | head -1`"""
    command = [sys.executable, "-m", "rloom", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_config_searches_inside_names_and_offers_similar_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "chat_template"]) == 0
    assert [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        "data.apply_chat_template_kwargs",
        "actor_rollout_ref.model.custom_chat_template",
    ]
    assert cli.main(["config", "val_generations_logged"]) == 2
    assert "there is no such key; similar names are trainer.log_val_generations" in capsys.readouterr().err
    assert cli.main(["config", "qqqq"]) == 2
    assert capsys.readouterr().err == "rloom: configuration error: qqqq: there is no such key\n"
