"""The completion scripts, run by real shells where they are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rloom.cli.completion import SCRIPTS, CompletionWords, completion_words
from rloom.config.keys import all_keys

# as readline calls it: COMP_LINE and COMP_POINT, then the answers in COMPREPLY
DRIVER = """
source "$1"
COMP_LINE="$2" COMP_POINT=${#2} COMP_WORDS=() COMP_CWORD=0 COMP_TYPE=9 COMP_KEY=9
_rloom rloom
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def words() -> CompletionWords:
    return completion_words()


@pytest.fixture(scope="module")
def script(words: CompletionWords, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "rloom.bash"
    file.write_text(SCRIPTS["bash"](words))
    return file


def completed(script: Path, line: str, folder: Path | None = None) -> list[str]:
    done = subprocess.run(
        ["bash", "-u", "-c", DRIVER, "bash", script, line], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rloom tr", ["train"]),
        ("rloom co", ["config", "compare", "completion"]),
        ("rloom --ver", ["--version"]),
        ("rloom data ", ["prepare", "environments", "check", "show", "--help"]),
        ("rloom data ch", ["check"]),
        ("rloom data check --tok", ["--tokenizer"]),
        ("rloom doctor env --j", ["--json"]),
        ("rloom view --no", ["--no-open"]),
        ("rloom completion f", ["fish"]),
        ("rloom help me", ["metrics"]),
        ("rloom kit --rm_a", ["--rm_api_type"]),
        ("rloom train --config-n", ["--config-name"]),
        (
            "rloom train algorithm.kl_c",
            [f"algorithm.kl_ctrl.{n}=" for n in ("type", "kl_coef", "horizon", "target_kl")],
        ),
        ("rloom plan data.seed=1 trainer.nn", ["trainer.nnodes="]),
        ("rloom train algorithm.kl_ctrl.type=", ["fixed", "adaptive"]),
        ("rloom train algorithm.kl_ctrl.type=ad", ["adaptive"]),
        ("rloom train trainer.val_only=T", ["True"]),
        ("rloom train algorithm.adv_estimator=rl", ["rloo"]),
        ("rloom train actor_rollout_ref.actor.kl_loss_type=fu", ["full"]),
        ("rloom config data.se", []),
    ],
)
def test_bash_completes_commands_flags_keys_and_values(
    script: Path, tmp_path: Path, line: str, found: list[str]
) -> None:
    assert completed(script, line, tmp_path) == found


def test_bash_completes_files_where_a_path_is_expected(script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    assert completed(script, "rloom train data.train_files=tr", tmp_path) == ["train.parquet"]
    assert completed(script, "rloom data check tra", tmp_path) == ["train.parquet"]


def test_every_key_and_no_section_is_offered(script: Path) -> None:
    offered = [word for word in completed(script, "rloom train ") if word.endswith("=")]
    assert offered == [f"{path}=" for path, key in all_keys().items() if key.section is None]


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_other_shells_read_their_script(words: CompletionWords, tmp_path: Path, shell: str, check: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / f"rloom.{shell}"
    file.write_text(SCRIPTS[shell](words))
    assert subprocess.run([shell, check, file], timeout=240).returncode == 0


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_scripts_hold_the_same_words(words: CompletionWords, shell: str) -> None:
    text = SCRIPTS[shell](words)
    assert "@" not in text.replace("(@)", "").replace('"$@"', "")
    for word in ("completion", "--tokenizer", "algorithm.kl_ctrl.type=", "adaptive", "--rm_api_type"):
        assert word in text
