"""The workers of supervised fine-tuning as the ranks of torchrun."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rloom.config.sft_schema import SftConfig
from rloom.engines.distributed import join, leave
from rloom.launch.sft import SftGroups, SftWorker
from rloom.launch.worker import FILES, Rendezvous
from rloom.launch.workers import layout_of
from rloom.runs.metrics import ModelWork, device_peak_flops
from rloom.runtime.placement import ACTOR, WorkerLayout
from rloom.runtime.torchrun import RankGroup, Ranks, master_address, this_rank
from rloom.training.memory import SFT_BUILD, explain_out_of_memory


@contextmanager
def torchrun_groups(config: SftConfig, layout: WorkerLayout) -> Iterator[SftGroups]:
    """On rank 0."""
    worker, work = build_rank(config, layout)
    ranks = Ranks(worker)
    peak = device_peak_flops(worker.device)
    yield SftGroups(
        model=RankGroup(ranks, ACTOR, workers_per_share=config.sequence_ranks),
        files=RankGroup(ranks, FILES),
        all_workers=None,
        work=work,
        device=worker.device,
        devices=layout.devices,
        peak_flops=None if peak is None else peak * layout.workers,
    )
    ranks.stop()  # not after an error: torchrun ends the other ranks when this one has failed
    leave()


def serve_rank(config: SftConfig) -> int:
    """On the other ranks, which end when rank 0 does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 finishes its step first, and needs them for it
        signal.signal(number, signal.SIG_IGN)
    worker, _ = build_rank(config, layout_of(config))
    Ranks(worker).serve()
    leave()
    return 0


def build_rank(config: SftConfig, layout: WorkerLayout) -> tuple[SftWorker, ModelWork | None]:
    rank = this_rank()
    worker = SftWorker(config, layout, layout.slots()[rank])
    join(rank, layout.workers, address=master_address(), device=worker.device)
    with explain_out_of_memory(SFT_BUILD):
        return worker, worker.build(Rendezvous()).get(ACTOR)
