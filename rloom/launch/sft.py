"""The parts of a run of supervised fine-tuning, from its configuration."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rloom.algos.objectives import SupervisedObjective
from rloom.config.batching import micro_batching, of_one_rank
from rloom.config.schema import EMBEDDED
from rloom.config.sft_schema import SftConfig
from rloom.data.examples import Example, RowFormat, load_examples
from rloom.data.stream import RowStream
from rloom.engines.base import AdamW, Engine
from rloom.errors import ConfigError
from rloom.families.family import family_of
from rloom.launch.build import RunParts, schedule
from rloom.launch.engines import Ranks, make_engine, model_work
from rloom.launch.identity import Record
from rloom.launch.model_sources import sft_source
from rloom.launch.models import causal_network, pick_device, placement
from rloom.launch.worker import FILES, BaseWorker, Rendezvous
from rloom.launch.workers import open_workers
from rloom.models.load import load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.source import EMBEDDED as EMBEDDED_FOLDER
from rloom.models.source import check_folder
from rloom.runs.metrics import ModelWork
from rloom.runtime.group import Group
from rloom.runtime.placement import ACTOR, WorkerLayout
from rloom.training.memory import SFT_BUILD
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
class SftParts(RunParts):
    """Everything of a run of supervised fine-tuning except its directory."""

    settings: SftSettings
    model: Learner
    stream: RowStream[Example]
    held_out: Sequence[Example]
    workers: Group | None  # all of them, iff they are other processes


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
) -> Iterator[SftParts]:
    data, trainer = config.data, config.trainer
    stream = RowStream(inputs.rows, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed)
    total = trainer.total_training_steps or trainer.total_epochs * stream.steps_per_epoch
    with open_workers(config, layout, logs, SftWorker, SFT_BUILD) as workers:
        settings = SftSettings(
            total_steps=total,
            save_every=trainer.save_freq if trainer.save_freq > 0 else None,
            validate_every=trainer.test_freq if trainer.test_freq > 0 else None,
            validate_first=trainer.val_before_train,
            rows_per_validation_pass=data.train_batch_size,
            device=workers.device,
            devices=workers.devices,
            peak_flops=workers.peak_flops,
        )
        numbers = layout.workers_of(ACTOR)
        model = Learner(
            "actor",  # the folder that `rloom export` reads
            workers.group(ACTOR, numbers, config.sequence_ranks),
            objective=SupervisedObjective(),
            mini_batching=MiniBatching(data.train_batch_size, 1, False, data.seed, horizon=data.max_length),
            schedule=schedule(config.optim, total),
            balance=trainer.balance_batch,
            max_nonfinite=trainer.max_nonfinite_updates,
            prefix="train",
            remedy="Lower optim.lr or optim.clip_grad",
            work=workers.work.get(ACTOR),
        )
        files = workers.group(FILES, numbers)
        yield SftParts(
            config,
            trainer.checkpoint,
            [model],
            files,
            identity,
            settings,
            model,
            stream,
            inputs.held_out,
            workers.all_workers,
        )


class SftWorker(BaseWorker[SftConfig]):
    """One worker: the model's training engine, and the writer of its files."""

    def build(self, rendezvous: Rendezvous) -> dict[str, ModelWork]:
        config, pool, rank = self.config, self.slot.pool, self.slot.rank
        # seed before LoRA weights are created, so that every world size starts from the same adapter
        torch.manual_seed(config.data.seed)
        tokenizer = load_tokenizer(sft_source(config))
        if pool.size > 1:
            self.join_pool(rendezvous, rank)
        network = sft_network(config, empty=rank > 0)  # rank 0 reads the model and broadcasts its weights
        work = model_work(network)  # before the engine divides it
        engine = self.roles[ACTOR] = sft_engine(config, network, ranks=pool.size)
        self.add_files(network, tokenizer)
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
