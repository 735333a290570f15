"""What a run reads: tokenizer, prompts, and the reward."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rloom.config.load import expand
from rloom.config.schema import EMBEDDED, Config
from rloom.data.prompts import load_prompts
from rloom.models.load import EMBEDDED as EMBEDDED_FOLDER
from rloom.models.load import ModelSource, load_tokenizer
from rloom.rewards.background import BackgroundScorer
from rloom.rewards.base import Reward
from rloom.rewards.pool import RulePool
from rloom.rewards.routing import check_sources, runs_code
from rloom.rewards.rules.code import Settings
from rloom.rewards.sandbox.describe import check_sandbox
from rloom.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """Read before any model is loaded."""

    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    held_out: list[Prompt]


def read_inputs(config: Config) -> Inputs:
    tokenizer = load_tokenizer(policy_source(config))
    return Inputs(tokenizer, train_prompts(config, tokenizer), held_out_prompts(config, tokenizer))


def policy_source(config: Config) -> ModelSource:
    model = config.actor_rollout_ref.model
    return ModelSource(
        model.path,
        trust_remote_code=model.trust_remote_code,
        overrides=model.override_config,
        longest=longest_sample(config),
    )


def longest_sample(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def critic_source(config: Config) -> ModelSource:
    critic, policy = config.critic, config.actor_rollout_ref.model
    return ModelSource(
        critic.model.path or policy.path,
        key="critic.model.path",
        trust_remote_code=critic.model.trust_remote_code or policy.trust_remote_code,
        overrides={**({} if critic.model.path else policy.override_config), **critic.model.override_config},
        longest=longest_sample(config),
    )


def train_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    data = config.data
    files = str(EMBEDDED_FOLDER / "train.parquet") if data.train_files == EMBEDDED else data.train_files
    return read_prompts(config, tokenizer, files, data.train_max_samples, "data.train_files")


def held_out_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    data = config.data
    files = data.val_files
    if files == EMBEDDED or (files is None and data.train_files == EMBEDDED):
        files = str(EMBEDDED_FOLDER / "test.parquet")
    return read_prompts(config, tokenizer, files, data.val_max_samples, "data.val_files") if files else []


def read_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, files: str | Sequence[str], max_samples: int, field: str
) -> list[Prompt]:
    data = config.data
    return load_prompts(
        files,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=max_samples,
        num_workers=data.dataloader_num_workers,
        return_raw_chat=data.return_raw_chat,
        custom_chat_template=config.actor_rollout_ref.model.custom_chat_template,
        field=field,
    )


def checked_reward(config: Config, prompts: Sequence[Prompt]) -> Reward:
    """The reward, after a check that it can score every data source."""
    custom = config.custom_reward_function
    if custom.path is None:
        rows: dict[str, list[int]] = defaultdict(list)
        for prompt in prompts:
            rows[prompt.data_source].append(prompt.index)
        check_sources(rows, custom.reward_kwargs)
        if any(map(runs_code, rows)):
            settings = Settings.of(config.reward_model.sandbox.model_dump())
            logger.warning(f"Note: {check_sandbox(settings.limits, settings.isolation)}")
    reward = make_reward(config)
    reward.check()
    return reward


def rules(config: Config) -> Reward:
    kwargs = config.custom_reward_function.reward_kwargs
    return RulePool(
        num_workers=config.reward_model.num_workers,
        timeout_s=config.reward_model.timeout_s,
        reward_kwargs=kwargs,
        sandbox=config.reward_model.sandbox.model_dump(),
    )


def custom_function(config: Config) -> Reward:
    custom = config.custom_reward_function
    assert custom.path is not None
    return RulePool(
        num_workers=config.reward_model.num_workers,
        timeout_s=config.reward_model.timeout_s,
        path=str(expand(custom.path)),
        name=custom.name,
        reward_kwargs=custom.reward_kwargs,
        whole_groups=config.reward_model.reward_manager == "batch",
    )


REWARDS: dict[str, Callable[[Config], Reward]] = {"rules": rules, "function": custom_function}


def make_reward(config: Config) -> Reward:
    return REWARDS["function" if config.custom_reward_function.path else "rules"](config)


def reward_queue(config: Config) -> BackgroundScorer:
    """The rewards of a machine other than the first, on which the reward was checked."""
    return BackgroundScorer(make_reward(config))
