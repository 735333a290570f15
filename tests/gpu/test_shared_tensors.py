"""Weights for a server on the trainer's own GPU, which NCCL does not connect: CUDA IPC handles over gloo."""

import base64
from concurrent.futures import Future

import torch

from rloom.engines.distributed import NamedGroup
from rloom.engines.weight_sync import SharedChannel, dumps, gpu_uuid, opened, received_stream, send_bucket, with_uuid
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.wire import SHARED, Call, TransferSettings
from tests.ranks import forkserver, free_port

GPU = torch.device("cuda", 0)
BUCKETS = [
    [("a", torch.arange(12.0).view(3, 4).bfloat16()), ("b", torch.full((1000,), 0.5))],
    [("c", torch.tensor([7]))],
]


def channel(rank: int, port: int) -> SharedChannel:
    group = NamedGroup("g", rank, 2, address=f"127.0.0.1:{port}", backend="gloo", device=GPU, timeout_s=60)
    return SharedChannel(group, GPU)


def receive(port: int, pipe: object) -> None:
    found = [(name, tensor.cpu().tolist()) for name, tensor in received_stream(channel(1, port))]
    pipe.send(found)  # type: ignore[attr-defined]


def test_two_processes_on_one_gpu_pass_weights_by_handles() -> None:
    context, port = forkserver(), free_port()
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(port, there))
    process.start()
    sender = channel(0, port)
    for bucket in [*BUCKETS, []]:
        send_bucket([(name, tensor.to(GPU)) for name, tensor in bucket], sender)
    found = here.recv()
    process.join()
    assert found == [(name, tensor.tolist()) for bucket in BUCKETS for name, tensor in bucket]


class Recorder:
    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def start(self, call: Call) -> "Future[bytes]":
        self.calls.append(call)
        done: Future[bytes] = Future()
        done.set_result(b'{"success": true, "message": ""}')
        return done


def test_a_handle_for_sglang_has_the_uuid_of_the_gpu() -> None:
    link = Recorder()
    sender = SglangApi().sender(link, TransferSettings(SHARED, GPU, 1, 1.0))
    sender.send([("b", torch.arange(3.0, device=GPU))], label="x")
    [text] = link.calls[0].json["serialized_named_tensors"]  # type: ignore[index]
    assert gpu_uuid(GPU).encode() in base64.b64decode(text)


def open_elsewhere(handle: bytes, pipe: object) -> None:
    tensor = opened(handle, GPU)
    pipe.send(tensor.cpu().tolist())  # type: ignore[attr-defined]


def test_a_handle_is_opened_by_uuid_in_another_process() -> None:
    context = forkserver()
    here, there = context.Pipe()
    tensor = torch.arange(5.0, device=GPU)
    process = context.Process(target=open_elsewhere, args=(dumps(with_uuid(tensor)), there))
    process.start()
    assert here.recv() == [0.0, 1.0, 2.0, 3.0, 4.0]
    process.join()
