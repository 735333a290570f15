"""Rules over several keys of `rloom sft`. They run before torch is imported, and report all faults at once."""

from collections.abc import Iterator

from rloom.config.checks import division_faults, machine_faults, resume_faults, with_source
from rloom.config.divisors import nearest_divisors
from rloom.config.sft_schema import SftConfig
from rloom.errors import ConfigError


def check_sft(config: SftConfig) -> None:
    by_workers = with_source([*batch_faults(config), *worker_faults(config)], config)
    faults = [*by_workers, *resume_faults(config), *output_faults(config)]
    if faults:
        raise ConfigError("\n".join(faults))


def batch_faults(config: SftConfig) -> Iterator[str]:
    data, groups = config.data, config.workers // config.sequence_ranks
    per_gpu, whole = data.micro_batch_size_per_gpu, data.micro_batch_size
    least = -(-data.max_length // config.sequence_ranks)
    if data.train_batch_size < groups:
        yield (
            f"data.train_batch_size={data.train_batch_size}: {groups} workers each need a row; use {groups} or more, "
            "or fewer trainer.n_gpus_per_node"
        )
    if per_gpu is not None and whole is not None:
        yield (
            f"data.micro_batch_size_per_gpu={per_gpu} and data.micro_batch_size={whole} set the same size twice; keep "
            "data.micro_batch_size_per_gpu"
        )
    elif per_gpu is None and whole is None and data.use_dynamic_bsz is False:
        yield "data.use_dynamic_bsz=False needs a size: set data.micro_batch_size_per_gpu"
    elif (data.use_dynamic_bsz or (per_gpu is None and whole is None)) and data.max_token_len_per_gpu < least:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}: one row may have data.max_length="
            f"{data.max_length} tokens; use {least} or more"
        )
    elif whole is not None and not data.use_dynamic_bsz:
        yield from division_faults("data.micro_batch_size", whole, groups, data.train_batch_size)


def worker_faults(config: SftConfig) -> Iterator[str]:
    shared = config.engine.ulysses_sequence_parallel_size
    if config.workers % shared:
        yield (
            f"engine.ulysses_sequence_parallel_size={shared} does not divide the {config.workers} workers "
            f"(trainer.nnodes × trainer.n_gpus_per_node); use {nearest_divisors(config.workers, shared)}"
        )
    size = config.engine.fsdp_size
    if size != -1 and (size < 1 or config.workers % size):
        counted = "1 worker" if config.workers == 1 else f"{config.workers} workers"
        yield f"engine.fsdp_size={size} does not divide {counted}; use {nearest_divisors(config.workers, size)}, or -1"
    if not config.uses_torchrun:
        yield from machine_faults(config)


def output_faults(config: SftConfig) -> Iterator[str]:
    folder = config.trainer.default_hdfs_dir
    if folder is not None:
        yield (
            f"trainer.default_hdfs_dir={folder}: rloom copies nothing to HDFS; remove the key, and copy "
            "trainer.default_local_dir after the run"
        )
