"""The configuration tree of supervised fine-tuning, `rloom sft`. Imports no torch.

Its keys are those of verl's SFT trainers; the sections that RL training also has are the same classes.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rloom.config.run_config import RunConfig
from rloom.config.schema import BETA, EMBEDDED, Checkpoint, Model, Optim, Sharding
from rloom.config.section import Section, key, section
from rloom.config.trainer_section import RayKwargs, RunTrainer

TORCHRUN = "LOCAL_WORLD_SIZE"  # torchrun sets it: ranks on this machine


class MultiTurn(Section):
    enable: bool | None = key(
        None, "True: rows are chats in `data.messages_key`. False: prompt and response. null: chats if a row has them."
    )


class SftData(Section):
    train_files: str | list[str] = key(
        EMBEDDED, "Training rows: one file or a list; parquet, json, jsonl. `embedded`: the arithmetic data of rloom."
    )
    val_files: str | list[str] | None = key(
        None,
        "Validation rows, in the same formats. null: none, or the embedded ones if trained on embedded data.",
        same_run=True,
    )
    train_batch_size: int = key(256, "Rows per step, over all workers: one optimizer step.", ge=1)
    micro_batch_size_per_gpu: int | None = key(
        None, "Rows per forward-backward pass. null: by token budget.", ge=1, same_run=True
    )
    micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    use_dynamic_bsz: bool | None = key(
        None,
        "Fill micro-batches up to `max_token_len_per_gpu` tokens. null: if no micro-batch size is given.",
        same_run=True,
    )
    max_token_len_per_gpu: int = key(8192, "Token budget of a micro-batch.", ge=1, same_run=True)
    prompt_key: str | None = key(
        None, "Column with the prompt: text or chat messages. null: `prompt`, `question` or `extra_info.question`."
    )
    response_key: str | None = key(
        None, "Column with the answer. null: `response`, `answer` or `extra_info.answer`, the first that a row has."
    )
    prompt_dict_keys: list[str] | None = key(None, "Keys below `prompt_key`, such as [question] for extra_info.")
    response_dict_keys: list[str] | None = key(None, "Keys below `response_key`, such as [answer] for extra_info.")
    messages_key: str = key("messages", "Column with a whole chat, whose assistant turns are the answers.")
    tools_key: str = key("tools", "Column with the tools of a chat, which the chat template renders.")
    multiturn: MultiTurn = section(MultiTurn, "Rows that are chats.")
    max_length: int = key(1024, "Maximum tokens of a row: prompt and answer together.", ge=2)
    truncation: Literal["error", "left", "right"] = key(
        "error", "For rows over the maximum: stop with an error, or remove tokens on that side."
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Further variables of the chat template.")
    train_max_samples: int = key(-1, "Use only the first N training rows. -1: all.", ge=-1)
    val_max_samples: int = key(-1, "Use only the first N validation rows. -1: all.", ge=-1, same_run=True)
    shuffle: bool = key(True, "Shuffle the rows in each epoch; the order depends only on `seed` and the epoch.")
    seed: int = key(1, "Seed of the order of the rows and of a new LoRA adapter.", ge=0)


class SftOptim(Optim):
    lr: float = key(1e-5, "Learning rate.", ge=0)
    betas: tuple[BETA, BETA] = key((0.9, 0.95), "Betas of AdamW.")
    lr_warmup_steps_ratio: float = key(
        0.1, "Warm-up as a share of all steps, if no number of steps is given.", ge=0, le=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = key(
        "cosine", "Learning rate schedule after the warm-up."
    )
    clip_grad: float = key(1.0, "Maximum norm of the gradient.", gt=0)


class SftEngine(Sharding):
    strategy: Literal["fsdp", "fsdp2"] = key(
        "fsdp2", "Training engine. One process runs the same code unsharded.", same_run=True
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "Ranks that share each sequence, for longer sequences; divides the workers and the model's attention heads. "
        "Token budgets count the tokens of one rank.",
        ge=1,
        same_run=True,
    )
    use_torch_compile: bool = key(
        True, "Compile the model's layers on a GPU: seconds once, then faster.", same_run=True
    )


class SftTrainer(RunTrainer):
    project_name: str = key("rloom_sft", "Project, for trackers and the default directory.")
    experiment_name: str = key(
        "${experiment_name:model.path,sft,data.train_files}",
        "Experiment, for trackers and the default directory. The default is the model, `sft` and the data: "
        "qwen2.5-0.5b_sft_gsm8k.",
    )
    total_epochs: int = key(4, "Passes over the training data.", ge=1)
    max_ckpt_to_keep: int | None = key(None, "Number of checkpoints to keep. null: all.", ge=1)
    checkpoint: Checkpoint = section(Checkpoint, "Contents of checkpoints.")
    default_hdfs_dir: str | None = key(None, "Only null: rloom copies nothing to HDFS.")


class SftConfig(RunConfig):
    other_names: ClassVar[Mapping[str, str]] = {
        "model.partial_pretrain": "model.path",
        "model.strategy": "engine.strategy",
        "model.fsdp_config.cpu_offload": "engine.param_offload",
        "model.fsdp_config.offload_params": "engine.param_offload",
        "optim.lr_scheduler": "optim.lr_scheduler_type",
        "data.multiturn.messages_key": "data.messages_key",
        "data.multiturn.tools_key": "data.tools_key",
        "data.chat_template": "model.custom_chat_template",
        "data.balance_dp_token": "trainer.balance_batch",
        "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
        "use_remove_padding": "model.use_remove_padding",
        "checkpoint": "trainer.checkpoint",
        "trainer.seed": "data.seed",
    }
    listing: ClassVar[str] = "rloom config --sft"

    data: SftData = section(SftData, "Rows: prompts with their answers.")
    model: Model = section(Model, "The model.")
    optim: SftOptim = section(SftOptim, "The optimizer and its learning rate schedule.")
    engine: SftEngine = section(SftEngine, "Sharding, offload and data type.")
    trainer: SftTrainer = section(SftTrainer, "The run: length, checkpoints, logs, machines.", same_run=True)
    ray_kwargs: RayKwargs = section(
        RayKwargs, "Ray, which runs on several machines use, or in an existing cluster.", same_run=True
    )

    @property
    def model_path(self) -> str:
        return self.model.path

    @property
    def uses_torchrun(self) -> bool:
        """torchrun has started the workers."""
        return TORCHRUN in os.environ

    @property
    def uses_ray(self) -> bool:
        return super().uses_ray and not self.uses_torchrun

    @property
    def uses_processes(self) -> bool:
        return super().uses_processes and not self.uses_torchrun

    @property
    def sequence_ranks(self) -> int:
        """Ranks that divide a sequence."""
        return 1 if self.workers == 1 else self.engine.ulysses_sequence_parallel_size
