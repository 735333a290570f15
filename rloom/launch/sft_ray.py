"""The workers of supervised fine-tuning as Ray actors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rloom.config.schema import SftConfig
from rloom.launch.ray_workers import build_models, start_workers, total_peak_flops
from rloom.launch.sft import SftGroups, SftWorker
from rloom.launch.worker import FILES
from rloom.runtime.placement import ACTOR, WorkerLayout
from rloom.runtime.ray import RayGroup
from rloom.training.memory import SFT_BUILD


@contextmanager
def ray_groups(config: SftConfig, layout: WorkerLayout, logs: Path) -> Iterator[SftGroups]:
    with start_workers(config, layout, logs, SftWorker) as (workers, _):
        all_workers, machines, work = build_models(config, layout, workers, SFT_BUILD)
        yield SftGroups(
            model=RayGroup(workers, ACTOR, workers_per_share=config.sequence_ranks),
            files=RayGroup(workers, FILES),
            all_workers=all_workers,
            work=work.get(ACTOR),
            device=torch.device("cpu"),
            devices=layout.devices,
            peak_flops=total_peak_flops(machines, layout),
        )
