import math
from dataclasses import replace

import pytest
import torch

from rloom.batch import Batch, TrainBatch
from rloom.runs.metrics import (
    ModelWork,
    batch_metrics,
    device_peak_flops,
    equal_groups,
    part_metrics,
    peak_flops_by_name,
    repetition,
    throughput,
    utilisation,
)
from rloom.types import Score

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> TrainBatch:
    """Three samples: prompt 2 + answer 2, prompt 1 + answer 1, and one of prompt 1 + answer 3 whose score failed."""
    return TrainBatch(
        tokens_T=torch.arange(10),
        mask_T=torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool),
        rollout_logprobs_T=torch.zeros(10),
        length_N=torch.tensor([4, 2, 4]),
        group_N=torch.tensor([0, 0, 1]),
        score_N=torch.tensor([1.0, 0.5, 0.0]),
        valid_N=torch.tensor([True, True, False]),
        advantages_T=torch.tensor([9.0, 9, 1, -2, 9, 4, 9, 9, 9, 9]),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=torch.tensor([9.0, 9, 1, 1, 9, 4, 9, 9, 9, 9]),
        returns_T=torch.tensor([9.0, 9, 2, 0, 9, 4, 9, 9, 9, 9]),
    )


def answers(*tokens: list[int], group: list[int], score: list[float], valid: list[bool]) -> Batch:
    """Answers, each with a prompt of one token."""
    prompted = [[0, *answer] for answer in tokens]
    return Batch(
        tokens_T=torch.tensor([token for sample in prompted for token in sample]),
        mask_T=torch.tensor([place > 0 for sample in prompted for place in range(len(sample))]),
        rollout_logprobs_T=torch.zeros(sum(map(len, prompted))),
        length_N=torch.tensor([len(sample) for sample in prompted]),
        group_N=torch.tensor(group),
        score_N=torch.tensor(score),
        valid_N=torch.tensor(valid),
    )


def test_equal_groups_is_the_share_of_prompts_whose_valid_answers_score_the_same() -> None:
    batch = answers(
        *([[1]] * 9),
        group=[4, 4, 7, 7, 2, 2, 5, 5, 9],
        score=[1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0],
        valid=[True, True, True, True, True, True, True, False, True],
    )
    # 4 and 2 are equal, 7 is not; 5 and 9 have one valid answer, which has no other to be compared with
    assert equal_groups(batch) == {"rollout/equal_groups": pytest.approx(2 / 3)}
    assert equal_groups(batch.select([8])) == {}


def test_repetition_is_the_share_of_groups_of_four_tokens_that_occurred_before() -> None:
    looped, plain, short = [1, 2, 1, 2, 1, 2, 1], [1, 2, 3, 4, 5], [1, 2, 1]
    batch = answers(looped, plain, short, group=[0, 1, 2], score=[0.0] * 3, valid=[True] * 3)
    # 1212 2121 1212 2121: two of four; 1234 2345: none of two; the third has no group of four. Groups that two answers
    # share are no repetition.
    assert repetition(batch) == {"rollout/repetition": pytest.approx((0.5 + 0.0) / 2)}
    assert repetition(batch.select([2])) == {}


def test_repetition_of_many_long_answers_is_that_of_a_part_of_them() -> None:
    long = [*range(1, 1001), *([7] * 512)]  # the loop at the end fills the part that is looked at
    batch = answers(*([long] * 100), group=[0] * 100, score=[0.0] * 100, valid=[True] * 100)
    assert repetition(batch) == {"rollout/repetition": pytest.approx(1 - 1 / 509)}


REWARDS_T = torch.tensor([0.0, 0, -0.25, 1, 0, 0.5, 0, 7, 7, 7])


def test_every_documented_number_of_a_batch(batch: TrainBatch) -> None:
    metrics = batch_metrics(batch, REWARDS_T, finished=[True, True, False])
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.75,
            "critic/score/max": 1.0,
            "critic/score/min": 0.5,
            "critic/score/std": 0.125**0.5,  # of 1 and 0.5: (2 * 0.25²) / 1
            "critic/rewards/mean": 0.625,  # 0.75 and 0.5
            "critic/rewards/std": 0.03125**0.5,
            "critic/rewards/max": 0.75,
            "critic/rewards/min": 0.5,
            "critic/advantages/mean": 1.0,  # 1, -2, 4
            "critic/advantages/max": 4.0,
            "critic/advantages/min": -2.0,
            "critic/returns/mean": 2.0,  # 2, 0, 4
            "critic/returns/max": 4.0,
            "critic/returns/min": 0.0,
            "critic/values/mean": 2.0,  # 1, 1, 4
            "critic/values/max": 4.0,
            "critic/values/min": 1.0,
            "critic/vf_explained_var": 0.75,  # errors 1, -1, 0: 1 - (2/3) / (8/3)
            "response_length/mean": 2.0,
            "response_length/max": 3.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 1 / 3,
            "prompt_length/mean": 4 / 3,
            "prompt_length/max": 2.0,
            "prompt_length/min": 1.0,
            "reward/failed": 1.0,
            "rollout/equal_groups": 0.0,  # 1 and 0.5; the other prompt has no valid answer
        }
    )


def test_rewards_and_equal_groups_are_those_after_shaping_and_scores_those_before(batch: TrainBatch) -> None:
    shaped = batch_metrics(batch, REWARDS_T, shaped_N=torch.tensor([0.5, 0.5, 0.0]))
    assert shaped["critic/score/mean"] == 0.75 and shaped["rollout/equal_groups"] == 1.0


def test_without_a_critic_there_are_no_values_and_returns(batch: TrainBatch) -> None:
    names = batch_metrics(replace(batch, values_T=None, returns_T=None), REWARDS_T)
    assert not any(name.startswith(("critic/values", "critic/returns", "critic/vf")) for name in names)
    assert "response_length/clip_ratio" not in names


def test_a_batch_whose_scores_all_failed_has_lengths_and_a_count_only(batch: TrainBatch) -> None:
    metrics = batch_metrics(replace(batch, valid_N=torch.zeros(3, dtype=torch.bool)), REWARDS_T)
    assert {name.split("/")[0] for name in metrics} == {"response_length", "prompt_length", "reward"}
    assert metrics["reward/failed"] == 3.0


def test_equal_returns_leave_nothing_to_explain(batch: TrainBatch) -> None:
    assert "critic/vf_explained_var" not in batch_metrics(replace(batch, returns_T=torch.ones(10)), REWARDS_T)


def test_what_is_not_finite_does_not_leave(batch: TrainBatch) -> None:
    metrics = batch_metrics(replace(batch, advantages_T=torch.full((10,), math.nan)), REWARDS_T)
    assert "critic/advantages/mean" not in metrics
    assert all(map(math.isfinite, metrics.values()))


def test_parts_of_scores_are_averaged_over_the_samples_that_have_them() -> None:
    scores = [Score(1.0, {"acc": 1.0, "style": 0.5}), Score(0.0, {"acc": 0.0}), Score.failed("no answer")]
    assert part_metrics(scores) == {"reward/acc": 0.5, "reward/style": 0.5}


def test_the_throughput_is_that_of_one_device() -> None:
    metrics = throughput(tokens=6000, seconds=2.0, device=CPU, devices=3)
    assert metrics["perf/total_num_tokens"] == 6000
    assert metrics["perf/time_per_step"] == 2.0
    assert metrics["perf/throughput"] == 1000.0


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_a_cpu_run_reports_the_peak_of_the_process(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    class Usage:
        ru_maxrss = 3 * 1024**3 // unit

    monkeypatch.setattr("rloom.runs.metrics.sys.platform", platform)
    monkeypatch.setattr("rloom.runs.metrics.resource.getrusage", lambda who: Usage)
    assert throughput(tokens=1, seconds=0.0, device=CPU, devices=1) == {
        "perf/total_num_tokens": 1.0,
        "perf/time_per_step": 0.0,
        "perf/max_memory_allocated_gb": 3.0,
    }


def test_the_utilisation_is_the_share_of_the_peak() -> None:
    assert utilisation("actor", flops=3e12, seconds=2.0, peak_flops=6e12) == {"perf/mfu/actor": 0.25}


def test_the_work_of_an_update_is_that_of_active_parameters_and_of_attention() -> None:
    # tokens of lengths 3 and 5 attend to 6 and 15 tokens; within a window of 2 to 1 + 2·2 and 1 + 4·2
    length_N = torch.tensor([3, 5])
    assert ModelWork(10, 10, {None: 100}).update_flops(length_N).tolist() == [60 * 3 + 600 * 6, 60 * 5 + 600 * 15]
    assert ModelWork(10, 4, {2: 100}).update_flops(length_N).tolist() == [48 * 3 + 600 * 5, 48 * 5 + 600 * 9]


def test_an_unknown_peak_gives_no_utilisation() -> None:
    assert device_peak_flops(CPU) is None
    assert utilisation("actor", flops=1e12, seconds=1.0, peak_flops=None) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H20", 148e12),
        ("Some Other Card", None),
    ],
)
def test_a_device_is_known_by_the_word_in_its_name(name: str, peak: float | None) -> None:
    assert peak_flops_by_name(name) == peak
