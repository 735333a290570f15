"""Whole runs: they learn, they leave what they promise, and every kind of model and engine gets through."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rloom.algos.registry import ALGORITHMS, POLICY_LOSSES
from rloom.launch.build import evaluate_checkpoint
from rloom.launch.export import export
from rloom.models.source import EMBEDDED_FOLDER
from rloom.runs.dumps.reader import Dumps
from rloom.runs.run_folder import RunFolder
from tests.e2e.runs import records, same, train, weights


@pytest.mark.slow
def test_the_default_task_is_learned_and_the_run_directory_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))
    train(
        tmp_path,
        3,
        "algorithm.adv_estimator=grpo",
        "data.train_max_samples=-1",
        "data.train_batch_size=16",
        "data.val_max_samples=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        "trainer.test_freq=3",
        "trainer.save_freq=3",
        "trainer.val_before_train=True",
        "trainer.logger=[console,tensorboard]",
        f"trainer.rollout_data_dir={tmp_path / 'answers'}",
        f"trainer.validation_data_dir={tmp_path / 'validation'}",
        picture=True,
    )
    first, last = (
        r["val-core/math_reasoning/acc/mean@1"] for r in records(tmp_path) if "val-core/math_reasoning/acc/mean@1" in r
    )
    assert 0.3 < first < 0.45
    assert last > first + 0.2
    said = capsys.readouterr().out
    assert f"Held-out accuracy on math_reasoning: {100 * first:.1f} % at the start, {100 * last:.1f} % now" in said
    assert (tmp_path / "learning_curve.png").stat().st_size > 10_000
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert list((tmp_path / "tensorboard").iterdir())
    rows = [json.loads(line) for line in (tmp_path / "answers" / "3.jsonl").read_text().splitlines()]
    assert len(rows) == 128
    assert sum(row["score"] for row in rows) / 128 == pytest.approx(records(tmp_path)[-2]["critic/score/mean"])
    assert len((tmp_path / "validation" / "0.jsonl").read_text().splitlines()) == 128
    found = evaluate_checkpoint(tmp_path / "global_step_3")
    assert found.metrics["val-core/math_reasoning/acc/mean@1"] == pytest.approx(last)
    assert found.measures == {"math_reasoning": "accuracy"}


MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
LOSS = "actor_rollout_ref.actor.policy_loss"
METRICS = {
    *(f"critic/{what}/{how}" for what in ("score", "rewards", "advantages") for how in ("mean", "max", "min")),
    *("critic/score/std", "critic/rewards/std"),
    *(f"actor/{name}" for name in ("pg_loss", "kl_loss", "kl_coef", "entropy", "pg_clipfrac", "pg_clipfrac_lower")),
    *(f"actor/{name}" for name in ("ppo_kl", "ppo_ratio", "grad_norm", "lr", "reward_kl_penalty")),
    *(f"response_length/{name}" for name in ("mean", "max", "min", "clip_ratio")),
    *(f"prompt_length/{name}" for name in ("mean", "max", "min")),
    *(
        f"timing_s/{name}"
        for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")
    ),
    *(f"perf/{name}" for name in ("total_num_tokens", "time_per_step", "throughput", "max_memory_allocated_gb")),
    *("reward/failed", "training/global_step", "training/epoch", "training/rollout_probs_diff_mean"),
}
CRITIC_METRICS = {
    *(f"critic/{what}/{how}" for what in ("values", "returns") for how in ("mean", "max", "min")),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vf_explained_var", "grad_norm", "lr")),
    *("timing_s/values", "timing_s/update_critic"),
}


@pytest.mark.parametrize("estimator", ["gae", "rloo", "grpo"])
def test_a_step_reports_the_metrics_users_know(tmp_path: Path, estimator: str) -> None:
    kl = ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    train(tmp_path, 1, f"algorithm.adv_estimator={estimator}", *kl)
    [record] = records(tmp_path)
    expected = METRICS | (CRITIC_METRICS if estimator == "gae" else set())
    assert expected - record.keys() == set()
    assert record["training/rollout_probs_diff_max"] < 1e-4, "rollout and trainer agree on every token"


@pytest.mark.parametrize(
    ("estimator", "on_policy"),
    # one update: with a critic, with groups, with greedy answers
    [*((name, False) for name in sorted(ALGORITHMS)), ("gae", True), ("grpo", True), ("remax", True)],
)
def test_every_estimator_goes_through_the_loop(tmp_path: Path, estimator: str, on_policy: bool) -> None:
    train(tmp_path, 1, f"algorithm.adv_estimator={estimator}", f"{MINI_BATCH}={4 if on_policy else 2}")
    [record] = records(tmp_path)
    assert record["actor/grad_norm"] > 0
    assert ("timing_s/old_log_prob" in record) == (not on_policy)
    assert ("critic/vf_loss" in record) == ALGORITHMS[estimator].needs_critic
    assert ("timing_s/gen_greedy" in record) == ALGORITHMS[estimator].needs_greedy
    assert record["training/rollout_probs_diff_mean"] < 1e-5, "the gap is measured whether or not a pass is spared"


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_policy_loss_goes_through_the_loop(tmp_path: Path, loss: str) -> None:
    train(tmp_path, 1, "algorithm.adv_estimator=grpo", f"{LOSS}.loss_mode={loss}", f"{MINI_BATCH}=4")
    assert records(tmp_path)[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize("lora", ["actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.lora_rank=0"])
def test_a_kl_loss_over_the_whole_vocabulary(tmp_path: Path, lora: str) -> None:
    full = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full")
    train(tmp_path, 2, "algorithm.adv_estimator=rloo", *full, lora, "actor_rollout_ref.actor.optim.lr=1e-2")
    first, second = (record["actor/kl_loss"] for record in records(tmp_path))
    assert 0 <= first < second
    assert "timing_s/ref" not in records(tmp_path)[0], "no second pass: the KL is taken where the logits are"


def test_rollout_correction_weighs_and_rejects(tmp_path: Path) -> None:
    keys = ("rollout_is=token", "rollout_rs=sequence", "rollout_rs_threshold=2", "rollout_token_veto_threshold=1e-4")
    train(tmp_path, 1, "algorithm.adv_estimator=rloo", *(f"algorithm.rollout_correction.{key}" for key in keys))
    [record] = records(tmp_path)
    assert record["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4), "our engines agree with the trainer"
    assert record["rollout_corr/rollout_rs_masked_fraction"] == 0


def test_old_log_probs_of_the_rollout_rewards_of_whole_groups_and_their_dumps(tmp_path: Path) -> None:
    file = tmp_path / "shorter.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(len(solution_strs) == 2) + 0.5 * place for place in range(len(solution_strs))]\n"
    )
    train(
        tmp_path / "run",
        1,
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        f"custom_reward_function.path={file}",
        "reward_model.reward_manager=batch",
    )
    [record] = records(tmp_path / "run")
    assert "timing_s/old_log_prob" not in record and record["critic/score/mean"] == 1.25
    assert abs(record["actor/ppo_kl"]) < 1e-2  # to the engine's log-probs, in the first of two updates nearly 0
    dumps = Dumps(tmp_path / "run")
    answers = [answer for group in range(4) for answer in dumps.answers("train", 1, group)]
    assert [answer.score for answer in answers] == [1.0, 1.5] * 4
    for answer in answers:
        assert answer.pieces and answer.logprobs and answer.advantages and answer.entropy and answer.ratio
        assert "".join(piece.text for piece in answer.pieces).startswith(answer.text)
        numbers = (answer.logprobs, answer.advantages, answer.entropy, answer.ratio)
        assert {len(values) for values in numbers} == {len(answer.pieces)} == {answer.length}
    assert {round(answer.advantages[0], 2) for answer in answers if answer.advantages} == {-0.71, 0.71}
    events = RunFolder(tmp_path / "run").events
    assert events[0]["event"] == "run" and events[-1]["status"] == "finished"


def test_a_reward_function_of_trl_runs_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def reward_func(prompts, completions, completion_ids, ground_truth, log_metric=None, **kwargs):\n"
        "    assert isinstance(completions[0], str) == isinstance(prompts[0], str) and completion_ids[0]\n"
        "    log_metric('digits', len(set(ground_truth)))\n"
        "    return [float(len(completions)) + 0.5 * place for place in range(len(completions))]\n"
    )
    function = (f"custom_reward_function.path={file}", "custom_reward_function.name=reward_func")
    train(tmp_path / "run", 1, "algorithm.adv_estimator=grpo", *function)
    [record] = records(tmp_path / "run")
    assert (record["critic/score/mean"], record["reward/failed"], record["reward/digits"]) == (2.25, 0, 1)


def test_the_overlong_penalty_is_in_the_reward_and_not_in_the_score(tmp_path: Path) -> None:
    buffer = "reward_model.overlong_buffer"
    train(tmp_path, 1, "algorithm.adv_estimator=rloo", f"{buffer}.enable=True", f"{buffer}.len=48")
    [record] = records(tmp_path)
    # the buffer is the whole answer allowed, so each of its 48 tokens costs 1/48
    penalty = record["critic/score/mean"] - record["critic/rewards/mean"]
    assert penalty == pytest.approx(record["response_length/mean"] / 48, rel=1e-5)


def test_every_answer_ends_where_prompt_and_answer_have_the_total_length(tmp_path: Path) -> None:
    """The scores of truncated answers are replaced, also those of the greedy answers, which ReMax subtracts."""
    lengths = ("data.max_prompt_length=20", "data.max_length=24", "data.val_max_samples=2")
    keys = ("algorithm.adv_estimator=remax", "reward_model.truncated_score=-0.25", "trainer.test_freq=1")
    train(tmp_path, 1, *lengths, *keys)
    record = next(record for record in records(tmp_path) if "actor/entropy" in record)
    assert record["response_length/clip_ratio"] == 1 and record["critic/score/max"] == 0 < record["actor/entropy"]
    assert (record["critic/rewards/min"], record["critic/rewards/max"]) == (-0.25, -0.25)
    assert (record["critic/advantages/min"], record["critic/advantages/max"]) == (0, 0)
    for shortest, longest in (("min", "max"), ("max", "min")):
        assert record[f"response_length/{longest}"] == 24 - record[f"prompt_length/{shortest}"]
    for answer in [Dumps(tmp_path).answers("validation", 1, group)[0] for group in range(2)]:
        assert answer.length <= 24 - 16 and not answer.finished  # the shortest prompts have 16 tokens


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_truncated_answers_are_masked_and_groups_are_kept_by_their_mean(tmp_path: Path, mode: str) -> None:
    """All scores are 0, so that dynamic sampling by different scores would fill no step."""
    groups = "algorithm.filter_groups"
    train(
        *(tmp_path, 1, f"trainer.v1.trainer_mode={mode}", "algorithm.adv_estimator=grpo", "data.max_prompt_length=20"),
        *("data.max_length=24", "algorithm.mask_truncated_answers=True", "reward_model.score_range=[0.5,1]"),
        *(f"{groups}.enable=True", f"{groups}.mean_score_range=[-1,0.25]", f"{groups}.max_num_gen_batches=1"),
    )
    [record] = records(tmp_path)
    assert record["response_length/max"] <= 24 - record["prompt_length/min"] and record["critic/score/max"] == 0
    assert (record["critic/rewards/min"], record["critic/rewards/max"]) == (0.5, 0.5)
    assert (record["actor/grad_norm"], record["actor/entropy"]) == (0, 0)  # no token is in the loss


def test_dynamic_sampling_replaces_groups_that_teach_nothing(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    keys = ("algorithm.filter_groups.enable=True", f"trainer.rollout_data_dir={answers}")
    train(tmp_path, 1, "algorithm.adv_estimator=grpo", *keys)
    scores = [json.loads(line)["score"] for line in (answers / "1.jsonl").read_text().splitlines()]
    assert len(scores) == 8
    assert all(one != other for one, other in zip(scores[::2], scores[1::2], strict=True))


def test_with_dynamic_sampling_a_run_ends_when_its_epochs_have_been_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 prompts in batches of 2, of which one has answers of different score: a step takes 2 of the 5 batches."""
    monkeypatch.setattr("rloom.training.sampling.informative_groups", lambda *_: torch.tensor([True, False]))
    keys = (
        *("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", "trainer.total_training_steps=null"),
        *("data.train_max_samples=10", "data.train_batch_size=2", "trainer.save_freq=-1", "trainer.test_freq=4"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    validated = "val-core/math_reasoning/acc/mean@1"
    train(tmp_path / "run", 0, *keys, "trainer.total_epochs=1")
    said = capsys.readouterr()
    found = [record for record in records(tmp_path / "run") if "training/epoch" in record]
    assert [record["training/epoch"] for record in found] == [0, 0]  # 4 batches; the fifth does not fill a step
    assert {record["rollout/num_gen_batches"] for record in found} == {2}
    assert "The data ended before step 3 was filled: step 2 was the last" in said.out
    assert "at the latest after step 5, which is also the length" in said.err and "at most 5 steps" in said.out
    assert [record["step"] for record in records(tmp_path / "run") if validated in record] == [2], "the last one"
    train(tmp_path / "run", 0, *keys, "trainer.total_epochs=2")
    found = [record for record in records(tmp_path / "run") if "training/epoch" in record]
    assert [record["training/epoch"] for record in found] == [0, 0, 1, 1, 1]  # step 3: batches 5 and 6
    train(tmp_path / "at_once", 0, *keys, "trainer.total_epochs=2")
    assert same(weights(tmp_path / "run", 5), weights(tmp_path / "at_once", 5))
    assert len(records(tmp_path / "run")) == 8, "5 steps, validated after 2, 4 and 5"


def test_an_estimator_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rloom.batch import Advantages\n"
        "def push_up(inputs, settings):\n"
        "    ones = inputs.batch.loss_mask_T.float()\n"
        "    return Advantages(ones, ones)\n"
    )
    train(tmp_path / "run", 1, f"algorithm.adv_estimator={tmp_path / 'mine.py'}:push_up")
    assert records(tmp_path / "run")[0]["critic/advantages/min"] == 1


def test_exactly_on_policy_skips_the_old_log_probs_and_changes_nothing(tmp_path: Path) -> None:
    once = ("algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    train(tmp_path / "skipped", 1, *once)
    train(tmp_path / "computed", 2, *once, "algorithm.kl_metric=True")
    assert "timing_s/old_log_prob" not in records(tmp_path / "skipped")[0]
    assert "timing_s/old_log_prob" in records(tmp_path / "computed")[0]
    skipped, computed = weights(tmp_path / "skipped", 1), weights(tmp_path / "computed", 1)
    assert max(float((skipped[name] - computed[name]).abs().max()) for name in skipped) < 1e-4
    train(tmp_path / "penalty", 2, *once, "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0")
    assert same(weights(tmp_path / "computed", 2), weights(tmp_path / "penalty", 2))
    measured = [record["kl_divergence"] for record in records(tmp_path / "computed")]
    assert measured == [record["actor/reward_kl_penalty"] for record in records(tmp_path / "penalty")]
    assert measured[0] == 0 < abs(measured[1]), "the first step compares the model with itself"


def test_critic_warmup_leaves_the_policy_alone(tmp_path: Path) -> None:
    train(tmp_path, 2, "trainer.critic_warmup=1")
    before = {
        name: p
        for name, p in AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER / "model").float().named_parameters()
    }
    assert same({name: p.detach() for name, p in before.items()}, weights(tmp_path, 1))
    assert not same(weights(tmp_path, 1), weights(tmp_path, 2))
    assert not same(weights(tmp_path, 1, "critic"), weights(tmp_path, 2, "critic"))


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.rollout.name=hf",),
        ("actor_rollout_ref.model.use_remove_padding=False", "critic.model.use_remove_padding=False"),
        ("actor_rollout_ref.model.use_remove_padding=False", "actor_rollout_ref.rollout.name=hf"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=True", "actor_rollout_ref.actor.entropy_coeff=0.01"),
        # bfloat16 is slow on most CPUs: two answers, whose entropy has a gradient whatever their score
        pytest.param(
            (
                "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
                "data.train_batch_size=2",
                "actor_rollout_ref.rollout.n=1",
                f"{MINI_BATCH}=1",
                "actor_rollout_ref.actor.entropy_coeff=0.01",
            ),
            marks=pytest.mark.long,
        ),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size=1"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",),
    ],
)
def test_other_ways_through_the_engines(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    train(tmp_path, 1, *overrides)
    [record] = records(tmp_path)
    assert record["actor/grad_norm"] > 0
    assert record["training/rollout_probs_diff_max"] < 0.02, "engine and trainer are the same policy"


SHAPE = {
    "vocab_size": 360,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


LONG = [pytest.param(family, marks=pytest.mark.long) for family in (Qwen2Config, LlamaConfig, MistralConfig)]


@pytest.mark.parametrize("family", [Qwen3Config, GemmaConfig, *LONG])
def test_model_families_load_and_train(tmp_path: Path, family: type[PreTrainedConfig]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family(**SHAPE))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(EMBEDDED_FOLDER / "model").save_pretrained(tmp_path / "model")
    path = f"actor_rollout_ref.model.path={tmp_path / 'model'}"
    # random weights answer nothing right: reward length instead, so that there is something to learn
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) / 10\n"
    )
    reward = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    train(
        tmp_path / "run",
        2,
        path,
        reward,
        "data.max_response_length=16",
        "data.max_prompt_length=64",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    assert all(record["actor/grad_norm"] > 0 for record in records(tmp_path / "run"))
    assert records(tmp_path / "run")[0]["training/rollout_probs_diff_max"] < 1e-4


@torch.no_grad()
def compare_logits(base: Path, merged: Path, adapter: Path) -> tuple[float, float]:
    """(how far training moved the logits, how far the merged model is from the adapter on its base)"""
    tokens = torch.tensor([[5, 6, 7, 8]])
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = start(tokens).logits
    whole = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    parts = PeftModel.from_pretrained(start, adapter)(tokens).logits
    return float((whole - before).abs().max()), float((whole - parts).abs().max())


def test_an_exported_lora_policy_answers_like_the_trained_one(tmp_path: Path) -> None:
    lora = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "algorithm.adv_estimator=rloo",
    )
    train(tmp_path, 2, *lora)
    merged = export(tmp_path / "global_step_2", tmp_path / "merged")
    adapter = export(tmp_path / "global_step_2", tmp_path / "adapter", adapter=True)
    assert (adapter / "adapter_model.safetensors").is_file()
    moved, apart = compare_logits(EMBEDDED_FOLDER / "model", merged, adapter)
    assert moved > 1e-3
    assert apart < 1e-4
