"""What vLLM as a rollout engine adds to the contract: its own copy of the weights, its cache, its arguments."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rloom.errors import ConfigError, ModelError
from rloom.launch.worker import check_agreement
from rloom.models.load import Lora
from rloom.models.source import EMBEDDED_FOLDER, ModelSource
from rloom.rollout.base import Request, Rollout
from rloom.rollout.vllm.environment import set_environment
from tests.contract.test_rollout_contract import (
    GREEDY,
    LUCKY,
    PROMPTS,
    Bench,
    as_batch,
    assert_trainer_agrees,
    greedy_by_hand,
    requests,
)
from tests.helpers import eager_model, engine_of, policy
from tests.requests import sampled

if TYPE_CHECKING:
    from rloom.rollout.vllm.arguments import VllmSettings
    from rloom.rollout.vllm.engine import VllmRollout


@pytest.fixture
def bench(shared_engine: Callable[..., "VllmRollout"], model_folder: Callable[[str], Path]) -> Bench:
    """Without the contract's wrapper: weights are as old as the last load_weights."""
    network = policy(model_folder("qwen3"))  # its head is tied to the embedding
    engine = engine_of(network)
    rollout = shared_engine(network)
    rollout.load_weights(engine.weights(), version=0)
    return Bench(network, engine, rollout)


def test_an_update_is_seen_after_it_is_sent_and_not_before(bench: Bench, tmp_path: Path) -> None:
    before = bench.write(requests(), GREEDY)
    bench.learn(rate=0.1)
    assert [one.tokens_L.tolist() for one in before] == bench.tokens(requests(), GREEDY)
    assert {one.version for one in before} == {0}
    bench.rollout.load_weights(bench.engine.weights(), version=7)
    bench.network.module.save_pretrained(tmp_path)
    after, model = bench.write(requests(), GREEDY), eager_model(tmp_path)
    assert [one.tokens_L.tolist() for one in after] == [greedy_by_hand(model, prompt) for prompt in PROMPTS]
    assert {one.version for one in after} == {7}
    assert [one.tokens_L.tolist() for one in after] != [one.tokens_L.tolist() for one in before]
    assert_trainer_agrees(bench, LUCKY)


def test_weights_that_vllm_does_not_repack_equal_the_trainers_bit_for_bit(bench: Bench) -> None:
    """On a CPU vLLM packs the matrices of linear layers; the embedding and the norms stay as they are."""
    bench.learn()
    bench.rollout.load_weights(bench.engine.weights(), version=1)
    trained = dict(bench.engine.weights())
    compared: dict[str, bool] = {}

    def compare(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in trained and parameter.shape == trained[name].shape:
                compared[name] = torch.equal(parameter, trained[name])

    vllm_of(bench.rollout).engine.apply_model(compare)
    assert all(compared.values())
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_norm.weight"} <= {*compared}


def test_cached_keys_of_a_prompt_serve_its_answers_and_are_dropped_with_the_weights(
    shared_engine: Callable[..., "VllmRollout"], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = policy(EMBEDDED_FOLDER / "model")
    engine, rollout = engine_of(network), shared_engine(network)
    bench, cached = Bench(network, engine, rollout), list[int]()
    completion = rollout.completion

    def recording(output: Any) -> Any:
        cached.append(output.num_cached_tokens)
        return completion(output)

    monkeypatch.setattr(rollout, "completion", recording)
    prompt = tuple(3 + number % 300 for number in range(400))
    asked = requests([prompt] * 3)
    for version in (0, 1):
        rollout.load_weights(engine.weights(), version)
        batch = as_batch(asked, bench.write(asked, LUCKY))
        torch.testing.assert_close(engine.score(batch), batch.rollout_logprobs_T, atol=1e-4, rtol=0)
        bench.learn(rate=0.01)
        bench.write(asked, LUCKY)
    first, again = cached[:3], cached[3:6]
    assert min(first) == 0 and max(first) >= 128  # the first answer computes the prompt, and later ones reuse it
    assert min(again) >= 128
    assert min(cached[6:9]) == 0  # after new weights it is computed again


def test_an_engine_with_other_weights_than_the_trainer_is_found_out(bench: Bench) -> None:
    check_agreement(bench.rollout, bench.engine, "vllm", longest=40, temperature=1.0)
    for _ in range(3):
        bench.learn(rate=0.1)
    with pytest.raises(ModelError, match=r"name=vllm: its log-probs differ from the trainer's by .*name=native or hf"):
        check_agreement(bench.rollout, bench.engine, "vllm", longest=40, temperature=1.0)
    bench.rollout.load_weights(bench.engine.weights(), version=1)
    check_agreement(bench.rollout, bench.engine, "vllm", longest=2, temperature=1.0)


def test_a_step_that_fails_leaves_no_request_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = vllm_of(bench.rollout)
    expected, step, steps = bench.tokens(requests(), GREEDY), rollout.engine.step, [0]

    def failing() -> Any:
        steps[0] += 1
        if steps[0] == 3:
            raise RuntimeError("no more memory")
        return step()

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more memory"):
        patch.setattr(rollout.engine, "step", failing)
        list(rollout.generate(sampled(requests(), GREEDY)))
    assert rollout.poll() == []
    assert not rollout.engine.has_unfinished_requests()
    assert bench.tokens(requests(), GREEDY) == expected


def test_closing_a_generation_early_cancels_the_rest(bench: Bench) -> None:
    short = replace(GREEDY, max_new_tokens=1)
    asked = [Request(PROMPTS[0], short, 1), *sampled(requests(), GREEDY)]
    answers = bench.rollout.generate(asked)
    assert next(answers)[0] == 0
    answers.close()
    assert not vllm_of(bench.rollout).engine.has_unfinished_requests()


def test_log_probs_of_validation_are_those_of_the_trainers_temperature(
    shared_engine: Callable[..., "VllmRollout"], model_folder: Callable[[str], Path]
) -> None:
    network = policy(model_folder("qwen2"), temperature=1.3)
    engine, rollout = engine_of(network), shared_engine(network)
    rollout.load_weights(engine.weights(), version=0)
    assert_trainer_agrees(Bench(network, engine, rollout), replace(LUCKY, temperature=0.4, top_p=0.9))
    assert_trainer_agrees(Bench(network, engine, rollout), GREEDY)


def test_a_weight_that_the_model_does_not_have_is_an_error(
    shared_engine: Callable[..., "VllmRollout"], model_folder: Callable[[str], Path]
) -> None:
    network = policy(model_folder("llama"), temperature=0.9)  # an engine of its own: the error leaves it unusable
    with pytest.raises(ModelError, match=r"does not take the trainer's weights: .*no_such.*name=native"):
        shared_engine(network).load_weights(iter([("model.no_such.weight", torch.zeros(1))]), version=1)


def test_a_lora_adapter_for_a_module_without_lora_in_vllm_is_an_error(
    shared_engine: Callable[..., "VllmRollout"], model_folder: Callable[[str], Path]
) -> None:
    network = policy(model_folder("qwen2"), lora=Lora(rank=4))
    weights: Iterator[Any] = iter([("base_model.model.model.no_such.lora_A.default.weight", torch.zeros(4, 128))])
    with pytest.raises(ModelError, match=r"the LoRA adapter: .*no LoRA for no_such.*target_modules"):
        shared_engine(network).load_weights(weights, version=1)


def test_starting_an_engine_changes_neither_the_generators_nor_the_threads_of_the_process(
    shared_engine: Callable[..., "VllmRollout"], model_folder: Callable[[str], Path]
) -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.random(), torch.rand(1), torch.set_num_threads, torch.get_num_threads()
    random.seed(5), np.random.seed(5)
    network = policy(model_folder("qwen2"), temperature=0.77)  # no other test has an engine of this temperature
    torch.manual_seed(5)
    shared_engine(network)
    assert (random.random(), np.random.random()) == expected[:2]
    assert torch.equal(torch.rand(1), expected[2])
    assert (torch.set_num_threads, torch.get_num_threads()) == expected[3:]


def vllm_of(rollout: Rollout) -> "VllmRollout":
    from rloom.rollout.vllm.engine import VllmRollout

    assert isinstance(rollout, VllmRollout)
    return rollout


# --- arguments


@pytest.fixture
def settings(model_folder: Callable[[str], Path]) -> "VllmSettings":
    set_environment()
    from rloom.rollout.vllm.arguments import VllmSettings

    source, cpu = ModelSource(str(model_folder("qwen2"))), torch.device("cpu")
    return VllmSettings(source, cpu, torch.float32, 8, 64, 32, 0.1, True, True, 1.0)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("block_sise", "EngineArgs has no such argument; did you mean block_size"),
        ("enforce_eager", "rloom sets this argument; use actor_rollout_ref.rollout.enforce_eager"),
        ("tensor_parallel_size", "use actor_rollout_ref.rollout.tensor_model_parallel_size"),
    ],
)
def test_an_unknown_or_reserved_engine_argument_is_refused_by_name(
    settings: "VllmSettings", name: str, sentence: str
) -> None:
    from rloom.rollout.vllm.arguments import check_model

    with pytest.raises(ConfigError, match=rf"engine_kwargs.{name}=1: .*{sentence}"):
        check_model(replace(settings, engine_kwargs={name: 1}))


def test_an_argument_of_vllm_is_passed_through(settings: "VllmSettings") -> None:
    from rloom.rollout.vllm.arguments import engine_arguments

    found = engine_arguments(replace(settings, engine_kwargs={"kv_cache_memory_bytes": 5, "load_format": "dummy"}))
    assert (found["kv_cache_memory_bytes"], found["load_format"], found["max_model_len"]) == (5, "dummy", 32)


def test_an_architecture_without_a_model_in_vllm_is_an_error_with_a_way_out(
    settings: "VllmSettings", tmp_path: Path
) -> None:
    from rloom.rollout.vllm.arguments import check_model

    (tmp_path / "config.json").write_text('{"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"]}')
    with pytest.raises(ModelError, match=r"vLLM does not accept this model.*XLNet.*name=native or hf"):
        check_model(replace(settings, source=ModelSource(str(tmp_path))))


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (4, 8), (16, 16), (33, 64)])
def test_the_rank_of_an_adapter_is_rounded_up_to_one_that_vllm_has(
    settings: "VllmSettings", rank: int, allowed: int
) -> None:
    from rloom.rollout.vllm.arguments import engine_arguments

    assert engine_arguments(replace(settings, lora_rank=rank))["max_lora_rank"] == allowed


def test_a_rank_that_vllm_does_not_have_is_refused(settings: "VllmSettings") -> None:
    from rloom.rollout.vllm.arguments import engine_arguments

    with pytest.raises(ConfigError, match=r"lora_rank=513: vLLM supports adapters up to rank 512"):
        engine_arguments(replace(settings, lora_rank=513))


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has bfloat16 arithmetic")
def test_bfloat16_on_a_cpu_without_it_is_refused(settings: "VllmSettings") -> None:
    """vLLM's kernels would end the process with an illegal instruction."""
    from rloom.rollout.vllm.arguments import check_model

    with pytest.raises(ConfigError, match=r"fsdp_config.dtype=bfloat16: this CPU .* use auto or float32"):
        check_model(replace(settings, dtype=torch.bfloat16))


def test_a_cache_too_small_for_one_sequence_is_an_error_that_names_the_keys(settings: "VllmSettings") -> None:
    from rloom.rollout.vllm.engine import VllmRollout

    with pytest.raises(ModelError, match=r"the engine could not be started: .*gpu_memory_utilization"):
        VllmRollout(replace(settings, engine_kwargs={"kv_cache_memory_bytes": 1}), convert=iter)
