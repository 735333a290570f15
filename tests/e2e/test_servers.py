"""Whole runs with servers: processes that replay SGLang's and TensorRT-LLM's protocols (tests/fake_servers.py), started
by rloom."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import command, records, same, train, weights

ROLLOUT = "actor_rollout_ref.rollout"
GRPO = "algorithm.adv_estimator=grpo"


def servers(name: str, *options: str, count: int = 2) -> tuple[str, ...]:
    start = f"{sys.executable} -m tests.fake_servers {name} --model {{model}} --port {{port}} {' '.join(options)}"
    return (
        GRPO,
        f"{ROLLOUT}.name={name}",
        f"{ROLLOUT}.server.count={count}",
        f"{ROLLOUT}.server.command='{start}'",
        f"{ROLLOUT}.server.health_interval_s=0.2",
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the engine that these servers have, in process: seeds determine its answers."""
    directory = tmp_path_factory.mktemp("calm")
    train(directory, 2, GRPO)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_a_server_killed_in_mid_generation_changes_nothing_in_the_weights(
    tmp_path: Path, calm: Path, count: int
) -> None:
    # the first process that starts ends at its sixth request: the first is the comparison before the run
    died = ("--die_at", "6", "--once", str(tmp_path.parent / f"died_{count}"))
    train(tmp_path, 2, *servers("sglang", *died, count=count))
    logs = [(tmp_path / "logs" / f"server_{number}.log").read_text() for number in range(count)]
    assert sorted(log.count("$ ") for log in logs) == [*[1] * (count - 1), 2]  # one was started again
    assert same(weights(tmp_path, 2), weights(calm, 2))
    assert max(record["training/rollout_probs_diff_mean"] for record in records(tmp_path)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [0, pytest.param(1, marks=pytest.mark.long)])
def test_tensorrt_llm_is_started_by_its_name_alone_and_again_after_its_death(
    tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    packages = str(Path(__file__).parents[1] / "packages")  # a package tensorrt_llm
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", packages)
    died = tmp_path.parent / f"trtllm_died_{deaths}"
    if deaths == 0:
        died.touch()
    monkeypatch.setenv("DIED", str(died))
    own = f"+{ROLLOUT}.engine_kwargs.disable_overlap_scheduler=True"
    train(tmp_path, 2, GRPO, f"{ROLLOUT}.name=trtllm", own, f"{ROLLOUT}.server.health_interval_s=0.2")
    assert same(weights(tmp_path, 2), weights(calm, 2))
    log = (tmp_path / "logs" / "server_0.log").read_text()
    assert log.count('"disable_overlap_scheduler": true') == log.count("\n$ ") == 1 + deaths
    ended = [int(number) for number in re.findall(r"^process (\d+)$", log, re.MULTILINE)]
    assert len(ended) == 1 + deaths
    for number in ended:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_a_server_that_does_not_start_ends_the_run_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"""{ROLLOUT}.server.command='sh -c "echo no GPU is left; exit 3"'"""
    assert command(tmp_path, 1, GRPO, f"{ROLLOUT}.name=sglang", start) != 0
    message = capsys.readouterr().err
    assert "ended with exit code 3" in message and message.rstrip().endswith("no GPU is left")


@pytest.mark.slow
def test_two_workers_that_shard_the_actor_send_its_weights_through_the_first(tmp_path: Path) -> None:
    train(tmp_path, 2, *servers("sglang", count=1), "trainer.n_gpus_per_node=2", "trainer.start_timeout_s=120")
    gaps = [record["training/rollout_probs_diff_mean"] for record in records(tmp_path)]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    log = (tmp_path / "logs" / "server_0.log").read_text()
    assert log.count("$ ") == 1  # started by one of the workers
