"""The reward model's queue, its keys and its place among the workers."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.effects import without_effect
from rloom.errors import ConfigError, ModelError
from rloom.launch.model_sources import reward_source
from rloom.launch.rewards import check_reward_model, reward_scorer
from rloom.models.classifier_scorer import HostWeights, ScoredConversations
from rloom.packing import MicroBatching
from rloom.rewards.base import ScoringUnit
from rloom.runtime.group import LocalGroup
from rloom.runtime.placement import REWARD, worker_layout
from rloom.training.reward_model import ModelQueue
from rloom.types import Sample, Score
from tests.classifiers import llama_config, random_classifier, sample, samples, save_classifier
from tests.helpers import configured

WORKERS = ("trainer.n_gpus_per_node=4", "trainer.device=cpu")


class LengthScorer:
    """Scores an answer by its number of words, and keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def score(self, some: Sequence[Sample]) -> ScoredConversations:
        self.calls.append([one.response for one in some])
        scores = [Score(float(len(one.response.split()))) for one in some]
        return ScoredConversations(scores, tokens=10 * len(some), truncated=1)


def queue_of(scorers: Sequence[LengthScorer], *, during_generation: bool) -> ModelQueue:
    return ModelQueue([LocalGroup([scorer]) for scorer in scorers], during_generation=during_generation)


def answers(*lengths: int) -> tuple[Sample, ...]:
    return tuple(sample("q", " ".join(["a"] * length)) for length in lengths)


def found(scores: Any) -> list[list[float | None]]:
    return [[score.value for score in group] for group in scores.result()]


def test_shared_workers_score_a_whole_generation_in_balanced_shares_when_asked_for_the_scores() -> None:
    scorers = [LengthScorer(), LengthScorer()]
    queue = queue_of(scorers, during_generation=False)
    pending = queue.submit([answers(9, 1), answers(2, 8)])
    assert queue.unit is ScoringUnit.BATCH and [scorer.calls for scorer in scorers] == [[], []]
    assert found(pending) == [[9.0, 1.0], [2.0, 8.0]]
    assert found(pending) == [[9.0, 1.0], [2.0, 8.0]]  # read once
    lengths = [sorted(len(text.split()) for text in call) for scorer in scorers for call in scorer.calls]
    assert lengths == [[1, 9], [2, 8]]  # with a question of one token each, 12 tokens for each worker
    assert queue.metrics() == {"tokens": 40.0, "truncated": 2.0}
    assert queue.metrics() == {"tokens": 0.0, "truncated": 0.0}


def test_workers_of_its_own_get_the_answers_to_a_prompt_by_load() -> None:
    scorers = [LengthScorer(), LengthScorer()]
    queue = queue_of(scorers, during_generation=True)
    assert queue.unit is ScoringUnit.PROMPT
    pending = [queue.submit([group]) for group in (answers(9, 9), answers(2, 2), answers(3, 3), answers(4, 4))]
    assert queue.loads == [20, 24]  # 6 and 8 tokens do not reach 20, so the second worker gets three of the four
    assert [found(scores) for scores in pending] == [[[9.0, 9.0]], [[2.0, 2.0]], [[3.0, 3.0]], [[4.0, 4.0]]]


def test_passes_do_not_depend_on_the_order_of_the_answers() -> None:
    calls = []
    for order in ((1, 5, 3, 2), (3, 2, 5, 1)):
        scorer = LengthScorer()
        assert found(queue_of([scorer], during_generation=False).submit([answers(*order)])) == [[*map(float, order)]]
        calls.append(scorer.calls)
    assert calls[0] == calls[1]


def test_weights_on_the_host_are_the_models_own_before_and_after_they_are_used() -> None:
    model = random_classifier(llama_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = HostWeights(model, torch.device("cpu"))
    with weights.on_device():
        model(input_ids=torch.tensor([[5, 6]]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [tensor.data_ptr() for tensor in weights.tensors] == [copy.data_ptr() for copy in weights.host]


def test_the_reward_model_shares_the_actors_workers_or_has_its_own() -> None:
    assert worker_layout(1, 4, {}).pool_of(REWARD).name == "actor+critic+ref+rollout+reward"
    layout = worker_layout(1, 4, {"reward": 1, "rollout": 1})
    assert [(pool.name, pool.first, pool.size) for pool in layout.pools] == [
        ("actor+critic+ref", 0, 2),
        ("reward", 2, 1),
        ("rollout", 3, 1),
    ]


def faults(*overrides: str) -> str:
    config = configured("data.train_files=a.parquet", *overrides)
    with pytest.raises(ConfigError) as caught:
        check(config, declared_needs(config))
    return str(caught.value)


def test_a_path_enables_the_reward_model_in_either_spelling() -> None:
    for key in ("reward_model.path", "reward_model.model.path"):
        config = configured(f"{key}=some/model", "reward_model.model.trust_remote_code=True")
        check(config, declared_needs(config))
        assert config.reward_model.model_path == "some/model"
        source = reward_source(config)
        assert (source.key, source.path, source.trust_remote_code) == (key, "some/model", True)
    assert configured("reward_model.path=some/model", "reward_model.enable=False").reward_model.model_path is None


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["reward_model.enable=True"], "reward_model.enable=True needs a reward model: reward_model.path=FOLDER"),
        (
            ["reward_model.path=a", "reward_model.model.path=b"],
            "reward_model.path=a and reward_model.model.path=b are the same key; keep one",
        ),
        (
            ["reward_model.path=a", "reward_model.model.input_tokenizer=other"],
            "reward_model.model.input_tokenizer=other: answers are decoded with the policy's tokenizer",
        ),
        (["reward_model.path=a", "reward_model.label_weights=[0]"], "label_weights=[0.0]: every score would be 0"),
        (
            ["reward_model.path=a", "reward_model.micro_batch_size=6", *WORKERS],
            "reward_model.micro_batch_size=6 (samples of all GPUs together) does not divide among 4 GPUs; use 4 or 8",
        ),
        (["reward_model.max_length=9"], "reward_model.max_length=9: no effect in this run, because there is no reward"),
        (["trainer.pools.reward=1", *WORKERS], "trainer.pools.reward=1: no effect in this run, because there is no re"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], reason: str) -> None:
    assert reason in faults(*overrides)


def test_keys_of_a_reward_model_that_is_switched_off_are_noted() -> None:
    config = configured("reward_model.enable=False", "reward_model.path=a", "trainer.device=cpu")
    needs = declared_needs(config)
    check(config, needs)
    assert "reward_model.path=a: no effect in this run, because there is no reward model; set reward_model.path" in (
        without_effect(config, needs).notices
    )


def test_passes_are_cut_by_conversations_or_by_tokens() -> None:
    for keys, expected in {
        (): MicroBatching(tokens=32768),
        ("micro_batch_size_per_gpu=3",): MicroBatching(samples=3),
        ("micro_batch_size=8",): MicroBatching(samples=2),
        ("micro_batch_size=8", "use_dynamic_bsz=True", "forward_max_token_len_per_gpu=99"): MicroBatching(tokens=99),
    }.items():
        section = configured(*(f"reward_model.{key}" for key in keys)).reward_model
        assert section.batching(ranks=4) == expected


def test_the_scorer_of_a_run_reads_every_key(tmp_path: Path) -> None:
    save_classifier(tmp_path, llama_config(labels=2))
    keys = ("max_length=20", "truncation=left", "label_weights=[1,-1]", "micro_batch_size_per_gpu=2")
    config = configured(
        f"reward_model.path={tmp_path}",
        *(f"reward_model.{key}" for key in keys),
        "reward_model.model.fsdp_config.dtype=bfloat16",
        "reward_model.model.use_remove_padding=False",
        "trainer.device=cpu",
    )
    scorer = reward_scorer(config, worker_layout(1, 1, {}))
    assert scorer.description == "bfloat16 on cpu, conversations padded"
    assert (scorer.encoder.max_length, scorer.encoder.truncation) == (20, "left")
    assert (scorer.batching, scorer.label_weights) == (MicroBatching(samples=2), [1.0, -1.0])
    scored = scorer.score(samples())
    assert all(score.value == score.parts["LABEL_0"] - score.parts["LABEL_1"] for score in scored.scores)
    assert scored.truncated == 1  # 8 + 8 + 5 tokens


def test_a_reward_model_that_cannot_be_used_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_classifier(folder, llama_config())
    check_reward_model(configured(f"reward_model.path={folder}"))
    for extra, reason in {
        "reward_model.max_length=65": r"reward_model.max_length=65: reward_model.path=.*model takes 64 tokens; use 64",
        "reward_model.path=./nowhere": r"reward_model.path=./nowhere: there is no such folder",
    }.items():
        with pytest.raises(ModelError, match=reason):
            check_reward_model(configured(f"reward_model.path={folder}", extra))
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    with pytest.raises(ModelError, match=r"reward_model.path=.*bare: no tokenizer could be loaded"):
        check_reward_model(configured(f"reward_model.path={bare}"))
