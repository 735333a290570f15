"""Starts a server that ends with this process's parent. The arguments of the process: PARENT COMMAND...

A worker is killed without a chance to stop its servers; Linux then sends them SIGTERM.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it ended before
            sys.exit(1)
    os.execvp(command[0], command)
