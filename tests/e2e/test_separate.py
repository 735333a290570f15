"""Runs whose generation has a worker of its own and goes on while a step trains."""

from pathlib import Path

import pytest

from rloom.runs.dumps.reader import Dumps
from rloom.runs.run_folder import RunFolder
from tests.e2e.runs import records, same, train, weights
from tests.e2e.test_ahead import WORST

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
