"""The pool over real worker processes: what users' functions do to it, and what it does to them."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rloom.errors import RewardError
from rloom.rewards.base import Setup, encode, pickled
from rloom.rewards.pool import RulePool
from rloom.rewards.worker_process import WorkerProcess
from rloom.types import Sample, Score
from tests.waiting import is_running, wait_until

ROOT = Path(__file__).parents[3]

FUNCTIONS = """
import asyncio, os, subprocess, sys, time
import helper_beside_it

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs):
    if solution_str == "raise":
        return int("no\\nnumber")
    if solution_str == "exit":
        sys.exit("enough")
    if solution_str == "hang":
        time.sleep(60)
    if solution_str == "hang with a child":
        child = subprocess.Popen(["sleep", "60"], start_new_session=extra_info.get("own_session", False))
        open(extra_info["pid_file"], "w").write(f"{os.getpid()} {child.pid}")
        child.wait()
    if solution_str == "die":
        print("last words", file=sys.stderr)
        os._exit(7)
    if solution_str == "print":
        print("printed by print")
        os.write(1, b"written to descriptor 1\\n")
        os.system("echo said by a child")
        return input() if extra_info.get("ask") else 1.0
    if solution_str == "kwargs":
        total = sum(extra_info["numbers"])
        return {"score": reward_kwargs["bonus"], "sum": total, "note": "text", "pred": ground_truth[0]}
    return eval(solution_str)

async def patient(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001)
    return float(ground_truth) if solution_str == "good" else helper_beside_it.VALUE

not_a_function = 3.5

def wants_more(data_source, solution_str, ground_truth, extra_info, temperature):
    return temperature
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("custom")
    (folder / "helper_beside_it.py").write_text("VALUE = 0.25\n")
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    return str(folder / "my_rewards.py")


@pytest.fixture(scope="module")
def custom(functions):
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=functions)) as pool:
        yield pool


def score(pool: RulePool, *responses: str, data_source="own", truth="42", **extra) -> list[Score]:
    return score_all(pool, [Sample(data_source, "p", response, truth, extra) for response in responses])


def score_all(pool: RulePool, samples: Sequence[Sample]) -> list[Score]:
    """Each sample in a group of its own."""
    return [one for [one] in asyncio.run(pool.score([(sample,) for sample in samples]))]


def wait_until_gone(*processes: int) -> None:
    wait_until(lambda: not any(map(is_running, processes)))


def read_pids(file: Path) -> list[int]:
    wait_until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1", 1.0), ("True", 1.0), ("0.25", 0.25), ("-3", -3.0), ("__import__('fractions').Fraction(3, 4)", 0.75)],
)
def test_a_number_is_a_score(custom, expression, value):
    assert score(custom, expression) == [Score(value)]


def test_a_numpy_scalar_is_a_score(custom):
    assert score(custom, "__import__('numpy').float32(0.5)", "__import__('numpy').bool_(True)") == [
        Score(0.5),
        Score(1),
    ]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("None", r"compute_score \(my_rewards.py:5\) returned None \(NoneType\); a reward is a number, or a dict"),
        ("'1.0'", r"returned '1.0' \(str\)"),
        ("[1.0]", r"returned \[1.0\] \(list\)"),
        ("float('nan')", r"returned nan; the reward is nan, which is not finite"),
        ("float('-inf')", r"the reward is -inf"),
        ("10 ** 400", r"\(int\)"),
        ("1e39", r"returned 1e\+39; the reward is 1e\+39, which is beyond 1e\+30"),
        ("-1.5e30", r"the reward is -1.5e\+30, which is beyond 1e\+30"),
        ("{'score': 1, 'length': 1e300}", r"length is 1e\+300, which is beyond 1e\+30"),
        ("{'acc': 1.0}", r"returned a dict with 'acc'; it needs a 'score'"),
        ("{'score': None}", r"returned 'score' = None \(NoneType\)"),
        ("{'score': 1, 'length': float('nan')}", r"length is nan"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(my_rewards.py:\d+ in compute_score\)"),
        ("raise", r"^ValueError: invalid literal for int\(\) .*no\\nnumber.* \(my_rewards.py:7 in compute_score\)$"),
        ("exit", r"^SystemExit: enough \(my_rewards.py:9 in compute_score\)$"),
    ],
)
def test_anything_else_is_a_failure_in_one_line(custom, expression, reason):
    [failed] = score(custom, expression)
    assert not failed.ok
    assert failed.reason is not None and "\n" not in failed.reason
    assert re.search(reason, failed.reason), failed.reason


def test_a_dict_gives_parts_and_a_prediction_and_the_kwargs_arrive(functions):
    pool = RulePool(num_workers=1, timeout_s=60, path=functions, reward_kwargs={"bonus": 0.5})
    with contextlib.closing(pool):
        assert score(pool, "kwargs", truth=["a", {"b": (1, 2)}], numbers=(1, 2, 3)) == [
            Score(0.5, parts={"sum": 6.0}, prediction="a")
        ]


def test_an_async_function_is_awaited_and_files_beside_it_import(functions):
    with contextlib.closing(RulePool(num_workers=2, timeout_s=60, path=functions, name="patient")) as pool:
        assert score(pool, "good", "bad", "good") == [Score(42), Score(0.25), Score(42)]


def test_what_a_function_prints_goes_to_stderr_and_does_not_disturb_the_scores(functions, capsys):
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=functions)) as pool:
        assert score(pool, "print", "0.5", "print") == [Score(1), Score(0.5), Score(1)]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["printed by print", "written to descriptor 1", "said by a child"] * 2


def test_a_function_that_reads_stdin_finds_it_empty(custom):
    [failed] = score(custom, "print", ask=True)
    assert failed.reason is not None and failed.reason.startswith("EOFError")


def test_a_hanging_call_fails_alone_and_its_worker_is_replaced(functions):
    with contextlib.closing(RulePool(num_workers=1, timeout_s=3, path=functions)) as pool:
        scores = score(pool, "1", "hang", "0.25", "0.5")
    assert [scores[0], scores[2], scores[3]] == [Score(1), Score(0.25), Score(0.5)]
    assert scores[1].reason == (
        "timed out after reward_model.timeout_s=3 s (data_source='own', a response of 4 characters); "
        "its worker was replaced"
    )


def test_a_kill_takes_the_processes_that_the_function_started(functions, tmp_path):
    pid_file = tmp_path / "pids"
    with contextlib.closing(RulePool(num_workers=1, timeout_s=3, path=functions)) as pool:
        [failed] = score(pool, "hang with a child", pid_file=str(pid_file))
    assert failed.reason is not None and failed.reason.startswith("timed out")
    worker, child = map(int, pid_file.read_text().split())
    wait_until_gone(worker, child)


def test_closing_during_the_replacement_of_a_worker_fails_its_sample(functions, tmp_path, monkeypatch):
    """The replacement waits for the end of stderr, which a process outside the worker's group keeps open."""
    monkeypatch.setattr("rloom.rewards.worker_process.EXIT_GRACE_S", 50.0)
    pid_file, found = tmp_path / "pids", []
    pool = RulePool(num_workers=1, timeout_s=3, path=functions)
    row = {"pid_file": str(pid_file), "own_session": True}
    scoring = threading.Thread(target=lambda: found.extend(score(pool, "hang with a child", **row)), daemon=True)
    scoring.start()
    worker, child = read_pids(pid_file)
    wait_until_gone(worker)
    time.sleep(1)  # its replacement has begun to wait
    ending = threading.Thread(target=pool.close, daemon=True)
    ending.start()
    ending.join(30)
    scoring.join(30)
    os.kill(child, signal.SIGKILL)
    assert not ending.is_alive()
    assert [one.reason for one in found] == ["the reward was closed before this sample was scored"]


def test_a_close_that_is_cancelled_kills_the_worker_and_its_children(functions, tmp_path):
    pid_file = tmp_path / "pids"

    async def cancel_close() -> None:
        process = WorkerProcess(Setup(functions, "compute_score", {}, False, 30, 30))
        await process.load()
        fields = ("own", "p", "hang with a child", "", {"pid_file": str(pid_file)})
        process.send(encode([(1, pickled((fields,)))]))
        pids = await asyncio.to_thread(read_pids, pid_file)
        closing = asyncio.create_task(process.close(grace_s=60))
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        wait_until_gone(*pids)
        assert await process.close() == -signal.SIGKILL

    asyncio.run(cancel_close())


def test_a_worker_that_dies_fails_its_sample_with_exit_code_and_last_words(functions):
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=functions)) as pool:
        scores = score(pool, "die", "0.5", "__import__('os').kill(__import__('os').getpid(), 9)", "1")
    assert scores[0].reason == "the reward worker ended with exit code 7; its last lines: last words"
    assert scores[2].reason == "the reward worker was killed by SIGKILL"
    assert [scores[1], scores[3]] == [Score(0.5), Score(1)]


def test_a_row_that_cannot_be_sent_fails_alone(custom):
    scores = score(custom, "1", callback=lambda: None) + score(custom, "1")
    assert scores[0].reason is not None and scores[0].reason.startswith("this row cannot be sent to a reward worker")
    assert scores[1] == Score(1)


def test_large_rows_pass_whole(custom):
    assert score(custom, "len(extra_info['text'])", text="x" * 3_000_000) == [Score(3_000_000)]


def test_a_reply_that_arrives_in_pieces_is_a_score(custom):
    assert score(custom, "{'score': 1.0, 'detail': 'x' * 1_000_000}", "0.5") == [
        Score(1.0, detail="x" * 1_000_000),
        Score(0.5),
    ]


def test_the_rules_score_by_data_source_with_the_options_they_read():
    samples = [
        Sample("openai/gsm8k", "p", "so it is 18", "18"),
        Sample("lighteval/MATH", "p", r"\boxed{\frac{2}{4}}", "0.5"),
        Sample("math_reasoning", "p", "答案：41", "42"),
        Sample("acme/poems", "p", "roses", "red"),
        Sample("openai/gsm8k", "p", "18", "eighteen"),
    ]
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, reward_kwargs={"method": "flexible"})) as pool:
        scores = score_all(pool, samples)
    assert scores[0] == Score(1, parts={"acc": 1.0}, prediction="18")
    assert scores[1] == Score(1, parts={"acc": 1.0}, prediction=r"\frac{2}{4}")
    assert scores[2] == Score(0, parts={"acc": 0.0}, prediction="41")
    assert scores[3].reason is not None and "no reward rule for data_source='acme/poems'" in scores[3].reason
    assert scores[4].reason is not None
    assert scores[4].reason.startswith(
        "GroundTruthError: ground_truth='eighteen' of a openai/gsm8k row is not a number (gsm8k"
    )


def test_the_import_of_a_slow_library_does_not_count_as_time_of_the_sample(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("import time\ntime.sleep(4)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with contextlib.closing(RulePool(num_workers=1, timeout_s=3)) as pool:
        assert score(pool, r"\boxed{42}", r"\boxed{2}", data_source="math") == [
            Score(1, parts={"acc": 1.0}, prediction="42"),
            Score(0, parts={"acc": 0.0}, prediction="2"),
        ]


def test_a_rule_whose_library_is_missing_fails_its_samples_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('it is not installed')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60)) as pool:
        [failed] = score(pool, r"\boxed{1}", data_source="math")
    assert failed.reason is not None
    assert failed.reason.startswith("the rule for math cannot be used: ImportError: it is not installed")


def test_workers_leave_the_cores_to_generation(functions, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    priority, threads = "os.getpriority(os.PRIO_PROCESS, 0)", "int(os.environ['OMP_NUM_THREADS'])"
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=functions)) as pool:
        assert [one.value for one in score(pool, priority, threads)] == [min(own + 5, 19), 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=functions)) as pool:
        assert [one.value for one in score(pool, threads)] == [3]


def test_640_samples_keep_their_order():
    samples = [Sample("math_reasoning", "p", f"15 + 27，所以答案是 {i}。", str(i)) for i in range(640)]
    with contextlib.closing(RulePool(num_workers=2, timeout_s=60)) as pool:
        scores = score_all(pool, samples)
    assert [one.prediction for one in scores] == [str(i) for i in range(640)]


def test_workers_stay_from_one_batch_to_the_next(functions):
    """To start one takes longer than a thousand samples."""
    samples = [Sample("s", "p", "os.getpid()", "")] * 64
    with contextlib.closing(RulePool(num_workers=2, timeout_s=60, path=functions)) as pool:
        processes = [one.value for _ in range(3) for one in score_all(pool, samples)]
    assert len(processes) == 3 * 64 and 1 <= len(set(processes)) <= 2


def check_error(path: str, name: str = "compute_score", **reward_kwargs) -> str:
    pool = RulePool(num_workers=1, timeout_s=60, path=path, name=name, reward_kwargs=reward_kwargs)
    with contextlib.closing(pool), pytest.raises(RewardError) as caught:
        pool.check()
    return str(caught.value)


def test_a_good_file_passes_the_check_and_the_rules_need_none(functions):
    RulePool(num_workers=1, timeout_s=60, path=functions).check()
    RulePool(num_workers=1, timeout_s=60).check()


def test_a_missing_file_is_named(tmp_path):
    message = check_error(str(tmp_path / "none.py"))
    assert message.startswith(f"custom_reward_function.path='{tmp_path}/none.py': there is no file")


def test_a_syntax_error_is_named_with_its_line(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ndef compute_score(:\n")
    assert "cannot be loaded: SyntaxError: invalid syntax (bad.py:2)" in check_error(str(tmp_path / "bad.py"))


def test_an_error_while_the_file_is_loaded_is_named_with_its_line(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\nimport a_module_that_is_not_there\n")
    message = check_error(str(tmp_path / "bad.py"))
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there' (bad.py:2 in <module>)" in message


def test_a_file_that_ends_the_process_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("import os\nos._exit(3)\n")
    message = check_error(str(tmp_path / "bad.py"))
    assert message.endswith("bad.py': the reward worker ended with exit code 3, while loading")


def test_a_missing_function_names_those_that_are_there(functions):
    message = check_error(functions, "compute_scores")
    assert message.startswith("custom_reward_function.name='compute_scores': ")
    assert message.endswith("it defines compute_score, patient, wants_more")


def test_a_name_that_is_no_function_is_refused(functions):
    message = check_error(functions, "not_a_function")
    assert "custom_reward_function.name='not_a_function'" in message and "that is a float, not a function" in message


def test_a_function_that_cannot_take_the_arguments_is_refused(functions):
    message = check_error(functions, "wants_more")
    assert message.endswith(
        "data_source, solution_str, ground_truth, extra_info: missing a required argument: 'temperature'"
    )
    assert "reward_kwargs bonus: got an unexpected keyword argument 'bonus'" in check_error(
        functions, "patient", bonus=1
    )


def test_a_file_that_breaks_after_the_check_fails_samples_and_not_the_pool(tmp_path):
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=str(tmp_path / "gone.py"))) as pool:
        [failed] = score(pool, "1")
    assert failed.reason is not None and "there is no file" in failed.reason


def test_a_pool_without_workers_is_refused():
    with pytest.raises(RewardError, match="num_workers=0"):
        RulePool(num_workers=0, timeout_s=60)


PARENT = """
import asyncio, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from rloom.rewards.pool import RulePool
from rloom.types import Sample

path, response = sys.argv[1:]
pool = RulePool(num_workers=1, timeout_s=3 if response == "forever" else 60, path=path)
sample = Sample("s", "p", response)
if response == "idle":
    asyncio.run(pool.score([(sample,)]))
    print("scored", flush=True)
    time.sleep(60)
asyncio.run(pool.score([(sample,)]))
"""

ORPHANS = """
import os, re, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    open(__file__ + ".pid", "w").write(str(os.getpid()))
    if solution_str == "forever":
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter lock
    if solution_str == "sleep":
        time.sleep(60)
    return 1.0
"""


def start_parent(folder: Path, response: str) -> tuple[subprocess.Popen[str], int]:
    """A process with a pool that scores `response`, and the pid of its worker, once that is at work."""
    (folder / "orphans.py").write_text(ORPHANS)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder / "orphans.py"), response],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    pid_file = folder / "orphans.py.pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), 240)
    if response == "idle":
        assert parent.stdout is not None and parent.stdout.readline() == "scored\n"
    return parent, int(pid_file.read_text())


@pytest.mark.parametrize("response", ["idle", "forever"])
def test_workers_end_by_themselves_when_their_parent_is_killed(tmp_path, response):
    parent, worker = start_parent(tmp_path, response)
    parent.kill()
    parent.communicate()
    wait_until_gone(worker)


def test_ctrl_c_ends_the_parent_without_a_word_from_the_workers(tmp_path):
    parent, worker = start_parent(tmp_path, "idle")
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    _, stderr = parent.communicate(timeout=60)
    assert stderr.count("Traceback") == 1 and "reward" not in stderr and "KeyboardInterrupt" in stderr
    wait_until_gone(worker)


GROUP_FUNCTION = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    if solution_strs[0] == "few":
        return [1.0]
    if solution_strs[0] == "raise":
        raise KeyError("no")
    best = max(len(text) for text in solution_strs)
    return [{"score": float(len(text) == best) + bonus, "longest": best} for text in solution_strs]
"""


def test_with_whole_groups_a_function_gets_lists_and_compares_the_answers_to_a_prompt(tmp_path):
    file = tmp_path / "group_rewards.py"
    file.write_text(GROUP_FUNCTION)
    pool = RulePool(num_workers=1, timeout_s=60, path=str(file), reward_kwargs={"bonus": 0.5}, whole_groups=True)
    with contextlib.closing(pool):
        pool.check()
        groups = [
            tuple(Sample("s", "p", text, "") for text in texts) for texts in (["a", "abc"], ["few"] * 2, ["raise"])
        ]
        [compared, few, raised] = asyncio.run(pool.score(groups))
    assert compared == [Score(0.5, parts={"longest": 3.0}), Score(1.5, parts={"longest": 3.0})]
    assert [one.reason for one in few] == ["compute_score (group_rewards.py:2) returned 1 results for 2 answers"] * 2
    assert raised[0].reason == "KeyError: 'no' (group_rewards.py:6 in compute_score)"


def test_a_function_for_single_answers_is_refused_for_groups(functions):
    pool = RulePool(num_workers=1, timeout_s=60, path=functions, whole_groups=True)
    expected = "data_sources, solution_strs, ground_truths, extra_infos"
    with contextlib.closing(pool), pytest.raises(RewardError, match=expected):
        pool.check()


def test_a_schedulers_sigterm_does_not_end_a_worker(tmp_path):
    """The run finishes its step first, and needs the scores."""
    file = tmp_path / "signalled.py"
    file.write_text(
        "import os, signal\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return 1.0\n"
    )
    with contextlib.closing(RulePool(num_workers=1, timeout_s=60, path=str(file))) as pool:
        assert [found.value for found in score(pool, "1")] == [1.0]
