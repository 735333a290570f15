"""A real `vllm serve` on a CPU, started and watched by rloom. One server for all tests: it takes a minute to start."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rloom.batch import Batch
from rloom.engines.local import LocalEngine
from rloom.launch.servers import VLLM_ON_CPU
from rloom.models.checkpoint_format import CheckpointFormat
from rloom.models.network import PolicyNetwork
from rloom.models.source import ModelSource
from rloom.rollout.base import Completion, Request, Sampling
from rloom.rollout.servers.arguments import VLLM_ENVIRONMENT, vllm_command
from rloom.rollout.servers.client import ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.launch import Launch, ServerProcess
from rloom.rollout.servers.vllm import VllmApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import COLLECTIVE, TransferSettings
from tests.helpers import CPU, engine_of, policy
from tests.requests import trajectories

TEMPERATURE = 0.7  # of the trainer's log-probs


class Bench:
    def __init__(self, folder: Path, log_file: Path) -> None:
        from rloom.rollout.vllm.arguments import VllmSettings, engine_arguments

        settings = VllmSettings(
            source=ModelSource(str(folder)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_sequences=16,
            max_batched_tokens=256,
            max_model_tokens=64,
            memory_share=0.1,
            free_memory=True,
            eager=True,
            temperature=TEMPERATURE,
            engine_kwargs={"kv_cache_memory_bytes": 32 << 20},
        )
        self.network: PolicyNetwork = policy(folder, temperature=TEMPERATURE)
        self.engine: LocalEngine = engine_of(self.network, CPU)
        command = vllm_command(engine_arguments(settings), tensor_parallel=1)
        self.process = ServerProcess(Launch(command, VLLM_ENVIRONMENT | VLLM_ON_CPU, log_file))
        self.rollout = self.client(self.process)

    def client(self, process: ServerProcess | None) -> ServerRollout:
        """None: it takes the server for one of the user's."""
        spec = ServerSpec(self.process.url, process, TransferSettings(COLLECTIVE, CPU.device, 1, 60))
        return ServerRollout(
            [spec],
            VllmApi(TEMPERATURE, request_seeds=True),
            ClientSettings(WatchSettings(400, 0.5, 2), request_timeout_s=120, releases_memory=False, bucket_bytes=4096),
            CheckpointFormat(self.network),
            self.engine.weights,
        )

    def write(
        self, sampling: Sampling, count: int = 6, rollout: ServerRollout | None = None
    ) -> tuple[list[Request], list[Completion]]:
        requests = [Request((5 + row // 2, 6, 7, 8), sampling, seed=row) for row in range(count)]
        found = dict((rollout or self.rollout).generate(requests))
        return requests, [found[row] for row in range(count)]

    def tokens(self, sampling: Sampling) -> list[list[int]]:
        return [completion.tokens_L.tolist() for completion in self.write(sampling)[1]]

    def gap(self, sampling: Sampling, rollout: ServerRollout | None = None) -> float:
        """Largest difference between the server's log-probs and the trainer's."""
        batch = Batch.pack(trajectories(*self.write(sampling, rollout=rollout)))
        return float((self.engine.score(batch) - batch.rollout_logprobs_T)[batch.mask_T].abs().max())


@pytest.fixture(scope="module")
def bench(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    from rloom.rollout.vllm.environment import set_environment

    set_environment()
    made = Bench(model_folder("qwen2"), tmp_path_factory.mktemp("server") / "server.log")
    with closing(made.rollout):
        made.rollout.load_weights(made.engine.weights(), version=0)
        yield made


SAMPLED = Sampling(12, temperature=TEMPERATURE)


def test_its_logprobs_are_the_trainers_before_top_k_and_top_p(bench: Bench) -> None:
    assert bench.gap(SAMPLED) < 1e-3
    assert bench.gap(Sampling(12, temperature=TEMPERATURE, top_k=3, top_p=0.8)) < 1e-3


def test_a_seed_determines_an_answer_and_a_stop_token_ends_it(bench: Bench) -> None:
    whole = bench.tokens(SAMPLED)
    assert bench.tokens(SAMPLED) == whole
    assert len({tuple(tokens) for tokens in whole}) > 3
    stop = whole[0][4]
    _, [first, *_] = bench.write(Sampling(12, temperature=TEMPERATURE, stop_ids=(stop,)))
    assert first.tokens_L.tolist() == whole[0][: whole[0].index(stop) + 1] and first.finished


def test_new_weights_are_seen_in_the_next_token(bench: Bench) -> None:
    greedy = Sampling(12, temperature=0.0)
    before = bench.tokens(greedy)
    with torch.no_grad():
        for parameter in bench.network.module.parameters():
            parameter.mul_(1.2)
    bench.rollout.load_weights(bench.engine.weights(), version=7)
    assert bench.tokens(greedy) != before
    assert bench.gap(SAMPLED) < 1e-3
    assert {completion.version for completion in bench.write(SAMPLED)[1]} == {7}


def test_killed_in_mid_generation_it_is_started_again_with_the_current_weights(bench: Bench) -> None:
    requests, expected = bench.write(SAMPLED)
    process = bench.process.process
    assert process is not None
    os.killpg(process.pid, signal.SIGSTOP)  # no request can finish before the end
    numbers = [bench.rollout.submit(request) for request in requests]
    assert bench.rollout.poll() == []
    os.killpg(process.pid, signal.SIGKILL)
    found: dict[int, Completion] = {}
    while len(found) < len(numbers):
        found |= {completion.request: completion for completion in bench.rollout.poll()}
    assert [found[number].tokens_L.tolist() for number in numbers] == [one.tokens_L.tolist() for one in expected]
    assert {completion.version for completion in found.values()} == {7}
    [server] = bench.rollout.watched.servers
    assert server.restarts == 1


def test_started_again_by_its_user_it_gets_the_weights_before_an_answer_is_used(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is idle, at the same port, healthy: the new process has the weights and the log-probs of the folder."""
    with closing(bench.client(None)) as rollout:
        rollout.load_weights(bench.engine.weights(), version=9)
        _, expected = bench.write(SAMPLED, rollout=rollout)
        assert {completion.version for completion in expected} == {9}
        process, [watched] = bench.process.process, bench.rollout.watched.servers
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        while not (watched.restarts == 2 and watched.is_up):  # the other client is the user that starts it again
            time.sleep(0.2)
        with caplog.at_level(logging.WARNING):
            _, found = bench.write(SAMPLED, rollout=rollout)
        assert [one.tokens_L.tolist() for one in found] == [one.tokens_L.tolist() for one in expected]
        assert {completion.version for completion in found} == {9}
        assert f"The server {bench.process.url} was started again: another process answers" in caplog.text
        assert bench.gap(SAMPLED, rollout) < 1e-3
