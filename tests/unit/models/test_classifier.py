"""Reward models score a conversation as transformers' own forward does for it alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, PreTrainedConfig, pipeline

from rloom.config.load import load_config
from rloom.errors import ModelError
from rloom.families.classifier import check_layouts, scoring_layout
from rloom.launch.rewards import reward_moments
from rloom.models.classifier import Classifier, PassLayout, load_classifier
from rloom.models.classifier_scorer import ClassifierScorer
from rloom.models.conversations import Conversation, ConversationEncoder, length_limit
from rloom.models.load import TOKENIZERS, load_tokenizer
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching
from rloom.types import Sample
from tests.classifiers import deberta_config, llama_config, random_classifier, sample, samples, save_classifier, words
from tests.helpers import FAMILIES, SHAPE, tiny_model

# transformers compiles parts of DeBERTa with it when the module is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
CPU = torch.device("cpu")
WHOLE = MicroBatching(tokens=10_000)


def source_of(folder: Path, **settings: Any) -> ModelSource:
    return ModelSource(str(folder), key="reward_model.path", **settings)


def scorer_of(
    folder: Path,
    *,
    packed: bool = True,
    batching: MicroBatching = WHOLE,
    label_weights: Sequence[float] | None = None,
    max_length: int | None = None,
    truncation: str = "error",
) -> ClassifierScorer:
    source = source_of(folder)
    chosen = scoring_layout(source, packed=packed)
    tokenizer = load_tokenizer(source)
    model = load_classifier(source, dtype=torch.float32, attention=chosen.attention)
    limit = max_length or length_limit(tokenizer, model.config.max_position_embeddings)
    return ClassifierScorer(
        Classifier(model, chosen.layout),
        ConversationEncoder(tokenizer, max_length=limit, truncation=truncation),
        device=CPU,
        batching=batching,
        label_weights=label_weights,
    )


def values(scorer: ClassifierScorer, some: Sequence[Sample]) -> list[float]:
    return [score.value for score in scorer.score(some).scores if score.value is not None]


def chat_tokens(folder: Path, one: Sample) -> list[int]:
    """By the tokenizer's own call for chats."""
    messages = [*one.messages, {"role": "assistant", "content": one.response}]
    found = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=True, return_dict=True)
    return list(found["input_ids"])


@torch.no_grad()
def own_values(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    return [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_classifier(tmp_path / "llama", llama_config())
    return tmp_path / "llama"


@pytest.fixture
def deberta(tmp_path: Path) -> Path:
    save_classifier(tmp_path / "deberta", deberta_config(), chat=False)
    return tmp_path / "deberta"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("batching", [WHOLE, MicroBatching(tokens=20), MicroBatching(samples=2)], ids=str)
def test_a_llama_classifier_scores_as_its_own_forward_does_one_by_one(
    llama: Path, packed: bool, batching: MicroBatching
) -> None:
    scorer = scorer_of(llama, packed=packed, batching=batching)
    assert scorer.classifier.layout is (PassLayout.PACKED if packed else PassLayout.PADDED)
    expected = own_values(llama, [chat_tokens(llama, one) for one in samples()])
    assert values(scorer, samples()) == pytest.approx(expected, rel=1e-4)
    assert max(expected) - min(expected) > 0.1  # the conversations differ


@pytest.mark.parametrize("batching", [WHOLE, MicroBatching(tokens=30), MicroBatching(samples=2)], ids=str)
def test_a_deberta_classifier_scores_pairs_as_transformers_pipeline_does(
    deberta: Path, batching: MicroBatching
) -> None:
    scorer = scorer_of(deberta, batching=batching)
    assert scorer.classifier.layout is PassLayout.ROWS
    classify = pipeline("text-classification", model=str(deberta), function_to_apply="none")
    expected = [classify({"text": one.prompt, "text_pair": one.response})["score"] for one in samples()]
    assert values(scorer, samples()) == pytest.approx(expected, rel=1e-4)
    assert max(expected) - min(expected) > 0.1


def test_special_tokens_are_written_once_and_no_answer_is_begun(llama: Path, deberta: Path) -> None:
    one = sample("w7 w8", "w9")
    [chat] = scorer_of(llama).encoder.encode([one])
    [pair] = scorer_of(deberta).encoder.encode([one])
    # <s> user w7 w8 </s> assistant w9 </s>
    assert chat.tokens == (1, 4, 7, 8, 2, 5, 9, 2)  # type: ignore[union-attr]
    # <s> w7 w8 </s> w9 </s>, the answer in the second segment
    assert (pair.tokens, pair.segments) == ((1, 7, 8, 2, 9, 2), (0, 0, 0, 0, 1, 1))  # type: ignore[union-attr]


def test_earlier_messages_are_part_of_the_conversation(llama: Path, deberta: Path) -> None:
    one = sample("w8", "w9", {"role": "system", "content": "w7"})
    assert values(scorer_of(llama), [one]) == pytest.approx(own_values(llama, [[1, 6, 7, 2, 4, 8, 2, 5, 9, 2]]))
    [pair] = scorer_of(deberta).encoder.encode([one])
    assert pair.tokens == (1, 7, 8, 2, 9, 2)  # type: ignore[union-attr]


def test_a_template_that_refuses_the_messages_fails_that_answer_alone(llama: Path) -> None:
    bad = sample("w7", "w8", {"role": "tool", "content": "w9"})
    first, second, third = scorer_of(llama).score([samples()[0], bad, samples()[1]]).scores
    assert second.reason == "the reward model's chat template refuses the conversation: no tools"
    assert [first.value, third.value] == pytest.approx(values(scorer_of(llama), samples()[:2]))


def test_an_answer_is_scored_at_its_last_token_that_is_not_the_padding_token(tmp_path: Path) -> None:
    for pad_id in (2, None):  # </s>, the last token of every conversation; no padding token at all
        folder = tmp_path / str(pad_id)
        model = save_classifier(folder, llama_config(pad_token_id=pad_id))
        with torch.no_grad():
            rows = [torch.tensor([chat_tokens(folder, one)]) for one in samples()]
            expected = [float(model(input_ids=row).logits[0, 0]) for row in rows]
        for packed in (True, False):
            assert values(scorer_of(folder, packed=packed), samples()) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_that_holds_the_padding_token_gets_a_pass_of_its_own() -> None:
    classifier = Classifier(random_classifier(deberta_config()), PassLayout.ROWS)
    rows = [(1, 7, 2), (1, 0, 7, 2), (1, 7, 8, 9, 2)]
    assert classifier.passes([Conversation(tokens) for tokens in rows], WHOLE) == [[2, 0], [1]]


def test_padded_passes_hold_the_budget_with_their_padding() -> None:
    classifier = Classifier(random_classifier(deberta_config()), PassLayout.ROWS)
    some = [Conversation((7,) * length) for length in (3, 10, 4, 9, 2)]
    # 20 tokens: two rows of 10; four rows of 4 would fit, three are left
    assert classifier.passes(some, MicroBatching(tokens=20)) == [[1, 3], [2, 0, 4]]
    assert classifier.passes(some, MicroBatching(samples=4)) == [[1, 3, 2, 0], [4]]


def test_several_labels_are_averaged_or_weighted_and_each_is_a_part(tmp_path: Path) -> None:
    config = llama_config(labels=3)
    config.id2label = {0: "helpful", 1: "honest", 2: "long"}
    model = save_classifier(tmp_path, config)
    with torch.no_grad():
        tokens = torch.tensor([chat_tokens(tmp_path, samples()[0])])
        outputs = model(input_ids=tokens).logits[0].tolist()
    [mean] = scorer_of(tmp_path).score(samples()[:1]).scores
    normal = scorer_of(tmp_path)
    normal.moments = (2.0, 4.0)
    [normalized] = normal.score(samples()[:1]).scores
    assert mean.value is not None and normalized.value == pytest.approx((mean.value - 2) / 4)
    [weighted] = scorer_of(tmp_path, label_weights=[1.0, 0.5, -2.0]).score(samples()[:1]).scores
    assert mean.parts == pytest.approx(dict(zip(("helpful", "honest", "long"), outputs, strict=True)), rel=1e-4)
    assert mean.value == pytest.approx(sum(outputs) / 3, rel=1e-4)
    assert weighted.value == pytest.approx(outputs[0] + 0.5 * outputs[1] - 2 * outputs[2], rel=1e-4)
    with pytest.raises(ModelError, match=r"label_weights=\[1.0\]: the reward model has 3 labels \(helpful, honest, lo"):
        scorer_of(tmp_path, label_weights=[1.0])


def test_an_output_that_is_not_finite_is_a_failure(llama: Path) -> None:
    scorer = scorer_of(llama)
    scorer.classifier.head.weight.data.fill_(float("nan"))
    scores = scorer.score(samples()).scores
    assert {score.reason for score in scores} == {
        "the reward model's output is [nan]; the reward is nan, which is not finite"
    }
    assert scorer.score_of([1e30]).value == 1e30
    assert scorer.score_of([-2e38]).reason == (
        "the reward model's output is [-2e+38]; the reward is -2e+38, which is beyond 1e+30"
    )


def test_a_conversation_over_the_limit_fails_or_is_cut(llama: Path) -> None:
    long = sample(words(10), words(60, 9))  # 10 + 60 + 5 tokens, and the model takes 64
    scored = scorer_of(llama).score([long, samples()[0]])
    assert scored.scores[0].reason == (
        "the conversation has 75 tokens, the reward model takes 64; reward_model.truncation=left or right would "
        "shorten it"
    )
    assert scored.scores[1].ok and scored.truncated == 0
    tokens = chat_tokens(llama, long)
    for truncation, kept in {"left": tokens[-64:], "right": tokens[:64]}.items():
        scorer = scorer_of(llama, truncation=truncation)
        scored = scorer.score([long])
        assert [scored.scores[0].value] == pytest.approx(own_values(llama, [kept]), rel=1e-4)
        assert (scored.truncated, scored.tokens) == (1, 64)


def test_a_pair_loses_the_begin_of_its_question_or_the_end_of_its_answer(deberta: Path) -> None:
    one = sample("w7 w8 w9 w10", "w11 w12 w13")  # 4 + 3 + 3 tokens
    left, right = (
        scorer_of(deberta, max_length=8, truncation=side).encoder.encode([one])[0] for side in ("left", "right")
    )
    assert left.tokens == (1, 9, 10, 2, 11, 12, 13, 2)  # type: ignore[union-attr]
    assert right.tokens == (1, 7, 8, 9, 10, 2, 11, 2)  # type: ignore[union-attr]
    [short] = scorer_of(deberta, max_length=5, truncation="left").score([one]).scores
    assert short.reason is not None and short.reason.startswith("reward_model.truncation=left: removing the whole que")


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    tiny_model(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the checkpoint has no score.weight, which LlamaForSequenceClassification n"):
        load_classifier(source_of(tmp_path), dtype=torch.float32, attention="eager")


class ValueHead(nn.Module):
    """The layout of InstructGPT-style checkpoints, such as Starling-RM-7B-alpha."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model(LlamaConfig(**SHAPE))
        self.transformer = self.model.model
        self.v_head = nn.Linear(SHAPE["hidden_size"], 1, bias=False)


def test_a_value_head_beside_a_causal_model_is_read_as_the_head(tmp_path: Path) -> None:
    whole = ValueHead()
    whole.model.config.save_pretrained(tmp_path)
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    model = load_classifier(source_of(tmp_path), dtype=torch.float32, attention="eager")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = whole.v_head(whole.transformer(tokens).last_hidden_state[0, -1])
        torch.testing.assert_close(model(input_ids=tokens).logits[0], expected)


def test_the_head_and_the_moments_of_a_reward_model_of_openrlhf_are_read(tmp_path: Path) -> None:
    whole = ValueHead()
    whole.model.config.update({"normalize_reward": True, "value_head_prefix": "v", "mean": 2.0, "std": 4.0})
    whole.model.config.save_pretrained(tmp_path)
    weights = {f"model.{name}": tensor for name, tensor in whole.transformer.state_dict().items()}
    torch.save({**weights, "v.weight": whole.v_head.weight}, tmp_path / "pytorch_model.bin")
    model = load_classifier(source_of(tmp_path), dtype=torch.float32, attention="eager")
    assert torch.equal(model.score.weight, whole.v_head.weight)
    for keys, moments in ((["reward_model.model.normalize=True"], (2.0, 4.0)), ([], (0.0, 1.0))):
        assert reward_moments(load_config([f"reward_model.path={tmp_path}", *keys])) == moments


def test_a_repository_without_a_tokenizer_gets_the_one_of_its_model_card(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "berkeley-nest/Starling-RM-7B-alpha"
    assert TOKENIZERS[name] == "meta-llama/Llama-2-7b-chat-hf"
    monkeypatch.setitem(TOKENIZERS, name, str(llama))
    assert load_tokenizer(ModelSource(name, key="reward_model.path"))("w7 w8")["input_ids"] == [1, 7, 8, 2]
    monkeypatch.setitem(TOKENIZERS, name, "./none")
    with pytest.raises(ModelError, match=rf"^reward_model.path={name}: its tokenizer=./none: there is no such folder"):
        load_tokenizer(ModelSource(name, key="reward_model.path"))


# Two labels that the model combines itself. One import exists in older transformers only, as in ArmoRM's code.
REMOTE_CODE = """
from dataclasses import dataclass
import torch
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LLAMA_INPUTS_DOCSTRING
from transformers.utils import ModelOutput

@dataclass
class Output(ModelOutput):
    rewards: torch.Tensor = None
    score: torch.Tensor = None
    logits: torch.Tensor = None

class Combining(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.regression = nn.Linear(config.hidden_size, 2, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None):
        if 61 not in input_ids[0]:
            raise ValueError("the token 61 marks an answer")
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        rewards = self.regression(hidden[:, -1])
        return Output(rewards=rewards, score=rewards[:, 0] - 3 * rewards[:, 1], logits=rewards)
"""


def save_remote(folder: Path) -> None:
    """The checkpoint of a class that transformers does not have."""
    model = save_classifier(folder, llama_config(labels=2))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "regression.weight": model.score.weight}, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "combining.Combining"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "combining.py").write_text(REMOTE_CODE)


def test_a_model_with_its_own_code_gives_its_own_score_once_it_is_trusted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = str(tmp_path_factory.mktemp("modules"))  # transformers copies the code there before it imports it
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", copies)
    save_remote(tmp_path)
    with pytest.raises(ModelError, match=r"no score.weight.* regression.weight .*reward_model.trust_remote_code=True"):
        load_classifier(source_of(tmp_path), dtype=torch.float32, attention="eager")
    source = source_of(tmp_path, trust_remote_code=True)
    chosen = scoring_layout(source, packed=True)
    assert (
        chosen.layout is PassLayout.SINGLE
    )  # the small model's two random samples do not hold the token that it needs
    model = load_classifier(source, dtype=torch.float32, attention=chosen.attention)
    encoder = ConversationEncoder(load_tokenizer(source), max_length=64, truncation="error")

    def scorer(label_weights: Sequence[float] | None = None) -> ClassifierScorer:
        return ClassifierScorer(
            Classifier(model, chosen.layout), encoder, device=CPU, batching=WHOLE, label_weights=label_weights
        )

    some = [sample("w7 w61", "w8"), sample("w7 w8 w61", "w9 w10")]
    expected = []
    with torch.no_grad():
        for one in some:
            tokens = torch.tensor([chat_tokens(tmp_path, one)])
            first, second = model.regression(model.model(tokens).last_hidden_state[0, -1]).tolist()
            expected.append(first - 3 * second)
    assert values(scorer(), some) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ModelError, match="Combining combines its 2 labels to one score itself; remove the key"):
        scorer([1.0, 1.0]).score(some)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_families_with_windows_and_caps_are_packed(family: str) -> None:
    config: PreTrainedConfig = FAMILIES[family]()
    config.num_labels = 2
    found = {one.layout: fault for one, fault in check_layouts(random_classifier(config)).items() if fault is None}
    assert PassLayout.PACKED in found


def test_a_family_whose_attention_is_its_own_is_padded() -> None:
    faults = check_layouts(random_classifier(deberta_config(labels=2)))
    assert [one.layout for one, fault in faults.items() if fault is None] == [PassLayout.ROWS]


def test_rotary_frequencies_that_depend_on_the_pass_are_computed_one_conversation_at_a_time(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save_classifier(tmp_path, llama_config(rope_parameters=rope))
    assert scoring_layout(source_of(tmp_path), packed=True).layout is PassLayout.SINGLE


def test_the_limit_is_the_lesser_of_model_and_tokenizer(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert length_limit(tokenizer, 512) == 512  # the tokenizer has none
    assert length_limit(tokenizer, None) is None
    tokenizer.model_max_length = 128
    assert length_limit(tokenizer, 512) == 128


def test_the_embedded_reward_model_is_the_same_each_time_and_its_scores_differ() -> None:
    """For smoke runs: the body is the embedded model's, the head comes from a fixed seed."""
    source = ModelSource("embedded", key="reward_model.path")
    one, other = (load_classifier(source, dtype=torch.float32, attention="sdpa") for _ in range(2))
    assert one.config.num_labels == 1
    assert torch.equal(one.score.weight, other.score.weight)
    tokens = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    with torch.no_grad():
        first, second = one(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.flatten().tolist()
    assert first != second
