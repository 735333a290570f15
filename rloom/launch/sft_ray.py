"""The workers of supervised fine-tuning as other processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rloom.config.sft_schema import SftConfig
from rloom.launch.sft import SftGroups, SftWorker
from rloom.launch.worker import FILES
from rloom.launch.workers import build_models, open_machines, start_workers, total_peak_flops
from rloom.runtime import remote
from rloom.runtime.placement import ACTOR, WorkerLayout
from rloom.training.memory import SFT_BUILD


@contextmanager
def worker_groups(config: SftConfig, layout: WorkerLayout, logs: Path) -> Iterator[SftGroups]:
    with open_machines(config, layout) as machines_of_run:
        workers = start_workers(config, layout, machines_of_run, logs, SftWorker)
        all_workers, machines, work = build_models(config, layout, workers, SFT_BUILD)
        yield SftGroups(
            model=remote.RemoteGroup(workers, ACTOR, workers_per_share=config.sequence_ranks),
            files=remote.RemoteGroup(workers, FILES),
            all_workers=all_workers,
            work=work.get(ACTOR),
            device=torch.device("cpu"),
            devices=layout.devices,
            peak_flops=total_peak_flops(machines, layout),
        )
