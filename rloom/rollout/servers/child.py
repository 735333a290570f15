"""Starts a server that ends with this process's parent: `python -m rloom.rollout.servers.child PARENT COMMAND...`.

A worker of Ray is killed without a chance to stop its servers; Linux then sends them SIGTERM.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it ended before
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
