"""How tests are shared among processes, and the environment of all of them. Fixtures are in fixtures.py."""

import gc
import os
import signal
import tempfile
from typing import Any

import pytest

from tests.groups import RAY, group_of, order_of

# before torch is imported, and inherited by every process a test starts: on tiny models one thread is fastest, and
# threads that spin while they wait take the cores from the tests that run beside
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 its workers wait for all that runs beside

# rows and tokens of this session: not in the cache of whoever runs the tests, and inherited by other processes
if "RLOOM_CACHE" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="rloom-cache-")
    os.environ["RLOOM_CACHE"] = CACHE.name

# a shell that starts the tests in the background has them ignore Ctrl-C, and every process that they start
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_FIXTURES = {"rank_processes", "interpreted_kernels"}


def pytest_configure(config: pytest.Config) -> None:
    """With `--numprocesses` the first process starts the others, which is sooner done without torch."""
    if not config.getoption("numprocesses", None):
        gc.disable()  # until all is imported: what modules make stays, and would be looked at again and again
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: order_of(item.nodeid))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: the garbage collector need not look at them again and again
    gc.enable()


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
