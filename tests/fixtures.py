"""Shared by all tests: folders of tiny models, processes that become ranks, and kernels that run without a GPU."""

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.engines.distributed import join, leave
from tests.helpers import FAMILIES, MIXTURES, save_model
from tests.interpreter import kernels_interpreted
from tests.ranks import RankProcesses

with suppress(ImportError):  # the tests on GPUs need none
    from hypothesis import HealthCheck, settings

    # by default a test fails for an example that takes 0.2 s or is drawn slowly, as on a busy machine
    settings.register_profile("any duration", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any duration")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's name, and a dtype -> a Hugging Face folder, made once."""

    @cache
    def folder(family: str, dtype: torch.dtype = torch.float32) -> Path:
        return save_model(tmp_path_factory.mktemp(family), {**FAMILIES, **MIXTURES}[family](), dtype=dtype)

    return folder


LIMIT_S = 900


@pytest.fixture
def time_limit() -> Iterator[None]:
    """A run that does not end is a failure."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def interpreted_kernels() -> Iterator[None]:
    pytest.importorskip("triton")
    with kernels_interpreted():
        yield


@pytest.fixture(params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Path:
    return model_folder(request.param)


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    """Four processes that can become the ranks of a process group."""
    rank_processes = RankProcesses(4)
    yield rank_processes
    rank_processes.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """This process is a process group of its own."""
    join(0, 1, address="127.0.0.1:0", device=torch.device("cpu"))
    yield
    leave()
