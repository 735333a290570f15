"""From prompts to scored trajectories, with a rollout engine and a reward made for the purpose."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from rloom.batch import Batch, Trajectory
from rloom.errors import RewardError
from rloom.rewards.base import ScoringUnit
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion, Request, Rollout, Sampling
from rloom.runtime.group import LocalGroup
from rloom.training.sampling import DynamicSampling, Sampler
from rloom.training.scoring import Scoring
from rloom.types import Prompt, SampleGroup, Score

SAMPLING = Sampling(max_new_tokens=2)
PROMPTS = [
    Prompt(i, ({"role": "user", "content": "?"},), f"prompt {i}", (10 + i,), "a", i, columns={"solution": i})
    for i in range(3)
]


class LastFirst(Rollout):
    """Answers the last request first: two tokens, its seed's last digit and the prompt's token."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.seeds: list[int] = []

    def submit(self, request: Request) -> int:
        self.waiting.append(request)
        self.seeds.append(request.seed)
        return len(self.waiting) - 1

    def poll(self) -> list[Completion]:
        request = self.waiting.pop()
        tokens = torch.tensor([request.seed % 10, request.tokens[0]])
        return [Completion(len(self.waiting), tokens, torch.tensor([-1.0, -2.0]), finished=True, version=4)]

    def cancel(self, request: int) -> None: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class Lengths:
    """The size of the group that each sample was scored in."""

    def __init__(self, unit: ScoringUnit) -> None:
        self.unit, self.submitted = unit, list[Sequence[SampleGroup]]()

    @property
    def groups(self) -> list[SampleGroup]:
        return [group for groups in self.submitted for group in groups]

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        self.submitted.append(groups)
        scores: Future[list[list[Score]]] = Future()
        scores.set_result([[Score(len(group) + 0.1 * place) for place in range(len(group))] for group in groups])
        return scores

    def metrics(self) -> dict[str, float]:
        return {"calls": float(len(self.submitted))}


def as_text(answers: Sequence[Sequence[int]]) -> list[str]:
    return [str(list(tokens)) for tokens in answers]


def generate(reward: Lengths, n: int = 2) -> list[Trajectory]:
    return generate_mix(CompositeReward([MixedPart("rule_score", reward)]), n)


def generate_mix(reward: CompositeReward, n: int = 2, engine: LastFirst | None = None) -> list[Trajectory]:
    sampler = Sampler(LocalGroup([engine or LastFirst()]), LocalGroup([]), reward, as_text, seed=1)
    return sampler.generate(PROMPTS, n, SAMPLING, "train/1", lambda done, total: None).scored(lambda done, total: None)


def test_trajectories_carry_their_group_their_turn_and_the_version_of_the_weights() -> None:
    found = generate(Lengths(ScoringUnit.ANSWER))
    assert [t.group for t in found] == [0, 0, 1, 1, 2, 2]
    assert found[3].tokens_L.tolist()[0::2] == [11, 11] and found[3].mask_L.tolist() == [False, True, True]
    assert (found[0].turns[0].start, found[0].turns[0].stop, found[0].turns[0].version) == (1, 3, 4)
    assert found[0].logprobs_L.tolist() == [0.0, -1.0, -2.0]
    assert Batch.pack(found).group_N.tolist() == [0, 0, 1, 1, 2, 2]


def test_every_answer_is_drawn_with_a_seed_of_its_own() -> None:
    engine = LastFirst()
    generate_mix(CompositeReward([MixedPart("rule_score", Lengths(ScoringUnit.ANSWER))]), engine=engine)
    assert len(engine.seeds) == len(set(engine.seeds)) == 6


def test_each_answer_is_scored_as_it_arrives_with_its_messages_and_tokens() -> None:
    reward = Lengths(ScoringUnit.ANSWER)
    assert [t.score.value for t in generate(reward)] == [1.0] * 6
    [first, *_] = reward.groups
    assert first[0].ground_truth == 2  # the last request is answered first
    assert first[0].prompt_tokens == (12,) and first[0].response_tokens[1] == 12
    assert first[0].columns == PROMPTS[2].columns == {"solution": 2}
    assert first[0].messages == PROMPTS[2].messages and first[0].response == str(list(first[0].response_tokens))


def test_a_reward_that_compares_answers_gets_all_answers_to_a_prompt_in_order() -> None:
    reward = Lengths(ScoringUnit.PROMPT)
    assert [t.score.value for t in generate(reward)] == pytest.approx([2.0, 2.1] * 3)
    assert [[sample.ground_truth for sample in group] for group in reward.groups] == [[2, 2], [1, 1], [0, 0]]


def test_a_model_on_the_workers_that_generate_gets_all_answers_at_once_in_the_order_of_the_rows() -> None:
    reward = Lengths(ScoringUnit.BATCH)
    assert [t.score.value for t in generate(reward)] == pytest.approx([2.0, 2.1] * 3)
    [groups] = reward.submitted
    assert [[sample.ground_truth for sample in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]


def test_the_parts_of_a_mix_get_their_own_units_and_are_added_up() -> None:
    alone, together = Lengths(ScoringUnit.ANSWER), Lengths(ScoringUnit.PROMPT)
    mix = CompositeReward([MixedPart("rule_score", alone, weight=0.3), MixedPart("rm_score", together, weight=0.7)])
    found = generate_mix(mix)
    # alone: 1.0 each; together: 2.0 and 2.1
    assert [t.score.value for t in found] == pytest.approx([0.3 + 1.4, 0.3 + 1.47] * 3)
    assert found[1].score.parts == pytest.approx({"rule_score": 1.0, "rm_score": 2.1})
    assert mix.metrics()["reward/rm_score/calls"] == 3.0


def test_an_error_of_the_decoder_or_a_queue_is_raised_where_generation_runs() -> None:
    class Broken(Lengths):
        def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        generate(Broken(ScoringUnit.ANSWER))


class Slow(LastFirst):
    """From the second answer on, each takes until `ready` is there; with `empty_polls` there is no second one."""

    polls_per_report = 1

    def __init__(self, ready: Callable[[], object], *, empty_polls: bool = False) -> None:
        super().__init__()
        self.ready, self.empty_polls, self.answered = ready, empty_polls, 0

    def poll(self) -> list[Completion]:
        if self.answered == 1:
            self.ready()
            if self.empty_polls:
                return []
        self.answered += 1
        return super().poll()


def decoding_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "decode-answers":
            thread.join(30)


def broken_decode(answers: Sequence[Sequence[int]]) -> list[str]:
    raise KeyError("a bug")


@pytest.mark.parametrize("empty_polls", [False, True], ids=["at the next answer", "before the next answer"])
def test_an_error_of_the_decoder_ends_generation_at_the_next_report(empty_polls: bool) -> None:
    rollout, reward = (
        Slow(decoding_ended, empty_polls=empty_polls),
        CompositeReward([MixedPart("rule_score", Lengths(ScoringUnit.ANSWER))]),
    )
    sampler = Sampler(LocalGroup([rollout]), LocalGroup([]), reward, broken_decode, seed=1)
    with pytest.raises(KeyError, match="a bug"):
        sampler.generate(PROMPTS[:2], 10, SAMPLING, "train/1", lambda done, total: None)
    assert rollout.answered == (1 if empty_polls else 2)  # of 20


def test_the_next_answer_after_an_error_of_the_decoder_raises_it() -> None:
    scoring = Scoring(
        CompositeReward([MixedPart("rule_score", Lengths(ScoringUnit.ANSWER))]), broken_decode, answers_per_prompt=20
    )
    answer = Completion(0, torch.tensor([1]), torch.tensor([-1.0]), finished=True, version=0)
    added = []
    with pytest.raises(KeyError, match="a bug"), scoring:
        for row in range(20):
            scoring.add(row, 0, PROMPTS[0], answer)
            added.append(row)
            decoding_ended()
    assert added == [0]


def test_scores_that_stop_the_run_end_generation_at_the_next_report() -> None:
    """Such as a budget that is spent: the queue took the answer, and its scores are an error."""
    noted = threading.Event()

    class Failed(Future[list[list[Score]]]):
        def add_done_callback(self, callback: Callable[[Any], object]) -> None:
            super().add_done_callback(callback)
            noted.set()

    class Spent(Lengths):
        def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
            scores = Failed()
            scores.set_exception(RewardError("the budget is spent"))
            return scores

    rollout, reward = (
        Slow(lambda: noted.wait(30)),
        CompositeReward([MixedPart("rule_score", Spent(ScoringUnit.ANSWER))]),
    )
    sampler = Sampler(LocalGroup([rollout]), LocalGroup([]), reward, as_text, seed=1)
    with pytest.raises(RewardError, match="the budget is spent"):
        sampler.generate(PROMPTS[:2], 10, SAMPLING, "train/1", lambda done, total: None)
    assert rollout.answered == 2  # of 20


def test_after_an_error_of_generation_nothing_is_submitted_any_more() -> None:
    class Fails(LastFirst):
        def poll(self) -> list[Completion]:
            if len(self.waiting) < 6:
                raise RuntimeError("out of memory")
            return super().poll()

    reward = Lengths(ScoringUnit.BATCH)
    sampler = Sampler(
        LocalGroup([Fails()]), LocalGroup([]), CompositeReward([MixedPart("rm_score", reward)]), as_text, seed=1
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.generate(PROMPTS, 2, SAMPLING, "train/1", lambda done, total: None)
    assert reward.submitted == []


def test_dynamic_sampling_keeps_groups_of_different_scores_and_numbers_them_anew() -> None:
    def round_of(number: int) -> list[Trajectory]:
        found = generate(Lengths(ScoringUnit.PROMPT))
        equal = [t for t in generate(Lengths(ScoringUnit.ANSWER)) if t.group != 1]  # groups 0 and 2: one score
        return equal + [t for t in found if t.group == 1]

    kept, metrics = DynamicSampling(groups_per_step=2, max_rounds=3).fill(round_of)
    assert [t.group for t in kept] == [0, 0, 1, 1]
    assert [t.prompt.index for t in kept] == [1, 1, 1, 1]
    assert metrics == {"rollout/num_gen_batches": 2, "rollout/surplus_groups": 0}


def test_groups_are_kept_by_their_accuracies() -> None:
    """Groups 0 to 2 have the accuracies 0 and 1, 1 and 1, and 0.5 and 0.5, and the scores of all are 7."""
    answers = zip(
        sorted(generate(Lengths(ScoringUnit.ANSWER)), key=lambda t: t.group), (0, 1, 1, 1, 0.5, 0.5), strict=True
    )
    scored = [replace(t, score=Score(7.0, {"acc": accuracy})) for t, accuracy in answers]
    assert DynamicSampling(1, 1, mean_range=(0.0, 1.0)).kept(scored) == [0, 2]
    assert DynamicSampling(1, 1, mean_range=(0.5, 2.0)).kept(scored) == [1]
    assert DynamicSampling(1, 1, by="acc").kept(scored) == [0] and DynamicSampling(1, 1).kept(scored) == []


def test_an_answer_has_what_its_prompt_leaves() -> None:
    sampling = Sampling(max_new_tokens=6, max_length=8)
    assert [sampling.after((0,) * size) for size in (1, 5, 9)] == [Sampling(6), Sampling(3), Sampling(1)]


def test_groups_beyond_those_of_a_step_are_dropped_and_counted() -> None:
    def round_of(number: int) -> list[Trajectory]:
        unit = ScoringUnit.ANSWER if number == 1 else ScoringUnit.PROMPT  # no group of different scores, then three
        return generate(Lengths(unit))

    kept, metrics = DynamicSampling(groups_per_step=1, max_rounds=3).fill(round_of)
    assert [t.prompt.index for t in kept] == [0, 0]
    assert metrics == {"rollout/num_gen_batches": 2, "rollout/surplus_groups": 2}
