"""Shared by all tests: folders of tiny models, processes that become ranks, and kernels that run without a GPU."""

import importlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

# before torch is imported, and inherited by every process a test starts: on tiny models one thread is fastest, and
# threads that spin while they wait take the cores from the tests that run beside
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from rloom.engines.distributed import join, leave
from rloom.runtime.nodes import free_port
from tests.groups import group_of, order_of
from tests.helpers import FAMILIES, save_model
from tests.ranks import RankProcesses

SLOW_FIXTURES = {"rank_processes", "interpreting_rank_processes", "interpreted_kernels"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: order_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's name -> a Hugging Face folder, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), FAMILIES[family]())
        return made[family]

    return folder


KERNELS = (
    "rloom.models.head_kernels",
    "rloom.rollout.native.kernels.attend",
    "rloom.rollout.native.kernels.sample",
)


def reduce_by_halves(reduction: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """`tl.reduce` of vectors. The interpreter's own calls the combining function for one element after the other."""
    assert reduction.axis == 0 and not reduction.keep_dims
    while (length := len(blocks[0].handle.data)) > 1:
        assert length % 2 == 0
        halves = [
            reduction.to_tensor(block.handle.data[part], block.dtype)
            for part in (slice(length // 2), slice(length // 2, None))
            for block in blocks
        ]
        blocks = reduction.combine_fn.fn(*halves)
    return [reduction.to_tensor(block.handle.data.item(), block.dtype) for block in blocks]


@pytest.fixture(scope="module")
def interpreted_kernels() -> Iterator[None]:
    """Without a CUDA device the kernels run in Triton's interpreter. Triton decides on that when one is defined."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    interpreted = cache(interpreter.InterpretedFunction)
    modules = [importlib.import_module(name) for name in KERNELS]
    with pytest.MonkeyPatch.context() as patch, triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        # Triton's own functions (tl.sum) were defined when it was imported, to be compiled
        patch.setattr(triton.JITFunction, "__call__", lambda self, *args, **named: interpreted(self.fn)(*args, **named))
        patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_by_halves)
        # once, instead of at each call of a function: that is a third of the interpreter's time
        language = {"tl": triton.language, "core": triton.language.core}
        changes = interpreter._patch_lang(FunctionType((lambda: None).__code__, language))
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        for module in modules:
            importlib.reload(module)
        yield
        changes.restore()
    for module in modules:
        importlib.reload(module)


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
