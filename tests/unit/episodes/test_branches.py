"""Numbers of a step whose episodes have several turns and branches, computed by hand.

| episode | group | score | sampled tokens of its branches |
| --- | --- | --- | --- |
| 0 | 0 | 1 | 2 + 1 (one token of the environment between), 2 |
| 1 | 0 | 0 | 3 |
| 2 | 1 | failed | 1, 1 |
| 3 | 1 | 3, not in the loss | 2 |
"""

from dataclasses import replace

import pytest
import torch

from rloom.algos.aggregate import Counts, aggregate, episode_tokens
from rloom.algos.correction import CorrectionSettings, correct
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, grpo, opo, rloo
from rloom.algos.kl import mean_sample_kl, token_rewards
from rloom.batch import Batch, TrainBatch, Trajectory, Turn, answers_of
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.episode import Episode, Node
from rloom.episodes.record import LIMITS, Ending, EpisodeRecord, episode_trajectories
from rloom.episodes.template import RenderedConversation
from rloom.runs.metrics import batch_metrics
from rloom.training.evaluate import Evaluator
from rloom.types import Prompt, Score

PROMPT = Prompt(0, (), "", (), "source")
FAILED = Score.failed("no score")


def trajectory(length, turns, score, group, branch=0, **more):
    mask_L = torch.zeros(length)
    for start, stop in turns:
        mask_L[start:stop] = 1
    return Trajectory(
        PROMPT,
        group,
        torch.arange(length),
        -mask_L,
        tuple(Turn(start, stop, 0) for start, stop in turns),
        more.pop("finished", True),
        score,
        branch=branch,
        **more,
    )


TRAJECTORIES = [
    trajectory(6, [(2, 4), (5, 6)], Score(1.0), 0),
    trajectory(5, [(3, 5)], Score(1.0), 0, branch=1),
    trajectory(4, [(1, 4)], Score(0.0), 0, finished=False),
    trajectory(3, [(2, 3)], FAILED, 1),
    trajectory(3, [(2, 3)], FAILED, 1, branch=1),
    trajectory(3, [(1, 3)], Score(3.0), 1, in_loss=False),
]
ENVIRONMENT = 1e6  # what no mean may contain
KL = [0.1, 0.4, 0.1, 0.1, 0.1, 0.1]  # of the sampled tokens of each sample


@pytest.fixture
def batch():
    return Batch.pack(TRAJECTORIES)


@pytest.fixture
def kl_T(batch):
    return torch.tensor(KL)[batch.sample_T].where(batch.mask_T, ENVIRONMENT)


def test_an_episode_has_its_score_once_and_the_kl_of_all_its_branches(batch, kl_T):
    inputs = AdvantageInputs(batch, token_rewards(batch, kl_T, 1.0))
    # 1 - (3 · 0.1 + 2 · 0.4) = -0.1; 0 - 0.3; 3 - 0.2
    assert inputs.return_N[batch.valid_N].tolist() == pytest.approx([-0.1, -0.1, -0.3, 2.8])
    first = [(batch.sample_T == row) & batch.mask_T for row in range(6)]

    def advantages(estimator, **settings):
        found = estimator(inputs, AdvantageSettings(**settings)).advantages_T
        assert not found[~batch.mask_T].any()
        return [float(found[mask][0]) for mask in first]

    assert advantages(rloo) == pytest.approx([0.2, 0.2, -0.2, 0, 0, 0], abs=1e-6)
    assert advantages(grpo, norm_by_std=False) == pytest.approx([0.1, 0.1, -0.1, 0, 0, 0], abs=1e-6)
    # the baseline is weighted by 5 and 3 sampled tokens: (5 · -0.1 + 3 · -0.3) / 8 = -0.175
    assert advantages(opo) == pytest.approx([0.075, 0.075, -0.125, 0, 0, 0], abs=1e-6)


def test_the_kl_of_a_step_is_a_mean_over_episodes(batch, kl_T):
    assert mean_sample_kl(batch, kl_T) == pytest.approx((1.1 / 5 + 0.1) / 2)


def test_denominators_count_episodes(batch):
    counts = Counts.of(batch, horizon=10)
    assert (counts.tokens, counts.samples) == (8, 2)  # without the failed one and the one that is not in the loss
    batch = replace(batch, episode_tokens_N=episode_tokens(batch))
    # the first branch has 1 at each token, the others 2: (3 · 1 + 2 · 2) / 5 and 2
    value_T = torch.tensor([1.0, 2, 2, 2, 2, 2])[batch.sample_T].where(batch.mask_T, ENVIRONMENT)
    assert float(aggregate(value_T, batch, "seq-mean-token-mean", counts)) == pytest.approx((7 / 5 + 2) / 2)
    assert float(aggregate(value_T, batch, "token-mean", counts)) == pytest.approx((7 + 6) / 8)
    assert float(aggregate(value_T, batch, "seq-mean-token-sum", counts)) == pytest.approx((7 + 6) / 2)


def test_metrics_of_a_step_count_episodes_and_sampled_tokens(batch, kl_T):
    rewards_T = token_rewards(batch, kl_T, 1.0)
    found = AdvantageInputs(batch, rewards_T)
    train_batch = TrainBatch.of(batch, rloo(found, AdvantageSettings()))
    metrics = batch_metrics(train_batch, rewards_T, finished=[one.finished for one in answers_of(TRAJECTORIES)])
    assert metrics["response_length/mean"] == 3 and metrics["response_length/max"] == 5  # 5, 3, 2 and 2 tokens
    assert metrics["prompt_length/mean"] == 1.5 and metrics["prompt_length/max"] == 2  # 2, 1, 2 and 1
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["critic/score/mean"] == pytest.approx((1 + 0 + 3) / 3)
    assert metrics["critic/rewards/mean"] == pytest.approx((-0.1 - 0.3 + 2.8) / 3)
    assert metrics["reward/failed"] == 1
    assert metrics["rollout/equal_groups"] == 0  # the two branches of one episode are no comparison
    assert metrics["critic/advantages/mean"] == pytest.approx((5 * 0.2 - 3 * 0.2) / 8, abs=1e-6)


def test_rollout_correction_reads_sampled_tokens_only(batch):
    trainer_T = batch.rollout_logprobs_T.where(batch.mask_T, -ENVIRONMENT)
    settings = CorrectionSettings(rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=1.5)
    found = correct(batch, trainer_T, settings)
    assert found.keep_T.all() and found.weights_T[batch.loss_mask_T].tolist() == [1.0] * 8
    assert found.metrics["rollout_corr/kl"] == 0.0


def test_a_validation_counts_episodes():
    answers = [replace(one, group=one.group) for one in TRAJECTORIES if one.score.ok or one.branch == 0]
    metrics = Evaluator.metrics(None, answers)
    (name,) = [name for name in metrics if "mean@2" in name]
    assert metrics[name] == pytest.approx((0.5 + 3) / 2)


@pytest.mark.parametrize("ending", Ending)
def test_what_happens_at_a_limit(ending):
    tokens_L = torch.tensor([5, 6])
    node = Node(None, (), tokens_L, RenderedConversation((), (), ""))
    answer = Node(0, ({"role": "assistant", "content": ""},), tokens_L, node.conversation, True, -torch.ones(2))
    failure = None if ending is Ending.DONE or ending.at_limit else "it failed"

    def found(at_limit):
        record = EpisodeRecord(Episode([node, answer]), ending, 0.5, failure, at_limit=at_limit)
        [one] = episode_trajectories(record, PROMPT, 0, Score(0.5))
        return one

    scored, masked, failed = (found(at_limit) for at_limit in ("score", "mask", "fail"))
    assert scored.in_loss and failed.in_loss and masked.in_loss != (ending in LIMITS)
    assert scored.finished == masked.finished == failed.finished == (ending not in LIMITS)
    assert scored.score.ok == (failure is None) == masked.score.ok
    assert failed.score.ok == (ending is Ending.DONE)
    if ending in LIMITS:
        assert failed.score.reason == f"the episode ended at a limit: {ending.value}"


def test_a_masked_episode_counts_for_the_others_of_its_group():
    """DAPO's overlong filtering: the score is in the baseline, the tokens are in no loss."""
    two = [trajectory(3, [(1, 3)], Score(1.0), 0), trajectory(3, [(1, 3)], Score(0.0), 0, in_loss=False)]
    batch = Batch.pack(two)
    found = rloo(AdvantageInputs(batch, token_rewards(batch)), AdvantageSettings()).advantages_T
    assert found.tolist() == [0, 1, 1, 0, 0, 0]
    assert Counts.of(batch, 10).tokens == 2 and EpisodeLimits(1).at_limit == "score"
