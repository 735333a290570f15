"""vLLM's server, as in 0.32 with VLLM_SERVER_DEV_MODE=1 and rloom's worker extension (rollout/vllm/server_worker.py).

The extension divides the logits by the trainer's temperature, so that vLLM's raw log-probs are the trainer's, and reads
new weights from a process group with the trainer.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from rloom.engines.distributed import NamedGroup
from rloom.engines.weight_sync import SharedChannel, send_bucket
from rloom.net.http import Unreachable
from rloom.rollout.base import Request
from rloom.rollout.servers.rendezvous import ServerRendezvous, backend_for, run_beside
from rloom.rollout.servers.wire import (
    SHARED,
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

EXTENSION = "rloom.rollout.vllm.server_worker.ServerWorker"
ABORT_S = 60.0  # for vLLM to abort requests whose connections were closed: before that it keeps their keys


@dataclass(frozen=True)
class VllmApi(ServerApi):
    temperature: float = 1.0  # of the trainer's log-probs
    request_seeds: bool = False

    @property
    def identity_route(self) -> IdentityRoute | None:
        return IdentityRoute(rpc("weights_identity"), identity)

    def generate(self, request: Request, name: str) -> Call:
        sampling = request.sampling
        body: dict[str, Any] = {
            "request_id": name,
            "prompt": request.tokens,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature / self.temperature,  # the logits are divided by the latter already
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "repetition_penalty": 1.0,  # not that of the model's generation settings
            **({"seed": request.seed} if self.request_seeds else {}),
            "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_ids),
            "ignore_eos": True,  # the model's own: only the stop tokens of the request stop
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        return Call("/v1/completions", body)

    def interrupt(self, name: str) -> Call | None:
        return Call("/abort_requests", {"request_ids": [f"cmpl-{name}-0"]})  # as its route for completions names it

    def release(self) -> Call:
        return Call(f"/sleep?{urlencode({'level': 1})}", {})

    def resume(self, part: str) -> Call:
        return Call(f"/wake_up?{urlencode({'tags': part})}", {})

    def sender(self, link: Link, settings: TransferSettings) -> Sender:
        return StreamSender(link, settings, self.temperature)


class StreamSender:
    """One call of the extension reads all buckets of an update, as they come over the process group."""

    def __init__(self, link: Link, settings: TransferSettings, temperature: float) -> None:
        self.link, self.settings, self.temperature = link, settings, temperature
        self.channel: NamedGroup | SharedChannel | None = None
        self.update: Future[bytes] | None = None

    def join(self) -> NamedGroup | SharedChannel:
        where, settings = ServerRendezvous.for_server(self.link.url), self.settings
        shared = settings.kind == SHARED
        backend = "gloo" if shared else backend_for(settings.device)
        answer = self.link.start(join_group(where, settings.server_ranks, backend, shared, self.temperature))
        group = where.join(
            answer, settings.server_ranks, backend=backend, device=settings.device, timeout_s=settings.timeout_s
        )
        answer.result()
        return SharedChannel(group, settings.device) if shared else group

    def send(self, bucket: Bucket, label: str) -> None:
        if self.channel is None:
            self.channel = self.join()
        if self.update is None:
            self.update = self.link.start(rpc("receive_weights", label=label))
        update, channel = self.update, self.channel
        run_beside(update, lambda: send_bucket(bucket, channel), check_taken)

    def finish(self, label: str) -> None:
        assert self.channel is not None and self.update is not None
        channel, update, self.update = self.channel, self.update, None
        run_beside(update, lambda: send_bucket([], channel), check_taken)
        check_taken(update)
        until_s = time.monotonic() + ABORT_S
        while not parsed(self.link.start(RESET).result())["success"]:
            if time.monotonic() > until_s:
                raise ServerApiError(
                    f"did not drop its prefix cache in {ABORT_S:g} s after new weights: it has requests"
                )
            time.sleep(0.1)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()


def check_taken(update: "Future[bytes]") -> None:
    found = parsed(update.result())["results"]
    if None in found:
        raise Unreachable("was started again, and has not joined the trainer")
    refusals = [text for text in found if text]
    if refusals:
        raise ServerApiError(f"does not take the trainer's weights: {refusals[0]}")


def identity(body: bytes) -> Identity:
    """Of all tensor parallel processes of the server. One that has other weights than the first counts as without."""
    try:
        found = [(str(instance), label) for instance, label in parsed(body)["results"]]
        [first, *others] = [label for _, label in found]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerApiError(f"does not report which process it is: {body[:200]!r}") from error
    return Identity(" ".join(instance for instance, _ in found), first if others == [first] * len(others) else None)


RESET = Call("/reset_prefix_cache", {})


def rpc(method: str, **arguments: Any) -> Call:
    return Call("/collective_rpc", {"method": method, "kwargs": arguments})


def join_group(where: ServerRendezvous, server_ranks: int, backend: str, shared: bool, temperature: float) -> Call:
    return rpc(
        "join_trainer",
        name=where.name,
        address=f"{where.host}:{where.port}",
        ranks=1 + server_ranks,
        backend=backend,
        shared=shared,
        temperature=temperature,
    )
