"""Several workers in processes of this machine: the same numbers as one process, and runs that survive a death."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from rloom.launch.export import export
from rloom.runtime import failures, remote
from rloom.runtime.group import NextItems, Stream
from rloom.runtime.nodes import wait_until
from tests.e2e.runs import arguments, records, same, terminate_all, train

pytestmark = pytest.mark.slow
OWN = ("timing_s/", "perf/")  # what another number of workers may change
LIMIT_S = 240


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A run that does not end is a failure."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def with_workers(tmp_path: Path) -> Callable[..., Path]:
    def run(workers: int, steps: int, *overrides: str, name: str = "") -> Path:
        directory = tmp_path / (name or f"workers_{workers}")
        train(directory, steps, *overrides, f"trainer.n_gpus_per_node={workers}")
        return directory

    return run


def numbers(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith(OWN)} for record in records(directory)]


def whole(run: Path, folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(export(run / f"global_step_{step}", folder) / "model.safetensors")


def assert_near(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other) > 0
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for key in first:
            assert first[key] == pytest.approx(second[key], rel=2e-3, abs=1e-5), key


# gae has every role, and with KL a reference; each test below compares some workers with the one run without
GAE = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.test_freq=3",  # greedy answers after training
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    train(directory, 3, *GAE, f"trainer.validation_data_dir={directory}/answers")
    return directory


class Deadly(remote.RemoteGroup):
    """A group whose last worker is killed at chosen calls: after they were sent, before all have answered."""

    plan: ClassVar[dict[str, int]] = {}  # method -> at which of its calls in the whole run
    calls: ClassVar[Counter[str]] = Counter()
    processes: ClassVar[dict[str, int]] = {}

    def strike(self, method: str) -> None:
        self.calls[method] += 1
        if self.plan.get(method) == self.calls[method]:
            os.kill(self.processes[self.workers[-1].name], signal.SIGKILL)

    def start(self, method: str, arguments: Any) -> remote.RemoteCalls:
        pending = super().start(method, arguments)
        self.strike(method)
        return pending

    def each(self, method: str, arguments: Any) -> list[Any]:
        found = super().each(method, arguments)
        if method == "machine":
            self.processes.update({worker.name: one.process for worker, one in zip(self.workers, found, strict=True)})
        return found

    def stream(self, method: str, next_items: NextItems) -> Stream:
        for number, item in enumerate(super().stream(method, next_items)):
            if number == 0:
                self.strike(method)
            yield item


def test_roles_apart_compute_the_same_as_together(alone: Path, with_workers: Callable[..., Path]) -> None:
    apart = with_workers(4, 3, *GAE, "trainer.pools.ref=1", "trainer.pools.rollout=1")
    assert_near(numbers(alone), numbers(apart))
    for record in records(apart):
        if "perf/throughput" in record:
            per_worker = record["perf/total_num_tokens"] / record["perf/time_per_step"] / 4
            assert record["perf/throughput"] == pytest.approx(per_worker)
            resident = [record[f"perf/worker_{number}/resident_gb"] for number in range(4)]
            # Linux updates the peak of a process in batches of pages: it may be some pages below what is resident
            assert record["perf/max_memory_allocated_gb"] >= 0.99 * max(resident)


def test_a_run_goes_on_with_another_number_of_workers_and_another_placement(
    alone: Path, with_workers: Callable[..., Path], tmp_path: Path
) -> None:
    # one answer at a time: two workers get one prompt of the four each, and the others as they finish
    one_by_one = "actor_rollout_ref.rollout.max_num_seqs=1"
    engines = ("trainer.pools.rollout=[1,2]",)  # on two of three workers that train
    # 8 samples a step: 3 workers train on 3, 3 and 2
    for workers, steps, placement in ((2, 1, ()), (1, 2, ()), (3, 3, engines)):
        moved = with_workers(workers, steps, *GAE, *placement, one_by_one, "trainer.test_freq=-1", name="moved")
    assert_near([record for record in numbers(alone) if "actor/grad_norm" in record], numbers(moved))
    expected = whole(alone, tmp_path / "alone")
    for name, tensor in whole(moved, tmp_path / "moved_hf").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_workers_that_share_sequences_compute_the_same(
    alone: Path, with_workers: Callable[..., Path], role: str
) -> None:
    """Those of one role; the other's are whole on the same two workers."""
    shared = with_workers(2, 2, *GAE, f"{role}.ulysses_sequence_parallel_size=2", "trainer.test_freq=-1")
    assert_near(numbers(alone)[:2], numbers(shared))


def test_a_worker_killed_in_generation_in_an_update_and_while_saving_costs_nothing(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calm = with_workers(2, 4, "algorithm.adv_estimator=grpo", name="calm")
    monkeypatch.setattr(remote, "RemoteGroup", Deadly)
    # step 2, once more step 2 and then step 3, and the checkpoint of step 4
    Deadly.plan, Deadly.calls = {"generate_stream": 2, "forward_backward": 6, "save": 4}, Counter()
    disturbed = with_workers(2, 4, "algorithm.adv_estimator=grpo", name="disturbed")
    said = capfd.readouterr().out
    assert said.count("worker 1 died") == 3 and "Restart 3 of 3" in said
    assert "Its last lines" in said and all(f"actor.{call}" in said for call in ("forward_backward", "save"))
    # 2 before the first death, of steps 2 and 3 before the second, of 3 and 4 before the third, and of 4 again
    assert Deadly.calls["generate_stream"] == 7, "each time the run went on from its last checkpoint"
    assert numbers(disturbed) == numbers(calm)
    assert same(whole(disturbed, disturbed / "hf", 4), whole(calm, calm / "hf", 4))


class Faulty(remote.RemoteGroup):
    """A group whose last worker raises at its fourth call of `score`, where the others wait for it in a collective."""

    processes: ClassVar[list[int]] = []
    called: ClassVar[list[str]] = []

    def start(self, method: str, arguments: Any) -> remote.RemoteCalls:
        self.called.append(method)
        if method != "score" or self.called.count("score") != 4:
            return super().start(method, arguments)
        *peers, last = self.workers
        answers = [peer.submit("call", self.role, method, arguments[0]) for peer in peers]
        return remote.RemoteCalls(self, [*answers, last.submit("call", self.role, "score_with_no_such_method", ())])

    def each(self, method: str, arguments: Any) -> list[Any]:
        found = super().each(method, arguments)
        if method == "machine":
            self.processes[:] = [machine.process for machine in found]
        return found


def test_an_error_on_one_worker_is_shown_first_ends_the_others_and_saves_nothing(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "RemoteGroup", Faulty)
    monkeypatch.setattr(failures, "RAISED_WAIT_S", 1.0)
    with pytest.raises(AssertionError):  # exit status 2
        with_workers(2, 5, "algorithm.adv_estimator=grpo", "trainer.save_freq=2", name="run")
    said = capfd.readouterr().err
    shown = said[said.index("rloom: worker error: ") :].splitlines()
    assert shown[0].startswith("rloom: worker error: worker 1 failed: AttributeError: ")
    assert "score_with_no_such_method" in shown[0]
    assert "checkpoint error" not in said and "room on the disk" not in said
    assert any(line.startswith("Its last lines") and line.endswith("worker_1.log):") for line in shown)
    assert shown[-1].startswith("A worker failed, so nothing was saved after it. The last good checkpoint is ")
    assert shown[-1].endswith("global_step_2; the same command goes on from it."), "step 3 was not saved"
    assert Faulty.called[-1] == "score", "nothing was asked of the workers after one had failed"
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in Faulty.processes), 30, "still there")


def test_a_run_does_not_begin_again_more_often_than_it_may(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "RemoteGroup", Deadly)
    Deadly.plan, Deadly.calls = {"optim_step": 1}, Counter()
    with pytest.raises(AssertionError):  # exit status 3
        with_workers(2, 2, "algorithm.adv_estimator=grpo", "trainer.max_restarts=0")
    assert "trainer.max_restarts=0: the run does not begin again" in capfd.readouterr().err


def test_gpus_that_are_not_there_are_missed_at_once(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(AssertionError):  # exit status 2
        with_workers(8, 1, "algorithm.adv_estimator=grpo", "trainer.device=cuda")
    said = capfd.readouterr().err
    assert "trainer.device=cuda: this machine shows no GPU (CUDA_VISIBLE_DEVICES=); use auto or cpu" in said


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """The process of a run with two workers, after its second step, and the processes below it."""
    code = "import sys; sys.modules['ray'] = None; from rloom.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
    keys = arguments(tmp_path / "run", 500, "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    yield process, below(process.pid)
    process.kill()
    process.communicate()


def below(parent: int) -> list[int]:
    """Ids of the processes that a process has started, and theirs."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found, parents = list[int](), [parent]
    while parents := [process for process, above in pairs if above in parents]:
        found += parents
    return [process for process in found if Path(f"/proc/{process}").exists()]  # without `ps`


def is_alive(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.is_file() and "State:\tZ" not in status.read_text()


def test_workers_end_with_a_driver_that_is_killed(started: tuple["subprocess.Popen[str]", list[int]]) -> None:
    process, others = started
    assert len(others) >= 1 + 2 * 2, "the process that workers are forked from, and two with the `tee` of each"
    process.kill()
    wait_until(lambda: not any(map(is_alive, others)), 30, "workers outlive the driver")


@pytest.mark.parametrize("everywhere", [True, False], ids=["SIGTERM everywhere", "Ctrl-C"])
def test_a_run_that_is_interrupted_saves_the_step_that_its_workers_finish(
    started: tuple["subprocess.Popen[str]", list[int]], tmp_path: Path, everywhere: bool
) -> None:
    """Neither is Ray imported: the module is not there."""
    process, others = started
    if everywhere:  # as by a scheduler
        terminate_all(process.pid)
    else:  # as by a terminal
        os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    last = len(records(tmp_path / "run"))
    assert last >= 2 and (tmp_path / "run" / f"global_step_{last}").is_dir()
    wait_until(lambda: not any(map(is_alive, others)), 30, "still there")
