"""The keys of the reward."""

from typing import Any, Literal

from rloom.config.judge_section import ApiJudge
from rloom.config.section import Section, key, section


class OverlongBuffer(Section):
    enable: bool = key(False, "Penalise answers that come close to `data.max_response_length` (DAPO).")
    len: int = key(128, "Over the last N tokens of the maximum length, the penalty grows from 0 to its maximum.", ge=1)
    penalty_factor: float = key(1.0, "The maximum penalty, subtracted from the score.", ge=0)


class RewardModel(Section):
    timeout_s: float = key(
        10.0, "Time limit of one call of a reward function; after it the sample counts as failed.", gt=0
    )
    reward_manager: Literal["naive", "batch"] = key(
        "naive",
        "How `custom_reward_function` is called. naive: once for each answer. batch: once for all answers to a prompt, "
        "with lists: data_sources, solution_strs, ground_truths, extra_infos.",
    )
    num_workers: int = key(2, "Processes that compute rewards during generation.", ge=1)
    max_failed_share: float = key(0.5, "Stop the run if a larger share of a step's rewards failed.", ge=0, le=1)
    overlong_buffer: OverlongBuffer = section(OverlongBuffer, "DAPO's over-long penalty.")
    api: ApiJudge = section(ApiJudge, "A language model behind an API as the judge of the answers.")


class CustomRewardFunction(Section):
    path: str | None = key(None, "Python file with your own reward function, which then scores every data source.")
    name: str = key("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = key({}, "Further keyword arguments of every call, also of the built-in rules.")
