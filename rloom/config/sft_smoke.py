"""Keys of `rloom sft` that the environment sets: torchrun's number of workers, and a smoke run (RLOOM_SMOKE=1)."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from rloom.config.keys import value_at
from rloom.config.schema import EMBEDDED
from rloom.config.sft_schema import TORCHRUN, SftConfig
from rloom.errors import ConfigError

log = logging.getLogger(__name__)
SMOKE = "RLOOM_SMOKE"
SMOKE_ROWS, SMOKE_STEPS, SMOKE_WORKERS = 8, 2, 2


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
    if os.environ.get(SMOKE, "0") != "1":
        return []
    trainer, rows = config.trainer, min(config.data.train_batch_size, SMOKE_ROWS)
    replaced: Mapping[str, Any] = {
        "model.path": EMBEDDED,
        "model.custom_chat_template": "null",
        "data.train_files": EMBEDDED,
        "data.val_files": EMBEDDED,
        "data.prompt_key": "prompt",
        "data.prompt_dict_keys": "null",
        "data.response_key": "reward_model",
        "data.response_dict_keys": "[ground_truth]",
        "data.multiturn.enable": "false",
        "data.train_batch_size": rows,
        "data.train_max_samples": SMOKE_STEPS * rows,
        "data.val_max_samples": rows,
        "data.max_length": min(config.data.max_length, 256),
        "data.micro_batch_size": "null",
        "data.micro_batch_size_per_gpu": min(config.data.micro_batch_size_per_gpu or rows, rows),
        "engine.fsdp_size": -1,
        "engine.ulysses_sequence_parallel_size": min(config.engine.ulysses_sequence_parallel_size, SMOKE_WORKERS),
        "trainer.total_training_steps": SMOKE_STEPS,
        "trainer.logger": "console",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": min(config.workers, SMOKE_WORKERS),
        "trainer.default_local_dir": f"'{trainer.default_local_dir}-smoke'",
    }
    if config.uses_torchrun:
        replaced = {
            key: value for key, value in replaced.items() if key not in ("trainer.nnodes", "trainer.n_gpus_per_node")
        }
    log.warning(f"{SMOKE}=1: a smoke run, with " + " ".join(f"{key}={value}" for key, value in replaced.items()))
    return [f"++{key}={value}" for key, value in replaced.items()]
