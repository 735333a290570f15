"""SGLang's server, as in v0.5.18: /generate, the routes for weights, memory and cache.

Its `output_token_logprobs` are log(softmax(logits / temperature)) of the sampled token, before top-k, top-p and min-p
cut the distribution (srt/layers/sampler.py), unless the server has SGLANG_RETURN_ORIGINAL_LOGPROB=1.
"""

import base64
from concurrent.futures import Future
from typing import Any

from rloom.engines.distributed import NamedGroup
from rloom.engines.weight_sync import dumps
from rloom.rollout.base import Request
from rloom.rollout.servers.rendezvous import ServerRendezvous, backend_for, run_beside
from rloom.rollout.servers.wire import (
    CACHE,
    SHARED,
    WEIGHTS,
    Bucket,
    Call,
    Link,
    Sender,
    ServerApi,
    ServerApiError,
    ServerCompletion,
    TransferSettings,
    parsed,
)


class SglangApi(ServerApi):
    """Every answer has the label of the weights."""

    def generate(self, request: Request, name: str) -> Call:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,  # -1: the whole vocabulary
            "sampling_seed": request.seed,  # read by a server with --enable-deterministic-inference
            "ignore_eos": sampling.ignore_eos,  # with it, SGLang ignores stop_token_ids, too
            "skip_special_tokens": False,
        }
        if not sampling.ignore_eos:
            parameters["stop_token_ids"] = list(sampling.stop_ids)
        body = {
            "rid": name,
            "input_ids": request.tokens,
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": False,
        }
        return Call("/generate", body)

    def parse_completion(self, body: bytes) -> ServerCompletion:
        try:
            meta = parsed(body)["meta_info"]
            entries, reason = meta["output_token_logprobs"], meta["finish_reason"]["type"]
            tokens = [entry[1] for entry in entries]
            label = meta["weight_version"]
        except (KeyError, TypeError, IndexError) as error:
            raise ServerApiError(
                f"sent an answer without output_token_logprobs or finish_reason: {body[:200]!r}"
            ) from error
        logprobs = [entry[0] for entry in entries]
        return ServerCompletion(
            tokens,
            logprobs,
            finished=reason == "stop",
            aborted=reason == "abort",
            label=label,
            reused_tokens=meta.get("cached_tokens") or 0,
        )

    def abort(self, name: str) -> Call | None:
        return Call("/abort_request", {"rid": name})

    def interrupt(self, name: str) -> Call | None:
        return self.abort(name)

    def release(self) -> Call:
        return Call("/release_memory_occupation", {"tags": [CACHE, WEIGHTS]})

    def resume(self, part: str) -> Call:
        return Call("/resume_memory_occupation", {"tags": [part]})

    def sender(self, link: Link, settings: TransferSettings) -> Sender:
        return SharedSender(link, settings) if settings.kind == SHARED else CollectiveSender(link, settings)


class CollectiveSender:
    """By broadcast in a process group of the trainer and one server."""

    def __init__(self, link: Link, settings: TransferSettings) -> None:
        self.link, self.settings = link, settings
        self.group: NamedGroup | None = None

    def join(self) -> NamedGroup:
        where, settings = ServerRendezvous.for_server(self.link.url), self.settings
        backend = backend_for(settings.device)
        answer = self.link.start(init_group(where, settings.server_ranks, backend))
        group = where.join(
            answer, settings.server_ranks, backend=backend, device=settings.device, timeout_s=settings.timeout_s
        )
        check_success(answer)
        return group

    def send(self, bucket: Bucket, label: str) -> None:
        if self.group is None:
            self.group = self.join()
        group = self.group
        answer = self.link.start(update_from_distributed(bucket, group.name, label))
        run_beside(answer, lambda: broadcast_all(bucket, group))
        check_success(answer)

    def finish(self, label: str) -> None:
        self.link.start(FLUSH).result()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


class SharedSender:
    """By handles of the trainer's memory, one for each process of the server."""

    def __init__(self, link: Link, settings: TransferSettings) -> None:
        self.link, self.ranks = link, settings.server_ranks

    def send(self, bucket: Bucket, label: str) -> None:
        handles = [base64.b64encode(dumps(list(bucket))).decode() for _ in range(self.ranks)]
        check_success(self.link.start(update_from_tensor(handles, label)))

    def finish(self, label: str) -> None:
        self.link.start(FLUSH).result()

    def close(self) -> None:
        pass


def broadcast_all(bucket: Bucket, group: NamedGroup) -> None:
    for _, tensor in bucket:
        group.broadcast(tensor)


FLUSH = Call("/flush_cache", {})


def init_group(where: ServerRendezvous, server_ranks: int, backend: str) -> Call:
    body = {
        "master_address": where.host,
        "master_port": where.port,
        "rank_offset": 1,
        "world_size": 1 + server_ranks,
        "group_name": where.name,
        "backend": backend,
    }
    return Call("/init_weights_update_group", body)


def update_from_distributed(bucket: Bucket, group: str, label: str) -> Call:
    body = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": group,
        "flush_cache": False,  # once, after the last bucket
        "weight_version": label,
    }
    return Call("/update_weights_from_distributed", body)


def update_from_tensor(handles: list[str], label: str) -> Call:
    body = {"serialized_named_tensors": handles, "flush_cache": False, "weight_version": label}
    return Call("/update_weights_from_tensor", body)


def check_success(answer: "Future[bytes]") -> None:
    found = parsed(answer.result())
    if not found["success"]:
        raise ServerApiError(f"did not take the weights: {found['message']}")
