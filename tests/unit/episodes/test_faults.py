"""Episodes whose environments hang, raise, exit, fork, print and return garbage. Tools, agents: test_fault_mix.py."""

import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

from rloom.batch import Batch
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.record import Ending, episode_metrics, episode_trajectories
from rloom.errors import TrainingError
from rloom.types import Score
from tests.unit.episodes.test_runner import run
from tests.waiting import wait_until

ENVIRONMENT = textwrap.dedent(
    """
    import ctypes, os, signal, subprocess, sys, threading, time

    class Odd(Exception):
        def __str__(self):
            raise ValueError("no text")

    class Bare:
        pass

    def forge(**reply):  # as generated code could do it
        import json
        body = json.dumps(reply).encode()
        os.write(connection(), len(body).to_bytes(8, "big") + body)

    def connection():  # generated code may find the socket to the driver
        for fd in os.listdir("/proc/self/fd"):
            if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}"):
                return int(fd)

    def call(**given):
        return {"name": "f", "arguments": "{}", "result": "", "seconds": 1.0, "error": None, **given}

    def forge_reply(game, **reply):  # with the number of the request
        frame = sys._getframe()
        while "number" not in frame.f_locals:
            frame = frame.f_back
        forge(number=frame.f_locals["number"], **reply)

    class Game:
        def reset(self, file="", begin="", **row):
            self.file, self.hangs, self.forges = file, False, False
            self.note("made")
            if begin == "raise":
                raise ValueError("cannot begin")
            return {"number": 3, "messages": [{"role": "user"}], "surrogate": "\\ud800?"}.get(begin)

        def note(self, what):
            with open(self.file, "a") as file:
                file.write(what + "\\n")

        def step(self, text):
            match text:
                case "raise": raise ValueError("no such move")
                case "odd error": raise Odd()
                case "sys.exit": sys.exit(3)
                case "exit": os._exit(3)
                case "interrupt": raise KeyboardInterrupt
                case "segfault": ctypes.string_at(0)
                case "recursion": return self.step("recursion")
                case "hang":
                    open(self.file + ".hangs", "w").close()
                    while True:
                        time.sleep(0.01)
                case "hang for ever":
                    signal.signal(signal.SIGALRM, signal.SIG_IGN)
                    open(self.file + ".hangs", "w").close()
                    time.sleep(600)
                case "thread":
                    threading.Thread(target=time.sleep, args=(600,)).start()
                case "fork":
                    if os.fork() == 0:
                        os.setsid()
                        time.sleep(600)
                        os._exit(0)
                case "child" | "child and exit":
                    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
                    text == "child" or os._exit(3)
                case "print": sys.stdout.write("x" * 3_000_000)
                case "close stdout":
                    os.close(1)
                    os.close(2)
                case "long": return "y" * 10_000_000, 0.0, False
                case "too long": return [{"role": "user", "content": "y", "more": "z" * 100_000_000}], 0.0, False
                case "nothing": return None
                case "number": return 7
                case "pair": return "seen", 0.0
                case "object": return Bare(), 0.0, False
                case "set": return [{"role": "user", "content": "a", "more": {1, 2}}], 0.0, False
                case "no role": return [{"content": "seen"}], 0.0, False
                case "odd role": return [{"role": 5, "content": "seen"}], 0.0, False
                case "nan": return "seen", float("nan"), False
                case "infinite": return "seen", float("inf"), False
                case "reward text": return "seen", "much", False
                case "surrogate": return "\\ud800\\udfff\\x00\\x1b[31m", 0.25, False
                case "bytes": return b"seen", 0.25, False
                case "garbage to the driver": os.write(connection(), b"\\xff" * 100)
                case "list to the driver": os.write(connection(), (2).to_bytes(8, "big") + b"[]")
                case "forged": forge(done=True, reward=100, messages=[], calls=[])
                case "forged at the end":
                    self.forges = True
                    return "seen", 0.25, True
                case "huge number": forge_reply(self, done=False, reward=10**400, messages=[], calls=[])
                case "long seconds": forge_reply(self, done=False, messages=[], calls=[call(seconds=10**400)])
                case "nan seconds": forge_reply(self, done=False, messages=[], calls=[call(seconds=float("nan"))])
                case "odd error text": forge_reply(self, done=False, messages=[], calls=[call(error=[])])
                case "many lists": forge_reply(self, done=False, messages=[[]] * 2_000_000)
                case "deep":
                    deep = []
                    for _ in range(400):
                        deep = [deep]
                    return [{"role": "user", "content": "a", "more": deep}], 0.0, False
                case "odd calls": return [{"role": "user", "content": "a", "tool_calls": 5}], 0.0, False
                case "half a frame":
                    os.write(connection(), (100).to_bytes(8, "big") + b"{")
                    os._exit(0)
                case "hang in close": self.hangs = True
                case "kill the parent" | "kill the parent of 8":
                    folder = os.path.dirname(self.file)
                    while text != "kill the parent" and str(os.listdir(folder)).count(".hangs") < 7:
                        time.sleep(0.05)
                    os.kill(os.getppid(), signal.SIGKILL)
                    time.sleep(600)  # its own process ends with the other
                case "stop the parent": os.kill(os.getppid(), signal.SIGSTOP)
                case "wait": time.sleep(0.3)
            return "seen", 0.25, text == "done"

        def get_metrics(self):
            self.forges and forge(reward=100, facts={}, state={}, metrics={})
            return {}

        def close(self):
            while self.hangs:
                time.sleep(0.01)
            self.note("closed")
    """
)
# a fault -> how its episode ends, and what it then has got; "done" follows where it goes on
FAULTS = {
    "raise": (Ending.FAILED, "ValueError: no such move"),
    "odd error": (Ending.FAILED, "Odd: "),
    "sys.exit": (Ending.FAILED, "SystemExit: 3"),
    "exit": (Ending.EXITED, "its process ended"),
    "interrupt": (Ending.FAILED, "KeyboardInterrupt: "),
    "segfault": (Ending.EXITED, "its process ended"),
    "recursion": (Ending.FAILED, "RecursionError: "),
    "hang": (Ending.NO_ANSWER, "CallTimeout: it took longer than its limit"),
    "hang for ever": (Ending.NO_ANSWER, "no answer after 10 s; its process was killed"),
    "thread": (Ending.DONE, 0.5),
    "fork": (Ending.DONE, 0.5),
    "child": (Ending.DONE, 0.5),
    "child and exit": (Ending.EXITED, "its process ended"),
    "print": (Ending.DONE, 0.5),
    "close stdout": (Ending.DONE, 0.5),
    "long": (Ending.WRONG_REPLY, "a reply of "),
    "too long": (Ending.WRONG_REPLY, "a reply of "),
    "nothing": (Ending.FAILED, "TypeError: "),
    "number": (Ending.FAILED, "TypeError: "),
    "pair": (Ending.FAILED, "TypeError: step returned tuple; return (observation, reward, done)"),
    "object": (Ending.FAILED, "TypeError: "),
    "set": (Ending.FAILED, "TypeError: Object of type set is not JSON serializable"),
    "no role": (Ending.FAILED, "TypeError: step returned an observation of list"),
    "odd role": (Ending.WRONG_REPLY, "a message of it is {'content': 'seen', 'role': 5}"),
    "nan": (Ending.WRONG_REPLY, "its reward is nan, not a finite number"),
    "infinite": (Ending.WRONG_REPLY, "its reward is inf, not a finite number"),
    "reward text": (Ending.FAILED, "TypeError: the reward of step is 'much'; return a number"),
    "surrogate": (Ending.DONE, 0.5),
    "bytes": (Ending.FAILED, "TypeError: "),
    "garbage to the driver": (Ending.WRONG_REPLY, "a reply of 18,446,744,073,709,551,615 bytes"),
    "list to the driver": (Ending.WRONG_REPLY, "its reply is list, not a JSON object"),
    "forged": (Ending.WRONG_REPLY, "its process sent a reply without a request"),
    "forged at the end": (Ending.WRONG_REPLY, "its process sent a reply without a request"),
    "huge number": (Ending.WRONG_REPLY, "its reward is 1000"),
    "long seconds": (Ending.WRONG_REPLY, "a call of its tools is {"),
    "nan seconds": (Ending.WRONG_REPLY, "a call of its tools is {"),
    "odd error text": (Ending.WRONG_REPLY, "a call of its tools is {"),
    "many lists": (Ending.WRONG_REPLY, "a reply with 2,000,002 brackets; at most 100,000 are read"),
    "deep": (Ending.WRONG_REPLY, "a value of its reply has more than 20 lists or mappings inside of each other"),
    "odd calls": (Ending.WRONG_REPLY, "its reply cannot be read (TypeError): ({"),
    "half a frame": (Ending.EXITED, "its process ended"),
    "hang in close": (Ending.DONE, 0.5),
}
BEGINNINGS = {
    "raise": (Ending.FAILED, "ValueError: cannot begin"),
    "number": (Ending.FAILED, "TypeError: "),
    "messages": (Ending.FAILED, "TypeError: reset returned list"),
    "surrogate": (Ending.DONE, 0.25),
}
# the process cannot run any more, or does not end in time
UNCLOSED = ("exit", "child and exit", "segfault", "hang for ever", "half a frame", "hang in close")
EPISODES = 2 * len(FAULTS)  # every other one has a fault


@pytest.fixture(scope="module")
def environment_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("faults") / "faults.py"
    file.write_text(ENVIRONMENT)
    return file


@pytest.fixture
def mark(monkeypatch):
    """In the variables of every process that the test starts."""
    name = f"mark-{uuid4()}"
    monkeypatch.setenv("RLOOM_TEST_MARK", name)
    return name


def processes(mark):
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_text(errors="replace"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            pass
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_each_fault_of_an_environment_ends_its_own_episode_with_its_reason(environment_file, tmp_path, mark):
    names = list(FAULTS)
    faults = [None if n % 2 else names[n // 2] for n in range(EPISODES)]
    begins = {2 * n + 1: name for n, name in enumerate(BEGINNINGS)}
    rows = {n: {"file": str(tmp_path / str(n)), "begin": begins.get(n, "")} for n in range(EPISODES)}
    scripts = [["7", "done"] if fault is None else [fault, "done"] for fault in faults]
    scripts = [["done"] if n in begins else script for n, script in enumerate(scripts)]
    limits = EpisodeLimits(4000, turns=8, call_s=10.0, result_characters=20)
    start_s = time.monotonic()
    records, sampled, prompts = run(environment_file, scripts, limits=limits, rows=rows, most=64)
    assert time.monotonic() - start_s < 240
    for n, record in enumerate(records):
        expected = BEGINNINGS[begins[n]] if n in begins else FAULTS.get(faults[n] or "", (Ending.DONE, 0.5))
        assert record.ending is expected[0], (scripts[n], record.failure)
        if record.ending is Ending.DONE:
            assert record.failure is None and record.reward == expected[1], scripts[n]
        else:
            assert record.failure.startswith(expected[1]) and record.reward is None, (scripts[n], record.failure)
    trajectories = [
        trajectory
        for n, (record, prompt) in enumerate(zip(records, prompts, strict=True))
        for trajectory in episode_trajectories(record, prompt, n, Score(1.0))
    ]
    assert [trajectory.answer_tokens for trajectory in trajectories] == sampled  # nothing else is in the mask
    batch = Batch.pack(trajectories)
    assert batch.valid_N.tolist() == [record.failure is None for record in records]
    endings = Counter(record.ending for record in records)
    metrics = episode_metrics(trajectories)
    counted = {ending: round(metrics[ending.metric] * EPISODES) for ending in Ending}
    assert {ending: count for ending, count in counted.items() if count} == endings
    assert sum(endings.values()) == EPISODES
    for n in range(EPISODES):  # one instance an episode; closed once wherever it can be
        lines = (tmp_path / str(n)).read_text().split()
        assert lines == (["made"] if scripts[n][0] in UNCLOSED else ["made", "closed"]), scripts[n]
    wait_until(lambda: not processes(mark))


def rows_in(folder, count):
    return {n: {"file": str(folder / str(n))} for n in range(count)}


def test_an_environment_that_kills_the_process_it_was_forked_from_is_followed_by_others(environment_file, tmp_path):
    scripts = [["kill the parent"], ["done"]]
    [killer, other], _, _ = run(environment_file, scripts, rows=rows_in(tmp_path, 2), most=1)
    assert (killer.ending, killer.failure) == (Ending.EXITED, "its process ended")
    assert (other.ending, other.reward) == (Ending.DONE, 0.25)


def test_episodes_that_run_when_their_server_is_killed_fail_and_those_after_them_do_not(environment_file, tmp_path):
    scripts = [["kill the parent of 8"], *[["hang for ever"]] * 7, *[["7", "done"]] * 16]
    limits = EpisodeLimits(4000, turns=8, call_s=60.0)
    records, _, _ = run(environment_file, scripts, limits=limits, rows=rows_in(tmp_path, 24), most=8)
    assert [record.ending for record in records[:8]] == [Ending.EXITED] * 8
    assert [(record.ending, record.reward) for record in records[8:]] == [(Ending.DONE, 0.5)] * 16


def test_a_server_that_ends_with_every_episode_ends_the_run_with_a_sentence(environment_file, tmp_path, monkeypatch):
    monkeypatch.setattr("rloom.episodes.pool.MOST_RESTARTS", 2)
    with pytest.raises(TrainingError, match=r"faults\.py:Game: the process that environments are forked from en"):
        run(environment_file, [["kill the parent"]] * 6, rows=rows_in(tmp_path, 6), most=1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_server_that_was_stopped_is_replaced(environment_file, tmp_path, mark, monkeypatch, caplog):
    monkeypatch.setattr("rloom.episodes.pool.FORK_LIMIT_S", 5.0)
    monkeypatch.setattr("rloom.episodes.pool.LATE_FORK_LIMIT_S", 2.0)
    records, _, _ = run(
        environment_file, [["stop the parent", "done"], *[["7", "done"]] * 11], rows=rows_in(tmp_path, 12), most=2
    )
    endings = [record.ending for record in records]
    assert endings.count(Ending.DONE) >= 10  # one other may run in the moment of the kill
    assert set(endings) <= {Ending.DONE, Ending.EXITED}
    assert "the process that environments are forked from did not answer in 5 s" in caplog.text
    wait_until(lambda: not processes(mark))


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from rloom.episodes.base import EpisodeLimits
from tests.unit.episodes.test_runner import run
folder = Path(sys.argv[3])
rows = {n: {"file": str(folder / str(n))} for n in range(4)}
last = "stop the parent" if "stop" in sys.argv else "7"
run(sys.argv[2], [["7", "7", "child", "hang for ever"], ["7"] * 5000, ["7"] * 5000, [last, "hang"]], rows=rows, most=4,
    limits=EpisodeLimits(400_000, call_s=120.0))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "given",
    [pytest.param([], id="running"), pytest.param(["stop"], id="stopped", marks=pytest.mark.long)],
)
def test_no_process_outlives_a_run_that_is_killed_and_waiting_environments_are_closed(
    environment_file, tmp_path, mark, given
):
    """Also if the process that they are forked from was stopped."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", RUN, str(root), str(environment_file), str(tmp_path), *given]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}) as process:
        try:
            wait_until(lambda: {*os.listdir(tmp_path)} == {"0", "1", "2", "3", "0.hangs", "3.hangs"}, 240)
            assert len(processes(mark)) >= 6  # the run, the process that is forked, four environments
        finally:
            process.kill()
    wait_until(lambda: not processes(mark))
    notes = [(tmp_path / str(n)).read_text().split() for n in range(4)]
    assert notes[1] == notes[2] == ["made", "closed"]  # between two calls
    assert notes[0] == notes[3] == ["made"]  # in a call that does not end
