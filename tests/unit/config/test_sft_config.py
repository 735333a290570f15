"""The keys of `rloom sft`: verl's spellings, errors with the nearest key, rules over several keys."""

from pathlib import Path

import pytest

from rloom.cli import main
from rloom.config.checks import check_sft
from rloom.config.load import load_sft_config
from rloom.errors import ConfigError

MODEL = "model.path=a/model"  # composed once; the embedded model is composed again for its preset
# arguments of verl's examples of SFT on GSM8K and on chats, with LoRA and with two ranks to a sequence
VERL = (
    "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet "
    "data.prompt_key=extra_info data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=['question'] "
    "+data.response_dict_keys=['answer'] data.micro_batch_size=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
    "model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear model.strategy=fsdp optim.clip_grad=0.5 "
    "data.multiturn.enable=false data.multiturn.messages_key=messages trainer.default_hdfs_dir=null trainer.seed=7 "
    'trainer.total_training_steps=1 trainer.logger=["console","wandb"] ulysses_sequence_parallel_size=2 '
    "use_remove_padding=true optim.lr_scheduler=cosine trainer.n_gpus_per_node=4"
)


def test_verls_spellings_are_keys() -> None:
    config = load_sft_config(VERL.split())
    check_sft(config)
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct" and config.model.lora_rank == 32
    assert (config.data.prompt_key, config.data.prompt_dict_keys) == ("extra_info", ["question"])
    assert (config.data.response_key, config.data.response_dict_keys) == ("extra_info", ["answer"])
    assert config.engine.ulysses_sequence_parallel_size == 2 and config.engine.strategy == "fsdp"
    assert config.optim.lr_scheduler_type == "cosine" and config.optim.clip_grad == 0.5
    assert config.data.seed == 7 and config.trainer.loggers == ["console", "wandb"]


def test_verls_spellings_are_keys_in_a_file_too(tmp_path: Path) -> None:
    text = "defaults: [sft_trainer, _self_]\nmodel: {partial_pretrain: a/model, fsdp_config: {cpu_offload: true}}\n"
    (tmp_path / "mine.yaml").write_text(text + "ulysses_sequence_parallel_size: 2\noptim.lr: 3e-5\n")
    config = load_sft_config(config_path=str(tmp_path), config_name="mine")
    assert config.model.path == "a/model" and config.engine.param_offload
    assert config.engine.ulysses_sequence_parallel_size == 2 and config.optim.lr == 3e-5
    assert config.is_given("model.path") and not config.is_given("data.seed")


@pytest.mark.parametrize(
    "key, fault",
    [
        ("data.trian_files=a", r"data.trian_files: there is no such key; did you mean data.train_files\?"),
        ("lora_rank=4", r"lora_rank: there is no such key; did you mean model.lora_rank\?"),
        ("actor_rollout_ref.model.path=a", r"did you mean model.path\? \(`rloom config --sft` lists them all\)"),
        ("data.truncation=middle", r"data.truncation='middle': .* it takes error\|left\|right"),
        ("data.custom_cls.path=a.py", r"write the rows to a parquet, json or jsonl file"),
    ],
)
def test_an_unknown_key_or_value_is_an_error_with_the_way_out(key: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_sft_config([MODEL, key])


@pytest.mark.parametrize(
    "keys, fault",
    [
        ("data.train_batch_size=2 trainer.n_gpus_per_node=4", "4 workers each need a row; use 4 or more"),
        ("data.micro_batch_size=3 trainer.n_gpus_per_node=2", "does not divide among 2 GPUs"),
        ("data.micro_batch_size=4 data.micro_batch_size_per_gpu=4", "set the same size twice"),
        ("data.use_dynamic_bsz=False", "needs a size"),
        ("data.max_token_len_per_gpu=512", "data.max_length=1024 tokens; use 1024 or more"),
        ("ulysses_sequence_parallel_size=2", "does not divide the 1 workers"),
        ("engine.fsdp_size=3 trainer.n_gpus_per_node=4", "does not divide 4 workers; use 2 or 4, or -1"),
        ("trainer.nnodes=2", "trainer.nnodes=2 needs trainer.master_addr"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("trainer.default_hdfs_dir=hdfs://a", "rloom copies nothing to HDFS"),
    ],
)
def test_rules_over_several_keys(keys: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        check_sft(load_sft_config([MODEL, *keys.split()]))


def test_help_and_the_tree_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--help"]) == 0
    assert capsys.readouterr().out.startswith("rloom sft [key=value ...]")
    assert main(["config", "--sft", "clip_grad"]) == 0
    assert capsys.readouterr().out == "optim.clip_grad (float, default 1.0): Maximum norm of the gradient.\n"
    assert main(["config", "--sft", "model.partial_pretrain"]) == 0
    assert capsys.readouterr().out.startswith("model.path (str, default embedded)")


def test_a_smoke_run_on_the_only_gpu_has_one_process_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.setattr("rloom.config.frontends.smoke.visible_gpus", lambda environment: ["0"])
    config = load_sft_config([MODEL, "trainer.n_gpus_per_node=8", "engine.ulysses_sequence_parallel_size=4"])
    assert (config.workers, config.engine.ulysses_sequence_parallel_size) == (1, 1)
    line = "  trainer.n_gpus_per_node: 8 -> 1 (one GPU is visible: one process holds the whole model)"
    assert line in capsys.readouterr().out.splitlines()
