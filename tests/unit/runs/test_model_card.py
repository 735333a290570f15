"""The README.md of an exported model, and the push to a hub."""

from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, constants

from rloom import cli, hub
from rloom.errors import ModelError
from rloom.runs.model_card import CardFacts, model_card
from tests.hub_server import hub_server
from tests.run_directories import write_run

CHANGED = {
    "actor_rollout_ref.model.path": "/home/grace/models/qwen",
    "actor_rollout_ref.actor.optim.lr": 1e-5,
    "data.train_files": ["/data/secret-project/train.parquet", "~/more.jsonl"],
    "data.val_files": "<python>",
    "trainer.default_local_dir": "/home/grace/runs/7",
    "trainer.total_training_steps": 40,
    "reward_model.api.base_url": "http://10.0.0.7/v1",
    "reward_model.api.api_key_env": "MY_KEY",
    "actor_rollout_ref.rollout.server.urls": ["http://10.0.0.8"],
    "ray_kwargs.ray_init": {"address": "10.0.0.1"},
}


def facts(**others: object) -> CardFacts:
    given = {
        "name": "my-model", "version": "0.1.0", "changed": CHANGED, "command": "train", "step": 40,
        "base": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "data": CHANGED["data.train_files"], "adapter": False,
    }  # fmt: skip
    return CardFacts(**{**given, **others})  # type: ignore[arg-type]


def test_the_card_has_base_data_algorithm_settings_validation_and_command(tmp_path: Path) -> None:
    steps = {0: {"val-core/gsm8k/acc/mean@1": 0.25}, 40: {"val-core/gsm8k/acc/mean@1": 0.5}}
    later = {50: {"val-core/gsm8k/acc/mean@1": 0.75}}  # after the checkpoint
    text = model_card(facts(), write_run(tmp_path, {}, {**steps, **later}, end="finished"))
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rloom", "grpo", "reinforcement-learning"],
    }
    assert (
        "`Qwen/Qwen2.5-0.5B`, trained for 40 steps with grpo on `train.parquet`, `more.jsonl`, by rloom 0.1.0." in body
    )
    assert "| gsm8k | accuracy | 25.0 % (step 0) | 50.0 % (step 40) |" in body
    assert "| `actor_rollout_ref.actor.optim.lr` | `1e-05` |" in body
    command = next(line for line in body.splitlines() if line.startswith("rloom train"))
    assert command == (
        "rloom train actor_rollout_ref.model.path=qwen actor_rollout_ref.actor.optim.lr=1e-05 "
        "'data.train_files=[train.parquet,more.jsonl]' trainer.total_training_steps=40"
    )


def test_no_value_inside_of_another_has_a_folder_of_this_machine(tmp_path: Path) -> None:
    changed = {
        "data.apply_chat_template_kwargs": {"file": "/home/grace/a.jinja", "deep": [{"b": "/home/grace/b"}], "n": 1},
        "actor_rollout_ref.rollout.stages": [{"path": "/home/grace/c", "api_token": "abc"}],
    }
    text = model_card(facts(changed=changed), tmp_path)
    assert "| `data.apply_chat_template_kwargs` | `{file:a.jinja,deep:[{b:b}],n:1}` |" in text
    assert "| `actor_rollout_ref.rollout.stages` | `[{path:c}]` |" in text and "grace" not in text


def test_a_folder_of_this_machine_is_no_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "base_model: models/mine\n" in model_card(facts(base="models/mine"), tmp_path)
    Path("models/mine").mkdir(parents=True)
    assert "base_model" not in model_card(facts(base="models/mine"), tmp_path)


def test_the_card_has_no_path_no_address_and_no_name_of_a_key_of_this_machine(tmp_path: Path) -> None:
    text = model_card(facts(base="/home/grace/models/qwen", adapter=True), tmp_path)
    for private in (
        "/home",
        "grace",
        "secret-project",
        "10.0.0",
        "MY_KEY",
        "~",
        "<python>",
        "base_model",
        "Validation",
    ):
        assert private not in text
    assert "library_name: peft" in text and "This is a LoRA adapter." in text


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_folder_is_sent_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with hub_server({}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint=server.url))
        assert hub.push_folder(tmp_path, "me/sums", private=True) == f"{server.url}/me/sums"
    [created] = server.created
    assert created["name"] == "sums" and "private" in (created.get("visibility"), *(name for name in created))
    assert server.uploaded == {"config.json": b"{}", "model.safetensors": b"\0" * 100}
    assert "Bearer hf_of_this_test" in server.tokens


def test_a_refusal_of_the_hub_names_the_folder_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: None
) -> None:
    with hub_server({}, status=403) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint=server.url))
        with pytest.raises(ModelError, match=rf"status 403 .*The model is in {tmp_path}; `hf upload me/sums"):
            hub.push_folder(tmp_path, "me/sums", private=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--private"], "--private: no effect without --push_to_hub NAME"),
        (["--push_to_hub", "me/sums"], "set HF_TOKEN to a token that may write"),
    ],
)
def test_a_push_that_cannot_work_is_refused_before_the_export(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out"), *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
