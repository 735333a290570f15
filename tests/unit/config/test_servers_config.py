"""Keys of inference servers: what is accepted, what is refused, and the commands that they become."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom import cli
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.errors import ConfigError
from rloom.launch import servers
from rloom.models.source import ModelSource
from rloom.rollout.servers import arguments
from rloom.rollout.servers.arguments import (
    SGLANG,
    TRTLLM,
    ServerSettings,
    class_fields,
    sglang_command,
    trtllm_command,
    vllm_command,
)
from rloom.rollout.servers.launch import own_command
from rloom.rollout.servers.trtllm_server import control_arguments
from rloom.trainer import main_ppo
from tests.helpers import configured

ROLLOUT = "actor_rollout_ref.rollout"
SERVER = f"{ROLLOUT}.server"
URL = f"{SERVER}.urls=http://10.0.0.1:30000"


@pytest.mark.parametrize("keys", [("sglang", f"{ROLLOUT}.tensor_model_parallel_size=4"), ("trtllm",)])
def test_the_documents_commands_pass_the_plan(keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    name, *further = keys
    assert cli.main(["plan", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.name={name}", *further]) == 0
    printed = capsys.readouterr()
    assert f"{name} takes longer" in printed.out
    engines = {
        "sglang": "8 / TP 4 = 2 engines: 32 prompts, 256",
        "trtllm": "1 / TP 1 = 1 engine: 64 prompts, 512",
    }
    assert engines[name] in printed.out
    assert ("on the GPU of the first of 8 workers" in printed.out + printed.err) == (name == "trtllm")


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_a_server_that_is_not_installed_is_named_before_torch_loads(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo.main([f"{ROLLOUT}.name={name}", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    package = {"sglang": "sglang", "trtllm": "tensorrt_llm"}[name]
    assert f"{ROLLOUT}.name={name}: {package} not installed here, so rloom cannot start the server" in line
    assert f"{SERVER}.urls=[...], or use {ROLLOUT}.name=vllm" in line


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            [f"{ROLLOUT}.name=trtllm", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            "tensor_model_parallel_size=2: TensorRT-LLM's server takes .* first worker's; use 1, or .*name=vllm",
        ),
        ([f"{ROLLOUT}.name=trtllm", f"{SERVER}.count=2"], "server.count=2: .* first worker's; use 1, or .*name=vllm"),
        ([f"{ROLLOUT}.name=trtllm", URL, f"{ROLLOUT}.temperature=0.7"], "temperature=0.7: TensorRT-LLM's log-probs"),
        ([f"{ROLLOUT}.name=trtllm", URL, f"{SERVER}.weight_transfer=collective"], "takes handles of memory only"),
        ([f"{ROLLOUT}.name=sglang", f"{SERVER}.urls=localhost:30000"], "server.urls has an entry that is not a URL"),
        ([f"{ROLLOUT}.name=sglang", f"{SERVER}.urls=http://a:b@c:1"], "without user name and query"),
        ([f"{ROLLOUT}.name=sglang", URL, f"{SERVER}.count=2"], "these servers are running; remove .*server.count"),
        ([f"{ROLLOUT}.name=sglang", URL, f"{ROLLOUT}.engine_kwargs={{a: 1}}"], "servers with arguments of their own"),
        ([f"{ROLLOUT}.name=sglang", "actor_rollout_ref.model.lora_rank=4"], "whole weights, not adapters"),
        (
            [f"{ROLLOUT}.name=sglang", "trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=3"],
            "tensor_model_parallel_size=3 does not divide 4 workers",
        ),
        (
            [f"{ROLLOUT}.name=sglang", "trainer.n_gpus_per_node=4", "trainer.pools.rollout=2"],
            "trainer.pools.rollout=2: servers are processes of their own",
        ),
        ([f"{ROLLOUT}.name=native", URL], "server.urls=.*no effect in this run, because no servers are used"),
        ([f"{ROLLOUT}.name=sglang", f"{SERVER}.key_env=sk-1"], "name of an environment variable"),
    ],
)
def test_what_servers_cannot_do_is_refused_with_the_way_out(keys: list[str], sentence: str) -> None:
    config = configured(*keys)
    with pytest.raises(ConfigError, match=sentence):
        check(config, declared_needs(config))


def test_vllm_is_a_server_where_its_keys_ask_for_one() -> None:
    assert not configured(f"{ROLLOUT}.name=vllm").actor_rollout_ref.rollout.uses_servers
    for key in (URL, f"{SERVER}.count=1"):
        config = configured(f"{ROLLOUT}.name=vllm", key, f"{ROLLOUT}.tensor_model_parallel_size=2", GPUS)
        assert config.actor_rollout_ref.rollout.uses_servers
        check(config, declared_needs(config))


GPUS = "trainer.n_gpus_per_node=2"
SETTINGS = ServerSettings(
    source=ModelSource("m"),
    dtype="bfloat16",
    max_sequences=256,
    max_prefill_tokens=8192,
    max_model_tokens=1024,
    memory_share=0.5,
    releases_memory=True,
    eager=False,
    tensor_parallel=2,
    on_gpu=True,
    engine_kwargs={"attention_backend": "fa3", "enable_deterministic_inference": True},
)


def test_sglangs_command_has_rlooms_settings_and_the_users() -> None:
    words = " ".join(sglang_command(SETTINGS)[1:])
    assert words == (
        f"-P -m sglang.launch_server --model-path {SETTINGS.source.location} --host 127.0.0.1 --port {{port}} "
        "--dtype bfloat16 --context-length 1024 --max-running-requests 256 --max-prefill-tokens 8192 "
        "--mem-fraction-static 0.5 --tp-size 2 --enable-memory-saver --enable-weights-cpu-backup "
        "--attention-backend fa3 --enable-deterministic-inference"
    )


def test_tensorrt_llm_is_started_over_the_llm_that_takes_new_weights() -> None:
    own = {"disable_overlap_scheduler": True, "kv_cache_config": {"enable_block_reuse": False}}
    settings = replace(
        SETTINGS, source=ModelSource("m", overrides={"rope_theta": 1}), tensor_parallel=1, eager=True, engine_kwargs=own
    )
    _, *words, arguments = trtllm_command(settings, "KEY")
    assert words[:2] == ["-P", arguments_file("trtllm_server.py")]
    assert " ".join(words[2:]) == "--model m --host 127.0.0.1 --port {port} --key-env KEY --arguments"
    assert json.loads(arguments) == {
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "max_seq_len": 1024,
        "max_batch_size": 256,
        "max_num_tokens": 8192,
        "enable_chunked_prefill": True,
        "tensor_parallel_size": 1,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False},
        "model_kwargs": {"rope_theta": 1},
        "sleep_config": {},
        "cuda_graph_config": None,
        "disable_overlap_scheduler": True,
    }


def test_a_tensorrt_llm_without_a_key_for_its_routes_gets_none() -> None:
    class Older:
        def __init__(self, generator: Any, model: str) -> None: ...

    class Newer:
        def __init__(
            self, enable_rl_control_endpoints: bool = False, rl_control_api_key: str | None = None
        ) -> None: ...

    assert control_arguments(Older, "key") == {}
    assert control_arguments(Newer, "key") == {"enable_rl_control_endpoints": True, "rl_control_api_key": "key"}


def arguments_file(name: str) -> str:
    return str(Path(arguments.__file__).with_name(name))


def test_vllms_command_is_that_of_the_engine_in_process_with_rlooms_worker() -> None:
    given = {
        "model": "m",
        "enforce_eager": False,
        "hf_overrides": {"a": 1},
        "skip_tokenizer_init": True,
        "revision": None,
    }
    assert vllm_command(given, tensor_parallel=4)[1:] == [
        *("-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--no-enforce-eager"),
        *("--hf-overrides", '{"a": 1}', "--tensor-parallel-size", "4"),
        *("--worker-extension-cls", "rloom.rollout.vllm.server_worker.ServerWorker", "--load-format", "auto"),
        *("--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", "{port}"),
        *("--seed", "{port}"),
    ]


def test_unknown_arguments_are_refused_by_the_engines_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "@dataclass\nclass ServerArgs:\n    tp_size: A[int, 'x'] = 1\n    attention_backend: str = 'a'\n"
    assert class_fields(source, ["ServerArgs"]) == {"tp_size", "attention_backend"}
    monkeypatch.setattr(arguments, "argument_names", lambda engine: class_fields(source, engine.classes))
    with pytest.raises(ConfigError, match=r"engine_kwargs.atention_backend=1: .*did you mean attention_backend\?"):
        arguments.check_names(SGLANG, {"atention_backend": 1})
    with pytest.raises(ConfigError, match=r"tp_size=2: rloom sets this argument; use .*tensor_model_parallel_size"):
        arguments.check_names(SGLANG, {"tp_size": 2})
    monkeypatch.undo()
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "packages")  # a package tensorrt_llm
    with pytest.raises(ConfigError, match=r"TorchLlmArgs of tensorrt_llm has no .*mean disable_overlap_scheduler\?"):
        arguments.check_names(TRTLLM, {"overlap_scheduler": 1})
    share = {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}}
    with pytest.raises(ConfigError, match=r"free_gpu_memory_fraction=0.9: rloom sets .*use .*gpu_memory_utilization"):
        arguments.trtllm_arguments(replace(SETTINGS, engine_kwargs=share))


def test_a_command_of_the_users_has_the_models_folder(tmp_path: Path) -> None:
    assert own_command("serve '{model}' --port {port}", str(tmp_path)) == ["serve", str(tmp_path), "--port", "{port}"]


@pytest.mark.parametrize(("keys", "most"), [([], 512), ([f"{ROLLOUT}.max_num_seqs=24"], 48)])
def test_a_server_gets_twice_as_many_requests_as_it_runs_sequences(
    keys: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a server of the user's, whose own limit rloom does not know."""
    monkeypatch.setattr(servers, "ServerRollout", lambda specs, wire, settings, *rest: settings)
    monkeypatch.setattr(servers, "CheckpointFormat", lambda network: network)
    config = configured(f"{ROLLOUT}.name=sglang", URL, *keys)
    settings: Any = servers.server_rollout(config, Any, None, torch.device("cpu"), torch.float32, [])  # type: ignore[arg-type]
    assert settings.max_requests == most
