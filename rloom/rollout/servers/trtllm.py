"""TensorRT-LLM's OpenAIServer: /v1/completions and its RL routes /release_memory, /resume_memory, /update_weights.

None of its routes tells one process from another: trtllm_server.py adds two for that.

Its PyTorch backend returns log-probs of the raw logits (LogprobMode.RAW), before the temperature: they are the
trainer's at temperature 1. A request has no field for another mode.
"""

import base64
import hashlib
import hmac
from typing import Any
from urllib.parse import urlencode

from rloom.engines.weight_sync import dumps, gpu_uuid, reduced
from rloom.rollout.base import Request
from rloom.rollout.servers.trtllm_server import IDENTITY_ROUTE, LABEL_ROUTE
from rloom.rollout.servers.wire import (
    CACHE,
    WEIGHTS,
    Bucket,
    Call,
    Identity,
    IdentityRoute,
    Link,
    Sender,
    ServerApi,
    ServerApiError,
    TransferSettings,
    parsed,
)

AUTHENTICATION = "x-trtllm-rl-control-auth"
TAGS = {WEIGHTS: ["model", "model_weights"], CACHE: ["kv_cache"]}  # of its ExecutorMemoryType
ANY_DEVICE = "cpu"  # in place of a GPU's UUID, where there is none


class TrtllmApi(ServerApi):
    @property
    def identity_route(self) -> IdentityRoute | None:
        return IdentityRoute(Call(IDENTITY_ROUTE, is_get=True), identity)

    def generate(self, request: Request, name: str) -> Call:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": "policy",  # required, and not compared
            "prompt": request.tokens,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),  # 0: the whole vocabulary
            "seed": request.seed,
            "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_ids),
            "include_stop_str_in_output": True,  # otherwise the stop token is cut off
            "ignore_eos": True,  # the model's own: only the stop tokens of the request stop
            "logprobs": 1,  # 0 is none
            "detokenize": False,  # token ids in place of a text
        }
        return Call("/v1/completions", body)

    def release(self) -> Call:
        return Call("/release_memory", {"tags": [*TAGS[CACHE], *TAGS[WEIGHTS]]})

    def resume(self, part: str) -> Call:
        return Call("/resume_memory", {"tags": TAGS[part]})

    def headers(self, key: str | None, body: bytes) -> dict[str, str]:
        if key is None:
            return {}
        return {AUTHENTICATION: f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"}

    def sender(self, link: Link, settings: TransferSettings) -> Sender:
        return HandleSender(link, settings)


def identity(body: bytes) -> Identity:
    try:
        found = parsed(body)
        return Identity(found["instance"], found["label"])
    except (KeyError, TypeError) as error:
        raise ServerApiError(f"does not report which process it is: {body[:200]!r}") from error


class HandleSender:
    """By CUDA IPC handles, by the GPU's UUID; a request without handles ends the update and drops cached keys."""

    def __init__(self, link: Link, settings: TransferSettings) -> None:
        self.link, self.has_begun = link, False
        self.device = gpu_uuid(settings.device) if settings.device.type == "cuda" else ANY_DEVICE

    def send(self, bucket: Bucket, label: str) -> None:
        if not self.has_begun:
            self.link.start(set_label(None)).result()  # another trainer's answers from here on are of neither's weights
            self.has_begun = True
        handles = dumps([(name, reduced(tensor)) for name, tensor in bucket])
        self.link.start(update_weights({self.device: base64.b64encode(handles).decode()})).result()

    def finish(self, label: str) -> None:
        self.link.start(update_weights(None)).result()
        self.link.start(set_label(label)).result()
        self.has_begun = False

    def close(self) -> None:
        pass


def update_weights(handles: dict[str, str] | None) -> Call:
    return Call("/update_weights", {"weights": handles})


def set_label(label: str | None) -> Call:
    return Call(LABEL_ROUTE if label is None else f"{LABEL_ROUTE}?{urlencode({'label': label})}", {})
