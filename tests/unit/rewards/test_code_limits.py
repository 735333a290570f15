"""Programs that try to make their score fail, limits of rows and of memory, and what isolates a program."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rloom.rewards.rules import code
from rloom.rewards.rules.code import compute_score
from rloom.rewards.rules.code_problems import problem_of
from rloom.rewards.sandbox.client import Sandbox, SandboxError, SandboxOutcome
from rloom.rewards.sandbox.settings import Limits, SandboxJob, SandboxRun, Suite
from rloom.rewards.sandbox.supervisor import used_times
from tests.sandbox_programs import LIMITS
from tests.unit.rewards.test_code_verdicts import CALLS, KEYS, MBPP, STREAMS, score

# an answer does not decide that its score is missing

EVASIVE = {
    "a real-time signal": "import os\nos.kill(os.getpid(), 35)",
    "a real-time signal in a call": "import os\ndef square(x): os.kill(os.getpid(), 64)",
    "deep JSON": "import os\nos.write(3, b'[' * 60000 + b'\\n')",
    "bytes in a call": "import os\ndef square(x):\n    for d in range(3, 9):\n"
    "        try: os.write(d, b'\\xff' * 8)\n        except OSError: pass",
    "an int beyond float": "def square(x): return 10 ** 400\nprint(10 ** 400)",
    "digits without end": "def square(x): return 10 ** 5000\nprint('9' * 5000, '1e400')",
    "a signal to init": "import os\nos.kill(1, 2)\ndef square(x): os.kill(1, 15)",
    "a deep value": "def square(x):\n    l = []\n    for i in range(100000): l = [l]\n    return l",
    "a value that contains itself": "def square(x):\n    l = []\n    l.append(l)\n    return l",
    "an exception without text": "class E(BaseException):\n    def __str__(self): 1 / 0\ndef square(x): raise E",
    "a name that is no text": "def square(x): raise type('\\ud800', (BaseException,), {})('\\ud800')\n"
    "raise SystemExit('\\ud800')",
    "half a character": "import sys\nsys.stdout.buffer.write(b'\\xff')\nprint('\\ud800')",
    "an exit code": "import sys\nsys.exit(10 ** 400)",
    "closed descriptors": "import os\nos.closerange(0, 64)",
    "a large value": "def square(x): return 'a' * (4 << 20)",
    "a null byte": "\0",
    "links and folders": "import os\nos.symlink('/usr', 'l')\nos.mkdir('a')\nos.symlink('..', 'a/b')\nos.chmod('a', 0)",
}


@pytest.mark.parametrize("isolation", ["auto", "none"])
@pytest.mark.parametrize("name", EVASIVE)
def test_whatever_a_program_does_its_score_is_a_number(name: str, isolation: str) -> None:
    for truth in (MBPP, CALLS | {"outputs": [4.0, 9]}, STREAMS):
        result = score(EVASIVE[name], truth, isolation=isolation)
        assert result["score"] == 0.0, result
        assert "test 1: " in result["detail"]


def test_a_solution_passes_with_links_and_folders_in_its_scratch_folder() -> None:
    deeper_than_a_recursion = "for i in range(1100):\n    os.mkdir('d')\n    os.chdir('d')"
    program = f"{EVASIVE['links and folders']}\n{deeper_than_a_recursion}\n"
    assert score(f"{program}def square(x): return x * x", MBPP, isolation="none")["score"] == 1.0
    sandbox = Sandbox(LIMITS, "none")
    outcome = sandbox.run(
        SandboxJob((f"import os; print(os.getcwd(), flush=True)\n{program}",), module_name="__main__")
    )
    scratch = Path(outcome.run.stdout.strip())
    assert (outcome.error, scratch.parent.is_dir(), scratch.exists()) == (None, True, False)
    sandbox.close()


# limits


def test_a_row_with_a_time_limit_has_this_limit() -> None:
    endless = "def square(x):\n    while True: pass"
    detail = score(endless, MBPP | {"time_limit_s": 0.5}, cpu_s=10)["detail"]
    assert "test 1: CPU time limit of 0.5 s" in detail
    with pytest.raises(ValueError, match="its time_limit_s is 'two', not a number of seconds above 0"):
        problem_of("mbpp", MBPP | {"time_limit_s": "two"})


def test_an_answer_may_take_ten_times_as_long_as_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "QUICK_CPU_S", 0.5)
    spent = "import time\ndef square(x):\n    while time.process_time() < {s}: pass\n    return x * x\n"

    def details(answer: str, reference: str) -> str:
        answer, extra = f"```python\n{answer}\n```", {"answer": reference}
        result = compute_score("mbpp", answer, MBPP, extra, sandbox=KEYS | {"cpu_s": 10, "timeout_s": 60.0})
        return str(result["detail"])

    assert "time limit of" in details(spent.format(s=1.0), "def square(x): return x ** 2")
    assert details(spent.format(s=1.0), spent.format(s=0.3)) == "3 of 3 tests passed"
    assert details(spent.format(s=1.0), "Multiply.") == "3 of 3 tests passed"  # no program: the usual limit


@pytest.mark.parametrize("name", ["code", "canonical_solution"])
def test_the_published_rows_have_their_reference_in_the_ground_truth(name: str) -> None:
    truth, endless = MBPP | {name: "def square(x): return x ** 2"}, "def square(x):\n    while True: pass"
    assert score(endless, truth, cpu_s=10)["detail"] == "0 of 3 tests passed; test 1: CPU time limit of 1 s"


class LimitedRuns:
    """A sandbox in which as many runs as `used_s` run into a limit, after so much processor time."""

    def __init__(self, *used_s: float) -> None:
        self.used_s = list(used_s)

    def run(self, job: SandboxJob, tests: Suite | None) -> SandboxOutcome:
        stopped = "time limit of 1 s" if self.used_s else None
        cpu_s = self.used_s.pop() if self.used_s else 0.1
        return SandboxOutcome(SandboxRun(stopped, stopped is not None, 0, "4\n", "", "", cpu_s, 1.0))


ONE_INPUT = {"inputs": ["2\n"], "outputs": ["4\n"]}


def test_a_program_that_slept_is_run_again_since_its_disk_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def details(*used_s: float) -> str:
        monkeypatch.setattr(code, "sandbox_for", lambda limits, isolation: LimitedRuns(*used_s))
        return str(score("print(4)", ONE_INPUT | {"time_limit_s": 1.0}, cpu_s=10)["detail"])

    assert details() == details(0.2) == "1 of 1 tests passed"
    assert details(0.2, 0.2) == details(0.9) == "0 of 1 tests passed; test 1: time limit of 1 s"  # once; it computed


def test_the_time_of_the_reference_does_not_use_up_the_total_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def reference_cpu_s(answer: object, reference: tuple[str, ...]) -> float:
        nonlocal now_s
        now_s += 1000.0  # on a busy machine
        return 0.5

    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(code, "_reference_cpu_s", reference_cpu_s)
    monkeypatch.setattr(code, "sandbox_for", lambda limits, isolation: LimitedRuns(1.0))
    assert score("print(4)", ONE_INPUT | {"code": "print(4)"}, cpu_s=10)["detail"] == "1 of 1 tests passed"


def test_time_in_which_a_program_waits_for_a_processor_is_not_its_own(tmp_path: Path) -> None:
    """A folder like /proc: the process of the tests, 7, and the program, 8, with two threads."""

    def write(pid: int, parent: int, ticks: str, threads: dict[int, tuple[str, int]]) -> None:
        for thread, (state, waited_ns) in threads.items():
            folder = tmp_path / str(pid) / "task" / str(thread)
            folder.mkdir(parents=True, exist_ok=True)
            stat = f"{thread} (a) b) {state} {parent} {'0 ' * 9}{ticks} 0"
            for place in (folder, tmp_path / str(pid)) if thread == pid else (folder,):
                (place / "stat").write_text(stat)
                (place / "schedstat").write_text(f"20000000 {waited_ns} 3\n")

    write(7, os.getpid(), "1 1 25 5", {7: ("S", 100_000_000)})  # 0.02 s, and 0.3 s of children that have ended
    write(8, 7, "40 10 0 0", {8: ("S", 2_000_000_000), 9: ("R", 500_000_000)})  # 0.5 s
    processes = os.open(tmp_path, os.O_RDONLY)
    used = used_times(processes, 7)
    assert used == (pytest.approx(0.82), pytest.approx(0.82 + 2.6), False)
    write(8, 7, "40 10 0 0", {8: ("S", 2_000_000_000), 9: ("S", 500_000_000)})
    assert used_times(processes, 7) == (used.cpu_s, used.ran_or_waited_s, True)
    assert used_times(processes, 77) is None  # hidden
    (tmp_path / "7" / "schedstat").write_text("0 0 0\n")
    assert used_times(processes, 7) is None  # a kernel that does not count
    os.close(processes)


def test_one_time_limit_holds_for_all_runs_of_an_answer() -> None:
    twenty = {"inputs": ["1\n"] * 20, "outputs": ["1\n"] * 20}
    keys = KEYS | {"cpu_s": 10, "timeout_s": 0.5, "total_timeout_s": 1.0, "partial_credit": True}
    begun = time.monotonic()
    result = compute_score("apps", "```python\nwhile True: pass\n```", twenty, {"answer": "print(1)"}, sandbox=keys)
    assert time.monotonic() - begun < code.call_limit_s(keys) == 2 * (1.0 + 0.5) + 30
    assert result["score"] == 0.0
    assert "time limit of" in str(result["detail"])


def test_a_schedulers_sigterm_ends_neither_the_sandbox_nor_a_program() -> None:
    sandbox = Sandbox(LIMITS, "none")
    sandbox.run(SandboxJob(("pass",)))
    assert sandbox._launcher is not None
    launcher = sandbox._launcher._process.pid
    signals = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGTERM) for pid in (launcher, *descendants(launcher))])
    signals.start()
    outcome = sandbox.run(SandboxJob(("import time; time.sleep(4); print(1)",), module_name="__main__"))
    signals.join()
    sandbox.close()
    assert (outcome.run.stdout, outcome.error) == ("1\n", None)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [found for child in children for found in (child, *descendants(child))]


def test_a_program_ends_as_in_python_after_its_threads_and_registered_functions() -> None:
    program = "import atexit, threading, time\natexit.register(print, 'end', flush=True)\n"
    program += "def main():\n    time.sleep(0.3)\n    print(input())\nthreading.Thread(target=main).start()"
    assert score(program, {"inputs": ["5\n"], "outputs": ["5\nend\n"]})["score"] == 1.0


def test_all_processes_of_a_program_share_one_memory_limit_where_cgroups_allow() -> None:
    sandbox = Sandbox(Limits(timeout_s=60, cpu_s=20, memory_mb=256, file_mb=16, processes=8, output_kb=64), "auto")
    if not (sandbox.protections.memory and sandbox.protections.fork):
        sandbox.close()
        pytest.skip("this user may not make a cgroup")
    children = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = b'1' * (150 << 20)\n"
    children += "        print('have', flush=True)\n        time.sleep(1)\n        os._exit(0)\n"
    children += "for _ in range(6):\n    try: os.wait()\n    except OSError: pass\n"
    outcome = sandbox.run(SandboxJob((children,), module_name="__main__"))
    after = sandbox.run(SandboxJob(("print(1)",), module_name="__main__"))
    sandbox.close()
    assert outcome.run.stdout.count("have") < 6  # 900 MB in all; 256 MB are allowed, and 128 MB for the sandbox itself
    assert (after.run.stdout, after.error) == ("1\n", None)


# isolation


@pytest.fixture
def weak_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A launcher on a machine without namespaces, seccomp and Landlock, as in some containers."""
    refuse = (
        "import rloom.rewards.sandbox.launcher as l\n"
        "def refused(*a): raise OSError(1, 'Operation not permitted')\n"
        "l.namespaces.unshare = refused; l.confine.seccomp_fault = lambda p: 'EPERM'\n"
        "l.confine.landlock_version = lambda: 0\n"
    )
    start = f"import sys; sys.path.insert(0, sys.argv[1])\n{refuse}l.main()"
    monkeypatch.setattr("rloom.rewards.sandbox.client._START", start)
    yield


@pytest.mark.usefixtures("weak_machine")
def test_without_any_barrier_generated_code_does_not_run_unless_that_is_asked_for() -> None:
    with pytest.raises(SandboxError, match=r"isolation=auto: this machine has no namespaces.*isolation=none"):
        Sandbox(LIMITS, "auto").run(SandboxJob(("pass",)))
    named = Sandbox(LIMITS, "none")
    assert named.run(SandboxJob(("print(1)",), module_name="__main__")).run.stdout == "1\n"
    named.close()


def test_datagrams_do_not_leave_the_sandbox(tmp_path: Path) -> None:
    name = f"\0rloom-test-{tmp_path.name}"
    send = "from socket import *\nfor kind in (SOCK_DGRAM, SOCK_SEQPACKET):\n    try:\n"
    send += "        a, b = socketpair(AF_UNIX, kind)\n"
    send += (
        f"        a.sendto(b'x', {name!r})\n        print('sent')\n    except OSError as e: print(type(e).__name__)\n"
    )
    send += "a, b = socketpair()\na.send(b'1')\nprint(b.recv(1))"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name)
        receiver.setblocking(False)
        sandbox = Sandbox(LIMITS, "none")
        outcome = sandbox.run(SandboxJob((send,), module_name="__main__"))
        sandbox.close()
        assert outcome.run.stdout == "PermissionError\nPermissionError\nb'1'\n"
        with pytest.raises(BlockingIOError):
            receiver.recv(1)


def test_a_program_does_not_find_an_earlier_program_or_the_tests_in_its_memory() -> None:
    """A program is a copy of its ancestors. Strings are searched backwards: the search itself has them, too."""
    search = "import gc, sys\ndef texts():\n    frame = sys._getframe()\n    while frame:\n"
    search += (
        "        yield repr(frame.f_locals)\n        frame = frame.f_back\n    yield from map(repr, gc.get_objects())\n"
    )
    search += "def found(x): return any(x in text[::-1] for text in texts())"
    asked = ("8672terces", "1472detcepxe", "))x(dnuof")  # the last one is in the program itself
    source = "".join(f"with __case__({i}): assert found({text!r}) is {i == 2}\n" for i, text in enumerate(asked))
    sandbox = Sandbox(LIMITS, "auto")
    sandbox.run(SandboxJob(("secret2768 = 1",)), Suite(0, source="expected2741 = 1"))
    outcome = sandbox.run(SandboxJob((f"{search}  # (found(x))",)), Suite(0, names=("found",), source=source))
    sandbox.close()
    assert [report["error"] for report in outcome.reports if "case" in report] == [None] * 3, outcome
