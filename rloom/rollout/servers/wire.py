"""How the server of one engine is called: request bodies, answers and the way weights take. One `Wire` per engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic_core import from_json, to_json
from torch import Tensor

from rloom.rollout.base import Request

WEIGHTS, CACHE = "weights", "kv_cache"  # parts of a server's GPU memory
COLLECTIVE, SHARED = "collective", "shared"  # ways to send weights

Bucket = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Call:
    """One HTTP request: a POST with this JSON body, or a GET."""

    path: str
    json: Mapping[str, Any] | None = None
    is_get: bool = False

    @property
    def body(self) -> bytes:
        return b"" if self.json is None else to_json(self.json)


@dataclass(frozen=True)
class ServerCompletion:
    """What a server generated for one request."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool  # ended with a stop token
    aborted: bool = False  # the server aborted it: it is sent again
    label: str | None = None  # of the weights, where the server reports it
    reused_tokens: int = 0  # of the prompt: found in the server's prefix cache, where the server reports it


@dataclass(frozen=True)
class Identity:
    """Which process answers, and the weights that it has."""

    instance: str  # another after a restart
    label: str | None  # of the weights that a trainer sent last. None: those that the process read at its start


@dataclass(frozen=True)
class IdentityRoute:
    call: "Call"
    parse: Callable[[bytes], Identity]


class ServerApiError(Exception):
    """An answer that is not of the engine's protocol. The message completes "the server ..."."""


class Link(Protocol):
    """One server, as far as weights are concerned."""

    @property
    def url(self) -> str: ...

    def start(self, call: Call) -> "Future[bytes]":
        """Send the request and return at once. Raises nothing: the future does."""


@dataclass(frozen=True)
class TransferSettings:
    kind: str  # COLLECTIVE or SHARED
    device: torch.device  # of the trainer's tensors
    server_ranks: int  # tensor parallel processes of the server
    timeout_s: float


class Sender(Protocol):
    """Sends weights to one server. Its methods block, and are called in a thread of the server's own."""

    def send(self, bucket: Bucket, label: str) -> None:
        """`label`: of the update, unique among all trainers and updates. The server keeps it, if it can."""

    def finish(self, label: str) -> None:
        """After the last bucket: the next token is computed with these weights, and no cached keys are left."""

    def close(self) -> None: ...


HEALTH = Call("/health", is_get=True)  # of all three engines


class ServerApi(ABC):
    """The methods with a body are those that most engines have."""

    @property
    def identity_route(self) -> IdentityRoute | None:
        """None: the engine's server has no such route."""
        return None

    @abstractmethod
    def generate(self, request: Request, name: str) -> Call:
        """`name` is unique among the requests of a run."""

    def parse_completion(self, body: bytes) -> ServerCompletion:
        return parse_openai_completion(body)

    def abort(self, name: str) -> Call | None:
        """None: the server aborts a request when its connection is closed."""
        return None

    def interrupt(self, name: str) -> Call | None:
        """After it the server answers the request with what it has, as aborted. None: it has no such route."""
        return None

    @abstractmethod
    def release(self) -> Call:
        """Release GPU memory: the cache is dropped, the weights go to the host."""

    @abstractmethod
    def resume(self, part: str) -> Call: ...

    def headers(self, key: str | None, body: bytes) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    @abstractmethod
    def sender(self, link: Link, settings: TransferSettings) -> Sender: ...


def parsed(body: bytes) -> Any:
    """By pydantic's reader, which takes a quarter of the time of Python's for an answer's log-probs."""
    try:
        return from_json(body)
    except ValueError as error:
        raise ServerApiError(f"sent no JSON: {body[:100]!r}") from error


def parse_openai_completion(body: bytes) -> ServerCompletion:
    """Of /v1/completions in the form of OpenAI, with token ids: vLLM and TensorRT-LLM."""
    try:
        answer = parsed(body)
        [choice] = answer["choices"]
        tokens, logprobs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerApiError(
            f"sent a completion without token_ids, logprobs or finish_reason: {body[:200]!r}"
        ) from error
    if len(tokens) != len(logprobs):
        raise ServerApiError(f"sent {len(tokens)} tokens and {len(logprobs)} log-probs")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return ServerCompletion(
        tokens,
        logprobs,
        finished=reason == "stop",
        aborted=reason not in ("stop", "length"),
        reused_tokens=details.get("cached_tokens") or 0,
    )
