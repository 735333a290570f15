"""Several machines by the documents' commands: here, several Ray nodes on one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rloom.config.frontends import train_sh
from rloom.console import INTERRUPTED
from rloom.errors import WorkerError
from rloom.runtime.joining import join_run
from rloom.runtime.nodes import reachable
from rloom.runtime.secret import secret_file
from tests.e2e.runs import arguments, records, terminate_all
from tests.ranks import free_port
from tests.waiting import is_running, wait_until

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",
    # a lost machine is reported after 3 s instead of 15
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def start(
    directory: Path,
    node: int,
    nodes: int,
    port: int,
    *overrides: str,
    steps: int = 2,
    address: str = "127.0.0.1",
    within: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """The command of the documents, one on each machine."""
    meeting = (f"trainer.nnodes={nodes}", f"trainer.node_rank={node}", f"trainer.master_addr={address}")
    keys = arguments(directory, steps, *meeting, f"trainer.master_port={port}", *overrides)
    return subprocess.Popen(
        [*within, sys.executable, "-m", "rloom.trainer.main_ppo", "algorithm.adv_estimator=grpo", *keys],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=CLEAN,
    )  # fmt: skip


@pytest.fixture
def port() -> Iterator[int]:
    found = free_port()
    yield found
    assert not reachable(f"127.0.0.1:{found}"), "the head outlived its run"


@dataclass(frozen=True)
class Network:
    """Where two machines are: their addresses, and what runs a command on each."""

    addresses: tuple[str, str]
    within: tuple[Sequence[str], Sequence[str]]


@pytest.fixture
def network() -> Iterator[Network]:
    """Two network namespaces with one link between them; where these cannot be made, the loopback device."""
    names = (f"rloom{os.getpid()}a", f"rloom{os.getpid()}b")
    first, second = names
    inside = {name: ["ip", "netns", "exec", name] for name in names}
    addresses = ("10.77.0.1", "10.77.0.2")
    try:
        for name in names:
            run(["ip", "netns", "add", name])
        run(["ip", "link", "add", "wire0", "netns", first, "type", "veth", "peer", "name", "wire1", "netns", second])
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            run([*inside[name], "ip", "link", "set", "lo", "up"])
            run([*inside[name], "ip", "addr", "add", f"{address}/24", "dev", f"wire{number}"])
            run([*inside[name], "ip", "link", "set", f"wire{number}", "up"])
    except (OSError, subprocess.CalledProcessError):
        yield Network(("127.0.0.1", "127.0.0.1"), ((), ()))
    else:
        yield Network(addresses, (inside[first], inside[second]))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def test_two_machines_train_together_until_a_schedulers_sigterm_after_which_the_step_is_finished_and_saved(
    tmp_path: Path, network: Network
) -> None:
    """With namespaces they share no network but one link. The signal reaches every process on both machines."""
    run, port, address = tmp_path / "run", free_port(), network.addresses[0]
    file = secret_file(run, f"{address}:{port}")
    run.mkdir()
    file.write_text("the secret of an earlier run")
    second, first = (
        start(run, node, 2, port, address=address, within=network.within[node], steps=500) for node in (1, 0)
    )
    secret = new_text(file, first)
    wait_for(lambda: (run / "global_step_1").is_dir(), first)
    processes = terminate_all(first.pid, second.pid)
    said = first.communicate(timeout=400)[0]
    assert first.returncode == INTERRUPTED, said
    heard = second.communicate(timeout=400)[0]
    assert second.returncode == 0, heard
    assert "Machine 1 stays while machine 0 finishes its step" in heard
    assert f"the run at {address}" in heard.lower() and "machine 1 leaves" in heard
    # machine 0 drives, and its worker is the first
    workers = [line.split(" on ")[1].split(",")[0] for line in said.splitlines() if line.startswith("worker ")]
    assert workers == list(network.addresses)
    steps = [record["training/global_step"] for record in records(run)]
    assert steps == [*range(1, len(steps) + 1)]
    assert f"Stopped after step {len(steps)}, saved in {run / f'global_step_{len(steps)}'}" in said
    assert " died" not in said and "failed" not in said, said
    wait_until(lambda: not any(map(is_running, processes)))
    assert (run / "logs" / "worker_1.log").is_file()
    assert not list(run.glob(".ray_token*")), "the secret ends with the run"
    left = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert left and not any(secret.encode() in text for text in (said.encode(), heard.encode(), *left))
    listens = [*network.within[0], "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
    assert subprocess.run(listens, capture_output=True).returncode != 0, "the head outlived its run"


def new_text(file: Path, process: subprocess.Popen[str]) -> str:
    """What machine 0 writes in place of what was there."""
    old = file.read_text()
    wait_for(lambda: file.read_text() != old, process)
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    wait_until(lambda: condition() or process.poll() is not None, 400)
    assert condition(), process.communicate()[0]


@pytest.mark.long
def test_a_machine_that_is_lost_leaves_the_others_to_go_on(tmp_path: Path, port: int) -> None:
    # the time limit is also that of a lost machine to return
    second, first = (start(tmp_path, node, 2, port, "trainer.start_timeout_s=20", steps=4) for node in (1, 0))
    wait_for(lambda: (tmp_path / "global_step_1").is_dir(), first)
    stop_machine(second)
    said = first.communicate(timeout=400)[0]
    assert first.returncode == 0, said
    assert " died" in said, said
    assert "1 of 2 machines are left: going on with them" in said, said
    assert [record["training/global_step"] for record in records(tmp_path)] == [1, 2, 3, 4]


def stop_machine(joined: subprocess.Popen[str]) -> None:
    """As when its plug is pulled: the command, and the Ray it started in a session of its own."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(joined.pid)], capture_output=True, text=True)
    joined.kill()
    joined.communicate()
    for child in children.stdout.split():
        subprocess.run(["pkill", "-9", "--session", child], check=False)


def test_a_machine_whose_first_is_not_there_says_so(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(WorkerError, match=f"trainer.start_timeout_s=1: there is no answer at {address}"):
        join_run(address, 1, directory=lambda: tmp_path, cpus=1, gpus=0, timeout_s=1, report=print)


def test_the_kits_variables_name_the_machines() -> None:
    found = train_sh.translate([], {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1"})
    named = {"trainer.nnodes": "4", "trainer.node_rank": "2", "trainer.master_addr": "10.0.0.1"}
    assert named.items() <= found.values.items()
