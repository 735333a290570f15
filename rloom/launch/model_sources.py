"""Where the models of a run come from, by its configuration. Imports no torch."""

from dataclasses import replace
from typing import Any

from rloom.config.base import RAW_TEMPLATE
from rloom.config.schema import Config, SftConfig
from rloom.data.chat import set_variables
from rloom.models.source import ModelSource


def policy_source(config: Config) -> ModelSource:
    model = config.actor_rollout_ref.model
    return ModelSource(
        model.path,
        trust_remote_code=model.trust_remote_code,
        overrides=model.override_config,
        longest=config.data.longest_sample,
        chat_template=None if is_raw(model.custom_chat_template) else model.custom_chat_template,
    )


def is_raw(template: str | None) -> bool:
    """OpenRLHF's way to write prompts without the chat template, which its models keep."""
    return template is not None and template.startswith(RAW_TEMPLATE)


def policy_tokenizer(config: Config) -> Any:  # PreTrainedTokenizerBase: transformers is not imported here
    """With the variables of the run in its chat template. Checkpoints and exported models have it without them."""
    from rloom.models.load import load_tokenizer  # imports transformers; rows are read before it

    template = config.actor_rollout_ref.model.custom_chat_template
    tokenizer = load_tokenizer(replace(policy_source(config), chat_template=template))
    set_variables(tokenizer, config.data.apply_chat_template_kwargs)
    return tokenizer


def critic_source(config: Config) -> ModelSource:
    critic, policy = config.critic, config.actor_rollout_ref.model
    return ModelSource(
        critic.model.path or policy.path,
        key="critic.model.path",
        trust_remote_code=critic.model.trust_remote_code or policy.trust_remote_code,
        overrides={**({} if critic.model.path else policy.override_config), **critic.model.override_config},
        longest=config.data.longest_sample,
    )


def reward_source(config: Config) -> ModelSource:
    section = config.reward_model
    assert section.model_path is not None
    key = "reward_model.path" if section.path is not None else "reward_model.model.path"
    return ModelSource(section.model_path, key=key, trust_remote_code=section.trusts_code)


def sft_source(config: SftConfig) -> ModelSource:
    model = config.model
    return ModelSource(
        model.path,
        key="model.path",
        trust_remote_code=model.trust_remote_code,
        overrides=model.override_config,
        longest=config.data.max_length,
        chat_template=model.custom_chat_template,
    )
