"""Servers that replay the protocols of SGLang v0.5.18, TensorRT-LLM and vLLM, with rloom's own engine behind them.

They refuse fields that the real servers do not have, join process groups as SGLang does (gloo in place of NCCL), open
handles of shared memory as both do, and apply the weights, so that the next answers show them. In a thread of a test,
or as a process: `python -m tests.fake_servers sglang --model FOLDER --port 8000`.
"""

import argparse
import asyncio
import base64
import hashlib
import hmac
import io
import json
import os
import pickle
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from rloom.engines.weight_sync import received_stream, retried
from rloom.errors import ModelError
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.servers.trtllm_server import IDENTITY_ROUTE, add_routes
from tests.fake_engines import Engine, OneToken, Refusal

# fields of v0.5.18: srt/managers/io_struct.py (GenerateReqInput, those that a text model has) and
# srt/sampling/sampling_params.py (SamplingParams)
GENERATE = {"rid", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"} | {
    "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "stream", "log_metrics", "lora_path",
}  # fmt: skip
SAMPLING = {"max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"} | {
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "json_schema", "regex", "ebnf",
    "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", "logit_bias", "sampling_seed", "custom_params",
}  # fmt: skip
# tensorrt_llm/serve/openai_protocol.py (CompletionRequest), which forbids others
COMPLETION = {"model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens"} | {
    "n", "presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user",
    "top_k", "lora_request", "prompt_ignore_length", "use_beam_search", "top_p_min", "min_p", "repetition_penalty",
    "length_penalty", "early_stopping", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "return_context_logits",
    "detokenize", "add_special_tokens", "response_format", "disaggregated_params",
}  # fmt: skip
JSON = dict[str, Any]


def refuse_unknown(found: JSON, known: set[str]) -> None:
    unknown = sorted(set(found) - known)
    if unknown:
        raise Refusal(f"unknown fields: {unknown}")


class FakeServer(ThreadingHTTPServer):
    """`hold_after` answers, further requests get none until the server is killed."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, model: Path | int, port: int = 0, hold_after: int | None = None, die_at: int | None = None
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine = OneToken(model) if isinstance(model, int) else Engine(model)
        self.hold_after, self.die_at = hold_after, die_at
        self.calls: Counter[str] = Counter()
        self.bodies: list[tuple[str, JSON]] = []
        self.connections: set[socket.socket] = set()
        self.most_connections = 0  # at a time
        self.released: set[str] = set()
        self.groups: dict[str, Any] = {}
        self.weight_version, self.is_healthy = "default", True
        self.counting = threading.Lock()
        self.dead = threading.Event()

    def begin(self) -> "FakeServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def kill(self) -> None:
        """Connections are reset, as by the end of a process."""
        self.shutdown()
        self.server_close()
        self.dead.set()
        self.engine.stopped.set()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def generated(self, request: Request, name: str) -> Completion:
        if self.released:
            raise Refusal(f"memory is released: {self.released}", 500)
        with self.counting:
            self.calls["generate"] += 1
            number = self.calls["generate"]
        if self.die_at is not None and number >= self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hold_after is not None and number > self.hold_after:
            self.dead.wait()
            raise ConnectionError
        return self.engine.generate(request, name)

    def release_tags(self, tags: list[str]) -> None:
        if self.engine.futures:
            raise Refusal("release_memory_occupation should be called only when server is idle", 500)
        self.released |= set(tags)

    def resume_tags(self, tags: list[str]) -> None:
        if not set(tags) <= self.released:
            raise Refusal(f"{tags} are not released", 500)
        self.released -= set(tags)

    def authorize(self, path: str, body: bytes, headers: Message) -> None:
        pass

    def answer(self, path: str, body: JSON) -> Any:
        raise NotImplementedError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)
        self.server.most_connections = max(self.server.most_connections, len(self.server.connections))

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self.server.calls[self.path] += 1
        if self.path == "/health":
            self.reply(200 if self.server.is_healthy else 503, b"")
        else:
            self.answer(b"")

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.calls[self.path] += 1
        self.answer(sent)

    def answer(self, sent: bytes) -> None:
        body = json.loads(sent or b"{}")
        self.server.bodies.append((self.path, body))
        try:
            self.server.authorize(self.path, sent, self.headers)
            found = self.server.answer(self.path, body)
        except Refusal as refusal:
            self.reply(refusal.status, json.dumps({"error": {"message": str(refusal)}}).encode())
        except (ConnectionError, OSError):
            self.close_connection = True
        else:
            self.reply(200, b"" if found is None else json.dumps(found).encode())

    def reply(self, status: int, body: bytes) -> None:
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class FakeSglang(FakeServer):
    def answer(self, path: str, body: JSON) -> Any:
        match path:
            case "/generate":
                return self.generate(body)
            case "/abort_request":
                refuse_unknown(body, {"rid", "abort_all", "finished_reason", "abort_message"})
                return self.engine.abort(body["rid"])
            case "/flush_cache":
                return self.engine.flush()
            case "/release_memory_occupation":
                return self.release_tags(body["tags"])
            case "/resume_memory_occupation":
                return self.resume_tags(body["tags"])
            case "/init_weights_update_group":
                return self.init_group(body)
            case "/update_weights_from_distributed":
                return self.update(body, self.from_group)
            case "/update_weights_from_tensor":
                return self.update(body, from_handles)
        raise Refusal(f"Not Found: {path}", 404)

    def generate(self, body: JSON) -> JSON:
        refuse_unknown(body, GENERATE)
        given = body["sampling_params"]
        refuse_unknown(given, SAMPLING)
        sampling = Sampling(
            given["max_new_tokens"],
            given["temperature"],
            given["top_p"],
            given["top_k"],
            tuple(given.get("stop_token_ids", ())),
            given["ignore_eos"],
        )
        request = Request(tuple(body["input_ids"]), sampling, given["sampling_seed"])
        found, version = self.generated(request, body["rid"]), self.weight_version
        tokens, logprobs = found.tokens_L.tolist(), found.logprobs_L.tolist()
        reason: JSON = {"type": "length", "length": len(tokens)}
        if found.finished:
            reason = {"type": "stop", "matched": tokens[-1]}
        if found.interrupted:
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(request.tokens),
            "weight_version": version,
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
            "output_token_logprobs_length": len(tokens),
            "completion_tokens": len(tokens),
        }
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def init_group(self, body: JSON) -> JSON:
        """As init_custom_process_group of srt/utils/common.py, on the one rank of this server."""
        name, timeout = body["group_name"], timedelta(seconds=120)
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, ranks = next(rendezvous(where, body["rank_offset"], body["world_size"], timeout=timeout))
        store.set_timeout(timeout)
        assert body["backend"] == "gloo"
        group, _ = _new_process_group_helper(
            ranks, rank, [], Backend(body["backend"]), PrefixStore(name, store), group_name=name, timeout=timeout
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}
        self.groups[name] = group
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def from_group(self, body: JSON) -> list[tuple[str, Tensor]]:
        weights, handles = [], []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            handles.append(dist.broadcast(weight, src=0, group=self.groups[body["group_name"]], async_op=True))
            weights.append((name, weight))
        for handle in handles:
            handle.wait()
        return weights

    def update(self, body: JSON, read: Any) -> JSON:
        if "weights" in self.released:
            raise Refusal("weights are released", 500)
        try:
            self.engine.load(read(body))
        except (ModelError, RuntimeError) as error:
            raise Refusal(f"Failed to update parameter online: {error}.") from error
        self.weight_version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update parameter online."}


class AllowedOnly(pickle.Unpickler):
    """Modules that the unpicklers of both engines load classes of."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = (
            "builtins.",
            "collections.",
            "torch.",
            "multiprocessing.resource_sharer.",
            "multiprocessing.reduction.",
        )
        if not f"{module}.".startswith(allowed):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


def from_handles(body: JSON) -> list[tuple[str, Tensor]]:
    [own] = body["serialized_named_tensors"]  # one for each tensor parallel rank
    found: list[tuple[str, Tensor]] = opened(base64.b64decode(own, validate=True))
    return found


def opened(data: bytes) -> Any:
    return retried(lambda: AllowedOnly(io.BytesIO(data)).load())


class OwnRoutes:
    """Routes that rloom's start program adds to FastAPI's app."""

    def __init__(self) -> None:
        self.endpoints: dict[tuple[str, str], Callable[..., Coroutine[Any, Any, Any]]] = {}

    def add_api_route(
        self, path: str, endpoint: Callable[..., Coroutine[Any, Any, Any]], *, methods: list[str]
    ) -> None:
        for method in methods:
            self.endpoints[method, path] = endpoint

    def call(self, method: str, target: str) -> Any:
        parts = urlsplit(target)
        if (method, parts.path) not in self.endpoints:
            raise Refusal(f"Not Found: {target}", 404)
        return asyncio.run(self.endpoints[method, parts.path](**dict(parse_qsl(parts.query))))


class FakeTrtllm(FakeServer):
    control_routes = ("/release_memory", "/resume_memory", "/update_weights")
    control_key: str | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.own_routes = OwnRoutes()
        add_routes(self.own_routes)

    def authorize(self, path: str, body: bytes, headers: Message) -> None:
        """As serve/rl_control_auth.py."""
        if self.control_key is not None and path in self.control_routes:
            signed = f"sha256={hmac.new(self.control_key.encode(), body, hashlib.sha256).hexdigest()}"
            if headers.get("x-trtllm-rl-control-auth") != signed:
                raise Refusal("Invalid RL control request authentication", 401)

    def answer(self, path: str, body: JSON) -> Any:
        match path:
            case "/v1/completions":
                return self.complete(body)
            case "/release_memory":
                self.release_tags(body["tags"])
            case "/resume_memory":
                self.resume_tags(body["tags"])
            case "/update_weights":
                self.update(body["weights"])
            case _:
                return self.own_routes.call("GET" if path == IDENTITY_ROUTE else "POST", path)
        return {"status": "success"}

    def complete(self, body: JSON) -> JSON:
        refuse_unknown(body, COMPLETION)
        assert body["logprobs"] and not body["detokenize"] and body["include_stop_str_in_output"]
        sampling = Sampling(
            body["max_tokens"], body["temperature"], body["top_p"], body["top_k"] or -1, tuple(body["stop_token_ids"])
        )
        return completion(self.generated(Request(tuple(body["prompt"]), sampling, body["seed"]), str(id(body))))

    def update(self, handles: dict[str, str] | None) -> None:
        """As WorkerExtension.update_weights of llmapi/rlhf_utils.py; `func(*args)` opens host memory here."""
        if handles is None:
            self.engine.flush()
            return
        if not {"model", "model_weights"}.isdisjoint(self.released):
            raise Refusal("weights are released", 500)
        found = opened(base64.b64decode(handles["cpu"]))
        self.engine.load([(name, function(*arguments)) for name, (function, arguments) in found])


def completion(found: Completion) -> JSON:
    """In the form of OpenAI, with the ids of tokens."""
    tokens, logprobs = found.tokens_L.tolist(), found.logprobs_L.tolist()
    choice = {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "logprobs": {"text_offset": [], "token_logprobs": logprobs, "tokens": [], "top_logprobs": []},
        "finish_reason": "abort" if found.interrupted else "stop" if found.finished else "length",
        "stop_reason": tokens[-1] if found.finished else None,
    }
    return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}


@dataclass(frozen=True)
class GlooChannel:
    group: Any
    device = torch.device("cpu")
    sends = False

    def broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()


class FakeVllm(FakeServer):
    """With the methods of rloom's worker extension (rollout/vllm/server_worker.py) behind /collective_rpc."""

    trainer: GlooChannel | None = None
    temperature: float | None = None  # that the extension divides logits by; None: not set
    label: str | None = None
    has_abort_route = True
    aborting = 0  # resets of the cache that are refused, because aborted requests have not ended

    def answer(self, path: str, body: JSON) -> Any:
        match path:
            case "/v1/completions":
                sampling = Sampling(body["max_tokens"], body["temperature"] * (self.temperature or 1.0))
                request = Request(tuple(body["prompt"]), sampling, body.get("seed", 0))
                return completion(self.generated(request, body["request_id"]))
            case "/collective_rpc":
                self.calls[body["method"]] += 1
                return {"results": [getattr(self, body["method"])(**body["kwargs"])]}
            case "/abort_requests" if self.has_abort_route:
                for name in body["request_ids"]:
                    self.engine.abort(name.removeprefix("cmpl-").removesuffix("-0"))
                return {"status": "aborted", "aborted": len(body["request_ids"])}
            case "/reset_prefix_cache":
                self.engine.flush()
                self.aborting -= 1
                return {"success": self.aborting < 0}
        raise Refusal(f"Not Found: {path}", 404)

    def weights_identity(self) -> list[str | None]:
        return [str(id(self)), self.label]

    def join_trainer(self, name: str, address: str, ranks: int, backend: str, shared: bool, temperature: float) -> None:
        """Beside the trainer's NamedGroup in one process, which has each group by name once: at the same keys."""
        self.label, self.temperature = None, temperature
        store, rank, ranks = next(rendezvous(f"tcp://{address}", 1, ranks, timeout=timedelta(seconds=120)))
        keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self.trainer = GlooChannel(dist.ProcessGroupGloo(keys, rank, ranks, timedelta(seconds=120)))

    def receive_weights(self, label: str) -> str | None:
        if self.trainer is None:
            return None
        self.engine.load(list(received_stream(self.trainer)))
        self.label = label
        return ""


KINDS: dict[str, type[FakeServer]] = {"sglang": FakeSglang, "trtllm": FakeTrtllm, "vllm": FakeVllm}


def dies_once(request: int | None, file: Path) -> int | None:
    """The request, if the file is not there; it is made."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return None
    return request


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--die_at", type=int, help="kill the process at this request")
    parser.add_argument("--once", type=Path, help="only if this file is not there; it is made")
    given = parser.parse_args()
    die_at = given.die_at if given.once is None else dies_once(given.die_at, given.once)
    KINDS[given.kind](given.model, given.port, die_at=die_at).serve_forever()


if __name__ == "__main__":
    main()
