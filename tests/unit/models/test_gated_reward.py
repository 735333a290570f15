"""ArmoRM's architecture: the score is worked out by hand, and without any of its repository's code."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from rloom.families.classifier import scoring_layout
from rloom.models.classifier import (
    ANSWER_HEADER,
    ARCHITECTURE,
    Classifier,
    GatedRewardModel,
    PassLayout,
    load_classifier,
)
from rloom.models.classifier_scorer import ClassifierScorer
from rloom.models.conversations import Conversation, ConversationEncoder
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching
from tests.classifiers import sample, word_tokenizer
from tests.helpers import SHAPE

CPU, WHOLE = torch.device("cpu"), MicroBatching(tokens=10_000)
OBJECTIVES, INNER = 19, 24
# two questions with an answer each, and the token that ends a prompt: the first of its last header
CONVERSATIONS = ((1, 7, 8, *ANSWER_HEADER, 9, 10, 11), (1, 7, *ANSWER_HEADER, 5, 128009, 12, *ANSWER_HEADER, 13))
PROMPT_ENDS = (3, 10)


def gated_config(**changes: int | float) -> LlamaConfig:
    shape = {**SHAPE, "vocab_size": 128_256, "hidden_size": 32, "pad_token_id": None, "initializer_range": 0.1}
    settings = {"num_objectives": OBJECTIVES, "gating_hidden_dim": INNER, "gating_temperature": 10}
    return LlamaConfig(**(shape | settings | changes), architectures=[ARCHITECTURE])


def test_the_score_by_hand() -> None:
    sizes = {"vocab_size": 8, "num_objectives": 2, "gating_hidden_dim": 2, "gating_n_hidden": 1}
    config = gated_config(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, gating_temperature=0.5, **sizes)
    model = GatedRewardModel(config)
    with torch.no_grad():
        model.regression_layer.weight.copy_(torch.eye(2))
        model.reward_transform_matrix.copy_(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
        for layer in model.gating.layers:
            layer.weight.copy_(torch.eye(2))
            layer.bias.zero_()
        model.gating.logit_scale.fill_(2.0)
        # objectives (2, 4) -> (2, -2 + 8); gate: relu (ln 3 / 2, 0), / 0.5, softmax (3/4, 1/4), x 2 = (1.5, 0.5)
        found = model.scores(torch.tensor([[2.0, 4.0]]), torch.tensor([[math.log(3) / 2, -5.0]]))
    assert found.tolist() == [[pytest.approx(1.5 * 2 + 0.5 * 6)]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Random weights with the names and shapes of ArmoRM's, and code that must not run."""
    config = gated_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = {f"model.{name}": tensor for name, tensor in LlamaModel(config).state_dict().items()}
        sizes = [config.hidden_size, INNER, INNER, INNER, OBJECTIVES]
        for number, (inputs, outputs) in enumerate(pairwise(sizes)):
            weights[f"gating.layers.{number}.weight"] = torch.randn(outputs, inputs)
            weights[f"gating.layers.{number}.bias"] = torch.randn(outputs)
        weights["gating.logit_scale"] = torch.tensor([1.3])
        weights["regression_layer.weight"] = torch.randn(OBJECTIVES, config.hidden_size)
        weights["reward_transform_matrix"] = torch.randn(OBJECTIVES, OBJECTIVES)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoModelForSequenceClassification": f"modeling_custom.{ARCHITECTURE}"}
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "auto_map": code}))
    (tmp_path / "modeling_custom.py").write_text("raise SystemExit('this code ran')")
    return tmp_path


@torch.no_grad()
def expected_scores(folder: Path) -> list[float]:
    """From the weights of the file and transformers' own Llama, one conversation at a time."""
    weights = load_file(folder / "model.safetensors")
    body = LlamaModel._from_config(gated_config(), attn_implementation="eager").eval()
    body.load_state_dict({name.removeprefix("model."): one for name, one in weights.items() if "model." in name})
    found = []
    for tokens, prompt_end in zip(CONVERSATIONS, PROMPT_ENDS, strict=True):
        hidden_TH = body(torch.tensor([tokens])).last_hidden_state[0]
        gate: Tensor = hidden_TH[prompt_end]
        for number in range(4):
            gate = weights[f"gating.layers.{number}.weight"] @ gate + weights[f"gating.layers.{number}.bias"]
            gate = gate.clamp(min=0) if number < 3 else gate
        powers = (gate / 10).exp()
        objectives = (weights["regression_layer.weight"] @ hidden_TH[-1]) @ weights["reward_transform_matrix"]
        found.append(float(1.3 * (powers / powers.sum()) @ objectives))
    return found


def source_of(folder: Path, *, trusted: bool = False) -> ModelSource:
    return ModelSource(str(folder), key="reward_model.path", trust_remote_code=trusted)


@pytest.mark.parametrize("trusted", [False, True])
def test_every_layout_scores_as_the_formula_does(folder: Path, trusted: bool) -> None:
    expected = expected_scores(folder)
    assert abs(expected[0] - expected[1]) > 0.1
    source, some = source_of(folder, trusted=trusted), [Conversation(tokens) for tokens in CONVERSATIONS]
    chosen = [scoring_layout(source, packed=packed) for packed in (True, False)]
    assert [one.layout for one in chosen] == [PassLayout.PACKED, PassLayout.PADDED]
    for one in chosen:
        model = load_classifier(source, dtype=torch.float32, attention=one.attention)
        outputs = Classifier(model, one.layout).outputs(some, CPU)
        assert outputs.flatten().tolist() == pytest.approx(expected, rel=1e-4)
    alone = Classifier(load_classifier(source, dtype=torch.float32, attention="eager"), PassLayout.SINGLE)
    assert [alone.outputs([one], CPU).item() for one in some] == pytest.approx(expected, rel=1e-4)


def test_a_conversation_without_the_header_of_an_answer_has_no_score(folder: Path) -> None:
    model = load_classifier(source_of(folder), dtype=torch.float32, attention="eager")
    encoder = ConversationEncoder(word_tokenizer(chat=True), max_length=64, truncation="error")
    scorer = ClassifierScorer(Classifier(model, PassLayout.PADDED), encoder, device=CPU, batching=WHOLE)
    [score] = scorer.score([sample("w7 w8", "w9")]).scores
    assert score.reason is not None and score.reason.startswith("the conversation has no header of an answer (<|start_")
