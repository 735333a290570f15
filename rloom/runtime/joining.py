"""Join the run of another machine: wait for its Ray head, authenticate with the run's secret, leave when it ends."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from rloom.errors import WorkerError
from rloom.interrupts import deferred_interrupt
from rloom.runtime.nodes import fail_if_ended, ray_command, ray_process, reachable
from rloom.runtime.secret import OTHER_WAY, environment, given_by_user, ray_variables, read_secret, secret_file

POLL_S = 1.0
MOST_MISSES = 3  # consecutive polls without an answer after which the head has ended
HEALTH_CHECK_S = 20.0  # Ray's own limit is longer if the process at the address does not use Ray's protocol
REFUSED = re.compile(r"authenticat|InvalidAuthToken", re.IGNORECASE)


def join_run(
    address: str,
    node: int,
    *,
    directory: Callable[[], Path],
    cpus: int,
    gpus: int,
    timeout_s: float,
    report: Callable[[str], None],
) -> None:
    """Join the head and stay until it ends. `directory`: the run directory, where machine 0 writes the secret. It is
    looked up again at each attempt: machine 0 has chosen it when its head answers."""
    report(f"Machine {node} joins the run at {address}")
    check = HeadCheck(address, lambda: secret_file(directory(), address))
    wait_for_head(check, timeout_s, report)
    stays = f"Machine {node} stays while machine 0 finishes its step. Once more leaves at once."
    with (
        environment(ray_variables(check.file)),
        ray_process([f"--address={address}"], node, cpus, gpus) as process,
        deferred_interrupt(lambda _: report(stays)),
    ):
        misses = 0
        while misses < MOST_MISSES:
            time.sleep(POLL_S)
            fail_if_ended(process, unless=lambda: not reachable(address))
            misses = 0 if reachable(address) else misses + 1
    report(f"The run at {address} has ended; machine {node} leaves")


def wait_for_head(check: "HeadCheck", timeout_s: float, report: Callable[[str], None]) -> None:
    """Return when the head accepts this machine's secret."""
    began, reported = time.monotonic(), ""
    while (problem := check.problem()) is not None:
        if time.monotonic() - began > timeout_s:
            raise WorkerError(f"After trainer.start_timeout_s={timeout_s:.0f}: {problem}. {check.way_out}")
        if problem != reported:
            report(f"Waiting up to {timeout_s:.0f} s: {problem}")
        reported = problem
        time.sleep(POLL_S / 5)


class HeadCheck:
    """Checks whether this machine can join the head; if not, why and what to do."""

    def __init__(self, address: str, find_file: Callable[[], Path]) -> None:
        self.address, self.find_file = address, find_file
        self.file = find_file()
        self.way_out = ""
        self.refused: str | None = None  # a secret of an earlier run, which the head did not accept

    def problem(self) -> str | None:
        """None: the head accepts this machine.

        Machine 0 writes the secret before it starts the head. The secret is read after the head answers and is tested
        with it, so that the secret of an earlier run is not used.
        """
        if not reachable(self.address):
            self.way_out = (
                "Start machine 0 (trainer.node_rank=0) with the same trainer.master_addr and trainer.master_port, and "
                "check that no firewall is between them"
            )
            return f"there is no answer at {self.address}"
        self.file = self.find_file()
        secret = None if given_by_user() else read_secret(self.file)
        self.way_out = (
            f"Put trainer.default_local_dir on a file system that all machines share (here it is {self.file.parent}), "
            f"or {OTHER_WAY}"
        )
        if secret is None and not given_by_user():
            return f"machine 0 answers at {self.address}, and its secret is not in {self.file}"
        if secret is not None and secret == self.refused:
            return f"{self.file} has the secret of an earlier run, which {self.address} does not accept"
        return self.health_check(secret)

    def health_check(self, secret: str | None) -> str | None:
        command = [ray_command(), "health-check", f"--address={self.address}", "--skip-version-check"]
        try:
            with environment(ray_variables(self.file)):
                result = subprocess.run(command, capture_output=True, text=True, timeout=HEALTH_CHECK_S)
        except subprocess.TimeoutExpired:
            return self.not_a_head()
        if result.returncode == 0:
            return None
        if not REFUSED.search(result.stderr):
            return self.not_a_head()
        if secret is None:  # the user set it: waiting for a file does not help
            raise WorkerError(
                f"the Ray head at {self.address} does not accept this machine's RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
                "RAY_AUTH_MODE; set them to the same values on every machine, or on none"
            )
        self.refused = secret
        return self.problem()

    def not_a_head(self) -> str:
        self.way_out = (
            "Check that trainer.master_addr is the address of machine 0, that trainer.master_port is the same on every "
            "machine, and that no other program uses that port"
        )
        return f"the process that answers at {self.address} is not Ray's head"
