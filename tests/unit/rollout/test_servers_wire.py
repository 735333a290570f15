"""Requests and answers of each engine, byte for byte.

Sources: SGLang v0.5.18 (srt/managers/io_struct.py, srt/managers/tokenizer_manager.py), vLLM 0.32.0
(entrypoints/openai/completion/protocol.py, entrypoints/serve/dev), TensorRT-LLM of 2026 (serve/openai_protocol.py,
serve/openai_server.py, serve/rl_control_auth.py).
"""

import base64
import json
import pickle
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from rloom.rollout.base import Request, Sampling
from rloom.rollout.servers import sglang, trtllm, vllm
from rloom.rollout.servers.rendezvous import ServerRendezvous
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.trtllm_server import add_routes
from rloom.rollout.servers.vllm import VllmApi
from rloom.rollout.servers.wire import (
    SHARED,
    Call,
    Identity,
    ServerApi,
    ServerApiError,
    ServerCompletion,
    TransferSettings,
)

ASKED = Request((5, 6), Sampling(4, temperature=0.5, top_p=0.9, stop_ids=(2,)), seed=7)
WHERE = ServerRendezvous("g", "10.0.0.1", 29500, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
BUCKET = [("a.weight", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(4))]
WIRES: list[Callable[[], ServerApi]] = [SglangApi, TrtllmApi, VllmApi]


def test_sglang_generates_from_token_ids() -> None:
    assert SglangApi().generate(ASKED, "r1").path == "/generate"
    assert SglangApi().generate(ASKED, "r1").body == (
        b'{"rid":"r1","input_ids":[5,6],"sampling_params":{"max_new_tokens":4,"temperature":0.5,"top_p":0.9,"top_k":-1,'
        b'"sampling_seed":7,"ignore_eos":false,"skip_special_tokens":false,"stop_token_ids":[2]},'
        b'"return_logprob":true,"stream":false}'
    )


def test_sglang_answers_with_tokens_logprobs_and_the_version_of_its_weights() -> None:
    body = (
        b'{"text":" a","output_ids":[9,2],"meta_info":{"id":"r1","finish_reason":{"type":"stop","matched":2},'
        b'"prompt_tokens":2,"weight_version":"3","output_token_logprobs":[[-0.5,9,null],[-1.25,2,null]],'
        b'"output_token_logprobs_length":2,"completion_tokens":2,"cached_tokens":0,"e2e_latency":0.1}}'
    )
    assert SglangApi().parse_completion(body) == ServerCompletion([9, 2], [-0.5, -1.25], finished=True, label="3")
    cut = body.replace(b'{"type":"stop","matched":2}', b'{"type":"length","length":2}')
    assert not SglangApi().parse_completion(cut).finished
    aborted = body.replace(b'{"type":"stop","matched":2}', b'{"type":"abort","message":"Aborted"}')
    assert SglangApi().parse_completion(aborted).aborted
    assert SglangApi().parse_completion(body.replace(b'"cached_tokens":0', b'"cached_tokens":1')).reused_tokens == 1


def test_sglang_joins_a_group_and_takes_buckets_without_flushing_after_each() -> None:
    assert sglang.init_group(WHERE, 2, "nccl") == Call(
        "/init_weights_update_group",
        {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g",
            "backend": "nccl",
        },
    )
    assert sglang.update_from_distributed(BUCKET, "g", "rloom-1f-12-0").body == (
        b'{"names":["a.weight","b"],"dtypes":["bfloat16","float32"],"shapes":[[2,3],[4]],"group_name":"g",'
        b'"flush_cache":false,"weight_version":"rloom-1f-12-0"}'
    )
    assert sglang.FLUSH.path == "/flush_cache"


def test_sglang_releases_and_resumes_by_tags_and_aborts_by_id() -> None:
    wire = SglangApi()
    assert wire.release() == Call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert wire.resume("weights") == Call("/resume_memory_occupation", {"tags": ["weights"]})
    assert wire.abort("r1") == Call("/abort_request", {"rid": "r1"})
    assert wire.headers("k", b"") == {"Authorization": "Bearer k"}


def test_vllm_generates_from_token_ids_at_the_trainers_temperature() -> None:
    """The extension has divided the logits by 0.25: a temperature of 0.5 is 2 of these."""
    assert VllmApi(0.25).generate(ASKED, "r1").path == "/v1/completions"
    body = (
        b'{"request_id":"r1","prompt":[5,6],"max_tokens":4,"temperature":2.0,"top_p":0.9,"top_k":0,'
        b'"repetition_penalty":1.0,"seed":7,"stop_token_ids":[2],"ignore_eos":true,"logprobs":0,'
        b'"return_token_ids":true,"skip_special_tokens":false}'
    )
    assert VllmApi(0.25, request_seeds=True).generate(ASKED, "r1").body == body
    assert VllmApi(0.25).generate(ASKED, "r1").body == body.replace(b'"seed":7,', b"")  # vLLM's sampler is faster


def test_an_interrupted_request_is_named_as_the_server_knows_it() -> None:
    assert SglangApi().interrupt("r1") == Call("/abort_request", {"rid": "r1"})
    assert VllmApi().interrupt("r1") == Call("/abort_requests", {"request_ids": ["cmpl-r1-0"]})
    assert TrtllmApi().interrupt("r1") is None


def test_vllm_and_trtllm_answer_in_the_form_of_openai() -> None:
    body = (
        b'{"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a",'
        b'"logprobs":{"text_offset":[0,2],"token_logprobs":[-0.5,-1.25],"tokens":[" a",""],"top_logprobs":[null,null]},'
        b'"finish_reason":"stop","stop_reason":2,"token_ids":[9,2],"prompt_token_ids":[5,6]}],"usage":{}}'
    )
    for wire in (VllmApi(), TrtllmApi()):
        assert wire.parse_completion(body) == ServerCompletion([9, 2], [-0.5, -1.25], finished=True)
        assert not wire.parse_completion(body.replace(b'"stop","stop', b'"length","stop')).finished
        assert wire.parse_completion(body.replace(b'"stop","stop', b'"abort","stop')).aborted
        reused = body.replace(b'"usage":{}', b'"usage":{"prompt_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}')
        assert wire.parse_completion(reused).reused_tokens == 1


def test_vllm_sleeps_wakes_and_joins_by_its_development_routes() -> None:
    assert VllmApi().release() == Call("/sleep?level=1", {})
    assert VllmApi().resume("kv_cache") == Call("/wake_up?tags=kv_cache", {})
    assert vllm.join_group(WHERE, 2, "nccl", False, 0.7).body == (
        b'{"method":"join_trainer","kwargs":{"name":"g","address":"10.0.0.1:29500","ranks":3,"backend":"nccl",'
        b'"shared":false,"temperature":0.7}}'
    )


def test_vllm_tells_one_process_from_another_and_the_update_that_it_has() -> None:
    route = VllmApi().identity_route
    assert route is not None and route.call.body == b'{"method":"weights_identity","kwargs":{}}'
    assert route.parse(b'{"results":[["p0","x"],["p1","x"]]}') == Identity("p0 p1", "x")
    assert route.parse(b'{"results":[["p0",null]]}') == Identity("p0", None)
    assert route.parse(b'{"results":[["p0","x"],["p1",null]]}').label is None  # one of two has not got it
    for body in (b'{"results":[null]}', b'{"results":[]}', b'{"results":[""]}', b"{}"):
        with pytest.raises(ServerApiError, match="which process it is"):
            route.parse(body)


def test_trtllm_generates_without_detokenizing_and_keeps_the_stop_token() -> None:
    assert TrtllmApi().generate(ASKED, "r1").path == "/v1/completions"
    assert TrtllmApi().generate(ASKED, "r1").body == (
        b'{"model":"policy","prompt":[5,6],"max_tokens":4,"temperature":0.5,"top_p":0.9,"top_k":0,"seed":7,'
        b'"stop_token_ids":[2],"include_stop_str_in_output":true,"ignore_eos":true,"logprobs":1,"detokenize":false}'
    )


def test_trtllm_signs_control_requests_with_its_key() -> None:
    """HMAC-SHA256 of the body, as `openssl dgst -sha256 -hmac secret` prints it."""
    call = TrtllmApi().resume("weights")
    assert (call.path, call.body) == ("/resume_memory", b'{"tags":["model","model_weights"]}')
    assert TrtllmApi().headers("secret", call.body) == {
        "x-trtllm-rl-control-auth": "sha256=8ac5aef9f861b885f8b4f1c2e6feadcf5095d00e7aa78dc2b43ef8461e7aa6da",
    }
    assert TrtllmApi().release().json == {"tags": ["kv_cache", "model", "model_weights"]}


class Recorder:
    """A link that accepts everything."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def start(self, call: Call) -> "Future[bytes]":
        self.calls.append(call)
        done: Future[bytes] = Future()
        done.set_result(b'{"success": true, "message": ""}')
        return done


def test_handles_are_made_once_for_each_process_of_a_server() -> None:
    link = Recorder()
    sender = SglangApi().sender(link, TransferSettings(SHARED, torch.device("cpu"), 2, 1.0))
    sender.send([("b", torch.arange(3.0))], label="x")
    [call] = link.calls
    assert call.json is not None
    opened = [pickle.loads(base64.b64decode(text)) for text in call.json["serialized_named_tensors"]]
    assert [(name, tensor.tolist()) for [(name, tensor)] in opened] == [("b", [0.0, 1.0, 2.0])] * 2


def test_trtllm_ends_an_update_without_handles() -> None:
    link = Recorder()
    sender = TrtllmApi().sender(link, TransferSettings(SHARED, torch.device("cpu"), 1, 1.0))
    sender.send([("b", torch.arange(3.0))], label="x")
    sender.finish(label="x")
    sender.send([("b", torch.arange(3.0))], label="y")
    first, last, second = (json.loads(call.body)["weights"] for call in link.calls if call.path == "/update_weights")
    [(name, (function, arguments))] = pickle.loads(base64.b64decode(first["cpu"]))
    assert (name, function(*arguments).tolist()) == ("b", [0.0, 1.0, 2.0])
    assert last is None and second is not None
    # the label is that of whole weights: none from the first bucket of an update to its end
    assert [call.path for call in link.calls] == [
        "/weights_label", "/update_weights", "/update_weights", "/weights_label?label=x",
        "/weights_label", "/update_weights",
    ]  # fmt: skip
    assert trtllm.update_weights(None).body == b'{"weights":null}'


def test_fastapi_serves_the_routes_that_tell_one_trtllm_process_from_another() -> None:
    """TensorRT-LLM's server is an app of FastAPI."""
    fastapi = pytest.importorskip("fastapi")
    testclient = pytest.importorskip("fastapi.testclient")
    found = []
    for _ in range(2):
        app = fastapi.FastAPI()
        add_routes(app)
        with testclient.TestClient(app) as served:
            route = TrtllmApi().identity_route
            assert route is not None
            for label in ("", "rloom-a-7-0", None):
                if label != "":
                    call = trtllm.set_label(label)
                    assert served.post(call.path, content=call.body).status_code == 200
                found.append(route.parse(served.get(route.call.path).content))
    assert [identity.label for identity in found] == [None, "rloom-a-7-0", None] * 2
    assert [identity.instance for identity in found] == [found[0].instance] * 3 + [found[3].instance] * 3
    assert found[0].instance != found[3].instance


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_of_another_protocol_is_an_error(wire: Callable[[], ServerApi]) -> None:
    for body in (b"<html>", b'{"choices": []}', b'{"meta_info": {}}'):
        with pytest.raises(ServerApiError, match="sent"):
            wire().parse_completion(body)


def test_with_ignore_eos_no_token_stops() -> None:
    request = Request((5,), Sampling(4, stop_ids=(2,), ignore_eos=True), seed=0)
    for wire in (VllmApi(), TrtllmApi()):
        found = wire.generate(request, "r").json
        assert found is not None and found["stop_token_ids"] == [] and found["ignore_eos"]
    found = SglangApi().generate(request, "r").json
    assert found is not None and found["sampling_params"]["ignore_eos"]
    assert "stop_token_ids" not in found["sampling_params"]
