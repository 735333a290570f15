"""Which layouts of conversations are correct for a family of classifiers, tried on a small model of the family.

Expected are the outputs of transformers' own forward with eager attention, one conversation at a time; the layouts
compute those of two conversations of different length together.
"""

import json
import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rloom.errors import ModelError
from rloom.families.training import TOLERANCE, largest_difference, small_model, two_samples
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.classifier import Classifier, PassLayout, ScoringLayout, is_gated, read_output, restore_older_names
from rloom.models.conversations import Conversation
from rloom.models.load import first_line, quiet_transformers, read_config, varies_with_length
from rloom.models.source import ModelSource, check_folder

log = logging.getLogger(__name__)
# In order of preference. Without a correct one, each conversation gets a pass of its own.
CANDIDATES = (
    ScoringLayout(PassLayout.PACKED, RLOOM_ATTENTION),
    ScoringLayout(PassLayout.PADDED, RLOOM_ATTENTION),
    ScoringLayout(PassLayout.PADDED, "sdpa"),
    ScoringLayout(PassLayout.PADDED, "eager"),
    ScoringLayout(PassLayout.ROWS, "sdpa"),
    ScoringLayout(PassLayout.ROWS, "eager"),
)
TRIED: dict[str, dict[ScoringLayout, str | None]] = {}  # model -> the fault of each layout; None: correct


def scoring_layout(source: ModelSource, *, packed: bool) -> ScoringLayout:
    """Packed if requested and correct, else the first padded layout that is correct."""
    identity = json.dumps([source.location, source.trust_remote_code])
    if identity not in TRIED:
        TRIED[identity] = try_layouts(source)
    faults = TRIED[identity]
    correct = [
        one for one, fault in faults.items() if fault is None and (packed or one.layout is not PassLayout.PACKED)
    ]
    if correct:
        return correct[0]
    log.info(
        f"{source.key}={source.path}: conversations are scored one at a time, by the model's own forward "
        f"({next(iter(faults.values()))})"
    )
    return ScoringLayout(PassLayout.SINGLE, None)


def try_layouts(source: ModelSource) -> dict[ScoringLayout, str | None]:
    check_folder(source)
    restore_older_names()
    try:
        config = read_config(source)
    except Exception as error:  # transformers raises many types
        raise ModelError(f"{source.key}={source.path}: its config.json cannot be read: {first_line(error)}") from error
    with quiet_transformers():
        try:
            # a gated reward model has the body of its family's classifier, and layouts concern the body
            runs_code = source.trust_remote_code and not is_gated(config)
            model = small_model(config, trust_remote_code=runs_code, kind=AutoModelForSequenceClassification)
        except ModelError as error:  # its code may require entries or tokens that a small model does not have
            return dict.fromkeys(CANDIDATES, str(error))
        if varies_with_length(model):
            return dict.fromkeys(CANDIDATES, "its rotary frequencies depend on the longest conversation of a pass")
        return check_layouts(model)


def check_layouts(model: PreTrainedModel) -> dict[ScoringLayout, str | None]:
    """`model` in float32 on the CPU."""
    samples = two_samples(model)
    expected_NL = own_outputs(model, samples)
    conversations = [Conversation(tuple(tokens.tolist())) for tokens in samples]
    return {one: find_fault(model, one, conversations, expected_NL) for one in CANDIDATES}


@torch.no_grad()
def own_outputs(model: PreTrainedModel, samples: Sequence[Tensor]) -> Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([read_output(model(input_ids=tokens[None])) for tokens in samples])


def find_fault(
    model: PreTrainedModel, one: ScoringLayout, conversations: Sequence[Conversation], expected_NL: Tensor
) -> str | None:
    try:
        assert one.attention is not None
        model.set_attn_implementation(one.attention)
        if model.config._attn_implementation != one.attention:  # transformers did not set it
            return f"{type(model).__name__} has its own attention only"
        found_NL = Classifier(model, one.layout).outputs(conversations, torch.device("cpu"))
    except Exception as error:  # from a family's code, given arguments that it does not support
        return first_line(error)
    relative = largest_difference(found_NL, expected_NL)
    return f"outputs differ from the model's own by {relative:.2g} of their size" if relative > TOLERANCE else None
