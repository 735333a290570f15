"""Supervised fine-tuning: its rows, its worker, the parts of a run, its first line and its summary."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rloom.algos.objectives import SupervisedObjective
from rloom.config.schema import SftConfig
from rloom.data.chat import set_variables
from rloom.data.examples import Example, load_examples
from rloom.data.stream import RowStream
from rloom.engines.base import AdamW, Engine
from rloom.engines.kinds import STRATEGIES
from rloom.families.family import family_of
from rloom.launch.build import RunParts, schedule, step_settings
from rloom.launch.directory import CONTENT
from rloom.launch.engines import Ranks, make_engine, model_work
from rloom.launch.identity import (
    SHAPES,
    VERSION,
    Continuation,
    Difference,
    Record,
    continuation,
    data_differences,
    lora_record,
    model_differences,
    read_record,
)
from rloom.launch.inputs import SftRows
from rloom.launch.job import (
    Outcome,
    continue_from,
    live_diagnosis,
    run_with_restarts,
    timetable,
    train_to_end,
)
from rloom.launch.model_sources import sft_source
from rloom.launch.models import causal_network, pick_device, placement
from rloom.launch.run import CURVE, from_here
from rloom.launch.worker import FILES, BaseWorker, Rendezvous
from rloom.launch.workers import open_workers, serve_rank
from rloom.models.fingerprint import fingerprint, tokenizer_digest
from rloom.models.load import load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.source import check_folder
from rloom.runs.curve import draw_learning_curve
from rloom.runs.metrics import ModelWork
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog
from rloom.runs.summary import summary_lines
from rloom.runtime.group import Group
from rloom.runtime.placement import ACTOR, WorkerLayout
from rloom.training.checkpoint import Checkpoints
from rloom.training.memory import SFT_BUILD
from rloom.training.roles import Learner, MiniBatching
from rloom.training.sft import SftSettings, SftTraining

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftInputs:
    """Read before the model is loaded."""

    tokenizer: PreTrainedTokenizerBase
    rows: list[Example]
    held_out: list[Example]
    content: str  # digest of the training rows as they are in the files


@dataclass(frozen=True)
class SftParts(RunParts):
    """Everything of a run of supervised fine-tuning except its directory."""

    settings: SftSettings
    model: Learner
    stream: RowStream[Example]
    held_out: Sequence[Example]
    workers: Group | None  # all of them, iff they are other processes


@contextmanager
def open_sft(
    config: SftConfig, layout: WorkerLayout, inputs: SftInputs, identity: Record, logs: Path
) -> Iterator[SftParts]:
    data, trainer = config.data, config.trainer
    stream = RowStream(inputs.rows, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed)
    total = trainer.total_training_steps or trainer.total_epochs * stream.steps_per_epoch
    with open_workers(config, layout, logs, SftWorker, SFT_BUILD) as workers:
        settings = SftSettings(
            rows_per_validation_pass=data.train_batch_size, **vars(step_settings(trainer, total, workers))
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
            equal_rows=not data.fills_by_tokens,
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
    engine, optim, shared = config.engine, config.optim, config.sequence_ranks
    batching = config.data.batching(ranks, shared)
    return make_engine(
        STRATEGIES[engine.strategy],
        network,
        placement(config, engine),
        Ranks(ranks, engine.fsdp_size, shared, "engine", sft_source(config)),
        scoring=batching,
        training=batching,
        optimizer=AdamW(optim.weight_decay, optim.betas, optim.clip_grad) if trained else None,
        compiled=engine.use_torch_compile,
    )


KIND = "sft"  # in the record of a run


def run(config: SftConfig, data: SftRows) -> Outcome:
    return run_with_restarts(SupervisedTraining(config, data))


def serve(config: SftConfig) -> int:
    """On the ranks of torchrun other than 0."""
    return serve_rank(config, SftWorker, SFT_BUILD)


@dataclass(frozen=True)
class SupervisedTraining:
    """Supervised fine-tuning as a job."""

    config: SftConfig
    data: SftRows
    only_reads: bool = False
    notices: tuple[str, ...] = ()

    @property
    def keep(self) -> dict[str, int | None]:
        return {"actor": self.config.trainer.max_ckpt_to_keep}

    def prepare(self) -> SftInputs:
        """Check device and model family, and make examples of the rows, before the model is loaded."""
        config, source = self.config, sft_source(self.config)
        if not config.has_workers:
            pick_device(config)  # fails at once if there is no GPU
        check_folder(source)
        family_of(source).layout(packed=config.model.use_remove_padding)
        tokenizer = load_tokenizer(source)
        set_variables(tokenizer, config.data.apply_chat_template_kwargs, "model.custom_chat_template")
        train, held_out = (
            load_examples(rows, tokenizer, max_length=config.data.max_length, truncation=config.data.truncation)
            for rows in (self.data.train, self.data.held_out)
        )
        return SftInputs(tokenizer, train, held_out, self.data.content)

    def identity(self, inputs: SftInputs) -> Record:
        config = self.config
        return {
            "version": VERSION,
            "kind": KIND,
            "model": fingerprint(sft_source(config)).record(),
            "tokenizer": tokenizer_digest(inputs.tokenizer),
            "lora": lora_record(config.model),
            CONTENT: inputs.content,
            "data": rows_record(inputs.rows),
            "held_out": rows_record(inputs.held_out),
            "shuffle": config.data.shuffle,
            "seed": config.data.seed,
        }

    def compare(self, start: Path, identity: Record) -> Continuation:
        """How this run goes on from a checkpoint; an error where that would be another run under the same name."""
        strict = self.config.trainer.resume_mode != "resume_path"
        found = list(differences(read_record(start, SHAPES, KIND), identity, strict))
        return continuation(start, self.config, found)

    def open(
        self, layout: WorkerLayout, inputs: SftInputs, identity: Record, logs: Path
    ) -> AbstractContextManager[SftParts]:
        return open_sft(self.config, layout, inputs, identity, logs)

    def train(
        self, parts: SftParts, log: RunLog, checkpoints: Checkpoints, start: Path | None, how: Continuation | None
    ) -> Outcome:
        training = SftTraining(
            parts.settings,
            parts.model,
            parts.stream,
            parts.held_out,
            parts.workers,
            log,
            checkpoints,
            parts.write_checkpoint,
            parts.load_checkpoint,
            live_diagnosis(self.config),
        )
        continue_from(training, log, start, how)
        return train_to_end(
            training,
            log,
            start,
            opening=opening(self.config, parts),
            summary=lambda: summary(log, checkpoints),
        )


def opening(config: SftConfig, parts: SftParts) -> str:
    tuned = f"a LoRA adapter of rank {config.model.lora_rank}" if config.model.has_lora else "all weights"
    steps = parts.settings.total_steps
    return (
        f"sft on {config.model.path} ({parts.settings.device}): {len(parts.stream)} rows, "
        f"{config.data.train_batch_size} a step, {steps} step{'s' if steps != 1 else ''}, {tuned}\n"
        f"{timetable(parts.settings, parts.stream.steps_per_epoch, validates=bool(parts.held_out))}"
    )


def summary(log: RunLog, checkpoints: Checkpoints) -> list[str]:
    newest = from_here(checkpoints.path(checkpoints.steps()[-1]))  # the last step is always saved
    return [
        *summary_lines(RunFolder(log.run_dir)),
        f"Learning curve: {from_here(draw_learning_curve(log.metrics_file, log.run_dir / CURVE))}",
        f"Model: {newest}; as a Hugging Face folder: rloom export {newest} DIR, which RL training starts from with "
        "actor_rollout_ref.model.path=DIR",
    ]


def rows_record(rows: Sequence[Example]) -> dict[str, Any]:
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps([row.index, row.text]).encode())
    return {"rows": len(rows), "content": found.hexdigest()}


def differences(saved: Record, own: Record, strict: bool) -> Iterator[Difference]:
    yield from model_differences(saved, own, strict, "model.path")
    yield from data_differences(saved, own, strict)
    if saved["held_out"] != own["held_out"]:
        yield Difference("the validation data is another: losses before and after do not compare", refused=False)
