"""torch's threads wait without spinning, unless the user chose otherwise; the OpenMP library itself is asked."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def openmp_library() -> Path:
    """The one that torch brings along. It is loaded alone, which takes milliseconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    found = [*torch.glob("lib/libgomp*"), *torch.parent.glob("torch.libs/libgomp*")]
    if not found:
        pytest.skip("this torch brings no libgomp along")
    return found[0]


def settings_seen_by_openmp(**chosen: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", f"import rloom.cli, ctypes; ctypes.CDLL({str(openmp_library())!r})"],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"} | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(re.findall(r"(\w+) = '(.*)'", done.stderr))


def test_threads_that_wait_do_not_spin() -> None:
    seen = settings_seen_by_openmp()
    assert (seen["OMP_WAIT_POLICY"], seen["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")


def test_what_the_user_chose_stays() -> None:
    assert settings_seen_by_openmp(OMP_WAIT_POLICY="active")["OMP_WAIT_POLICY"] == "ACTIVE"
    assert settings_seen_by_openmp(GOMP_SPINCOUNT="77")["GOMP_SPINCOUNT"] == "77"


@pytest.mark.parametrize(
    "module", ["rloom.cli", "rloom.trainer.main_ppo", "rloom.runtime.ray", "rloom.rewards.pool_worker"]
)
def test_every_way_into_a_process_sets_it_before_torch(module: str) -> None:
    """Finding a module imports its package, whose first lines set it; nothing of the package has imported torch yet."""
    program = (
        "import importlib.util, os, sys\n"
        f"importlib.util.find_spec({module!r})\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["passive", "False"]
