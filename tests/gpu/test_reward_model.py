"""A reward model on a GPU: the scores of the CPU, and weights that leave no memory behind when they are offloaded."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from rloom.families.classifier import scoring_layout
from rloom.models.classifier import Classifier, load_classifier
from rloom.models.classifier_scorer import ClassifierScorer
from rloom.models.conversations import ConversationEncoder
from rloom.models.load import load_tokenizer
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching
from tests.classifiers import deberta_config, llama_config, samples, save_classifier

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # transformers compiles parts of DeBERTa with torch.jit
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def scorer(
    folder: Path, device: torch.device, dtype: torch.dtype, *, offload: bool, compiled: bool = False
) -> ClassifierScorer:
    source = ModelSource(str(folder), key="reward_model.path")
    chosen = scoring_layout(source, packed=True)
    return ClassifierScorer(
        Classifier(load_classifier(source, dtype=dtype, attention=chosen.attention), chosen.layout),
        ConversationEncoder(load_tokenizer(source), max_length=64, truncation="error"),
        device=device,
        batching=MicroBatching(tokens=40),
        offload=offload,
        compiled=compiled,
    )


def values(found: ClassifierScorer) -> list[float]:
    return [score.value for score in found.score(samples()).scores if score.value is not None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("config", [llama_config(), deberta_config()], ids=["llama", "deberta"])
def test_offloaded_weights_score_as_on_the_cpu_and_leave_the_gpu(
    config: PreTrainedConfig, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    save_classifier(tmp_path, config, chat=config.model_type == "llama")
    expected = values(scorer(tmp_path, CPU, torch.float32, offload=False))
    resident = values(scorer(tmp_path, CUDA, dtype, offload=False))
    offloaded = scorer(tmp_path, CUDA, dtype, offload=True)
    before = torch.cuda.memory_allocated()
    first, second = values(offloaded), values(offloaded)
    assert first == second == resident
    assert torch.cuda.memory_allocated() == before
    largest = max(abs(value) for value in expected)
    compiled = scorer(tmp_path, CUDA, dtype, offload=True, compiled=True)
    assert values(compiled) == values(compiled) == pytest.approx(first, abs=tolerance * largest)
    assert first == pytest.approx(expected, abs=tolerance * largest)
