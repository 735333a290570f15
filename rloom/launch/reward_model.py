"""The reward model of a run: its source, the checks before it is loaded, and its scorer on a worker."""

from transformers import PreTrainedTokenizerBase

from rloom.config.derived import reward_batching
from rloom.config.schema import Config
from rloom.errors import ModelError
from rloom.families.classifier import scoring_layout
from rloom.launch.model_sources import reward_source
from rloom.launch.models import pick_device, pick_dtype
from rloom.models.classifier import Classifier, load_classifier
from rloom.models.classifier_scorer import ClassifierScorer
from rloom.models.conversations import ConversationEncoder, length_limit
from rloom.models.load import load_tokenizer, read_config
from rloom.models.source import ModelSource
from rloom.runtime.placement import REWARD, ROLLOUT, WorkerLayout


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
        batching=reward_batching(section, len(layout.workers_of(REWARD))),
        label_weights=section.label_weights,
        offload=offloads_reward_model(config, layout),
        compiled=section.use_torch_compile,
    )
