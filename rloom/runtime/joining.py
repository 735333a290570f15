"""A machine that joins the run of another: it waits for the head, is let in by the run's secret, and leaves with it."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from rloom.errors import WorkerError
from rloom.runtime.nodes import fail_if_ended, ray_command, ray_process, reachable
from rloom.runtime.secret import OTHER_WAY, environment, given_by_user, read_secret, secret_file, settings

LOOKS_APART_S = 1.0
GONE_AFTER = 3  # looks in a row that do not find the head
PROBE_S = 20.0  # Ray's own check waits longer for a head that does not speak Ray's protocol
REFUSED = re.compile(r"authenticat|InvalidAuthToken", re.IGNORECASE)


def join_run(
    address: str, node: int, *, directory: Path, cpus: int, gpus: int, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Join the head and stay until it is gone. `directory`: the run's, where machine 0 leaves the secret."""
    say(f"Machine {node} joins the run at {address}")
    file = secret_file(directory, address)
    await_admission(Admission(address, file), timeout_s, say)
    with environment(settings(file)), ray_process([f"--address={address}"], node, cpus, gpus) as process:
        missing = 0
        while missing < GONE_AFTER:
            time.sleep(LOOKS_APART_S)
            fail_if_ended(process, unless=lambda: not reachable(address))
            missing = 0 if reachable(address) else missing + 1
    say(f"The run at {address} has ended; machine {node} leaves")


def await_admission(admission: "Admission", timeout_s: float, say: Callable[[str], None]) -> None:
    """Return when the head accepts this machine's secret."""
    began, said = time.monotonic(), ""
    while (obstacle := admission.obstacle()) is not None:
        if time.monotonic() - began > timeout_s:
            raise WorkerError(f"After trainer.start_timeout_s={timeout_s:.0f}: {obstacle}. {admission.way_out}")
        if obstacle != said:
            say(f"Waiting up to {timeout_s:.0f} s: {obstacle}")
        said = obstacle
        time.sleep(LOOKS_APART_S / 5)


class Admission:
    """What keeps this machine from joining, and what would help."""

    def __init__(self, address: str, file: Path) -> None:
        self.address, self.file = address, file
        self.way_out = ""
        self.refused: str | None = None  # a secret that the head did not accept: that of an earlier run

    def obstacle(self) -> str | None:
        """None: the head accepts this machine.

        Machine 0 writes the secret before it starts the head. It is read after the head answers, and the head is asked
        whether it accepts it, so that what an earlier run left is not used.
        """
        if not reachable(self.address):
            self.way_out = (
                "Start machine 0 (trainer.node_rank=0), with the same trainer.master_addr and trainer.master_port, and "
                "see that no firewall is between them"
            )
            return f"nobody answers at {self.address}"
        secret = None if given_by_user() else read_secret(self.file)
        self.way_out = (
            f"Put trainer.default_local_dir on a file system that all machines share (here it is {self.file.parent}), "
            f"or {OTHER_WAY}"
        )
        if secret is None and not given_by_user():
            return f"machine 0 answers at {self.address}, and its secret is not in {self.file}"
        if secret is not None and secret == self.refused:
            return f"{self.file} has the secret of an earlier run, which {self.address} does not accept"
        return self.asked_head(secret)

    def asked_head(self, secret: str | None) -> str | None:
        command = [ray_command(), "health-check", f"--address={self.address}", "--skip-version-check"]
        try:
            with environment(settings(self.file)):
                answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            return self.not_a_head()
        if answer.returncode == 0:
            return None
        if not REFUSED.search(answer.stderr):
            return self.not_a_head()
        if secret is None:  # the user's own: no file will change it
            raise WorkerError(
                f"the Ray head at {self.address} does not accept this machine's RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
                "RAY_AUTH_MODE; give them the same values on every machine, or on none"
            )
        self.refused = secret
        return self.obstacle()

    def not_a_head(self) -> str:
        self.way_out = (
            "Is trainer.master_addr the address of machine 0, and trainer.master_port the same on every machine? "
            "Another program may have that port"
        )
        return f"something answers at {self.address}, but it is not Ray's head"
