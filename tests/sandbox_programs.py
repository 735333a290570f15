"""Hostile programs, and what has to become of them. `python -m tests.sandbox_programs ISOLATION` runs them as the user
and with the interpreter that start it; it needs only the standard library."""

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from rloom.rewards.sandbox.client import Sandbox
from rloom.rewards.sandbox.settings import Limits, SandboxJob

ROOT = Path(__file__).parents[1]
SECRET = "sk-not-for-programs"
LIMITS = Limits(timeout_s=60, cpu_s=20, memory_mb=512, file_mb=16, processes=8, output_kb=64)
SHORT = replace(LIMITS, cpu_s=1)  # what sleeps or has children must not use the wall time

REFUSED = r"PermissionError|FileNotFoundError|Read-only file system"
NO_PROCESS = r"BlockingIOError|PermissionError"
TIME = r"^CPU time limit of 1 s$"

# name -> (program, a regular expression for the reason; "" allows an end without error). A program that gets through
# prints ESCAPED.
ENDLESS = {
    "an endless loop": ("while True: pass", TIME),
    "a loop that ignores SIGXCPU": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile 1: pass",
        TIME,
    ),
    "a long sleep": ("import time; time.sleep(1000)", r"^time limit of 1 s$"),
    "a sleep without signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nsignal.sigwait([signal.SIGHUP])",
        r"^time limit of 1 s$",
    ),
    "a fork bomb that goes on": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", TIME),
    "loops in one child after another": (
        "import os, time\nwhile True:\n    if not os.fork():\n        while time.process_time() < 0.2: pass\n"
        "        os._exit(0)\n    os.wait()",
        rf"time limit of 1 s$|{NO_PROCESS}",
    ),
    "loops in children of nobody": (
        "import os, time\nwhile True:\n    if not os.fork():\n        if not os.fork():\n"
        "            while time.process_time() < 0.2: pass\n        os._exit(0)\n    os.wait()\n    time.sleep(0.2)",
        rf"time limit of 1 s$|{NO_PROCESS}",
    ),
    "a child that holds the pipes": (
        "import os, time\nif not os.fork():\n    time.sleep(1000)\nos._exit(0)",
        rf"^$|{NO_PROCESS}|^time limit of 1 s$",
    ),
}
PROGRAMS = {
    "a fork bomb": ("import os\nwhile True: os.fork()", NO_PROCESS),
    "many threads": (
        "import threading, time\nfor _ in range(2000): threading.Thread(target=time.sleep, args=(9,)).start()\n"
        "print('ESCAPED')",
        r"can't start new thread|MemoryError",
    ),
    "100 GB at once": ("x = bytearray(100 << 30); print('ESCAPED')", r"^MemoryError"),
    "100 GB in parts": (
        "x = [bytearray(1 << 24) for _ in range(100 << 6)]; print('ESCAPED')",
        r"^MemoryError",
    ),
    "a 10 GB file": (
        "f = open('big', 'wb')\nfor _ in range(10 << 10): f.write(bytes(1 << 20))\nprint('ESCAPED')",
        r"File too large|No space left",
    ),
    "shared memory": ("import os; os.memfd_create('m'); print('ESCAPED')", REFUSED),
    "a socket": ("import socket; socket.create_connection(('127.0.0.1', 22)); print('ESCAPED')", REFUSED),
    "a datagram": (
        "import socket as s\ns.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 53))\nprint('ESCAPED')",
        REFUSED,
    ),
    "killing the parent": ("import os; os.kill(os.getppid(), 9)", rf"{REFUSED}|^$"),
    "killing pid 1": ("import os; os.kill(1, 9)", rf"{REFUSED}|^$"),
    "killing everything": ("import os; os.kill(-1, 9)", rf"{REFUSED}|ProcessLookupError|^$"),
    "limits of the parent": (
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)); print('ESCAPED')",
        REFUSED,
    ),
    "its own environment": ("import os; print(sorted(os.environ), 'HOME' in os.environ and 'ESCAPED')", r"^$"),
    "the parent's environment": ("import os; print('ESCAPED', open(f'/proc/{os.getppid()}/environ').read())", REFUSED),
    "its first environment": ("print(open('/proc/self/environ').read())", REFUSED),
    "the repository": (f"import os; print('ESCAPED', os.listdir({str(ROOT / 'tests')!r}))", REFUSED),
    "the home folder": (f"import os; print('ESCAPED', open({str(Path.home() / '.bashrc')!r}).read())", REFUSED),
    "passwords": ("print('ESCAPED', open('/etc/passwd').read())", REFUSED),
    "writing next to the interpreter": ("import os; open(os.__file__ + 'x', 'w'); print('ESCAPED')", REFUSED),
    "writing to /var/tmp": ("open('/var/tmp/rloom-escaped', 'w'); print('ESCAPED')", REFUSED),
    "deleting the interpreter": ("import os; os.remove(os.__file__); print('ESCAPED')", REFUSED),
    "1 GB of output": (
        "import os\nfor _ in range(1 << 14): os.write(1, b'x' * (1 << 16))\nprint('ESCAPED')",
        r"^output limit of 64 kB$",
    ),
    "1 GB of errors": (
        "import os\nfor _ in range(1 << 14): os.write(2, b'x' * (1 << 16))\nprint('ESCAPED')",
        r"^output limit of 64 kB$",
    ),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 9)\n"
        "        time.sleep(1000)\n    os._exit(0)\nos.wait()",
        rf"{NO_PROCESS}|^$",
    ),
    "a new user namespace": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('ESCAPED')",
        r"^$",
    ),
    "a crash": ("import ctypes; ctypes.string_at(0)", r"^killed by SIGSEGV$"),
    "an exit code": ("import os; os._exit(3)", r"^exit code 3$"),
    "an exception": ("1 / 0", r"^ZeroDivisionError: division by zero \(line 2 of the program\)$"),
}


def processes_named(name: str) -> int:
    """On the whole machine: a process inside a pid namespace is visible from outside."""
    found = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            found += Path(f"/proc/{entry}/comm").read_text().strip() == name
    return found


def main(isolation: str) -> None:
    """Print a line of JSON for each program, and one for the sandbox."""
    os.environ["OPENAI_API_KEY"] = SECRET
    name = f"rl{os.getpid()}"  # of the programs' processes and all their children
    for programs, limits in ((PROGRAMS, LIMITS), (ENDLESS, SHORT)):
        sandbox = Sandbox(limits, isolation)  # type: ignore[arg-type]
        for title, (source, _) in programs.items():
            named = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name}')\n{source}"
            outcome = sandbox.run(SandboxJob((named,), module_name="__main__"))
            text = (outcome.run.stdout + outcome.run.stderr)[-300:]
            left = processes_named(name)
            print(json.dumps({"title": title, "error": outcome.error or "", "text": text, "left": left}), flush=True)
        after = sandbox.run(SandboxJob(("import os; print(os.listdir('.'))",), module_name="__main__"))
        print(json.dumps({"title": "after", "text": after.run.stdout, "error": after.error or "", "left": 0}))
        uid, fork = sandbox.protections.uid, sandbox.protections.fork
        sandbox.close()
    print(json.dumps({"title": "sandbox", "uid": uid, "fork": fork}))


if __name__ == "__main__":
    main(sys.argv[1])
