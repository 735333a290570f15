"""Several workers in processes of this machine: the same numbers as one process, and runs that survive a death."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from rloom.launch.export import export
from rloom.runtime import failures, remote
from rloom.runtime.group import NextItems, Stream
from tests.e2e.runs import below, records, run_with_log, same, terminate_all, train
from tests.ranks import forkserver
from tests.waiting import is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("time_limit")]
OWN = ("timing_s/", "perf/")  # what another number of workers may change


@pytest.fixture
def with_workers(tmp_path: Path) -> Callable[..., Path]:
    def run(workers: int, steps: int, *overrides: str, name: str = "") -> Path:
        directory = tmp_path / (name or f"workers_{workers}")
        train(directory, steps, *overrides, f"trainer.n_gpus_per_node={workers}")
        return directory

    return run


def numbers(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith(OWN)} for record in records(directory)]


def whole(run: Path, folder: Path, step: int = 2) -> dict[str, torch.Tensor]:
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
    "trainer.test_freq=2",  # greedy answers after training
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone")
    train(directory, 2, *GAE, f"trainer.validation_data_dir={directory}/answers")
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

    def start(self, method: str, arguments: Any, **options: Any) -> remote.RemoteCalls:
        pending = super().start(method, arguments, **options)
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
    apart = with_workers(4, 2, *GAE, "trainer.pools.ref=1", "trainer.pools.rollout=1")
    assert_near(numbers(alone), numbers(apart))
    for record in records(apart):
        if "perf/throughput" in record:
            per_worker = record["perf/total_num_tokens"] / record["perf/time_per_step"] / 4
            assert record["perf/throughput"] == pytest.approx(per_worker)
            resident = [record[f"perf/worker_{number}/resident_gb"] for number in range(4)]
            # Linux updates the peak of a process in batches of pages: it may be some pages below what is resident
            assert record["perf/max_memory_allocated_gb"] >= 0.99 * max(resident)


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_workers_and_another_placement(
    alone: Path, with_workers: Callable[..., Path], tmp_path: Path
) -> None:
    # one answer at a time: two workers get one prompt of the four each, and the others as they finish
    one_by_one = "actor_rollout_ref.rollout.max_num_seqs=1"
    engines = ("trainer.pools.rollout=[1,2]",)  # on two of three workers that train
    # 8 samples a step: 3 workers train on 3, 3 and 2
    for workers, steps, placement in ((2, 1, ()), (3, 2, engines)):
        moved = with_workers(workers, steps, *GAE, *placement, one_by_one, "trainer.test_freq=-1", name="moved")
    assert_near([record for record in numbers(alone) if "actor/grad_norm" in record], numbers(moved))
    expected = whole(alone, tmp_path / "alone")
    for name, tensor in whole(moved, tmp_path / "moved_hf").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", pytest.param("critic", marks=pytest.mark.long)])
def test_workers_that_share_sequences_compute_the_same(
    alone: Path, with_workers: Callable[..., Path], role: str
) -> None:
    """Those of one role; the other's are whole on the same two workers."""
    shared = with_workers(2, 1, *GAE, f"{role}.ulysses_sequence_parallel_size=2", "trainer.test_freq=-1")
    assert_near(numbers(alone)[:1], numbers(shared))


@dataclass(frozen=True)
class Deaths:
    steps: int
    plan: dict[str, int]
    generations: int  # with each time the run went on from its last checkpoint


SHORT = "in an update"
DEATHS = {
    # 2 generations before it, and of step 2 again
    SHORT: Deaths(2, {"forward_backward": 3}, 3),
    # step 2, once more step 2 and then step 3, and the checkpoint of step 4: 2 generations before the first death, of
    # steps 2 and 3 before the second, of 3 and 4 before the third, and of 4 again
    "in generation, in an update and while saving": Deaths(
        4, {"generate_stream": 2, "forward_backward": 6, "save": 4}, 7
    ),
}


@pytest.mark.parametrize(
    "name", [name if name == "in an update" else pytest.param(name, marks=pytest.mark.long) for name in DEATHS]
)
def test_a_worker_that_is_killed_costs_nothing(
    with_workers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    deaths = DEATHS[name]
    calm = with_workers(2, deaths.steps, "algorithm.adv_estimator=grpo", name="calm")
    monkeypatch.setattr(remote, "RemoteGroup", Deadly)
    Deadly.plan, Deadly.calls = deaths.plan, Counter()
    disturbed = with_workers(2, deaths.steps, "algorithm.adv_estimator=grpo", name="disturbed")
    said, count = capfd.readouterr().out, len(deaths.plan)
    assert said.count("worker 1 died") == count and f"Restart {count} of 3" in said
    assert "Its last lines" in said
    assert all(f"actor.{call}" in said for call in deaths.plan if call != "generate_stream")
    assert Deadly.calls["generate_stream"] == deaths.generations
    assert numbers(disturbed) == numbers(calm)
    assert same(*(whole(run, run / "hf", deaths.steps) for run in (disturbed, calm)))


class Faulty(remote.RemoteGroup):
    """A group whose last worker raises at its second call of `score`, where the others wait for it in a collective."""

    processes: ClassVar[list[int]] = []
    called: ClassVar[list[str]] = []

    def start(self, method: str, arguments: Any, **options: Any) -> remote.RemoteCalls:
        self.called.append(method)
        if method != "score" or self.called.count("score") != 2:
            return super().start(method, arguments, **options)
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
        with_workers(2, 3, "algorithm.adv_estimator=grpo", name="run")
    said = capfd.readouterr().err
    shown = said[said.index("rloom: worker error: ") :].splitlines()
    assert shown[0].startswith("rloom: worker error: worker 1 failed: AttributeError: ")
    assert "score_with_no_such_method" in shown[0]
    assert "checkpoint error" not in said and "room on the disk" not in said
    assert any(line.startswith("Its last lines") and line.endswith("worker_1.log):") for line in shown)
    assert shown[-1].startswith("A worker failed, so nothing was saved after it. The last good checkpoint is ")
    assert shown[-1].endswith("global_step_1; the same command goes on from it."), "step 2 was not saved"
    assert Faulty.called[-1] == "score", "nothing was asked of the workers after one had failed"
    wait_until(lambda: not any(map(is_running, Faulty.processes)))


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


def run_in_session(directory: Path, steps: int, *overrides: str) -> None:
    os.setsid()
    sys.modules["ray"] = None  # type: ignore[assignment]  # it cannot be imported
    run_with_log(directory, steps, *overrides)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[ForkServerProcess, list[int]]]:
    """The process of a run with two workers, after its second step, and the processes below it."""
    run = tmp_path / "run"
    keys = ("algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2")
    process: ForkServerProcess = forkserver().Process(target=run_in_session, args=(run, 500, *keys))
    process.start()
    wait_until(lambda: (run / "global_step_2").is_dir() or process.exitcode is not None, 240)
    assert process.exitcode is None, run.with_suffix(".log").read_text()
    assert process.pid is not None
    yield process, below(process.pid)
    process.kill()
    process.join()


def test_workers_end_with_a_driver_that_is_killed(started: tuple[ForkServerProcess, list[int]]) -> None:
    process, others = started
    assert len(others) >= 1 + 2 * 2, "the process that workers are forked from, and two with the `tee` of each"
    assert process.pid not in map(os.getsid, others), "Ctrl-C in a terminal is for the driver alone"
    process.kill()
    wait_until(lambda: not any(map(is_running, others)))


@pytest.mark.parametrize(
    "everywhere", [True, pytest.param(False, marks=pytest.mark.long)], ids=["SIGTERM everywhere", "Ctrl-C"]
)
def test_a_run_that_is_interrupted_saves_the_step_that_its_workers_finish(
    started: tuple[ForkServerProcess, list[int]], tmp_path: Path, everywhere: bool
) -> None:
    """Neither is Ray imported: the module is not there."""
    process, others = started
    assert process.pid is not None
    if everywhere:  # as by a scheduler
        terminate_all(process.pid)
    else:  # as by a terminal
        os.killpg(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130, (tmp_path / "run.log").read_text()
    last = len(records(tmp_path / "run"))
    assert last >= 2 and (tmp_path / "run" / f"global_step_{last}").is_dir()
    wait_until(lambda: not any(map(is_running, others)))
