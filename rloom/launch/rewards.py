"""The reward of a run, from its configuration."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloom.config.base import GIVEN_IN_PYTHON
from rloom.config.derived import RewardKinds, RewardPart, reward_parts
from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.data.prompts import PromptTable
from rloom.errors import ModelError, RewardError
from rloom.families.classifier import scoring_layout
from rloom.launch.model_sources import reward_source
from rloom.launch.models import pick_device, pick_dtype
from rloom.models.classifier import Classifier, load_classifier
from rloom.models.classifier_scorer import ClassifierScorer
from rloom.models.conversations import ConversationEncoder, length_limit
from rloom.models.load import load_tokenizer, read_config
from rloom.models.source import ModelSource
from rloom.net.loop import EventLoop
from rloom.plugins import referenced
from rloom.rewards.base import Reward, ScoreQueue
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rewards.function_reward import FunctionReward
from rloom.rewards.judge.judge import JudgeReward
from rloom.rewards.kinds import KINDS, RewardKind
from rloom.rewards.pool import RulePool
from rloom.rewards.remote import RemoteReward
from rloom.rewards.routing import check_sources, runs_code
from rloom.rewards.rules import format
from rloom.rewards.rules.code import CodeSettings
from rloom.rewards.sandbox.client import check_sandbox
from rloom.rewards.score_queue import BackgroundScorer, FutureQueue, LeastLoaded
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.placement import REWARD, ROLLOUT, WorkerLayout, worker_layout
from rloom.training.reward_model import ModelQueue


def has_reward_model(config: Config) -> bool:
    return config.reward_model.model_path is not None


def check_reward_model(config: Config) -> None:
    """Before weights are read: the model's family can be computed here, and its tokenizer can be used."""
    if has_reward_model(config):
        source = reward_source(config)
        scoring_layout(source, packed=config.reward_model.model.use_remove_padding)
        longest_conversation(config, source, load_tokenizer(source))


def longest_conversation(config: Config, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens. None: the model has no limit, and none is set."""
    wanted = config.reward_model.max_length
    positions = getattr(read_config(source).get_text_config(), "max_position_embeddings", None)
    limit = length_limit(tokenizer, positions)
    if wanted is not None and limit is not None and wanted > limit:
        raise ModelError(
            f"reward_model.max_length={wanted}: {source.key}={source.path} takes {limit} tokens; use {limit} or less"
        )
    return wanted or limit


def reward_moments(config: Config) -> tuple[float, float]:
    """Mean and standard deviation that scores are normalised by."""
    found, source = config.reward_model.model, reward_source(config)
    fields = read_config(source).to_dict() if found.normalize else {}
    if found.normalize and not {"mean", "std"} <= fields.keys():
        log.warning(
            f"Note: reward_model.model.normalize=True: no effect, because config.json of {source.path} has no mean and "
            "std"
        )
    return float(fields.get("mean", 0.0)), float(fields.get("std", 1.0))


def offloads_reward_model(config: Config, layout: WorkerLayout) -> bool:
    """By default its weights are on the host while other roles use its GPU."""
    chosen = config.reward_model.model.fsdp_config.param_offload
    return len(layout.pool_of(REWARD).roles) > 1 if chosen is None else chosen


def scores_during_generation(config: Config, layout: WorkerLayout) -> bool:
    """Its workers do not generate, and its weights need not be copied to the GPU again for each prompt."""
    apart = {*layout.workers_of(REWARD)}.isdisjoint(layout.workers_of(ROLLOUT))
    return apart and not offloads_reward_model(config, layout)


def reward_scorer(config: Config, layout: WorkerLayout) -> ClassifierScorer:
    """A whole copy of the reward model, for one of its workers."""
    section, source, device = config.reward_model, reward_source(config), pick_device(config)
    tokenizer = load_tokenizer(source)
    chosen = scoring_layout(source, packed=section.model.use_remove_padding)
    fsdp = section.model.fsdp_config
    model = load_classifier(source, dtype=pick_dtype(device, fsdp.dtype), attention=chosen.attention)
    return ClassifierScorer(
        Classifier(model, chosen.layout),
        ConversationEncoder(
            tokenizer, max_length=longest_conversation(config, source, tokenizer), truncation=section.truncation
        ),
        device=device,
        batching=section.batching(len(layout.workers_of(REWARD))),
        label_weights=section.label_weights,
        moments=reward_moments(config),
        offload=offloads_reward_model(config, layout),
        compiled=section.use_torch_compile,
    )


log = logging.getLogger(__name__)


def rules(config: Config) -> RulePool:
    return RulePool(
        num_workers=config.reward_model.num_workers,
        timeout_s=config.reward_model.timeout_s,
        reward_kwargs=config.custom_reward_function.reward_kwargs,
        sandbox=config.reward_model.sandbox.model_dump(),
    )


def custom_function(config: Config) -> RulePool:
    custom = config.custom_reward_function
    assert custom.path is not None
    if custom.path == GIVEN_IN_PYTHON:
        raise RewardError(
            f"custom_reward_function.path={GIVEN_IN_PYTHON}: the reward of that run was a function given to "
            "rloom.train, which is not saved; write it to a file and set custom_reward_function.path=FILE"
        )
    return RulePool(
        num_workers=config.reward_model.num_workers,
        timeout_s=config.reward_model.timeout_s,
        path=str(expand(custom.path)),
        name=custom.name,
        reward_kwargs=custom.reward_kwargs,
        whole_groups=config.reward_model.reward_manager == "batch",
        reads_episodes=True,
    )


def given_function(config: Config, function: Callable[..., Any]) -> FunctionReward:
    # by default one call at a time, since a function that was written for a notebook need not be thread-safe
    calls = config.reward_model.num_workers if config.is_given("reward_model.num_workers") else 1
    return FunctionReward(
        function,
        concurrent_calls=calls,
        timeout_s=config.reward_model.timeout_s,
        reward_kwargs=config.custom_reward_function.reward_kwargs,
        whole_groups=config.reward_model.reward_manager == "batch",
    )


def format_rule(config: Config) -> RulePool:
    return RulePool(
        num_workers=1,
        timeout_s=config.reward_model.timeout_s,
        path=format.__file__,
        reward_kwargs={"pattern": config.reward_model.format.pattern},
    )


def judge(config: Config) -> JudgeReward:
    return JudgeReward(config.reward_model.api)


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


@contextmanager
def open_queues(
    config: Config, data: Sequence[PromptTable], functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Iterator[dict[str, BackgroundScorer]]:
    """The rewards that run in this process, by the name of their part. Checked: they can score the prompts.

    `functions`: the reward functions that the calling program gave, by the name of their part.
    """
    with ExitStack() as stack:
        loop = stack.enter_context(closing(EventLoop("reward-loop")))
        queues = {}
        for part in reward_parts(config):
            if part.kind.check_prompts is not None:
                referenced(part.kind.check_prompts)(config, data)
            if part.kind.build is not None:
                given = functions.get(part.name) if part.kind.takes_function else None
                reward = build(part.kind, config) if given is None else given_function(config, given)
                shared = loop if part.source in KINDS else None  # a user's own kind may block its loop
                queues[part.name] = stack.enter_context(closing(BackgroundScorer(reward, shared)))
                reward.check()
        yield queues


def check_rules(config: Config, data: Sequence[PromptTable]) -> None:
    """Every data source has a rule."""
    rows: dict[str, list[int]] = defaultdict(list)
    for prompts in data:
        for source, own in prompts.rows_by_source().items():
            rows[source] += own
    check_sources(rows, config.custom_reward_function.reward_kwargs)
    if any(map(runs_code, rows)):
        settings = CodeSettings.of(config.reward_model.sandbox.model_dump())
        log.warning(f"Note: {check_sandbox(settings.limits, settings.isolation)}")


def in_process_model(config: Config) -> list[Group]:
    """The reward model for a run without workers, if the run has one."""
    if not has_reward_model(config):
        return []
    return [LocalGroup([reward_scorer(config, worker_layout(1, 1, {}))])]


def reward_mix(
    config: Config,
    queues: Mapping[str, BackgroundScorer],
    *,
    elsewhere: Sequence[FutureQueue] = (),
    model: Sequence[Group],
    during_generation: bool = False,
) -> CompositeReward:
    """`elsewhere`: the queues of the other machines of the run. `model`: the workers of the reward model, which score
    at the end of a generation or during it."""

    def queue(part: RewardPart) -> ScoreQueue:
        if part.kind.build is None:
            return ModelQueue(model, during_generation=during_generation)
        own = queues[part.name]
        return LeastLoaded(own, [own, *elsewhere]) if part.kind.every_machine else own

    return CompositeReward(
        [
            MixedPart(
                part.name,
                queue(part),
                part.weight,
                part.normalize,
                part.skip_failed,
                part.optional,
                by_turns=part.kind.by_turns,
            )
            for part in reward_parts(config)
        ]
    )


def spread_source(config: Config) -> str | None:
    """The kind of reward that the other machines of a run compute too. A function of this process stays in it."""
    if config.custom_reward_function.path == GIVEN_IN_PYTHON:
        return None
    return next((part.source for part in reward_parts(config) if part.kind.every_machine), None)


def queue_of(config: Config, source: str) -> BackgroundScorer:
    """On a machine other than the first, on which the reward was checked."""
    return BackgroundScorer(build(RewardKinds.of(config).every[source], config))


def build(kind: RewardKind, config: Config) -> Reward:
    assert kind.build is not None  # the reward model is on the workers
    reward: Reward = referenced(kind.build)(config)
    return reward
