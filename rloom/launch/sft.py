"""The parts of a run of supervised fine-tuning, from its configuration."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rloom.algos.objectives import SupervisedObjective
from rloom.config.batching import micro_batching, of_one_rank
from rloom.config.saved import CONFIG_FILE, config_text
from rloom.config.schema import EMBEDDED
from rloom.config.sft_schema import SftConfig
from rloom.data.examples import Example, RowFormat, load_examples
from rloom.data.stream import RowStream
from rloom.engines.base import AdamW, Engine
from rloom.engines.distributed import join
from rloom.errors import ConfigError
from rloom.families.family import family_of
from rloom.launch.build import schedule
from rloom.launch.engines import Ranks, make_engine, model_work
from rloom.launch.identity import IDENTITY_FILE, Record
from rloom.launch.model_sources import sft_source
from rloom.launch.models import causal_network, pick_device, placement
from rloom.launch.worker import FILES, GatheredFiles, ModelFiles, Rendezvous
from rloom.models.load import load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.source import EMBEDDED as EMBEDDED_FOLDER
from rloom.models.source import check_folder
from rloom.runs.metrics import ModelWork, device_peak_flops
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.placement import ACTOR, WorkerLayout, WorkerSlot
from rloom.training.memory import SFT_BUILD, explain_out_of_memory
from rloom.training.roles import Learner, MiniBatching
from rloom.training.sft import SftSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftInputs:
    """Read before the model is loaded."""

    tokenizer: PreTrainedTokenizerBase
    rows: list[Example]
    held_out: list[Example]


@dataclass(frozen=True)
class SftGroups:
    """The group of workers that holds each role."""

    model: Group
    files: Group
    all_workers: Group | None  # None: this process
    work: ModelWork | None  # of the model, where it is known
    device: torch.device  # of the loop itself
    devices: int  # of all workers
    peak_flops: float | None


@dataclass(frozen=True)
class SftComponents:
    config: SftConfig
    settings: SftSettings
    model: Learner
    stream: RowStream[Example]
    held_out: Sequence[Example]
    groups: SftGroups
    identity: Record

    def write_checkpoint(self, folder: Path) -> None:
        contents = frozenset(self.config.trainer.checkpoint.save_contents)
        self.model.save(folder, contents)
        (folder / CONFIG_FILE).write_text(config_text(self.config))
        (folder / IDENTITY_FILE).write_text(json.dumps(self.identity, indent=1))
        self.groups.files.call("describe", folder / "actor")
        if "hf_model" in contents:
            self.groups.files.call("write_pretrained", folder / "actor" / "huggingface")

    def load_checkpoint(self, folder: Path) -> None:
        self.model.load(folder, frozenset(self.config.trainer.checkpoint.load_contents))


def prepare_sft(config: SftConfig) -> SftInputs:
    """Check device and model family, and read the rows, before the model is loaded."""
    if not config.has_workers:
        pick_device(config)  # fails at once if there is no GPU
    source = sft_source(config)
    check_folder(source)
    family_of(source).layout(packed=config.model.use_remove_padding)
    tokenizer, data = load_tokenizer(source), config.data
    held_out = data.val_files
    if held_out == EMBEDDED or (held_out is None and data.train_files == EMBEDDED):
        held_out = str(EMBEDDED_FOLDER / "test.parquet")
    train = str(EMBEDDED_FOLDER / "train.parquet") if data.train_files == EMBEDDED else data.train_files
    return SftInputs(
        tokenizer,
        read_rows(config, tokenizer, train, data.train_max_samples, "data.train_files"),
        read_rows(config, tokenizer, held_out, data.val_max_samples, "data.val_files") if held_out else [],
    )


def read_rows(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, files: str | list[str], max_samples: int, field: str
) -> list[Example]:
    data = config.data
    return load_examples(
        files,
        RowFormat(
            tokenizer,
            messages_key=data.messages_key,
            tools_key=data.tools_key,
            is_chat=data.multiturn.enable,
            prompt_path=column_path(data.prompt_key, data.prompt_dict_keys, "prompt"),
            response_path=column_path(data.response_key, data.response_dict_keys, "response"),
            chat_template=config.model.custom_chat_template,
            variables=data.apply_chat_template_kwargs,
        ),
        max_length=data.max_length,
        truncation=data.truncation,
        max_samples=max_samples,
        field=field,
    )


def column_path(column: str | None, below: list[str] | None, what: str) -> tuple[str, ...] | None:
    if column is None and below:
        raise ConfigError(f"data.{what}_dict_keys={below} needs the column that has them: set data.{what}_key")
    return None if column is None else (column, *(below or ()))


@contextmanager
def open_sft(
    config: SftConfig, layout: WorkerLayout, inputs: SftInputs, identity: Record, logs: Path
) -> Iterator[SftComponents]:
    data, trainer = config.data, config.trainer
    stream = RowStream(inputs.rows, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed)
    total = trainer.total_training_steps or trainer.total_epochs * stream.steps_per_epoch
    with open_groups(config, layout, logs) as groups:
        settings = SftSettings(
            total_steps=total,
            save_every=trainer.save_freq if trainer.save_freq > 0 else None,
            validate_every=trainer.test_freq if trainer.test_freq > 0 else None,
            validate_first=trainer.val_before_train,
            rows_per_validation_pass=data.train_batch_size,
            device=groups.device,
            devices=groups.devices,
            peak_flops=groups.peak_flops,
        )
        model = Learner(
            "actor",  # the folder that `rloom export` reads
            groups.model,
            objective=SupervisedObjective(),
            mini_batching=MiniBatching(data.train_batch_size, 1, False, data.seed, horizon=data.max_length),
            schedule=schedule(config.optim, total),
            balance=trainer.balance_batch,
            max_nonfinite=trainer.max_nonfinite_updates,
            prefix="train",
            remedy="Lower optim.lr or optim.clip_grad",
            work=groups.work,
        )
        yield SftComponents(config, settings, model, stream, inputs.held_out, groups, identity)


@contextmanager
def open_groups(config: SftConfig, layout: WorkerLayout, logs: Path) -> Iterator[SftGroups]:
    if config.has_workers:
        from rloom.launch.sft_ray import worker_groups

        with worker_groups(config, layout, logs) as groups:
            yield groups
        return
    if config.workers > 1:
        from rloom.launch.sft_torchrun import torchrun_groups

        with torchrun_groups(config, layout) as groups:
            yield groups
        return
    [slot] = layout.slots()
    worker = SftWorker(config, layout, slot)
    with explain_out_of_memory(SFT_BUILD):
        work = worker.build(Rendezvous()).get(ACTOR)
    yield SftGroups(
        model=LocalGroup([worker.roles[ACTOR]]),
        files=LocalGroup([worker.roles[FILES]]),
        all_workers=None,
        work=work,
        device=worker.device,
        devices=layout.devices,
        peak_flops=device_peak_flops(worker.device),
    )


class SftWorker:
    """One worker: the model's training engine, and the writer of its files."""

    def __init__(self, config: SftConfig, layout: WorkerLayout, slot: WorkerSlot) -> None:
        self.config, self.layout, self.slot = config, layout, slot
        self.device = pick_device(config)
        self.roles: dict[str, object] = {}

    def build(self, rendezvous: Rendezvous) -> dict[str, ModelWork]:
        """Load the model, all ranks together. Returns its work by role, where it is known."""
        config, pool, rank = self.config, self.slot.pool, self.slot.rank
        # seed before LoRA weights are created, so that every world size starts from the same adapter
        torch.manual_seed(config.data.seed)
        tokenizer = load_tokenizer(sft_source(config))
        if pool.size > 1 and pool.name in rendezvous:  # torchrun's ranks have joined already
            shared = self.layout.gpus_per_worker < 1
            join(rank, pool.size, address=rendezvous[pool.name], device=self.device, shared=shared)
        network = sft_network(config, empty=rank > 0)  # rank 0 reads the model and broadcasts its weights
        work = model_work(network)  # before the engine divides it
        engine = sft_engine(config, network, ranks=pool.size)
        self.roles = {
            ACTOR: engine,
            FILES: ModelFiles(network, tokenizer)
            if self.slot.alone
            else GatheredFiles(network, tokenizer, engine, writes=rank == 0),
        }
        if rank == 0:
            log.info(f"model: {engine.size:,} parameters, {engine.description}")
        return {} if work is None else {ACTOR: work}


def sft_network(config: SftConfig, *, empty: bool = False) -> PolicyNetwork:
    model = config.model
    return causal_network(
        model,
        sft_source(config),
        temperature=1.0,
        checkpointing=model.enable_gradient_checkpointing,
        empty=empty,
    )


def sft_engine(config: SftConfig, network: PolicyNetwork, *, trained: bool = True, ranks: int = 1) -> Engine:
    data, engine, optim = config.data, config.engine, config.optim
    shared = config.sequence_ranks
    samples = data.micro_batch_size_per_gpu or of_one_rank(data.micro_batch_size, ranks, shared)
    batching = micro_batching(samples, data.use_dynamic_bsz, data.max_token_len_per_gpu * shared)
    return make_engine(
        engine.strategy,
        network,
        placement(config, engine),
        Ranks(ranks, engine.fsdp_size, shared, "engine", sft_source(config)),
        scoring=batching,
        training=batching,
        optimizer=AdamW(optim.weight_decay, optim.betas, optim.clip_grad) if trained else None,
        compiled=engine.use_torch_compile,
    )
