"""What a run reads: tokenizer and prompts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloom.config.base import EMBEDDED, IN_PYTHON
from rloom.config.derived import reward_parts
from rloom.config.schema import Config
from rloom.data.prompts import GivenRows, load_prompts
from rloom.data.rows import Columns
from rloom.errors import DataError
from rloom.launch.model_sources import policy_source
from rloom.models.load import load_tokenizer
from rloom.models.source import EMBEDDED_FOLDER
from rloom.types import Prompt

log = logging.getLogger(__name__)
FEWEST_ROWS = 16  # a smoke run may have fewer different ones


@dataclass(frozen=True)
class UserObjects:
    """Objects of the calling program in place of files. The keys of those files have the value IN_PYTHON."""

    train: GivenRows | None = None
    validation: GivenRows | None = None
    reward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Inputs:
    """Read before any model is loaded."""

    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    held_out: list[Prompt]
    reward: Callable[..., Any] | None = None  # the caller's function


def read_inputs(config: Config, given: UserObjects) -> Inputs:
    tokenizer = load_tokenizer(policy_source(config))
    prompts = train_prompts(config, tokenizer, given.train)
    different = len({prompt.text for prompt in prompts})
    if len(prompts) >= FEWEST_ROWS and different <= len(prompts) / 2:
        log.warning(f"Note: the {len(prompts):,} training rows have only {different:,} different prompts")
    return Inputs(tokenizer, prompts, held_out_prompts(config, tokenizer, given.validation), given.reward)


def train_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, given: GivenRows | None = None) -> list[Prompt]:
    data = config.data
    files = str(EMBEDDED_FOLDER / "train.parquet") if data.train_files == EMBEDDED else data.train_files
    return read_prompts(config, tokenizer, given or files, data.train_max_samples, "data.train_files")


def held_out_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, given: GivenRows | None = None
) -> list[Prompt]:
    data = config.data
    files = data.val_files
    if files == EMBEDDED or (files is None and data.train_files == EMBEDDED):
        files = str(EMBEDDED_FOLDER / "test.parquet")
    source = given or files
    return read_prompts(config, tokenizer, source, data.val_max_samples, "data.val_files") if source else []


def read_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    files: str | Sequence[str] | GivenRows,
    max_samples: int,
    field: str,
) -> list[Prompt]:
    data = config.data
    if files == IN_PYTHON:
        raise DataError(
            f"{field}={IN_PYTHON}: the rows of that run were given to rloom.train and not saved; set {field}=FILE"
        )
    return load_prompts(
        files,
        tokenizer=tokenizer,
        columns=Columns(
            data.prompt_key,
            data.reward_fn_key,
            rules=any(part.kind.by_data_source for part in reward_parts(config)),
            default_data_source=data.default_data_source,
            label_key=data.label_key,
        ),
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=max_samples,
        num_workers=data.dataloader_num_workers,
        return_raw_chat=data.return_raw_chat,
        custom_chat_template=config.actor_rollout_ref.model.custom_chat_template,
        field=field,
    )
