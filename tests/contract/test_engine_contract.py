"""What every training engine owes the roles that use it. Another engine joins by one entry in ENGINES."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import ValueObjective
from rloom.batch import TokenOutputs, TrainBatch
from rloom.engines.base import AdamW, Engine, Placement
from rloom.engines.storage import TensorFile
from rloom.errors import CheckpointError, TrainingError
from rloom.hashed_files import read_report
from rloom.models.checkpoint_format import merge_adapter, save_pretrained
from rloom.models.load import Lora
from rloom.packing import MicroBatching
from rloom.runtime.group import LocalGroup
from rloom.training.roles import Learner, Scorer
from tests.engine_subjects import ENGINES, OBJECTIVE, WHOLE, Subject, learner
from tests.helpers import (
    ADAMW,
    FAMILIES,
    Weights,
    a_batch,
    assert_identical,
    assert_same,
    eager_model,
    recorded_syncs,
    samples_of,
    save_model,
    tiny_tokenizer,
    train_batch,
)

EVERYTHING = frozenset({"model", "optimizer"})
LORA = Lora(rank=4)


def learn(who: Learner, batch: TrainBatch, step: int) -> dict[str, float]:
    return who.learn(batch, step, progress=lambda done, total: None)


def taught(
    subject: Subject, *engines: Engine, objective: Any = OBJECTIVE, batch: TrainBatch | None = None
) -> tuple[list[Weights], dict[str, float]]:
    """The gradient that the lesson leaves in each engine, and its metrics."""
    who, batch = learner(*engines, objective=objective), train_batch() if batch is None else batch
    shares = who.accumulate(batch)
    gradients = [subject.gradients(engine) for engine in engines]
    return gradients, who.apply(0.0, batch, shares).metrics


SPLITS = {
    "two": {"micro": MicroBatching(samples=4)},
    "eight": {"micro": MicroBatching(samples=1)},
    "by tokens": {"micro": MicroBatching(tokens=20)},
    "padded": {"packed": False},
    "padded, by tokens": {"packed": False, "micro": MicroBatching(tokens=30)},
    "checkpointed": {"checkpointing": True},
    "checkpointed, padded, three": {"checkpointing": True, "packed": False, "micro": MicroBatching(samples=3)},
}


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# every split and every aggregation once; the other pairs are long
SPLIT_PAIRS = [
    pytest.param(aggregation, split, marks=[pytest.mark.long] * (aggregation != "token-mean" and split != "by tokens"))
    for aggregation in AGGREGATIONS
    for split in SPLITS
]


@pytest.mark.parametrize(("aggregation", "split"), SPLIT_PAIRS)
def test_the_gradient_does_not_depend_on_the_split(
    subject: Subject, folder: Path, split: str, aggregation: str
) -> None:
    objective = replace(OBJECTIVE, aggregation=aggregation)
    whole, parts = subject.build(folder), subject.build(folder, **SPLITS[split])
    [whole_gradients], whole_metrics = taught(subject, whole, objective=objective)
    [parts_gradients], parts_metrics = taught(subject, parts, objective=objective)
    assert len(whole_gradients) == 27  # every parameter of a two-layer qwen2
    assert 0.1 < whole_metrics["actor/pg_clipfrac"] < 0.9  # some tokens are clipped and some are not
    assert_same(parts_gradients, whole_gradients)
    assert parts_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3"])
def test_windows_softcaps_and_tied_weights_keep_the_gradient(
    subject: Subject, model_folder: Callable[[str], Path], family: str
) -> None:
    whole = subject.build(model_folder(family))
    parts = subject.build(model_folder(family), micro=MicroBatching(samples=1), packed=False, checkpointing=True)
    learner(whole).accumulate(train_batch())
    learner(parts).accumulate(train_batch())
    assert_same(subject.gradients(parts), subject.gradients(whole))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_two_workers_gradients_are_one_workers_without_the_answers_that_are_not_in_the_loss(
    subject: Subject, folder: Path, aggregation: str
) -> None:
    """Truncated answers are such; here each worker has one of them, and the failed one of `train_batch` is removed."""
    objective = replace(OBJECTIVE, aggregation=aggregation)
    whole, trained = train_batch(), [0, 2, 3, 5, 7]
    masked = replace(whole, in_loss_N=torch.isin(torch.arange(8), torch.tensor(trained)))
    pair = [subject.build(folder, micro=MicroBatching(samples=size)) for size in (1, 3)]
    [gradients], _ = taught(subject, subject.build(folder), objective=objective, batch=whole.select(trained))
    [first, second], _ = taught(subject, *pair, objective=objective, batch=masked)
    assert_same({name: first[name] + second[name] for name in first}, gradients)


def test_two_workers_gradients_add_up_to_one_workers(subject: Subject, folder: Path) -> None:
    alone = subject.build(folder)
    pair = [
        subject.build(folder, micro=MicroBatching(samples=1)),
        subject.build(folder, micro=MicroBatching(tokens=25)),
    ]
    [gradients], alone_metrics = taught(subject, alone)
    [first, second], pair_metrics = taught(subject, *pair)
    assert_same({name: first[name] + second[name] for name in first}, gradients)
    assert pair_metrics == pytest.approx(alone_metrics, rel=1e-4, abs=1e-6)


def test_a_critics_gradient_does_not_depend_on_the_split(subject: Subject, folder: Path) -> None:
    objective = ValueObjective(clip_range=0.5, aggregation="token-mean")
    whole = subject.build(folder, critic=True)
    parts = subject.build(folder, critic=True, micro=MicroBatching(samples=1), packed=False, checkpointing=True)
    [whole_gradients], whole_metrics = taught(subject, whole, objective=objective)
    [parts_gradients], parts_metrics = taught(subject, parts, objective=objective)
    assert_same(parts_gradients, whole_gradients)
    assert parts_metrics == pytest.approx(whole_metrics)


def test_the_gradient_is_that_of_the_loss_written_out_by_hand(subject: Subject, folder: Path) -> None:
    """REINFORCE: with no old log-probs the ratio is 1 and its gradient that of the log-prob."""
    objective = replace(OBJECTIVE, entropy_coefficient=0.0, kl_coefficient=None)
    engine, batch, model = subject.build(folder), a_batch(), eager_model(folder)
    learner(engine, objective=objective).accumulate(batch)
    loss = torch.zeros(())
    advantages = batch.advantages_T.split(batch.length_N.tolist())
    for (tokens, mask), advantage, valid in zip(samples_of(batch), advantages, batch.valid_N, strict=True):
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        loss = loss - (advantage[1:] * logprobs * mask[1:]).sum() * valid
    (loss / 54).backward()  # 57 written tokens, 3 of them in the answer whose score failed
    assert_same(subject.gradients(engine), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("micro", [WHOLE, MicroBatching(samples=3), MicroBatching(tokens=20)])
def test_score_gives_the_logprobs_that_the_objective_sees(subject: Subject, folder: Path, micro: MicroBatching) -> None:
    seen: list[Tensor] = []

    class Spy:
        needs_entropy_gradient = needs_full_kl = records_tokens = False

        def __call__(self, outputs: TokenOutputs, batch: TrainBatch, counts: Counts) -> Any:
            seen.append(outputs.output_T.detach())
            return outputs.output_T.sum(), {}

    engine = subject.build(folder, micro=micro)
    subject.build(folder).forward_backward(train_batch(), Spy(), Counts(54, 7, 16))
    torch.testing.assert_close(engine.score(train_batch()), seen[0], atol=1e-5, rtol=1e-5)


def test_two_workers_score_what_one_scores(subject: Subject, folder: Path) -> None:
    alone, pair = subject.build(folder), [subject.build(folder), subject.build(folder)]
    expected_T = alone.score(train_batch())
    torch.testing.assert_close(Scorer(LocalGroup(pair)).score(train_batch()), expected_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(learner(*pair).scorer.score(train_batch()), expected_T, atol=1e-5, rtol=1e-5)


def test_scoring_leaves_the_gathered_gradient_alone(subject: Subject, folder: Path) -> None:
    engine = subject.build(folder)
    learner(engine).accumulate(train_batch())
    before = subject.gradients(engine)
    engine.score(train_batch())
    assert_identical(subject.gradients(engine), before)


def test_the_first_step_of_adamw_is_the_one_worked_out_by_hand(subject: Subject, folder: Path) -> None:
    """p <- p (1 - lr * decay) - lr * g / (|g| + 1e-8): after one step both moments, unbiased, are g and g squared."""
    engine = subject.build(folder, adamw=AdamW(weight_decay=0.1, betas=(0.9, 0.95), grad_clip=0.5))
    before, objective = subject.weights(engine), OBJECTIVE
    learner(engine, objective=objective).accumulate(train_batch())
    gradients = subject.gradients(engine)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    update = engine.optim_step(0.01)
    assert update.applied and update.grad_norm == pytest.approx(float(norm), rel=1e-5) and norm > 0.5
    for name, weight in subject.weights(engine).items():
        clipped = gradients[name] * 0.5 / (norm + 1e-6)
        expected = before[name] * (1 - 0.01 * 0.1) - 0.01 * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(weight, expected, atol=2e-6, rtol=0, msg=name)


def test_metrics_gather_as_gradients_do_and_are_forgotten_with_them(subject: Subject, folder: Path) -> None:
    """Two halves of a lesson, given one after the other, are the lesson; the next update begins from nothing."""
    (_, expected), engine = taught(subject, subject.build(folder)), subject.build(folder)
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
        engine.forward_backward(train_batch().select(rows), OBJECTIVE, Counts.of(train_batch(), 16))
    assert engine.optim_step(0.0).metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    engine.forward_backward(train_batch(), OBJECTIVE, Counts.of(train_batch(), 16))
    assert engine.optim_step(0.0).metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_step_forgets_the_gradient_and_a_rate_of_zero_moves_nothing(subject: Subject, folder: Path) -> None:
    engine = subject.build(folder)
    before = subject.weights(engine)
    learner(engine).accumulate(train_batch())
    assert engine.optim_step(0.0).applied
    assert_identical(subject.weights(engine), before)
    assert all(torch.count_nonzero(gradient) == 0 for gradient in subject.gradients(engine).values())


def test_an_update_moves_probability_to_what_was_rewarded(subject: Subject, folder: Path) -> None:
    batch = replace(train_batch(), advantages_T=torch.ones(len(train_batch().tokens_T)), old_logprobs_T=None)
    objective = replace(OBJECTIVE, kl_coefficient=None, entropy_coefficient=0.0)
    engine = subject.build(folder)
    who = learner(engine, objective=objective, rate=0.001)
    before = float(who.scorer.score(batch)[batch.loss_mask_T].mean())
    metrics = learn(who, batch, step=1)
    assert float(who.scorer.score(batch)[batch.loss_mask_T].mean()) > before + 0.1
    assert metrics["actor/lr"] == 0.001 and metrics["actor/nonfinite_updates"] == 0


def poisoned() -> TrainBatch:
    """One advantage, of a token that teaches, in the first sample, is no number."""
    batch = train_batch()
    advantages_T = batch.advantages_T.clone()
    advantages_T[5] = float("nan")
    return replace(batch, advantages_T=advantages_T)


def test_a_gradient_that_is_not_finite_is_dropped_and_changes_nothing(subject: Subject, folder: Path) -> None:
    engine, untouched = subject.build(folder), subject.build(folder)
    before = subject.weights(engine)
    learner(engine).accumulate(poisoned())
    update = engine.optim_step(0.01)
    assert not update.applied
    assert_identical(subject.weights(engine), before)
    for worker in (engine, untouched):  # nor do the optimizer's moments remember it
        learner(worker).accumulate(train_batch())
        assert worker.optim_step(0.01).applied
    assert_identical(subject.weights(engine), subject.weights(untouched))


def test_a_skipped_update_is_counted_and_stays_out_of_the_metrics(subject: Subject, folder: Path) -> None:
    metrics = learn(learner(subject.build(folder)), poisoned(), step=1)
    assert metrics["actor/nonfinite_updates"] == 1.0  # the other of the two mini-batches is sound
    assert all(value == value for value in metrics.values())


def test_too_many_skipped_updates_in_a_row_stop_the_run(subject: Subject, folder: Path) -> None:
    batch = poisoned()
    everywhere = replace(batch, advantages_T=torch.full_like(batch.advantages_T, float("nan")))
    engine = subject.build(folder)
    who = learner(engine, max_nonfinite=3)
    before = subject.weights(engine)
    learn(who, everywhere, step=1)  # two mini-batches, two skipped updates
    with pytest.raises(TrainingError, match=r"3 actor updates in a row .*trainer\.max_nonfinite_updates=3"):
        learn(who, everywhere, step=2)
    assert_identical(subject.weights(engine), before)


def test_a_sound_update_starts_the_count_anew(subject: Subject, folder: Path) -> None:
    who = learner(subject.build(folder), max_nonfinite=2)
    for step in range(1, 4):
        assert learn(who, poisoned(), step)["actor/nonfinite_updates"] == 1.0


@pytest.mark.parametrize(
    "kind", [{}, {"lora": LORA}, {"critic": True}, {"packed": False}], ids=["whole", "lora", "critic", "padded"]
)
def test_a_loaded_engine_goes_on_bit_for_bit(
    subject: Subject, folder: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    objective = ValueObjective(0.5, "token-mean") if "critic" in kind else OBJECTIVE
    torch.manual_seed(0)
    first = subject.build(folder, **kind)
    learn(learner(first, objective=objective), train_batch(), step=1)
    first.save(tmp_path, EVERYTHING)
    torch.manual_seed(1)  # an adapter starts from other numbers; the saved ones must replace them
    second = subject.build(folder, **kind)
    second.load(tmp_path, EVERYTHING)
    assert_identical(subject.weights(second), subject.weights(first))
    for engine in (first, second):
        learn(learner(engine, objective=objective), train_batch(), step=2)
    assert_identical(subject.weights(second), subject.weights(first))


def test_a_save_in_the_background_holds_the_step_at_which_it_began(
    subject: Subject, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and step counts are copied: the next update comes before anything is written here."""
    engine, (waited, background) = subject.build(folder), (tmp_path / "waited", tmp_path / "background")
    learn(learner(engine), train_batch(), step=1)
    for place in (waited, background):
        place.mkdir()
    expected = engine.save(waited, EVERYTHING)
    gate, write = threading.Event(), TensorFile.write

    def write_later(file: TensorFile) -> None:
        assert gate.wait(60), "the save held up the next update"
        write(file)

    monkeypatch.setattr(TensorFile, "write", write_later)
    files = engine.save(background, EVERYTHING, True)
    learn(learner(engine), train_batch(), step=2)
    gate.set()
    engine.check_save(True)
    assert len(files) == len(expected) == 2
    for file, same in zip(files, expected, strict=True):
        assert file.read_bytes() == same.read_bytes() and read_report(file) == read_report(same) is not None


def test_without_the_optimizer_only_the_weights_come_back(subject: Subject, folder: Path, tmp_path: Path) -> None:
    first = subject.build(folder)
    learn(learner(first), train_batch(), step=1)
    first.save(tmp_path, frozenset({"model"}))
    second = subject.build(folder)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing: .*checkpoint\.load_contents"):
        second.load(tmp_path, EVERYTHING)
    second.load(tmp_path, frozenset({"model"}))
    assert_identical(subject.weights(second), subject.weights(first))


def test_loaded_moments_are_where_the_placement_says(
    subject: Subject, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next update: generation comes first and needs the memory. Without a GPU, the moves are recorded."""
    engine, moved = subject.build(folder), []
    learn(learner(engine), train_batch(), step=1)
    engine.save(tmp_path, EVERYTHING)
    monkeypatch.setattr("rloom.engines.optim.move_moments", lambda *to: moved.append((len(to[0].state), to[1].type)))
    for offload in (True, False):
        engine.placement = Placement(torch.device("cuda", 0), offload_optimizer=offload)
        engine.load(tmp_path, EVERYTHING)
    assert moved == [(27, "cpu"), (27, "cuda")]  # of every parameter


def test_the_optimizers_settings_are_the_configurations_and_not_the_checkpoints(
    subject: Subject, folder: Path, tmp_path: Path
) -> None:
    first = subject.build(folder, adamw=replace(ADAMW, weight_decay=0.5))
    learn(learner(first), train_batch(), step=1)
    first.save(tmp_path, EVERYTHING)
    second = subject.build(folder, adamw=replace(ADAMW, weight_decay=0.0))
    second.load(tmp_path, EVERYTHING)
    before, moved = subject.weights(first), []
    for engine in (first, second):
        learner(engine).accumulate(train_batch())
        engine.optim_step(0.1)
        moved.append(subject.weights(engine))
    for name, weight in before.items():  # they differ by the decay that only the first is told to apply
        torch.testing.assert_close(moved[1][name] - moved[0][name], 0.1 * 0.5 * weight, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"intermediate_size": 40}, r"model\.layers\.0\.mlp\.gate_proj\.weight is \(40, 32\) there and \(48, 32\)"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is missing there and \(\d+"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is \(\d+.*\) there and missing in this model"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_by_its_parameters_name(
    subject: Subject, folder: Path, tmp_path: Path, change: dict[str, int], names: str
) -> None:
    config = FAMILIES["qwen2"]()
    config.layer_types = None
    other = type(config)(**{**config.to_dict(), **change})
    subject.build(save_model(tmp_path / "other", other)).save(tmp_path, frozenset({"model"}))
    engine = subject.build(folder)
    before = subject.weights(engine)
    with pytest.raises(CheckpointError, match=names):
        engine.load(tmp_path, frozenset({"model"}))
    assert_identical(subject.weights(engine), before)


def test_a_checkpoint_without_the_weights_says_which_file_is_missing(
    subject: Subject, folder: Path, tmp_path: Path
) -> None:
    subject.build(folder, lora=LORA).save(tmp_path, EVERYTHING)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing: .*LoRA"):
        subject.build(folder).load(tmp_path, EVERYTHING)


def test_what_is_saved_is_synced_before_the_save_returns(subject: Subject, folder: Path, tmp_path: Path) -> None:
    """Whole files and the entries of their folders. The driver, which seals them, may be on another machine."""
    engine = subject.build(folder)
    learn(learner(engine), train_batch(), step=1)
    with recorded_syncs(tmp_path) as synced:
        engine.save(tmp_path, EVERYTHING)
    saved = {str(file.relative_to(tmp_path)): file.stat().st_size for file in tmp_path.rglob("*.safetensors")}
    assert (
        len(saved) == 2 and saved.items() <= synced.items() and {str(Path(name).parent) for name in saved} <= {*synced}
    )


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(subject: Subject, folder: Path, tmp_path: Path) -> None:
    for contents in EVERYTHING:
        with pytest.raises(CheckpointError, match=r"nowhere.* cannot be written"):
            subject.build(folder).save(tmp_path / "nowhere", frozenset({contents}))


def taught_adapter(subject: Subject, folder: Path) -> Any:
    """An engine whose adapter has learned for three steps."""
    torch.manual_seed(0)
    engine = subject.build(folder, lora=LORA)
    who = learner(engine)
    for step in range(1, 4):
        learn(who, train_batch(), step)
    return engine


def test_with_lora_only_the_adapter_learns_and_the_reference_stays_the_base_model(
    subject: Subject, folder: Path
) -> None:
    base_T = subject.build(folder).score(train_batch())
    torch.manual_seed(0)
    engine = subject.build(folder, lora=LORA)
    frozen = {name: p.clone() for name, p in engine.module.named_parameters() if "lora_" not in name}
    assert all("lora_" in name for name in subject.weights(engine)) and len(subject.weights(engine)) == 28
    # a new adapter changes nothing
    torch.testing.assert_close(engine.score(train_batch()), base_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(engine.score_reference(train_batch()), base_T, atol=1e-5, rtol=1e-5)
    for step in range(1, 4):
        learn(learner(engine), train_batch(), step)
        torch.testing.assert_close(engine.score_reference(train_batch()), base_T, atol=1e-5, rtol=1e-5)
    assert (engine.score(train_batch()) - base_T).abs().max() > 0.1
    now = dict(engine.module.named_parameters())
    assert_identical({name: now[name] for name in frozen}, frozen)


def test_the_scorer_can_ask_the_policy_without_its_adapter(subject: Subject, folder: Path) -> None:
    base_T = subject.build(folder).score(train_batch())
    scorer = Scorer(LocalGroup([taught_adapter(subject, folder)]), reference=True)
    torch.testing.assert_close(scorer.score(train_batch()), base_T, atol=1e-5, rtol=1e-5)


def test_lora_learns_the_same_with_gradient_checkpointing(subject: Subject, folder: Path) -> None:
    engines = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        engines.append(subject.build(folder, lora=LORA, checkpointing=checkpointing))
        learner(engines[-1]).accumulate(train_batch())
    plain, checkpointed = (subject.gradients(engine) for engine in engines)
    assert len(plain) == 28
    assert_same(checkpointed, plain)


def test_a_merged_adapter_says_what_the_adapter_said_and_loads_anywhere(
    subject: Subject, folder: Path, tmp_path: Path
) -> None:
    engine, batch = taught_adapter(subject, folder), a_batch()
    engine.save(tmp_path, frozenset({"model"}))
    exported = ENGINES["local"].build(folder, lora=LORA, adamw=None)  # one process, as `rloom export` does it
    exported.load(tmp_path, frozenset({"model"}))
    merge_adapter(exported.network)
    save_pretrained(exported.network, tiny_tokenizer(), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    found_T, unchanged_T = logprobs_of(merged, batch), logprobs_of(eager_model(folder), batch)
    torch.testing.assert_close(found_T, engine.score(batch), atol=1e-4, rtol=1e-4)
    assert (found_T - unchanged_T).abs().max() > 0.1


@torch.no_grad()
def logprobs_of(model: Any, batch: TrainBatch) -> Tensor:
    found = []
    for tokens, mask in samples_of(batch):
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        found += [torch.zeros(1), logprobs * mask[1:]]
    return torch.cat(found)


def test_its_weights_are_those_of_the_model_by_the_models_names(subject: Subject, folder: Path) -> None:
    engine, expected = subject.build(folder), dict(eager_model(folder).named_parameters())
    assert_identical(dict(engine.weights()), expected)
    learn(learner(engine), train_batch(), step=1)
    assert_identical(dict(engine.weights()), subject.weights(engine))
    assert all(not weight.requires_grad for _, weight in engine.weights())


@pytest.mark.parametrize("other", ENGINES)
@pytest.mark.parametrize("kind", [{}, {"lora": LORA}], ids=["whole", "lora"])
def test_another_engine_goes_on_from_its_checkpoint(
    subject: Subject, one_rank: None, folder: Path, tmp_path: Path, kind: dict[str, Any], other: str
) -> None:
    first, second = subject.build(folder, **kind), ENGINES[other].build(folder, **kind)
    learn(learner(first), train_batch(), step=1)
    first.save(tmp_path, EVERYTHING)
    second.load(tmp_path, EVERYTHING)
    for engine in (first, second):
        learn(learner(engine), train_batch(), step=2)
    assert_same(ENGINES[other].weights(second), subject.weights(first))
