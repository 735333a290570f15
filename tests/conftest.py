"""Shared by all tests: folders of tiny models, processes that become ranks, and kernels that run without a GPU."""

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# before torch is imported, and inherited by every process a test starts: on tiny models one thread is fastest, and
# threads that spin while they wait take the cores from the tests that run beside
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 its workers wait for all that runs beside

import pytest
import torch

from rloom.engines.distributed import join, leave
from rloom.runtime.nodes import free_port
from tests.groups import RAY, group_of, order_of
from tests.helpers import FAMILIES, MIXTURES, save_model
from tests.interpreter import kernels_interpreted
from tests.ranks import RankProcesses

SLOW_FIXTURES = {"rank_processes", "interpreted_kernels"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: order_of(item.nodeid))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: the garbage collector need not look at them again and again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ray waits for its processes with time limits of its own: beside other tests its tests have priority."""
    if "PYTEST_XDIST_WORKER" in os.environ and group_of(item.nodeid) != RAY and os.nice(0) == 0:
        os.nice(5)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's name, and a dtype -> a Hugging Face folder, made once."""

    @cache
    def folder(family: str, dtype: torch.dtype = torch.float32) -> Path:
        return save_model(tmp_path_factory.mktemp(family), {**FAMILIES, **MIXTURES}[family](), dtype=dtype)

    return folder


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
    join(0, 1, address=f"127.0.0.1:{free_port()}", device=torch.device("cpu"))
    yield
    leave()
