"""The reward of reward servers, from the configuration."""

from rloom.config.schema import Config
from rloom.rewards.remote import RemoteReward


def remote_reward(config: Config) -> RemoteReward:
    remote = config.reward_model.remote
    return RemoteReward(
        remote.addresses,
        timeout_s=remote.timeout_s,
        max_retries=remote.max_retries,
        concurrency=remote.concurrency,
        batch_size=remote.batch_size,
        token_env=remote.token_env,
    )
