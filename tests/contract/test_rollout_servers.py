"""The rollout contract on servers: the client, and a server that replays SGLang's protocol. Only `build` differs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from rloom.engines.local import LocalEngine
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Rollout
from rloom.rollout.servers.client import ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import SHARED, TransferSettings
from tests.contract.test_rollout_contract import (  # noqa: F401
    Bench,
    test_a_models_own_generation_settings_do_not_bend_the_policy,
    test_a_stop_token_ends_an_answer_and_belongs_to_it,
    test_an_update_is_seen_by_the_next_generation,
    test_answers_to_one_prompt_differ_and_repeat_with_their_seeds,
    test_generating_draws_nothing_from_the_global_generator,
    test_greedy_tokens_are_those_of_a_plain_loop_without_a_cache,
    test_ignore_eos_writes_to_the_limit_whatever_is_written,
    test_logprobs_are_those_before_top_k_and_top_p_cut_the_distribution,
    test_no_answer_is_longer_than_allowed,
    test_no_requests_give_no_answers,
    test_sampled_logprobs_are_the_trainers,
    test_top_k_of_one_is_greedy,
    test_training_goes_on_undisturbed_after_a_rollout,
)
from tests.contract.test_rollout_requests import (  # noqa: F401
    test_requests_join_while_others_run_whatever_their_sampling,
)
from tests.fake_servers import FakeSglang
from tests.helpers import CPU


class Following(Rollout):
    """A client with the weights of one trainer: they are sent before a batch begins.

    The contract tests are written for engines that generate with the trainer's own parameters.
    """

    def __init__(self, client: ServerRollout, owner: LocalEngine) -> None:
        self.client, self.owner, self.version = client, owner, 0

    def submit(self, request: Request) -> int:
        if not self.client.tasks:
            self.client.load_weights(self.owner.weights(), self.version)
        return self.client.submit(request)

    def poll(self) -> list[Completion]:
        return self.client.poll()

    def cancel(self, request: int) -> None:
        self.client.cancel(request)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        assert list(weights) == []
        self.version = version

    def sleep(self) -> None:
        self.client.sleep()

    def wake(self) -> None:
        self.client.wake()


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


@pytest.fixture
def family_folder(folder: Path) -> Path:
    return folder  # the server's engine is native, which is tested with every family


@pytest.fixture(scope="module")
def client(model_folder: Callable[[str], Path]) -> Iterator[ServerRollout]:
    server = FakeSglang(model_folder("qwen2")).begin()
    spec = ServerSpec(server.url, None, TransferSettings(SHARED, CPU.device, 1, 120))
    settings = ClientSettings(WatchSettings(120, 0.5, 0), request_timeout_s=120, releases_memory=True)
    rollout = ServerRollout([spec], SglangApi(), settings, lambda weights: weights)
    yield rollout
    rollout.close()
    server.kill()


@pytest.fixture
def build(client: ServerRollout) -> Callable[..., Rollout]:
    def rollout(network: PolicyNetwork, owner: LocalEngine, max_sequences: int = 64) -> Rollout:
        return Following(client, owner)

    return rollout


@pytest.fixture
def bench(build: Callable[..., Rollout], folder: Path) -> Bench:
    return Bench.at(folder, build, max_sequences=2)
