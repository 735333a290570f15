"""A machine that joins the run of machine 0. Ray starts its workers as processes: here no model code is imported."""

import torch

from rloom.config.base import RunConfig
from rloom.launch.directory import directory_of
from rloom.runtime.joining import join_run


def join(config: RunConfig) -> int:
    trainer = config.trainer
    join_run(
        trainer.head,
        trainer.node_rank,
        directory=lambda: directory_of(config),
        cpus=config.gpus_per_node,
        gpus=torch.cuda.device_count(),
        timeout_s=trainer.start_timeout_s,
        report=print,
    )
    return 0
