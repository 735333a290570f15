"""The part of a model that one rank of the Megatron engine holds: bytes in memory and bytes that reach it.

A copy of the model is on TP × PP ranks, and there are DP copies. Weights and float32 gradients are those of the rank's
part; float32 masters and moments are divided over the copies as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rloom.config.sections import Megatron
from rloom.models.limits import LOGITS_AT_ONCE
from rloom.plan.architecture import FLOAT32, ModelPlan

Parts = dict[str, float]  # part -> bytes


@dataclass(frozen=True)
class Transfer:
    received: float  # bytes that reach one GPU
    span: int  # consecutive ranks within which they are sent


def section(model: ModelPlan) -> Megatron:
    assert model.megatron is not None  # the callers dispatch on it
    return model.megatron


def rank_layers(model: ModelPlan) -> int:
    return model.architecture.layers // section(model).pipeline_model_parallel_size


def rank_parameters(model: ModelPlan) -> float:
    """Norms are whole on every rank of a stage. The first stage has the embedding, the last one the head."""
    size, tensor = model.architecture, section(model).tensor_model_parallel_size
    norms = size.norm_parameters
    layers = rank_layers(model) * ((size.layer_parameters - norms) / tensor + norms)
    embedding = size.embedding / tensor if model.is_first_stage else 0.0
    if not model.is_last_stage:
        return layers + embedding
    if not model.vocabulary:  # a critic
        return layers + embedding + 2 * size.hidden
    shared = size.tied and model.is_first_stage  # on separate stages each has a copy of a tied embedding
    return layers + embedding + (0.0 if shared else size.embedding / tensor) + size.hidden


def stored(model: ModelPlan) -> Parts:
    parameters = rank_parameters(model)
    masters = FLOAT32 * parameters / model.copies if model.number_bytes < FLOAT32 else 0
    return {
        "weights": model.number_bytes * parameters,
        "masters": masters,
        "moments": 2 * FLOAT32 * parameters / model.copies,
    }


def at_rest(model: ModelPlan) -> Parts:
    """What stays on the GPU between uses. Masters are a part of the optimizer state."""
    parts, keys = stored(model), section(model)
    if keys.param_offload:
        parts["weights"] = 0
    if keys.optimizer_offload:
        parts["masters"] = parts["moments"] = 0
    return parts


def in_passes(model: ModelPlan) -> Parts:
    """What passes hold beside the optimizer state: the first stage begins a pass for each later stage before it gets
    the first gradient, the last stage has one pass at a time."""
    parameters, passes, stages = rank_parameters(model), model.updates.passes, section(model)
    started = min(stages.pipeline_model_parallel_size, passes.count) if model.is_first_stage else 1
    return {
        **at_rest(model),
        "weights": model.number_bytes * parameters,
        "gradients": FLOAT32 * parameters,
        "activations": activations(model, passes.tokens, started),
        "head": head(model, passes.tokens),
    }


def in_optimizer_step(model: ModelPlan) -> Parts:
    """The gradient, and the rank's part of the sum over copies."""
    summed = 1 / model.copies if model.copies > 1 else 0
    return {**stored(model), "gradients": FLOAT32 * rank_parameters(model) * (1 + summed)}


def in_save(model: ModelPlan) -> Parts:
    """A save puts one parameter together at a time, in float32: of the copies, then of the ranks of TP, then under the
    names of transformers, of which two are one parameter (gate and up)."""
    size, tensor = model.architecture, section(model).tensor_model_parallel_size
    has_embedding = model.is_first_stage or (model.is_last_stage and bool(model.vocabulary) and not size.tied)
    rows = max(2 * size.intermediate, size.vocabulary if has_embedding else 0)
    of_tensor_ranks = 1 / tensor + 1 if tensor > 1 else 1
    return {**at_rest(model), "gathered parameter": FLOAT32 * rows * size.hidden * (of_tensor_ranks + 1)}


def activations(model: ModelPlan, tokens: int, started: int) -> float:
    """Activations of `started` passes; a recomputed layer is that of one pass."""
    size, layers = model.architecture, rank_layers(model)
    tensor = section(model).tensor_model_parallel_size
    between = size.hidden / (tensor if section(model).divides_tokens else 1)
    saved = 2 * (between + (size.query_size + size.kv_size + size.intermediate) / tensor)
    numbers = started * layers * between + saved if model.checkpointing else started * layers * saved
    return model.number_bytes * tokens * numbers


def head(model: ModelPlan, tokens: int) -> float:
    """As in one process, of the rank's part of the vocabulary."""
    if not model.vocabulary or not model.is_last_stage:
        return 0
    vocabulary = model.vocabulary / section(model).tensor_model_parallel_size
    logits = min(LOGITS_AT_ONCE, tokens * vocabulary)
    return (FLOAT32 + model.number_bytes) * (logits + vocabulary * model.architecture.hidden)


def bubble(model: ModelPlan, passes: int) -> float:
    """Time of a pipeline, as a multiple of that without idle stages: the last stage begins PP - 1 passes late."""
    return (passes + section(model).pipeline_model_parallel_size - 1) / passes


def between_layers(model: ModelPlan, tokens: float, forwards: int, backwards: int) -> Iterator[Transfer]:
    """TP sums the output of attention and of the MLP, in each direction; PP sends a layer's output to the next stage.

    A sum over N ranks, or a gather and a reduce-scatter in its place, brings 2 (N - 1) / N of its size to each.
    """
    size, keys = model.architecture, section(model)
    tensor, pipeline = keys.tensor_model_parallel_size, keys.pipeline_model_parallel_size
    output = model.number_bytes * size.hidden * tokens
    sums = 2 * rank_layers(model) * (forwards + backwards)
    yield Transfer(sums * output * 2 * (tensor - 1) / tensor, tensor)
    if pipeline > 1:
        sent = output / (tensor if keys.divides_tokens else 1)
        yield Transfer(sent * (1 + min(1, backwards)), keys.model_ranks)  # recomputation stays within a stage


def between_copies(model: ModelPlan) -> Transfer:
    """At each optimizer step gradients are summed and scattered, and new weights gathered."""
    share = (model.copies - 1) / model.copies
    return Transfer((FLOAT32 + model.number_bytes) * rank_parameters(model) * share, model.ranks)


def offloaded_bytes(model: ModelPlan) -> float:
    """Over PCIe in an update: the optimizer state once to the GPU and back, weights for the passes and for the step."""
    parts, keys = stored(model), section(model)
    moved = 2 * (parts["masters"] + parts["moments"]) if keys.optimizer_offload else 0.0
    return moved + (4 * parts["weights"] if keys.param_offload else 0.0)


def description(keys: Megatron, ranks: int) -> str:
    copies = ranks // keys.model_ranks
    text = f"Megatron TP {keys.tensor_model_parallel_size} × PP {keys.pipeline_model_parallel_size}: "
    text += f"{'one copy' if copies == 1 else f'{copies} copies, each'} over {keys.model_ranks} ranks"
    if copies > 1:
        text += "; they divide the optimizer state"
    if keys.expert_model_parallel_size > 1:
        text += f"; experts over EP {keys.expert_model_parallel_size} × TP {keys.expert_tensor_ranks}"
    if keys.offloaded:
        text += f"; on the host between uses: {', '.join(keys.offloaded)}"
    return text
