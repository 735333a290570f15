"""Keys of `rloom sft` that the environment sets: torchrun's number of workers, and a smoke run (RLOOM_SMOKE=1)."""

import os
from typing import Any

from rloom.config.frontends.smoke import STEPS, examine, is_on, replaced_text, smoke_workers, worker_notes
from rloom.config.frontends.smoke_sizes import MAX_WORKERS
from rloom.config.grammar import override_value
from rloom.config.keys import value_at
from rloom.config.schema import EMBEDDED
from rloom.config.sft_schema import TORCHRUN, SftConfig
from rloom.errors import ConfigError

ROWS = 8  # of a step


def torchrun_settings(config: SftConfig) -> list[str]:
    """Under torchrun, machines and workers are those that it started."""
    if not config.uses_torchrun:
        return []
    local = int(os.environ[TORCHRUN])
    started = {"trainer.n_gpus_per_node": local, "trainer.nnodes": int(os.environ["WORLD_SIZE"]) // local}
    for key, number in started.items():
        if config.is_given(key) and value_at(config, key) != number:
            raise ConfigError(
                f"{key}={value_at(config, key)}: torchrun has started {number}; remove the key, or start `rloom sft` "
                "without torchrun"
            )
    return [f"++{key}={number}" for key, number in started.items()]


def smoke_settings(config: SftConfig) -> list[str]:
    """With RLOOM_SMOKE=1: the embedded model on a few embedded rows, two steps, at most two workers."""
    if not is_on(os.environ):
        return []
    available = examine(os.environ)
    workers = min(config.workers, MAX_WORKERS) if config.uses_torchrun else smoke_workers(config, available)
    changes = {key: value for key, value in replacements(config, workers).items() if value_at(config, key) != value}
    print(replaced_text(config, changes, worker_notes(config, available, workers)), flush=True)
    return [f"++{key}={override_value(value)}" for key, value in changes.items()]


def replacements(config: SftConfig, workers: int) -> dict[str, Any]:
    trainer, rows = config.trainer, min(config.data.train_batch_size, ROWS)
    sizes = {} if config.uses_torchrun else {"nnodes": 1}
    if not config.uses_torchrun and workers != (trainer.n_gpus_per_node or 1):  # null: the embedded model takes one GPU
        sizes["n_gpus_per_node"] = workers
    return {
        "model.path": EMBEDDED,
        "model.custom_chat_template": None,
        "data.train_files": EMBEDDED,
        "data.val_files": EMBEDDED,
        "data.prompt_key": "prompt",
        "data.prompt_dict_keys": None,
        "data.response_key": "extra_info",
        "data.response_dict_keys": ["answer"],
        "data.multiturn.enable": False,
        "data.train_batch_size": rows,
        "data.train_max_samples": STEPS * rows,
        "data.val_max_samples": rows,
        "data.max_length": min(config.data.max_length, 256),
        "data.micro_batch_size": None,
        "data.micro_batch_size_per_gpu": min(config.data.micro_batch_size_per_gpu or rows, rows),
        "engine.fsdp_size": -1,
        "engine.ulysses_sequence_parallel_size": min(config.engine.ulysses_sequence_parallel_size, workers),
        "trainer.total_training_steps": STEPS,
        "trainer.logger": ["console"],
        **{f"trainer.{key}": value for key, value in sizes.items()},
        "trainer.default_local_dir": f"{trainer.default_local_dir}/smoke",
        "trainer.resume_mode": "disable",
    }
