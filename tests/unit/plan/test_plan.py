"""`rloom plan`: numbers worked out by hand, and held to what the engines do and to what was measured."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from benchmarks import plan_scaling as scaling
from rloom import cli
from rloom.config.load import load_config
from rloom.errors import ConfigError, ModelError
from rloom.models.load import Lora, with_lora
from rloom.models.network import ValueNetwork
from rloom.packing import MicroBatching
from rloom.plan import memory, render, timing
from rloom.plan.architecture import Architecture, architecture
from rloom.plan.batches import batches, plan_passes
from rloom.plan.make import Costs, Plan, make_plan
from rloom.runs.metrics import PEAK_FLOPS
from tests.architecture.source import ROOT
from tests.helpers import FAMILIES, SHAPE, a_batch

GIB = 2**30
ONE_GPU = "trainer.n_gpus_per_node=1"
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
SMALL = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
WHOLE = ("actor_rollout_ref.model.enable_gradient_checkpointing=False", "algorithm.adv_estimator=grpo")
DOCUMENT = (  # of the worked example: 32 prompts × 4, train batch 32 samples, micro 1, 8 GPUs
    "algorithm.adv_estimator=rloo",
    "data.train_batch_size=32",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "trainer.n_gpus_per_node=8",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "model", {**SMALL, **SHAPES["0.5B"]})


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(folder: Path | None, *keys: str, gpu_gib: float = 140.0) -> Plan:
    path = [] if folder is None else [f"actor_rollout_ref.model.path='{folder}'"]
    return make_plan(load_config([ONE_GPU, *path, *keys]), gpu_gib)


def costs_of(folder: Path, *keys: str, gpu_gib: float = 140.0) -> Costs:
    costs = plan_of(folder, *keys, gpu_gib=gpu_gib).costs
    assert costs is not None
    return costs


def shape(name: str) -> Architecture:
    return architecture({**SMALL, **SHAPES[name]}, "test")


# --- batches


def test_the_worked_example_of_the_documents() -> None:
    sizes = plan_of(None, *DOCUMENT).batches
    assert (sizes.prompts, sizes.answers_per_prompt, sizes.samples) == (32, 4, 128)
    assert (sizes.engines, sizes.prompts_per_engine, sizes.samples_per_engine) == (8, 4, 16)
    shared = load_config([*DOCUMENT, "actor_rollout_ref.rollout.tensor_model_parallel_size=4"])
    sizes_of_two = batches(shared, critic=False)
    assert (sizes_of_two.engines, sizes_of_two.prompts_per_engine, sizes_of_two.samples_per_engine) == (2, 16, 64)
    assert (sizes.actor.samples, sizes.actor.passes.samples, sizes.actor.passes.count) == (32, 4, 4)
    assert (sizes.actor.per_epoch, sizes.actor.count) == (4, 4)
    assert plan_of(None, *DOCUMENT, "actor_rollout_ref.actor.ppo_epochs=5").batches.actor.count == 20


def test_the_worked_example_is_printed_as_the_documents_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *DOCUMENT]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "prompts × answers 32 × 4 = 128 samples",
        "rollout engines 8 / TP 1 = 8 engines: 4 prompts, 16 samples each",
        "actor mini-batch 8 prompts × 4 = 32 samples; 4 a rank",
        "actor micro-batches 4 / 1 a pass = 4 accumulation steps a mini-batch",
        "actor optimizer steps 128 / 32 = 4 a PPO epoch × 1 epoch = 4 a step",
        "1 node × 8 GPUs = 8: processes, without Ray, all roles on every GPU",
        "roles actor, native rollout engine × 8",
    ):
        assert words in said


def test_a_critic_follows_the_actor_where_it_says_nothing_itself() -> None:
    keys = (
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    )
    own = ("critic.ppo_mini_batch_size=32", "critic.ppo_epochs=3", "critic.ppo_micro_batch_size=8")
    follows, differs = plan_of(None, *keys).batches, plan_of(None, *keys, *own, "trainer.n_gpus_per_node=4").batches
    assert follows.critic is not None and differs.critic is not None
    assert (follows.critic.samples, follows.critic.count) == (32, 4)
    # 64 samples over 4 ranks; the older key's 8 samples are 2 a rank
    assert (differs.critic.count, differs.critic.passes.samples, differs.critic.passes.count) == (6, 16, 8)
    assert plan_of(None, *keys, "algorithm.adv_estimator=grpo").batches.critic is None


def test_passes_are_cut_as_the_engine_cuts_them() -> None:
    budget, size = MicroBatching(tokens=32768), MicroBatching(samples=4)
    found = [plan_passes(128, budget, 640), plan_passes(128, budget, 200), plan_passes(7, size, 30)]
    # 51 samples of 640 tokens fit the budget, so there are three passes, evened out; other lengths may fill one
    expected = [(3, 43, 32768), (1, 128, 25600), (2, 4, 120)]
    assert [(passes.count, passes.samples_each, passes.tokens) for passes in found] == expected


# --- what is refused


def test_faults_are_those_of_training_and_all_are_heard_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(None, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1", "trainer.pools.rollout=2")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("actor_rollout_ref.rollout.n=1: grpo compares the answers to one prompt")
    assert lines[-1].startswith("trainer.pools: one worker holds every role")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "=3 does not divide 8, the number of workers"),
        ("trainer.pools.rollout=8", "0 are left for the actor"),
        ("trainer.nnodes=2", "trainer.nnodes=2 needs trainer.master_addr"),
        ("algorithm.rollout_correction.rollout_rs=token", "rollout_rs=token needs"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=3", "fsdp_size=3 does not divide 8 workers; use 2 or 4"),
        ("algorithm.adv_estimator=gea", "algorithm.adv_estimator=gea: there is no such entry; use one of gae, rloo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=x", "loss_mode=x: there is no such entry; use one of vanilla"),
    ],
)
def test_what_cannot_be_is_an_error(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(None, "trainer.n_gpus_per_node=8", key)


# --- sizes


BIASED = {
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
    "qwen3 with biases": Qwen3Config(**SHAPE, attention_bias=True),
    "qwen2 untied": Qwen2Config(**{**SHAPE, "num_key_value_heads": 4}, tie_word_embeddings=False),
}
CONFIGS = {**{name: make() for name, make in FAMILIES.items()}, **BIASED}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_counted_exactly(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        policy = sum(p.numel() for p in model.parameters())
        adapted = with_lora(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), Lora(4))
        critic = ValueNetwork(model, packed=True).module
    for said in (config.to_dict(), config.to_diff_dict()):  # a config.json may leave defaults out
        size = architecture(said, "test")
        assert size.parameters == policy
        assert size.critic_parameters == sum(p.numel() for p in critic.parameters())
        assert size.adapter_parameters(4, "all-linear") == sum(
            p.numel() for p in adapted.parameters() if p.requires_grad
        )


def test_published_models_have_their_published_sizes() -> None:
    assert (shape("0.5B").parameters, shape("1.5B").parameters) == (494_032_768, 1_543_714_304)
    embedded = plan_of(None).costs
    assert embedded is not None and embedded.actor.parameters == 834_688
    seven = architecture(scaling.QWEN_7B, "test")
    assert (seven.parameters, seven.matrix_parameters) == (7_615_616_512, 7_070_619_136)


def test_the_adapter_of_two_modules() -> None:
    # q: 896 + 896, v: 896 + 128, rank 8, 24 layers
    assert shape("0.5B").adapter_parameters(8, ["q_proj", "v_proj"]) == 24 * 8 * (1792 + 1024)


def test_a_hub_name_is_read_from_the_cache_and_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    path = "actor_rollout_ref.model.path=some/model"
    missing = plan_of(None, path)
    assert missing.costs is None
    assert "`hf download some/model config.json` fetches that one file" in missing.notes[0]
    stored = tmp_path / "models--some--model"
    written(stored / "snapshots" / "abc", {**SMALL, **SHAPES["0.5B"]})
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    found = plan_of(None, path)
    assert found.costs is not None and found.costs.actor.parameters == 494_032_768


def test_a_family_that_cannot_be_counted_still_has_batches(tmp_path: Path) -> None:
    plan = plan_of(written(tmp_path / "moe", {"model_type": "mixtral"}))
    assert plan.costs is None and plan.batches.prompts == 1024
    assert "(model_type 'mixtral'); the families counted are llama, mistral" in plan.notes[0]


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "llama"}'])
def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        plan_of(tmp_path)


# --- memory


def test_one_process_holds_eighteen_bytes_a_parameter(folder: Path) -> None:
    held = costs_of(folder, *WHOLE, "actor_rollout_ref.rollout.n=2").memory.phases
    size = 494_032_768
    step = held[memory.ACTOR_STEP]
    assert [step[name] for name in ("weights", "masters", "moments", "gradients")] == [
        2 * size,
        4 * size,
        8 * size,
        4 * size,
    ]
    assert "gradients" not in held[memory.GENERATION]
    offloaded = costs_of(folder, *WHOLE, "actor_rollout_ref.rollout.n=2", *OFFLOAD).memory.phases
    generation = offloaded[memory.GENERATION]
    assert [generation[name] for name in ("weights", "masters", "moments")] == [2 * size, 0, 0]
    assert offloaded[memory.ACTOR_STEP] == step  # all meet on the GPU


OFFLOAD = tuple(f"actor_rollout_ref.actor.fsdp_config.{name}_offload=True" for name in ("param", "optimizer"))


def test_eight_ranks_hold_shards_and_a_whole_gradient_between_passes(folder: Path) -> None:
    keys = (*WHOLE, "actor_rollout_ref.rollout.n=8", "trainer.n_gpus_per_node=8")
    costs, size = costs_of(folder, *keys), 494_032_768
    passes = costs.memory.phases[memory.ACTOR_PASSES]
    assert (passes["weights"], passes["moments"]) == (4 * size / 8, 8 * size / 8)
    assert passes["gradients"] == 4 * size + 4 * size / 8  # 256 samples a rank: many passes
    # the embedding and the last norm, and two layers
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 896 + 256 + 3 * 896 * 4864 + 2 * 896
    assert passes["gathered layers"] == 2 * (151936 * 896 + 896 + 2 * layer)
    assert passes["rollout engine's weights"] == 2 * size
    one = costs_of(folder, *keys, "actor_rollout_ref.actor.ppo_mini_batch_size=8").memory.phases
    assert one[memory.ACTOR_PASSES]["gradients"] == 4 * size / 8  # 8 samples of 1,024 tokens a rank: one pass
    little = costs_of(folder, *keys, gpu_gib=7).memory.phases  # a quarter of it is less than the 1.84 GiB of a gradient
    assert little[memory.ACTOR_PASSES]["gradients"] == 4 * size / 8


def test_reference_and_critic_count_only_where_they_exist(folder: Path) -> None:
    two, kl = "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.use_kl_loss=True"
    assert not costs_of(folder, *WHOLE, two).memory.phases[memory.GENERATION]["reference"]
    assert costs_of(folder, *WHOLE, two, kl).memory.phases[memory.GENERATION]["reference"] == 2 * 494_032_768
    lora = costs_of(folder, *WHOLE, two, kl, "actor_rollout_ref.model.lora_rank=8")
    assert not lora.memory.phases[memory.GENERATION]["reference"]
    assert lora.actor.trainable == 24 * 8 * (1792 + 2 * 1024 + 1792 + 3 * 5760)
    with_critic = costs_of(folder).memory
    assert with_critic.phases[memory.GENERATION]["critic at rest"] == 14 * (494_032_768 + 896)
    assert memory.CRITIC_PASSES in with_critic.phases


def test_a_token_leaves_behind_what_layers_save(folder: Path) -> None:
    two = "actor_rollout_ref.rollout.n=2"
    model, light = costs_of(folder, *WHOLE, two).actor, costs_of(folder, WHOLE[1], two).actor
    assert memory.activations(model, 1) == 2 * 24 * 13568  # 2·896 + 2·896 + 2·128 + 2·4864
    assert memory.activations(light, 1) == 2 * (24 * 896 + 13568)
    # 2 GiB of logits in float32 and half of that as gradient, the head's own gradient in both
    assert memory.head(model, 32768) == 6 * (2**29 + 151936 * 896)


PEAKS = {  # (shape, tokens of the fullest pass) -> GiB; with recomputed layers
    False: {("0.5B", 27520): 28.5, ("0.5B", 40960): 36.7, ("0.5B", 81920): 60.1, ("1.5B", 12160): 44.8,
            ("1.5B", 16640): 51.1, ("1.5B", 20480): 56.1, ("1.5B", 40960): 82.6},
    True: {("0.5B", 16384): 12.26, ("1.5B", 16384): 30.97, ("1.5B", 32768): 32.74},
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", PEAKS)
def test_peaks_are_those_that_were_measured_or_a_little_above(tmp_path: Path, checkpointing: bool) -> None:
    """docs/measurements/, one update; torch's allocator alone. A recomputed layer and the head are not held at once."""
    switch = f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}"
    for (name, tokens), measured in PEAKS[checkpointing].items():
        folder = written(tmp_path / f"{name}{tokens}", {**SMALL, **SHAPES[name]})
        model = costs_of(folder, WHOLE[1], switch, "actor_rollout_ref.rollout.n=2").actor
        found = 18 * model.parameters + memory.activations(model, tokens) + memory.head(model, tokens)
        assert measured < found / GIB < measured * (1.08 if checkpointing else 1.03)


def test_the_cache_takes_what_is_asked_for_up_to_its_share(folder: Path) -> None:
    keys = (*WHOLE, "data.train_batch_size=256", "actor_rollout_ref.rollout.n=8")
    cache = costs_of(folder, *keys).memory.cache
    assert cache.token_bytes == 2 * 24 * 2 * 64 * 2
    assert (cache.running, cache.wanted) == (1024, 1024 * 512 + 256 * 512)
    assert cache.room == 70 * GIB // 12288 // 128 * 128  # whole pages
    assert cache.bytes == 12288 * 655360
    little = costs_of(folder, *keys, "actor_rollout_ref.rollout.gpu_memory_utilization=0.001", gpu_gib=80).memory
    assert little.cache.whole_sequences == int(0.08 * GIB) // 12288 // 1024 == 6  # 54 pages, 4 + 4 for each
    kept = costs_of(folder, *keys, "actor_rollout_ref.rollout.free_cache_engine=False").memory
    assert kept.phases[memory.ACTOR_PASSES]["key-value cache"] == cache.bytes


def test_prompt_and_answer_of_the_plan_are_together_as_long_as_a_sample(folder: Path) -> None:
    lengths = ("data.max_prompt_length=1023", "data.max_response_length=1024", "data.max_length=1024")
    costs = costs_of(folder, *WHOLE, *lengths, "data.train_batch_size=256", "actor_rollout_ref.rollout.n=4")
    # 1,024 answers of 1,023 tokens, 8 pages each, and 256 prompts of one token
    assert costs.memory.cache is not None and costs.memory.cache.wanted == (1024 * 8 + 256) * 128
    sizes = batches(load_config([*lengths, "data.max_prompt_length=900"]), critic=False)
    assert (sizes.prompt_tokens, sizes.answer_tokens, sizes.longest) == (1, 1023, 1024)
    short = batches(load_config([*lengths, "data.max_response_length=500"]), critic=False)
    assert (short.prompt_tokens, short.answer_tokens, short.longest) == (524, 500, 1024)


def test_many_short_answers_fit_where_few_do_at_a_limit_of_32k(folder: Path) -> None:
    long = ("data.max_response_length=32768", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=33280")
    found = costs_of(folder, *WHOLE, *long, "data.train_batch_size=256", "actor_rollout_ref.rollout.n=8").memory
    assert found.cache.room == 47_786 * 128  # 70 GiB of 12,288 bytes a token; 4 + 256 pages at full length
    [_, line] = render.cache_lines(found)  # 46 pages for each of 1,024
    assert line.endswith("183 of the 1,024 sequences that may run, at full length; all of them at 5,888 tokens each")


def test_the_peak_and_the_bytes_of_a_token_are_those_of_the_code_that_needs_torch() -> None:
    assert PEAK_FLOPS["H200"] == timing.PEAK
    train_batch = a_batch()
    sizes = {field.name: getattr(train_batch, field.name) for field in fields(train_batch) if field.name.endswith("_T")}
    numbers = {name: tensor.element_size() for name, tensor in sizes.items() if tensor is not None}
    assert sum(numbers.values()) - numbers["advantages_T"] - numbers["tokens_T"] // 2 == timing.PUT
    assert numbers["tokens_T"] + numbers["rollout_logprobs_T"] == timing.COMPLETION


# --- time


def test_bytes_over_links_by_hand() -> None:
    """Eight GPUs share 9 GB: 7.875 GB reach each by NVLink. Four such machines: 6.75 GB enter each by 8 ports."""
    assert timing.Links(8, 8).gather(9e9, 8) == (7.875e9 / 450e9, 7.875e9)
    seconds, received = timing.Links(32, 8).gather(9e9, 32)
    assert (seconds, received) == (max(8.71875e9 / 450e9, 6.75e9 / 400e9), 8.71875e9)
    assert timing.Links(1, 1).gather(9e9, 1) == (0, 0)
    assert timing.Links(32, 8).all_reduce(1e9, 4) == (1.5e9 / 50e9, 1.5e9)


def test_an_update_gathers_twice_a_pass_and_reduces_once_a_mini_batch(folder: Path) -> None:
    actor = "actor_rollout_ref.actor"
    keys = ("data.train_batch_size=64", "actor_rollout_ref.rollout.n=8", f"{actor}.ppo_mini_batch_size=32")
    micro = f"{actor}.ppo_micro_batch_size_per_gpu=8"
    plan = plan_of(folder, *WHOLE, *keys, micro, "trainer.n_gpus_per_node=8", gpu_gib=140)
    costs = plan.costs
    assert costs is not None and costs.time is not None
    stages = {stage.name: stage for stage in costs.time.stages}
    size, outer = 494_032_768, 151936 * 896 + 896
    # 256 samples over 8 ranks are 32, in 4 passes; two mini-batches
    gathered, reduced = 2 * 4 * 2 * (2 * (size - outer) + outer), 2 * 4 * size
    assert stages["actor update"].wire_bytes == pytest.approx(7 / 8 * (gathered + reduced))
    little = replace(costs.memory, gpu_bytes=7 * GIB)  # no room for a whole gradient: each of 4 passes sums its own
    update = timing.update("actor update", plan.batches, costs.actor, timing.Links(8, 8), little)
    assert update.wire_bytes == pytest.approx(7 / 8 * (gathered + 4 * reduced))
    assert stages["weights to the engine"].wire_bytes == pytest.approx(7 / 8 * 2 * size)
    # 12 bytes of a completion, 9 of a batch, 4 of advantages, 4 of old log-probs, 8 of a record
    assert stages["samples through the driver"].wire_bytes == (12 + 9 + 4 + 4 + 8) * 64 * 8 * 1024


def test_the_driver_takes_as_long_as_was_measured_with_64_workers() -> None:
    """`benchmarks/scale.py --workers 64 --tokens 16777216 --length 32768`, all stages but the dump, which is written
    by a thread: docs/measurements/workers.md."""
    config, critic = load_config(["algorithm.adv_estimator=gae"]), SimpleNamespace()
    sizes: Any = SimpleNamespace(tokens=1 << 24, critic=critic, actor=SimpleNamespace(epochs=1))
    assert timing.through_driver(config, sizes, scorings=3).compute_s == pytest.approx(5.64, rel=0.1)


def test_an_on_policy_step_of_one_process_has_nothing_on_the_wire(folder: Path) -> None:
    on_policy = "actor_rollout_ref.actor.ppo_mini_batch_size=1024"
    time = costs_of(folder, *WHOLE, "actor_rollout_ref.rollout.n=2", on_policy).time
    assert time is not None
    assert [stage.name for stage in time.stages] == ["generation", "actor update"]
    assert time.wire_share == 0


STEP = (  # benchmarks/step.py and benchmarks/rollout.py: prompts of 128, answers of 512 tokens, 8 to a prompt
    *WHOLE,
    "actor_rollout_ref.rollout.n=8",
    "data.max_prompt_length=128",
    "data.max_response_length=512",
)


@pytest.mark.parametrize(
    ("name", "prompts", "measured"), [("0.5B", 128, 2.24), ("0.5B", 32, 1.09), ("1.5B", 64, 2.71), ("7B", 32, 4.52)]
)
def test_generation_takes_about_as_long_as_was_measured(
    tmp_path: Path, name: str, prompts: int, measured: float
) -> None:
    config = scaling.QWEN_7B if name == "7B" else {**SMALL, **SHAPES[name]}
    batch = (f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}")
    time = costs_of(written(tmp_path / "m", config), *STEP, *batch, gpu_gib=400).time
    assert time is not None
    assert time.of("generation") == pytest.approx(measured, rel=0.12)


def test_an_update_takes_about_as_long_as_was_measured(folder: Path) -> None:
    """docs/measurements/step.md, a whole step: 4.52 s for 1,024 samples of 640 tokens."""
    batch = ("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128")
    time = costs_of(folder, *STEP, *batch).time
    assert time is not None
    assert time.of("actor update") == pytest.approx(4.52, rel=0.05)
    assert (timing.training_share(494_000_000), timing.training_share(7_000_000_000)) == (0.452, 0.530)


def test_what_is_offloaded_crosses_to_the_gpu_and_back(folder: Path) -> None:
    model, size = costs_of(folder, *WHOLE, *OFFLOAD, "actor_rollout_ref.rollout.n=2").actor, 494_032_768
    # four updates: weights for the passes and for the optimizer, masters, two moments, each both ways
    assert timing.offloaded_bytes(model, passes=0, sums=4) == 4 * 2 * (2 + 2 + 4 + 8) * size
    eight = (*WHOLE, *OFFLOAD, "actor_rollout_ref.rollout.n=8", "trainer.n_gpus_per_node=8")
    # a rank's shard of weights twice a pass, of gradients as often as they are summed
    assert timing.offloaded_bytes(costs_of(folder, *eight).actor, passes=5, sums=3) == (10 + 3) * 4 * size / 8
    lora = costs_of(folder, *eight, "actor_rollout_ref.model.lora_rank=8").actor
    assert timing.offloaded_bytes(lora, passes=5, sums=3) == 4 * (10 * lora.parameters + 3 * lora.trainable) / 8


def test_time_is_left_out_where_nothing_was_measured_or_nothing_fits(folder: Path) -> None:
    exact = plan_of(folder, "algorithm.lam=1.0", "actor_rollout_ref.actor.fsdp_config.dtype=float32")
    assert exact.costs is not None and exact.costs.time is None
    assert exact.notes == ("Time is left out: rates were measured in bfloat16 only",)
    crowded = plan_of(folder, "algorithm.lam=1.0", gpu_gib=10)
    assert crowded.notes[-1] == "Time is left out: it does not fit"
    assert plan_of(None, "trainer.device=cpu").costs is None


# --- what is printed


def test_a_plan_needs_no_torch() -> None:
    code = "import sys; from rloom import cli; cli.main(['plan']); print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_the_table_in_the_guide_is_the_one_the_formula_makes() -> None:
    file = ROOT / "docs" / "plan.md"
    page = file.read_text(encoding="utf-8")
    assert page.count(scaling.BEGIN) == 1
    assert scaling.renewed(page) == page, "run `python benchmarks/plan_scaling.py docs/plan.md`"


# --- host memory


@pytest.mark.parametrize(
    ("stored", "keys", "number_bytes"),
    [
        ({"torch_dtype": "bfloat16"}, (), 2),
        ({"dtype": "float16"}, (), 2),
        ({"dtype": "float32"}, (), 4),
        ({}, (), 4),  # config.json does not say it
        ({"dtype": "bfloat16"}, ("trainer.n_gpus_per_node=8",), 2),  # one of eight workers reads
        ({"dtype": "bfloat16"}, ("trainer.n_gpus_per_node=8", "algorithm.use_kl_in_reward=True"), 2),  # in turn
    ],
)
def test_the_host_holds_one_model_while_it_is_read(
    tmp_path: Path, stored: dict[str, str], keys: tuple[str, ...], number_bytes: int
) -> None:
    folder = written(tmp_path / "model", {**SMALL, **SHAPES["0.5B"], **stored})
    costs = costs_of(folder, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *keys)
    assert costs.host_bytes == number_bytes * 494_032_768


def test_a_model_with_an_adapter_is_read_in_float32_and_a_critic_may_be_the_larger_model(tmp_path: Path) -> None:
    small, large = (
        written(tmp_path / name, {**SMALL, **SHAPES[name], "dtype": "bfloat16"}) for name in ("0.5B", "1.5B")
    )
    lora = costs_of(small, "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=8")
    assert lora.host_bytes == 4 * lora.actor.parameters > 4 * 494_032_768
    costs = costs_of(small, f"critic.model.path={large}")
    assert costs.critic is not None and costs.host_bytes == 2 * costs.critic.parameters
    plan = plan_of(small, f"critic.model.path={large}")
    assert "of the first machine while it reads a model" in render.render(plan)
