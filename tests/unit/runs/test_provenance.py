"""What a run records about its start, and what it never writes."""

import json
import subprocess
from pathlib import Path

import pytest

from rloom.config.given_keys import leaf_keys
from rloom.runs.provenance import COMMIT, command_line, commit_of, start_record, versions, without_secrets
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog

KEYS = (
    "sk-proj-0123456789abcdef",
    "hf_abcdefghijklmnop",
    "ghp_0123456789abcdef",
    "AIzaSyA0123456789abcdef",
    "AKIA0123456789ABCDEF",
    "gsk_0123456789abcdef",
    "xai-0123456789abcdef",
    "r8_0123456789abcdef0123",
    "xoxb-0123456789-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["rloom", "train", "a=1", "b=two words"], "rloom train a=1 'b=two words'"),
        (["/x/rloom/__main__.py", "train", "a=1"], "python -m rloom train a=1"),
        (["rloom", "judge.api_key=abc", "x.password=1"], "rloom 'judge.api_key=***' 'x.password=***'"),
        (["rloom", "--hf-token", "abc", "--lr", "1"], "rloom --hf-token '***' --lr 1"),
        (["rloom", "--api-key=abc"], "rloom '--api-key=***'"),
        (["rloom", "WANDB_API_KEY=abc"], "rloom 'WANDB_API_KEY=***'"),
        (["rloom", "url=https://me:pass@host/v1"], "rloom 'url=https://***@host/v1'"),
        (["rloom", "url=https://host/v1?api_key=abc&n=1"], "rloom 'url=https://host/v1?***&n=1'"),
        (["rloom", "header=Bearer abcdef"], "rloom 'header=Bearer ***'"),
        (["rloom", "api={api_key: my secret, n: 1}"], "rloom 'api={api_key: ***, n: 1}'"),
        (["rloom", "headers={Authorization: abc}"], "rloom 'headers={Authorization: ***}'"),
        (["rloom", "h={x-api-key: 1}"], "rloom 'h={x-api-key: ***}'"),
        (["rloom", '{"api_key": "a,b", "n": 1}'], """rloom '{"api_key": ***, "n": 1}'"""),
        (["rloom", "h=Authorization: Basic dXNlcjpw"], "rloom 'h=Authorization: ***'"),
        (["rloom", "url=https://u:p@h/v1?api_key=zzz"], "rloom 'url=https://***@h/v1?***'"),
        (["rloom", "url=https://h/v1?sig=zzz&n=1"], "rloom 'url=https://h/v1?***&n=1'"),
        (["rloom", "url=https://hooks.slack.com/services/T0/B0/x"], "rloom 'url=https://hooks.slack.com/services/***'"),
        (["rloom", "HF_TOKEN=hf_x", "WANDB_KEY=x", "pwd=1"], "rloom 'HF_TOKEN=***' 'WANDB_KEY=***' 'pwd=***'"),
        (["rloom", "a.passphrase=one two", "a.api_keys=[x,y]"], "rloom 'a.passphrase=***' 'a.api_keys=***'"),
        (["rloom", "accessToken=x", "a.hfToken=x"], "rloom 'accessToken=***' 'a.hfToken=***'"),
        (["rloom", "--token", "-abc", "--lr", "1"], "rloom --token '***' --lr 1"),
        (["rloom", '"judge.api_key"=s', "+judge.api_key=s"], """rloom '"judge.api_key"=***' '+judge.api_key=***'"""),
        # names of settings that are no secrets
        (["rloom", "tokens_per_minute=5", "a.key_env=NAME"], "rloom tokens_per_minute=5 a.key_env=NAME"),
        (["rloom", "model.tokenizer=a/b", "pad_token=x"], "rloom model.tokenizer=a/b pad_token=x"),
        (["rloom", "max_tokens=5", "data.prompt_key=prompt"], "rloom max_tokens=5 data.prompt_key=prompt"),
        (["rloom", "api.api_key_env=OPENAI_API_KEY"], "rloom api.api_key_env=OPENAI_API_KEY"),
        (["rloom", "model=Qwen/Qwen2-0.5B"], "rloom model=Qwen/Qwen2-0.5B"),
    ],
)
def test_the_command_is_as_typed_without_secrets(arguments: list[str], shown: str) -> None:
    assert command_line(arguments) == shown


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_not_written_wherever_it_stands(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rloom", f"some.setting={key}", key, f"[{key},b]", f"--flag={key}"])
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with RunLog.open(tmp_path, loggers=["file"], project="p", experiment="e", config={}) as log:
        log.truncate_after(-1)
    assert all(key not in file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    (event, _) = RunFolder(tmp_path).events
    assert event["command"].startswith("rloom 'some.setting=***'")


def test_secrets_of_a_configuration_are_not_shown() -> None:
    given = {"a.api_key": "abc", "a.token": None, "a.max_tokens": 5, "a.api_key_env": "NAME"}
    assert without_secrets(given) == {**given, "a.api_key": "***"}


def test_secrets_inside_values_are_not_shown() -> None:
    given = {
        "a.headers": {"Authorization": "abc", "n": 1},
        "a.urls": ["https://u:p@h/v1", {"accessToken": "x"}],
        "a.command": "curl -H 'x-api-key: abc'",
        "a.api_keys": ["x"],
        "trainer.note": "sk-0123456789",
        "model.path": "Qwen/Qwen2-0.5B",
    }
    assert without_secrets(given) == {
        "a.headers": {"Authorization": "***", "n": 1},
        "a.urls": ["https://***@h/v1", {"accessToken": "***"}],
        "a.command": "curl -H 'x-api-key: ***",
        "a.api_keys": "***",
        "trainer.note": "***",
        "model.path": "Qwen/Qwen2-0.5B",
    }


@pytest.mark.usefixtures("time_limit")
def test_a_text_of_one_long_word_takes_time_in_proportion_to_its_length() -> None:
    word = "W" * 2_000_000  # hours, where every letter of it is tried as the start of a name
    assert without_secrets({"a": f"{word} 9api_key: abc"}) == {"a": f"{word} 9api_key: ***"}


def test_no_default_of_a_key_is_hidden() -> None:
    defaults = {name: key.default for name, key in leaf_keys().items() if key.default}
    shown = without_secrets(defaults)
    assert [name for name in defaults if shown[name] == "***"] == []


def test_the_run_event_has_the_record_and_the_notices_follow_it(tmp_path: Path) -> None:
    notices = ["data.seed has no effect"]
    with RunLog.open(
        tmp_path, loggers=["file"], project="p", experiment="e", config={}, total_steps=3, notices=notices
    ) as log:
        log.truncate_after(-1)
    run, notice, _ = RunFolder(tmp_path).events
    assert {name: run[name] for name in ("command", "versions", "commit")} == start_record()
    assert (run["total_steps"], run["step"]) == (3, 0)
    assert (notice["event"], notice["kind"], notice["message"]) == ("warning", "notice", notices[0])


def test_versions_are_of_what_is_installed() -> None:
    found = versions()
    assert {"python", "rloom", "torch", "transformers"} <= found.keys() and all(found.values())


def test_the_commit_is_the_one_that_git_names(tmp_path: Path) -> None:
    def git(*arguments: str, folder: Path = tmp_path) -> str:
        own = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "init.defaultBranch=main",
            "-c",
            "commit.gpgsign=false",
        ]
        done = subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert commit_of(tmp_path) is None or not (tmp_path / ".git").exists()
    git("init", "-q")
    assert commit_of(tmp_path) is None  # no commit yet
    git("commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "below").mkdir()
    assert commit_of(tmp_path / "below") == git("rev-parse", "HEAD")
    git("worktree", "add", "-q", str(tmp_path / "tree"), "-b", "other")
    git("commit", "-q", "--allow-empty", "-m", "second", folder=tmp_path / "tree")
    assert commit_of(tmp_path / "tree") == git("rev-parse", "HEAD", folder=tmp_path / "tree") != commit_of(tmp_path)
    git("pack-refs", "--all")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    git("checkout", "-q", "--detach")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/../../../etc/passwd")
    found = commit_of(tmp_path)
    assert found is None or COMMIT.fullmatch(found)
    assert json.dumps(found)
