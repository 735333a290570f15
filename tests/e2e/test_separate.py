"""Runs whose generation has a worker of its own and goes on while a step trains."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from rloom.runs.dumps.reader import Dumps
from rloom.runs.run_folder import RunFolder
from tests.e2e.runs import command, records, same, train, weights
from tests.e2e.test_ahead import SPANS, WORST, answers, start, versions_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("time_limit")]
POOLS = ("algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2", "trainer.pools.rollout=1")
SEPARATE = (*POOLS, "trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_strategy=wait")


def test_without_staleness_a_run_computes_what_a_synchronous_one_does_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path / "sync", 2, *POOLS)
    train(tmp_path / "separate", 2, *SEPARATE, "trainer.v1.sampler.max_off_policy_threshold=0")
    assert same(weights(tmp_path / "sync", 2), weights(tmp_path / "separate", 2))
    for step in (1, 2):
        found, expected = (Dumps(tmp_path / name).answers("train", step, 0) for name in ("separate", "sync"))
        assert found == expected
    assert [record[WORST] for record in records(tmp_path / "separate")] == [0.0, 0.0]
    events = [event for event in RunFolder(tmp_path / "separate").events if event["event"] == "generation"]
    spans = [span for event in events for span in event["spans"]]
    begun = [begin for begin, _ in spans if begin not in {end for _, end in spans}]  # others go on over an event
    assert [event["step"] for event in events] == [1, 2] and len(begun) == 2, "engines generate once for each step"


@pytest.mark.long
@pytest.mark.parametrize("cache", ["refill", "keep"])
def test_a_killed_run_goes_on_with_the_answers_that_its_other_worker_was_generating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    """With validations between. Each prompt of the synchronous run is trained once.
    To generate takes longer than to train, so that answers are interrupted."""
    steps = 5
    train(tmp_path / "sync", steps, *POOLS[:1], "trainer.save_freq=-1", f"trainer.rollout_data_dir={tmp_path / 'due'}")
    run, keys = tmp_path / "run", (*SEPARATE, f"trainer.rollout_data_dir={tmp_path / 'found'}", "trainer.test_freq=2")
    keys = (*keys, "trainer.v1.sampler.max_off_policy_threshold=2", "actor_rollout_ref.rollout.max_num_seqs=2")
    keys = (*keys, "actor_rollout_ref.rollout.ignore_eos=True", "data.max_response_length=64")
    keys = (*keys, f"trainer.v1.kv_on_update={cache}")
    killed = start(run, steps, *keys)
    wait_until(lambda: (run / "global_step_2").exists() or not killed.is_alive(), 120)
    assert killed.is_alive() and killed.pid is not None, run.with_suffix(".log").read_text()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert command(run, steps, *POOLS) != 0, "as a synchronous run it would lose these answers"
    assert "which would be lost with trainer.v1.trainer_mode=sync" in capsys.readouterr().err
    process = start(run, steps, *keys)
    process.join(timeout=240)
    assert process.exitcode == 0, run.with_suffix(".log").read_text()
    found, expected = answers(tmp_path / "found"), answers(tmp_path / "due")
    assert Counter(prompt for prompt, _ in found.elements()) == Counter(prompt for prompt, _ in expected.elements())
    assert Counter(step for _, step in found.elements()) == dict.fromkeys(range(1, steps + 1), 8)
    measured = [record for record in records(run) if SPANS in record]
    assert max(record[SPANS] for record in measured) > 1, "answers were interrupted"
    assert 1 <= max(record[WORST] for record in measured) <= 2
    versions = [found for step in range(1, steps + 1) for found in versions_of(run, step)]
    assert any(len(found) > 1 for found in versions) and len(versions) == 8 * steps
    assert all(found and list(found) == sorted(found) for found in versions)
    if cache == "keep":  # has no schedule
        return
    train(tmp_path / "replay", steps, *keys, f"trainer.replay={run}")
    assert same(weights(run, steps), weights(tmp_path / "replay", steps)), "the run as it was trained in the end"
