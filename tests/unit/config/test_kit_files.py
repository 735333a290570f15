"""The files that users of train.sh edit: what they set, where they are found, and how a mistake in them is named."""

import ast
import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from rloom.config.frontends.train_sh import JUDGE, KeyFile, judge_file, reward_file, translate
from rloom.config.keys import all_keys
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError

ROOT = Path(__file__).parents[3]
KIT = ROOT / "rloom" / "assets" / "kit"
# As document 002 prints them.
MIX = """
composite_reward:
  enable: true
  weights:
    rm_score: 0.7
    rule_score: 0.3
"""
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "math_reasoning":
        answer = extract_final_answer(solution_str)
        return 1.0 if answer == ground_truth else 0.0
    return 0.0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, without files; its parent is the test's own too."""
    made = tmp_path / "current"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def loaded(*arguments: str, environment: dict[str, str] | None = None) -> Config:
    command = translate(arguments, environment or {})
    return load_config(command.overrides, command.values)


def uncommented(text: str) -> str:
    """With the keys that the file shows in comments: `#key: value`, and `#  ` before the lines of a text."""
    return re.sub(r"^#(?=[^\s#]|  )", "", text, flags=re.M)


def test_the_mix_of_the_document_is_read() -> None:
    write(Path("reward_model_config.yaml"), MIX)
    command = translate(["--reward_model", "a/model"], {})
    mix = load_config(command.overrides, command.values).reward_model.composite
    assert (mix.enable, mix.weights) == (True, {"rm_score": 0.7, "rule_score": 0.3})
    assert command.reward == (
        "Reward: a mix of reward model a/model and rules, selected by the data_source of each row, "
        "with the keys of reward_model_config.yaml"
    )


def test_the_command_line_overrides_the_file_entry_by_entry() -> None:
    write(Path("reward_model_config.yaml"), MIX)
    mix = loaded("--reward_model", "m", "composite_reward.weights.rm_score=0.5").reward_model.composite
    assert mix.weights == {"rm_score": 0.5, "rule_score": 0.3}
    assert not loaded("composite_reward.enable=false").is_given("reward_model.composite.weights")


def test_a_mix_that_is_not_enabled_sets_nothing_but_can_be_enabled_by_a_key() -> None:
    write(Path("reward_model_config.yaml"), MIX.replace("true", "false"))
    assert not loaded().is_given("reward_model.composite")
    mix = loaded("--reward_model", "m", "composite_reward.enable=True").reward_model.composite
    assert (mix.enable, mix.weights) == (True, {"rm_score": 0.7, "rule_score": 0.3})


def test_the_judges_file_is_read_with_its_flag_only_and_flags_override_it() -> None:
    write(Path("api_reward_config.yaml"), "type: openai\nmodel: from-file\nscoring_prompt: 'a: {prompt}\\n${x}'\n")
    assert not loaded().is_given(JUDGE)
    command = translate(["--use_api_reward", "--rm_model", "from-flag"], {})
    judge = load_config(command.overrides, command.values).reward_model.api
    assert (judge.enable, judge.type, judge.model) == (True, "openai", "from-flag")
    assert judge.scoring_prompt == "a: {prompt}\\n${x}"
    assert command.reward == "Reward: API judge, with the keys of api_reward_config.yaml"
    assert loaded("--use_api_reward", f"{JUDGE}.model=from-key").reward_model.api.model == "from-key"


def test_the_current_directory_comes_before_that_of_train_sh(tmp_path: Path) -> None:
    environment = {"RLOOM_KIT_DIR": str(tmp_path / "kit")}
    write(tmp_path / "kit" / "api_reward_config.yaml", "model: beside-train-sh")
    assert loaded("--use_api_reward", environment=environment).reward_model.api.model == "beside-train-sh"
    write(Path("api_reward_config.yaml"), "model: current")
    assert loaded("--use_api_reward", environment=environment).reward_model.api.model == "current"


@pytest.mark.parametrize("place", ["common", "../common", "kit"])
def test_the_users_compute_score_is_used_wherever_the_document_puts_it(tmp_path: Path, place: str) -> None:
    environment = {"RLOOM_KIT_DIR": str(tmp_path / "kit")}
    folder = tmp_path / "kit" / "common" if place == "kit" else Path(place)
    file = write(folder / "reward_functions.py", FUNCTION)
    command = translate([], environment)
    assert load_config(command.overrides, command.values).custom_reward_function.path == str(file)
    assert command.reward == f"Reward: compute_score of {file}"


@pytest.mark.parametrize(
    ("text", "is_used"),
    [
        (FUNCTION, True),
        ("async def compute_score(**row): return 1.0", True),
        ("from mine import score as compute_score", True),
        ("compute_score = len", True),
        ("raise SystemExit('it is not imported')\ndef compute_score(): ...", True),
        (textwrap.indent(FUNCTION, "# "), False),
        ("class A:\n    def compute_score(self): ...", False),
        ("'compute_score'", False),
    ],
)
def test_a_file_is_used_if_it_defines_compute_score(text: str, is_used: bool) -> None:
    write(Path("common/reward_functions.py"), text)
    assert (loaded().custom_reward_function.path == "common/reward_functions.py") is is_used


def test_the_users_own_key_replaces_the_file() -> None:
    write(Path("common/reward_functions.py"), FUNCTION)
    assert loaded("custom_reward_function.path=other.py").custom_reward_function.path == "other.py"


@pytest.mark.parametrize(
    "arguments",
    [["--use_api_reward"], ["--reward_model", "m"], ["reward_model.remote.urls=http://a/x"]],
)
def test_another_reward_replaces_the_file_and_the_first_line_says_so(arguments: list[str]) -> None:
    write(Path("common/reward_functions.py"), FUNCTION)
    command = translate(arguments, {})
    assert load_config(command.overrides, command.values).custom_reward_function.path is None
    assert command.reward.endswith(
        "; compute_score of common/reward_functions.py is not used, because another reward is set and no mix uses "
        "rule_score"
    )


def test_a_mix_uses_the_function_as_rule_score() -> None:
    write(Path("common/reward_functions.py"), FUNCTION)
    write(Path("reward_model_config.yaml"), MIX)
    command = translate(["--use_api_reward"], {})
    assert load_config(command.overrides, command.values).custom_reward_function.path == "common/reward_functions.py"
    assert command.reward == (
        "Reward: a mix of API judge and compute_score of common/reward_functions.py, "
        "with the keys of reward_model_config.yaml"
    )


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "reward_model_config.yaml",
            "composite_reward: {enabled: true}",
            "did you mean reward_model.composite.enable?",
        ),
        ("reward_model_config.yaml", "reward_model: {num_worker: 3}", "did you mean reward_model.num_workers?"),
        ("reward_model_config.yaml", "trainer: {total_epochs: 3}", "trainer: this file takes the sections composite_"),
        ("reward_model_config.yaml", "composite_reward: true", "reward_model.composite is a section of keys"),
        ("reward_model_config.yaml", "- 1", "it holds no keys"),
        ("reward_model_config.yaml", "a: [", "it cannot be read: while parsing"),
        ("api_reward_config.yaml", "modle: qwen-max", "reward_model.api.modle: there is no such key; did you mean"),
        (
            "api_reward_config.yaml",
            "api_key: sk-sekret",
            "put it into an environment variable, such as DASHSCOPE_API_KEY",
        ),
        ("common/reward_functions.py", "def compute_score(:", "it is not valid Python: invalid syntax"),
    ],
)
def test_a_mistake_is_named_with_its_file(name: str, text: str, fault: str) -> None:
    write(Path(name), text)
    with pytest.raises(ConfigError) as caught:
        translate(["--use_api_reward"], {})
    assert str(caught.value).startswith(f"{name}: ") and fault in str(caught.value)
    assert "sekret" not in str(caught.value)


def test_the_files_that_train_sh_writes_set_nothing_until_they_are_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(KIT)
    assert judge_file({}) == KeyFile(Path("api_reward_config.yaml"), {})
    command = translate(["--use_api_reward"], {})
    assert set(command.values) == {"trainer.default_local_dir", "trainer.number_runs", f"{JUDGE}.enable"}
    assert command.reward == "Reward: API judge"


def test_every_key_that_the_files_show_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("api_reward_config.yaml", "reward_model_config.yaml"):
        write(Path(name), uncommented((KIT / name).read_text(encoding="utf-8")))
    judge, reward = judge_file({}), reward_file({})
    assert judge is not None and reward is not None
    apart = {f"{JUDGE}.enable", f"{JUDGE}.cache_dir"}  # the flag, and a folder of the run
    assert set(judge.values) == {path for path in all_keys() if path.startswith(f"{JUDGE}.")} - apart
    assert "{ground_truth}" in judge.values[f"{JUDGE}.scoring_prompt"]
    assert reward.values["reward_model.max_failed_share"] == 0.5
    mix = yaml.safe_load((KIT / "reward_model_config.yaml").read_text(encoding="utf-8"))
    assert mix == {"composite_reward": {"enable": False, "weights": {"rm_score": 0.7, "rule_score": 0.3}}}


def test_the_function_that_the_file_shows_is_that_of_the_document() -> None:
    text = (KIT / "common" / "reward_functions.py").read_text(encoding="utf-8")
    shown = ast.parse(re.sub(r"^# ", "", text.partition('\n"""\n')[2], flags=re.M))
    assert ast.dump(shown) == ast.dump(ast.parse(FUNCTION))


def test_train_sh_passes_its_own_folder(tmp_path: Path) -> None:
    kit = tmp_path / "a kit"
    script = write(kit / "train.sh", (ROOT / "train.sh").read_text(encoding="utf-8"))
    show = '#!/bin/sh\necho "$RLOOM_KIT_DIR" "$@"\n'
    for program, text in ((kit / ".venv" / "bin" / "rloom", show), (tmp_path / "bin" / "make", "#!/bin/sh\n")):
        write(program, text).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script), "--lr", "1"], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{kit} kit --lr 1\n"
    assert not (kit / "common").exists()  # a copy of the script alone has nothing to write


def test_train_sh_writes_the_files_that_are_missing_and_changes_none(tmp_path: Path) -> None:
    assets = ("reward_model_config.yaml", "common/reward_functions.py")
    for name in ("train.sh", *(f"rloom/assets/kit/{asset}" for asset in assets)):
        write(tmp_path / name, (ROOT / name).read_text(encoding="utf-8"))
    for program in (tmp_path / ".venv" / "bin" / "rloom", tmp_path / "bin" / "make"):
        write(program, "#!/bin/sh\n").chmod(0o755)
    write(tmp_path / "reward_model_config.yaml", MIX)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(tmp_path / "train.sh")], env=environment, check=True, capture_output=True)
    written = (tmp_path / "common" / "reward_functions.py").read_text(encoding="utf-8")
    assert written == (KIT / "common" / "reward_functions.py").read_text(encoding="utf-8")
    assert (tmp_path / "reward_model_config.yaml").read_text(encoding="utf-8") == MIX


@pytest.mark.parametrize("spelling", ["composite_reward", "reward_model.composite"])
def test_both_names_of_the_mix_are_keys(spelling: str, tmp_path: Path) -> None:
    typed = load_config([f"{spelling}.enable=True", f"+{spelling}.weights.rm_score=0.7"])
    whole = load_config([f"{spelling}={{enable: True, weights: {{rm_score: 0.7}}}}"])
    for config in (typed, whole):
        assert (config.reward_model.composite.enable, config.reward_model.composite.weights) == (
            True,
            {"rm_score": 0.7},
        )
        assert config.given == {"reward_model.composite.enable", "reward_model.composite.weights"}
    for text in (MIX, "composite_reward.enable: true\ncomposite_reward: {weights: {rm_score: 0.7, rule_score: 0.3}}"):
        write(tmp_path / "mine.yaml", f"defaults: [ppo_trainer, _self_]\n{text}")
        changes = [f"{spelling}.weights.rm_score=0.1"]
        mixed = load_config(changes, config_path=str(tmp_path), config_name="mine")
        assert mixed.reward_model.composite.weights == {"rm_score": 0.1, "rule_score": 0.3}
        assert mixed.given == {"reward_model.composite.enable", "reward_model.composite.weights"}


def test_a_file_with_both_names_of_the_mix_is_refused(tmp_path: Path) -> None:
    text = (
        "defaults: [ppo_trainer, _self_]\nreward_model: {composite: {enable: true}}\ncomposite_reward: {enable: false}"
    )
    write(tmp_path / "mine.yaml", text)
    with pytest.raises(ConfigError, match=r"reward_model\.composite\.enable: written twice, in two spellings"):
        load_config(config_path=str(tmp_path), config_name="mine")


def test_an_unknown_key_of_the_mix_is_named_by_its_real_name() -> None:
    with pytest.raises(
        ConfigError, match=r"reward_model\.composite\.enabel: .* did you mean reward_model\.composite\.enable"
    ):
        load_config(["composite_reward.enabel=True"])
