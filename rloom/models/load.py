"""Load a model or a tokenizer from a folder or by its name on the hub, ready for samples of the run's lengths."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rloom.errors import ModelError
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.source import ModelSource, check_folder
from rloom.models.weight_files import not_finite, stored_dtype
from rloom.transfer import all_finite

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()  # rloom has its own


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: int = 16
    target_modules: str | Sequence[str] = "all-linear"
    adapter_path: str | None = None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress warnings about configuration and kernels: they are shown when the model itself is loaded."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


# Repositories without a tokenizer, and the model whose tokenizer their model card names.
TOKENIZERS = {"berkeley-nest/Starling-RM-7B-alpha": "meta-llama/Llama-2-7b-chat-hf"}


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    if source.path in TOKENIZERS:
        source = ModelSource(TOKENIZERS[source.path], key=f"{source.key}={source.path}: its tokenizer")
    check_folder(source)
    try:
        with explained_tokenizer_warnings(source):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.location, trust_remote_code=source.trust_remote_code
            )
    except Exception as error:  # transformers raises many types
        raise ModelError(f"{source.key}={source.path}: no tokenizer could be loaded: {first_line(error)}") from error
    if source.chat_template is not None:
        tokenizer.chat_template = source.chat_template
    return tokenizer


# transformers warns that the pattern of a tokenizer is wrong, which is true of older Mistral models. It also warns of
# every local folder whose config.json does not say which version wrote it, such as a copy of Qwen.
PATTERN_WARNING, PATTERN_LOGGER = "fix_mistral_regex", "transformers.tokenization_utils_tokenizers"
OLD_PATTERN_MODELS = frozenset({"mistral", "mistral3", "voxtral", "ministral", "pixtral"})
_explained: set[str] = set()  # models


@contextmanager
def explained_tokenizer_warnings(source: ModelSource) -> Iterator[None]:
    """Replace the warning by a note, once for each model that it is true of."""

    def explain(record: logging.LogRecord) -> bool:
        if PATTERN_WARNING not in record.getMessage():
            return True
        if is_old_mistral(source) and source.path not in _explained:
            _explained.add(source.path)
            log.warning(
                f"Note: {source.key}={source.path}: its tokenizer splits words by the pattern of older Mistral models, "
                "which transformers considers wrong. rloom uses it as it is; to correct it, load it with "
                "AutoTokenizer.from_pretrained(MODEL, fix_mistral_regex=True) and save it in the model's folder"
            )
        return False

    logger = logging.getLogger(PATTERN_LOGGER)
    logger.addFilter(explain)
    try:
        yield
    finally:
        logger.removeFilter(explain)


def is_old_mistral(source: ModelSource) -> bool:
    """A model on the hub is: transformers has looked at its tags."""
    file = Path(source.location) / "config.json"
    return not file.is_file() or json.loads(file.read_text(encoding="utf-8")).get("model_type") in OLD_PATTERN_MODELS


def read_config(source: ModelSource) -> PreTrainedConfig:
    """The model's configuration with the overrides applied. Nothing else is changed: families read an entry in ways
    that its name does not tell (the noise of Phi-3.5-MoE's router is also a threshold of its evaluation)."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, trust_remote_code=source.trust_remote_code)
    for name, value in source.overrides.items():
        setattr(config, name, value)
    return config


def load_causal_lm(
    source: ModelSource,
    *,
    lora: Lora | None = None,
    empty: bool = False,
    attention: str = RLOOM_ATTENTION,
) -> PreTrainedModel | PeftModel:
    """The model in evaluation mode, without dropout. With rloom's attention its forward requires an `attend` argument.

    Its weights are in the dtype of its files, which takes half the memory of float32, and engines cast them. With LoRA
    they are in float32: peft rounds the adapter that it draws to the dtype of the weights. `empty`: only the
    configuration is read, and the parameters are on the meta device, in float32.
    """
    check_folder(source)
    try:
        config = read_config(source)
        settings = {"attn_implementation": attention, "trust_remote_code": source.trust_remote_code}
        model: PreTrainedModel
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **settings)
        if empty:
            model.tie_weights()  # init_empty_weights unties them
            with suppress(OSError):  # a model has no such file
                model.generation_config = GenerationConfig.from_pretrained(source.location)
        else:
            dtype, described = stored_dtype(source) if lora is None else torch.float32, model
            model = AutoModelForCausalLM.from_pretrained(source.location, config=config, dtype=dtype, **settings)
            if dtype != torch.float32:
                restore_buffers(model, described)
    except Exception as error:
        raise ModelError(
            f"{source.key}={source.path}: the model could not be loaded: {first_line(error)}. "
            "Give a folder with config.json and weights, or a hub name that this machine can reach"
        ) from error
    fix_generation_config(model)
    if source.longest is not None:
        fix_rotary_scaling(model, source.longest)
    adapted = (model if lora is None else with_lora(model, lora, empty=empty)).eval()
    if not empty:
        check_finite(source, adapted)
    return adapted


def restore_buffers(model: PreTrainedModel, described: PreTrainedModel) -> None:
    """Buffers in float32: those that are computed, not read, as they are in a model that was created in float32."""
    for part, other in zip(model.modules(), described.modules(), strict=True):
        for name, computed in other.named_buffers(recurse=False):
            read = part.get_buffer(name)
            setattr(part, name, computed if name in other._non_persistent_buffers_set else read.to(computed.dtype))


def check_finite(source: ModelSource, model: torch.nn.Module) -> None:
    """With such weights every answer is empty or noise, and its score 0: that looks like a model that cannot do it."""
    faulty = [name for name, weights in model.named_parameters() if not all_finite(weights)]
    if faulty:
        raise ModelError(not_finite(f"{source.key}={source.path}", faulty))


def fix_generation_config(model: PreTrainedModel) -> None:
    """Some published models set a temperature without do_sample: transformers loads that, but refuses to save it."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True


def with_lora(model: PreTrainedModel, lora: Lora, *, empty: bool = False) -> PeftModel:
    if lora.adapter_path is not None:
        return load_adapter(model, lora.adapter_path, empty=empty)
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    settings = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, settings)
    except ValueError as error:  # no module has such a name
        raise ModelError(f"actor_rollout_ref.model.target_modules={targets}: {first_line(error)}") from error


def load_adapter(model: PreTrainedModel, path: str, *, empty: bool) -> PeftModel:
    folder = str(Path(path).expanduser())
    try:
        if empty:
            settings = PeftConfig.from_pretrained(folder)
            settings.inference_mode = False  # a saved adapter has it set, which freezes the adapter
            return get_peft_model(model, settings)
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
    except Exception as error:
        raise ModelError(
            f"actor_rollout_ref.model.lora_adapter_path={path}: the adapter could not be loaded: {first_line(error)}. "
            "Give a folder with adapter_config.json and the weights of an adapter made for this model"
        ) from error


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['(no message)'])[0]}"


def allocate(module: torch.nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Put uninitialised parameters in the place of the module's own. Shared ones stay shared."""
    allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in allocated:
                values = torch.empty_like(parameter, device=device, dtype=dtype)
                allocated[parameter] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            part.register_parameter(name, allocated[parameter])


@torch.no_grad()
def fix_rotary_scaling(model: PreTrainedModel, longest: int) -> None:
    """Set the frequencies of length-dependent rotary embeddings once, for the run's longest sample.

    transformers sets them in every pass by its largest position (longrope of Phi-3: two sets; dynamic: a formula), so a
    sample's logits would depend on the other samples in the batch, and change in the middle of an answer.
    """
    for module in model.modules():
        kinds = vars(module).get("rope_type")
        if isinstance(kinds, str) and depends_on_length(kinds):
            module(torch.zeros(1), last_position(longest))
            module.rope_type = fixed(kinds)
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if depends_on_length(kind):
                    module(torch.zeros(1), last_position(longest), layer_type)
                    kinds[layer_type] = fixed(kind)


def varies_with_length(model: PreTrainedModel) -> bool:
    """Whether the frequencies depend on the longest sample of a pass."""
    kinds = [vars(module).get("rope_type") for module in model.modules()]
    named = [name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])]
    return any(isinstance(name, str) and depends_on_length(name) for name in named)


def depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def fixed(kind: str) -> str:
    """A rope type for which transformers does not recompute the frequencies."""
    return f"fixed {kind.replace('dynamic', 'ntk')}"


def last_position(longest: int) -> Tensor:
    return torch.tensor([[longest - 1]])
