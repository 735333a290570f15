"""A run whose steps are too large for `rollouts/`: the answers to some prompts are dumped, and nothing else changes."""

from pathlib import Path

import pytest

from rloom.runs.dumps.limits import DUMPS_TO_KEEP, TOKEN_BYTES
from rloom.runs.dumps.reader import Dumps
from tests.e2e.runs import records, same, train, weights

TOKENS = 60  # of a step; its eight answers have more


def test_sampled_dumps_change_no_number_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_epochs=2", "trainer.save_freq=2")
    whole, sampled = tmp_path / "whole", tmp_path / "sampled"
    train(whole, 2, *keys)
    assert "drawn at random" not in capfd.readouterr().out
    limit = TOKENS * TOKEN_BYTES * DUMPS_TO_KEEP / 1024**3
    train(sampled, 2, *keys, f"trainer.log_rollouts_gb={limit:.9f}")
    assert capfd.readouterr().out.count("of the 4 prompts of this step are written to rollouts/") == 1
    assert same(weights(whole, 2), weights(sampled, 2))
    names = ("actor/entropy", "actor/pg_loss", "critic/score/mean")
    for one, other in zip(records(whole), records(sampled), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
    every, some = Dumps(whole), Dumps(sampled)
    for step in (1, 2):
        assert (every.groups_of_step("train", step), some.groups_of_step("train", step)) == (None, 4)
        groups = [prompt.group for prompt in some.prompts("train", step)]
        assert 1 <= len(groups) < 4
        for group in groups:  # with the entropies and ratios of the update
            assert some.answers("train", step, group) == every.answers("train", step, group)
            assert all(
                answer.entropy and max(map(float, answer.entropy)) > 0 for answer in every.answers("train", step, group)
            )
