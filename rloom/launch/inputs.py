"""What a run reads: rows, checked before torch is imported; then tokenizer and prompts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rloom.config.base import EMBEDDED_NAME, GIVEN_IN_PYTHON
from rloom.config.derived import reward_parts
from rloom.config.schema import Config, SftConfig
from rloom.data.chat import Tokenizer
from rloom.data.examples import ChatColumns, ChatRow, read_chats
from rloom.data.prompts import GivenRows, PromptRows, PromptTable, load_prompts, read_prompt_rows
from rloom.data.rows import Columns, rows_digest
from rloom.environments.kinds import ENVIRONMENTS
from rloom.episodes.kinds import gives_rewards
from rloom.errors import ConfigError, DataError
from rloom.launch.model_sources import policy_tokenizer
from rloom.models.source import EMBEDDED_FOLDER
from rloom.plugins import referenced

log = logging.getLogger(__name__)
FEWEST_ROWS = 16  # a smoke run may have fewer different ones
TRAIN, HELD_OUT = "data.train_files", "data.val_files"
Files = str | Sequence[str]


@dataclass(frozen=True)
class UserObjects:
    """Objects of the calling program in place of files. The keys of those files have the value GIVEN_IN_PYTHON."""

    train: GivenRows | None = None
    validation: GivenRows | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # part of the reward -> its function
    episodes: bytes | None = None  # environment and tools, pickled


@dataclass(frozen=True)
class RunData:
    """Rows of a run, checked, and the calling program's reward functions."""

    train: PromptRows
    held_out: PromptRows | None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    episodes: bytes | None = None

    @property
    def content(self) -> str:
        """Digest of the training rows as they are in the files."""
        return self.train.content


@dataclass(frozen=True)
class SftRows:
    """Rows of a run of supervised fine-tuning, checked."""

    train: Sequence[ChatRow]
    held_out: Sequence[ChatRow]

    @cached_property
    def content(self) -> str:
        return rows_digest((row.messages, row.variables) for row in self.train)


@dataclass(frozen=True)
class Inputs:
    """Read before any model is loaded."""

    tokenizer: Any  # PreTrainedTokenizerBase: transformers is not imported here
    prompts: PromptTable
    held_out: PromptTable | None
    data: RunData


def read_data(config: Config, given: UserObjects) -> RunData:
    return RunData(
        read_rows(
            config,
            given.train or environment_rows(config, TRAIN) or training_files(config),
            config.data.train_max_samples,
            TRAIN,
        ),
        held_out_rows(config, given.validation),
        given.functions,
        given.episodes,
    )


def held_out_rows(config: Config, given: GivenRows | None = None) -> PromptRows | None:
    source = given or environment_rows(config, HELD_OUT) or held_out_files(config)
    return read_rows(config, source, config.data.val_max_samples, HELD_OUT) if source else None


def environment_rows(config: Config, field: str) -> GivenRows | None:
    """The embedded data of an environment of rloom that has data of its own."""
    kind = ENVIRONMENTS.get(config.actor_rollout_ref.rollout.multi_turn.environment or "")
    files = config.data.train_files if field == TRAIN else config.data.val_files or config.data.train_files
    if kind is None or kind.rows is None or files != EMBEDDED_NAME:
        return None
    train, test = referenced(kind.rows)()
    return GivenRows(field, train if field == TRAIN else test)


def training_files(config: Config | SftConfig) -> Files:
    return with_embedded(config.data.train_files, "train.parquet")


def held_out_files(config: Config | SftConfig) -> Files | None:
    files = config.data.val_files
    if files is None and config.data.train_files == EMBEDDED_NAME:
        files = EMBEDDED_NAME
    return None if files is None else with_embedded(files, "test.parquet")


def with_embedded(files: Files, name: str) -> Files:
    """`embedded`, alone or in a list, is a file of rloom's own data; those on the hub are downloaded."""
    if not isinstance(files, str):
        found = [with_embedded(file, name) for file in files]
        return [file for one in found for file in ([one] if isinstance(one, str) else one)]
    if files.startswith("hf://"):
        from rloom.hub import files_at  # huggingface_hub is slow to import

        return [str(file) for file in files_at(files)]
    return str(EMBEDDED_FOLDER / name) if files == EMBEDDED_NAME else files


def read_rows(config: Config, files: Files | GivenRows, max_samples: int, field: str) -> PromptRows:
    data = config.data
    if files == GIVEN_IN_PYTHON:
        raise DataError(
            f"{field}={GIVEN_IN_PYTHON}: the rows of that run were given to rloom.train and not saved; set {field}=FILE"
        )
    columns = Columns(
        data.prompt_key,
        data.reward_fn_key,
        rules=any(part.kind.by_data_source for part in reward_parts(config)),
        default_data_source=data.default_data_source,
        label_key=data.label_key,
    )
    return read_prompt_rows(files, columns, max_samples=max_samples, field=field)


def read_sft_rows(config: SftConfig) -> SftRows:
    data = config.data
    columns = ChatColumns(
        messages_key=data.messages_key,
        tools_key=data.tools_key,
        is_chat=data.multiturn.enable,
        prompt_path=column_path(data.prompt_key, data.prompt_dict_keys, "prompt"),
        response_path=column_path(data.response_key, data.response_dict_keys, "response"),
    )
    held_out = held_out_files(config)
    return SftRows(
        read_chats(training_files(config), columns, max_samples=data.train_max_samples, field=TRAIN),
        read_chats(held_out, columns, max_samples=data.val_max_samples, field=HELD_OUT) if held_out else [],
    )


def column_path(column: str | None, below: list[str] | None, what: str) -> tuple[str, ...] | None:
    if column is None and below:
        raise ConfigError(f"data.{what}_dict_keys={below} needs the column that has them: set data.{what}_key")
    return None if column is None else (column, *(below or ()))


def read_inputs(config: Config, data: RunData) -> Inputs:
    tokenizer = policy_tokenizer(config)
    prompts = as_prompts(config, tokenizer, data.train, TRAIN)
    by_prompt = not gives_rewards(config)  # else the columns, which the environment reads, make a difference, too
    if by_prompt and len(data.train) >= FEWEST_ROWS and prompts.different <= len(data.train) / 2:
        log.warning(f"Note: the {len(data.train):,} training rows have only {prompts.different:,} different prompts")
    return Inputs(
        tokenizer,
        prompts,
        None if data.held_out is None else as_prompts(config, tokenizer, data.held_out, HELD_OUT),
        data,
    )


def as_prompts(config: Config, tokenizer: Tokenizer, rows: PromptRows, field: str) -> PromptTable:
    data = config.data
    return load_prompts(
        rows,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        num_workers=data.dataloader_num_workers,
        return_raw_chat=data.return_raw_chat,
        field=field,
    )
