"""Numbers of a step whose episodes have several turns and branches, computed by hand.

| episode | group | score | sampled tokens of its branches |
| --- | --- | --- | --- |
| 0 | 0 | 1 | 2 + 1 (one token of the environment between), 2 |
| 1 | 0 | 0 | 3 |
| 2 | 1 | failed | 1, 1 |
| 3 | 1 | 3, not in the loss | 2 |
"""

import math
import random
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from rloom.algos.aggregate import Counts, aggregate, episode_tokens
from rloom.algos.correction import CorrectionSettings, correct
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, gae, grpo, opo, reinforce_plus_plus, rloo
from rloom.algos.kl import mean_sample_kl, token_rewards
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Batch, TokenOutputs, TrainBatch, Trajectory, Turn, answers_of
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.episode import Episode, Node
from rloom.episodes.record import LIMITS, Ending, EpisodeRecord, episode_trajectories
from rloom.episodes.template import RenderedConversation
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.runs.metrics import batch_metrics, repetition
from rloom.training.evaluate import Evaluator
from rloom.training.scoring import PendingAnswer, PendingTrajectories, ScoreIndex
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


CUT = [
    trajectory(3, [(1, 3)], Score(1.0), 0),
    trajectory(4, [(1, 4)], Score(0.0), 0, finished=False),
    trajectory(2, [(1, 2)], Score(0.0), 0),
]


@pytest.mark.parametrize(
    ("mask_truncated", "aggregation", "expected"),
    [
        # advantages 1, -0.5 and -0.5 at 2, 3 and 1 tokens, and the ratio is 1: the loss of a token is -A
        (True, "token-mean", -(2 * 1 - 1 * 0.5) / 3),
        (True, "seq-mean-token-mean", -(1 - 0.5) / 2),
        (True, "seq-mean-token-sum-norm", -(2 * 1 - 1 * 0.5) / (2 * 10)),
        (False, "token-mean", -(2 * 1 - 3 * 0.5 - 1 * 0.5) / 6),
        (False, "seq-mean-token-mean", -(1 - 0.5 - 0.5) / 3),
    ],
)
def test_a_truncated_answer_is_in_the_baseline_and_not_in_the_loss(mask_truncated, aggregation, expected):
    batch = Batch.pack(CUT, mask_truncated=mask_truncated)
    train_batch = TrainBatch.of(batch, rloo(AdvantageInputs(batch, token_rewards(batch)), AdvantageSettings()))
    objective = PolicyObjective("vanilla", LossSettings(), aggregation, 0.0, None, "kl", measures_gap=False)
    counts = Counts.of(train_batch, horizon=10)

    def loss(*rows):
        part = train_batch.select(rows)
        return float(objective(TokenOutputs(-torch.ones(len(part.tokens_T)), part.mask_T.float()), part, counts)[0])

    for of_micro_batches in (loss(0, 1, 2), loss(0) + loss(1) + loss(2), loss(0, 2) + loss(1)):
        assert of_micro_batches == pytest.approx(expected, abs=1e-6)
    assert loss(1) == 0 or not mask_truncated


def test_only_answers_that_ended_at_a_limit_are_masked():
    assert Batch.pack([CUT[0], CUT[2]], mask_truncated=True).in_loss_N is None
    found = Batch.pack(TRAJECTORIES, mask_truncated=True).in_loss_N
    assert found is not None and found.tolist() == [True, True, False, True, True, False]


def episode_of(rewards, cuts=()):
    """Turns of two tokens with one token of the environment between them. Before the turns `cuts`, a branch begins that
    repeats the whole past as the environment's."""
    conversation = RenderedConversation((), (), "")
    nodes, parent, past = [], None, [0]
    for turn, reward in enumerate(rewards):
        if turn == 0 or turn in cuts:
            parent = None
        added_L = torch.tensor(past if parent is None else past[-1:])
        nodes.append(Node(parent, (), added_L, conversation))
        own = [10 * turn + 1, 10 * turn + 2]
        own_L = torch.tensor(own)
        answer = ({"role": "assistant", "content": ""},)
        nodes.append(
            Node(len(nodes) - 1, answer, own_L, conversation, True, -torch.ones(2), reward=reward, request=turn)
        )
        parent, past = len(nodes) - 1, [*past, *own, 0]
    return Episode(nodes)


def returns(episode, score, weight=1.0, gamma=1.0, lam=None):
    """Of every sampled token by its number: REINFORCE++'s, or GAE's."""
    record = EpisodeRecord(episode, Ending.DONE, score)
    batch = Batch.pack(episode_trajectories(record, PROMPT, 0, Score(score), weight))
    inputs = AdvantageInputs(batch, token_rewards(batch), torch.zeros(len(batch.tokens_T)))
    assert inputs.return_N.tolist() == [pytest.approx(score)] * len(batch)
    settings = AdvantageSettings(gamma=gamma, lam=1.0 if lam is None else lam)
    found = (reinforce_plus_plus if lam is None else gae)(inputs, settings).advantages_T
    tokens = batch.tokens_T[batch.mask_T].tolist()
    assert len(set(tokens)) == len(tokens) == 2 * len(episode.turns)
    return dict(zip(tokens, found[batch.mask_T].tolist(), strict=True))


def test_rewards_of_turns_stay_with_their_turns_when_each_begins_a_branch():
    rewards = [1.0, 0.0, 2.0]
    found = returns(episode_of(rewards, cuts=(1, 2)), score=3.5)  # 0.5 at the end
    assert found == {1: 3.5, 2: 3.5, 11: 2.5, 12: 2.5, 21: 2.5, 22: 2.5}
    assert returns(episode_of([1.0, 0.0], cuts=(1,)), score=1.0) == {1: 1.0, 2: 1.0, 11: 0.0, 12: 0.0}


def test_rewards_of_turns_are_not_placed_where_another_reward_scores():
    """Those of verl's tools are facts for the rule."""
    record = EpisodeRecord(episode_of([-0.05, None]), Ending.DONE, None)
    [trajectory] = episode_trajectories(record, PROMPT, 0, Score(1.0))
    assert trajectory.turn_rewards == ()


@pytest.mark.parametrize("seed", range(20))
def test_an_episode_that_a_template_cuts_into_branches_has_the_same_returns(seed):
    draw = random.Random(seed)
    rewards = [draw.choice([None, 0.0, 0.25, 1.0, -0.5]) for _ in range(draw.randrange(1, 7))]
    cuts = [turn for turn in range(1, len(rewards)) if draw.random() < 0.5]
    weight, score = draw.choice([1.0, 0.5]), draw.choice([0.0, 1.0, -2.25])
    whole, cut = episode_of(rewards), episode_of(rewards, cuts)
    for lam in (None, 1.0):
        expected = returns(whole, score, weight, lam=lam)
        assert returns(cut, score, weight, lam=lam) == pytest.approx(expected)
        left = score
        for turn, reward in enumerate(rewards):
            assert expected[10 * turn + 1] == expected[10 * turn + 2] == pytest.approx(left)
            left -= weight * (reward or 0.0)


def test_turns_of_branches_that_alternate_have_the_rewards_from_their_request_on():
    """Two conversations: requests 0 and 2 in the first, 1 and 3 in the second."""
    episode = episode_of([1.0, 2.0, 4.0, 8.0], cuts=(2,))
    for node, request in ((1, 0), (3, 2), (5, 1), (7, 3)):
        episode.replace(node, request=request)
    found = returns(episode, score=15.0)
    assert [found[10 * turn + 1] for turn in range(4)] == [15.0, 10.0, 14.0, 8.0]
    assert [found[10 * turn + 2] for turn in range(4)] == [15.0, 10.0, 14.0, 8.0]


def test_equal_scores_divided_over_turns_in_other_ways_have_no_advantage():
    records = [EpisodeRecord(episode_of([0.1, reward]), Ending.DONE, 1.0) for reward in (0.2, 0.7, 0.3)]
    batch = Batch.pack([one for record in records for one in episode_trajectories(record, PROMPT, 0, Score(1.0))])
    found = grpo(AdvantageInputs(batch, token_rewards(batch)), AdvantageSettings())
    assert not found.advantages_T.any()


def test_rollout_correction_counts_episodes():
    """Episode 0 has ratios e^0.5 and e^-0.4 in its branches: one answer of e^0.1."""
    batch = Batch.pack(TRAJECTORIES[:3])
    log_ratio_N = torch.tensor([0.5 / 3, -0.4 / 2, 0.0])
    trainer_T = (batch.rollout_logprobs_T + log_ratio_N[batch.sample_T]).where(batch.mask_T, -ENVIRONMENT)
    settings = CorrectionSettings(rollout_is="sequence", rollout_rs="sequence", rollout_rs_threshold=1.2)
    found = correct(batch, trainer_T, settings)
    assert found.keep_T.all()
    assert found.weights_T[batch.mask_T].tolist() == pytest.approx([math.exp(0.1)] * 5 + [1.0] * 3)
    assert found.metrics["rollout_corr/rollout_is_seq_mean"] == pytest.approx((math.exp(0.1) + 1) / 2)
    tight = replace(settings, rollout_rs_threshold=1.05)
    rejected = correct(batch, trainer_T, tight)
    assert not rejected.keep_T[batch.mask_T][:5].any() and rejected.keep_T[batch.mask_T][5:].all()
    assert rejected.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    # perplexities: (3 · (1 - 0.5 / 3) + 2 · 1.2) / 5 = 0.98 and 1
    assert rejected.metrics["rollout_corr/training_log_ppl"] == pytest.approx((0.98 + 1) / 2)


def test_repetition_is_counted_within_turns_and_over_episodes():
    def batch_of(*samples):
        found = []
        for branch, (tokens, turns) in samples:
            one = trajectory(len(tokens), turns, Score(1.0), 0, branch=branch)
            found.append(replace(one, tokens_L=torch.tensor(tokens)))
        return Batch.pack(found)

    call = [7, 8, 9, 1]
    twice = batch_of((0, ([5, *call, 5, *call], [(1, 5), (6, 10)])))
    assert repetition(twice) == {"rollout/repetition": 0.5}  # one group of each turn, none over both
    other = (0, ([5, 1, 2, 3, 4], [(1, 5)]))
    branches = batch_of((0, ([5, *call], [(1, 5)])), (1, ([5, 6, *call], [(2, 6)])), other)
    assert repetition(branches) == {"rollout/repetition": 0.25}  # the mean of 1/2 and 0


@pytest.mark.parametrize(("failure", "at_limit"), [("it failed", "score"), (None, "fail")])
def test_an_episode_without_a_score_does_not_count_for_the_running_moments(failure, at_limit):
    reward = CompositeReward([MixedPart("judge", None, normalize=True)])
    ending = Ending.DONE if failure else Ending.TURNS
    records = [
        EpisodeRecord(episode_of([None]), Ending.DONE, 1.0),
        EpisodeRecord(episode_of([None]), Ending.DONE, 3.0),
        EpisodeRecord(episode_of([None]), ending, 1000.0, failure, at_limit=at_limit),
    ]
    scores = Future()
    scores.set_result([[Score(record.reward)] for record in records])
    answers = [
        PendingAnswer(PROMPT, 0, record, "", [ScoreIndex(scores, number, 0)]) for number, record in enumerate(records)
    ]
    found = PendingTrajectories(answers, reward).scored(lambda done, total: None, update_moments=True)
    assert [one.score.ok for one in found] == [True, True, False]
    assert (reward.moments["judge"].count, reward.moments["judge"].mean) == (2, 2.0)
