"""Supervised fine-tuning from the command to the files: small real runs on the embedded model."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloom import cli
from rloom.config.from_checkpoint import MODEL_ALONE, load_saved
from rloom.config.load import load_config, load_sft_config
from rloom.data.chat import render_chat
from rloom.data.prepare import arithmetic
from rloom.engines.local import LocalEngine
from rloom.errors import CheckpointError, ConfigError
from rloom.launch.build import evaluate_checkpoint
from rloom.launch.export import export
from rloom.launch.model_sources import policy_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.source import EMBEDDED_FOLDER
from rloom.trainer import main_ppo, sft_trainer
from tests.e2e.runs import records, same, weights
from tests.helpers import apart
from tests.ranks import forkserver

SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=32",
    "data.val_max_samples=8",
    "optim.lr_warmup_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.max_ckpt_to_keep=null",
    "trainer.device=cpu",
)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning curve takes as long as a step."""
    monkeypatch.setattr("rloom.launch.sft.draw_learning_curve", lambda metrics_file, picture: picture)


def command(directory: Path, steps: int, *overrides: str) -> int:
    where = [f"trainer.default_local_dir={directory}", f"trainer.total_training_steps={steps}"]
    return sft_trainer.main([*SMALL, *where, *overrides])


def train(directory: Path, steps: int, *overrides: str) -> Path:
    assert command(directory, steps, *overrides) == 0
    return directory


WITH_VALIDATION = ("optim.lr_scheduler=constant", "trainer.val_before_train=True")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rloom.launch.sft.draw_learning_curve", lambda metrics_file, picture: picture)
        return train(tmp_path_factory.mktemp("sft") / "whole", 4, *WITH_VALIDATION)


def losses(directory: Path) -> list[float]:
    return [record["train/loss"] for record in records(directory) if "train/loss" in record]


def test_the_loss_falls_and_the_answers_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": "7"}]} for n in "12"
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    file = tmp_path / "rows.json"
    keys = (f"data.train_files={file}", f"data.val_files={file}", "data.train_batch_size=2", "trainer.save_freq=-1")
    train(tmp_path / "run", 20, *keys, "optim.lr=5e-3", "trainer.val_before_train=True", "trainer.test_freq=20")
    found = losses(tmp_path / "run")
    assert found[0] > 5 and found[-1] < 0.05
    start, end = (record for record in records(tmp_path / "run") if "val/loss" in record)
    assert start["val/loss"] == pytest.approx(found[0], rel=1e-5)  # the same two rows, before the first update
    assert end["val/perplexity"] == pytest.approx(torch.tensor(end["val/loss"]).exp().item(), rel=1e-5)
    printed = capsys.readouterr().out
    assert (
        "step 20/20 · epoch 20/20 · loss" in printed
        and f"Validation loss: {start['val/loss']:.3f} at the start" in printed
    )
    # the exported folder answers with what it learnt, and RL training starts from it
    folder = export(tmp_path / "run" / "global_step_20", tmp_path / "exported")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "7<|im_end|>"
    rl = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"]
    rl += [
        "algorithm.adv_estimator=rloo",
        "data.train_files=embedded",
        "data.train_max_samples=4",
        "trainer.device=cpu",
    ]
    rl += ["data.max_prompt_length=64", "data.max_response_length=8", "reward_model.num_workers=1"]
    rl += ["trainer.val_before_train=False", "trainer.test_freq=-1"]
    rl += [f"trainer.default_local_dir={tmp_path / 'rl'}", "trainer.total_training_steps=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
        main_ppo.train(load_config([*rl, f"actor_rollout_ref.model.path={folder}"]))
    assert (tmp_path / "rl" / "global_step_1").is_dir()


def test_ctrl_c_saves_and_the_same_command_computes_what_it_would_have_without_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps and two more equal four bit for bit."""
    keys = ("optim.lr_scheduler=constant", "trainer.save_freq=-1")
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "optim_step", interrupting(LocalEngine.optim_step, at=2))
        assert command(tmp_path / "parts", 4, *keys) == 130
    assert [path.name for path in (tmp_path / "parts").glob("global_step_*")] == ["global_step_2"]
    parts = train(tmp_path / "parts", 4, *keys)
    assert same(weights(whole, 4), weights(parts, 4)) and not same(weights(whole, 2), weights(whole, 4))
    assert losses(parts) == losses(whole) and len(losses(whole)) == 4


def test_one_step_and_one_more_of_lora_equal_two_bit_for_bit(tmp_path: Path) -> None:
    keys = ("model.lora_rank=2", "model.enable_gradient_checkpointing=True", "optim.lr_scheduler=constant")
    both, parts = train(tmp_path / "both", 2, *keys), train(tmp_path / "parts", 1, *keys)
    train(parts, 2, *keys)
    one, two, continued = (
        weights(run, step, file="lora.safetensors") for run, step in ((both, 1), (both, 2), (parts, 2))
    )
    assert same(two, continued) and not same(one, two)
    assert losses(parts) == losses(both) and len(losses(both)) == 2
    merged, adapter = (
        export(both / "global_step_2", tmp_path / name, adapter=name == "adapter") for name in ("merged", "adapter")
    )
    assert (merged / "model.safetensors").is_file() and (adapter / "adapter_config.json").is_file()


@pytest.mark.slow
def test_two_workers_compute_what_one_computes(whole: Path, tmp_path: Path) -> None:
    two = train(tmp_path / "two", 2, *WITH_VALIDATION, "trainer.n_gpus_per_node=2")
    assert losses(two) == pytest.approx(losses(whole)[:2], rel=1e-5)
    assert records(two)[0]["val/loss"] == pytest.approx(records(whole)[0]["val/loss"], rel=1e-6)
    found = load_file(export(two / "global_step_2", tmp_path / "hf") / "model.safetensors")
    assert apart(found, weights(whole, 2), weights(whole, 1)) < 0.01


@pytest.mark.slow
def test_torchruns_ranks_compute_what_one_process_computes(whole: Path, tmp_path: Path) -> None:
    """torchrun's agent in this process; its ranks are forked, since Python and torch take longer to start."""
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL)
    launched = LaunchConfig(
        1,
        1,
        2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method=forkserver().get_start_method(),
        logs_specs=logs,
    )
    status = elastic_launch(launched, command)(tmp_path / "two", 2, "optim.lr_scheduler=constant")
    assert status == {0: 0, 1: 0}
    printed = "".join(file.read_text() for file in (tmp_path / "logs").rglob("stdout.log"))
    assert printed.count("step 2/2") == 1, "rank 0 alone writes the log"
    assert losses(tmp_path / "two") == pytest.approx(losses(whole)[:2], rel=1e-5)


def interrupting(method: Any, at: int) -> Any:
    calls: list[int] = []

    def called(self: LocalEngine, learning_rate: float) -> Any:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return method(self, learning_rate)

    return called


def test_updates_that_are_not_finite_are_skipped_counted_and_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = PolicyNetwork.loss
    monkeypatch.setattr(PolicyNetwork, "loss", lambda self, *a, **k: loss(self, *a, **k) * float("nan"))
    assert command(tmp_path / "run", 4) == 2
    captured = capsys.readouterr()
    assert "3 actor updates in a row had a gradient that is not finite" in (text := captured.err)
    assert "Lower optim.lr or optim.clip_grad" in text
    skipped = "1 update of the model skipped, because the gradient was not finite."
    assert [f"Step {step}: {skipped}" in captured.out for step in (1, 2, 3)] == [True, True, False]  # 3 is the error
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    warnings = [event for event in map(json.loads, lines) if event["event"] == "warning"]
    assert [(event["step"], event["kind"], event["value"]) for event in warnings] == [
        (1, "nonfinite_updates", 1.0),
        (2, "nonfinite_updates", 1.0),
    ]
    assert [record["train/nonfinite_updates"] for record in records(tmp_path / "run")] == [1, 1]


def test_another_model_or_other_data_is_another_run(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (whole, 5, *WITH_VALIDATION)
    assert command(*keys, "data.train_max_samples=16") == 2
    assert (
        "is of another run, which this one does not continue: the training data is another" in capsys.readouterr().err
    )
    assert command(*keys, "model.lora_rank=2") == 2
    assert "LoRA was off" in capsys.readouterr().err


def test_rl_training_does_not_continue_a_checkpoint_of_sft(whole: Path) -> None:
    keys = ["trainer.device=cpu", f"trainer.default_local_dir={whole}", "algorithm.adv_estimator=rloo"]
    with pytest.raises(CheckpointError, match=r"is a checkpoint of `rloom sft`.*rloom export"):
        main_ppo.train(load_config(keys))
    with pytest.raises(CheckpointError, match=r"is a checkpoint of `rloom sft`, which has no reward.*rloom export"):
        evaluate_checkpoint(whole / "global_step_4")


def test_a_checkpoint_answers_in_a_chat_as_its_export_does(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, question = whole / "global_step_4", "12 + 20 等于多少？"
    exported = export(checkpoint, tmp_path / "exported")
    said = []
    for model in (checkpoint, whole, exported):
        assert cli.main(["chat", str(model), "--prompt", question, "--max_tokens", "24", "trainer.device=cpu"]) == 0
        said.append(capsys.readouterr().out)
    assert said == [said[0]] * 3 and said[0].strip()


def test_files_have_the_template_of_the_run_and_its_checkpoints_the_variables(tmp_path: Path) -> None:
    template = "{{ mark }}{% for m in messages %}{{ m.content }}{% endfor %}"
    variables = "data.apply_chat_template_kwargs.mark=7"
    checkpoint = train(tmp_path / "run", 1, f"model.custom_chat_template='{template}'", variables) / "global_step_1"
    for folder in (checkpoint / "actor", export(checkpoint, tmp_path / "exported")):
        assert AutoTokenizer.from_pretrained(folder).chat_template == template
    tokenizer = policy_tokenizer(load_saved(checkpoint))
    assert render_chat([{"role": "user", "content": "a"}], tokenizer) == "7a"


def test_the_policy_of_a_checkpoint_of_sft_does_not_run_its_code_unless_allowed(whole: Path, tmp_path: Path) -> None:
    saved, allowed = (whole / "global_step_4/config.yaml").read_text(), "actor_rollout_ref.model.trust_remote_code=true"
    (tmp_path / "config.yaml").write_text(saved.replace("trust_remote_code: false", "trust_remote_code: true"))
    with pytest.raises(ConfigError, match=f"is not trusted to do that.*add to the command: {allowed}$"):
        load_saved(tmp_path, uses=MODEL_ALONE)
    config = load_saved(tmp_path, [allowed], uses=MODEL_ALONE)
    assert config.actor_rollout_ref.model.trust_remote_code
    assert config.data.max_prompt_length + config.data.max_response_length == load_sft_config().data.max_length


def test_a_smoke_run_replaces_model_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.chdir(tmp_path)
    keys = ["model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct", "data.train_files=$HOME/data/gsm8k/train.parquet"]
    keys += ["data.prompt_key=extra_info", "data.prompt_dict_keys=['question']", "trainer.default_local_dir=mine"]
    assert sft_trainer.main([*keys, "data.response_key=extra_info", "+data.response_dict_keys=['answer']"]) == 0
    printed = capsys.readouterr()
    assert (
        "step 2/2" in printed.out
        and "RLOOM_SMOKE=1: two steps with a tiny model and data\n  model.path: " in printed.out
    )
    assert (tmp_path / "mine" / "smoke" / "global_step_2").is_dir()


def test_torchrun_decides_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = load_sft_config(["model.path=a/model"])
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, config.uses_ray) == (4, 2, False)
    with pytest.raises(ConfigError, match=r"trainer.n_gpus_per_node=8: torchrun has started 4; remove the key"):
        load_sft_config(["model.path=a/model", "trainer.n_gpus_per_node=8"])


def test_without_keys_the_answers_are_those_of_the_embedded_model_and_its_errors_are_learned_away(
    tmp_path: Path,
) -> None:
    """The model copies a student who works without an error with probability 0.30 * 0.95 * 0.96 where a carry is
    needed and 0.75 * 0.95 * 0.96 elsewhere (recipes/embedded): that is the loss of the right answers at the start."""
    rows = 64
    sizes = (f"data.val_max_samples={rows}", "data.train_batch_size=32", "data.train_max_samples=-1")
    often = ("trainer.val_before_train=True", "trainer.test_freq=4", "trainer.save_freq=-1")
    run = train(tmp_path, 4, *sizes, *often, "optim.lr=2e-4", "optim.lr_warmup_steps=0")
    _, test = arithmetic.questions(train=8192, test=512, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER / "model")
    tokens = sum(len(tokenizer(question.answer).input_ids) + 1 for question in test[:rows])  # and the end of the turn
    chances = [(0.30 if question.problem.hard else 0.75) * 0.95 * 0.96 for question in test[:rows]]
    expected = -sum(math.log(chance) for chance in chances) / tokens
    first, last = (record["val/loss"] for record in records(run) if "val/loss" in record)
    assert first == pytest.approx(expected, rel=0.1)
    assert last < 0.85 * first
