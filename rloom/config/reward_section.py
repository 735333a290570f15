"""The keys of the reward."""

from typing import Any, Literal

from rloom.config.judge_section import ApiJudge
from rloom.config.remote_section import RemoteReward
from rloom.config.reward_model_section import ClassifierKeys
from rloom.config.sandbox_section import Sandbox
from rloom.config.section import IN_PYTHON, Section, key, section


class OverlongBuffer(Section):
    enable: bool = key(False, "Penalise answers that come close to `data.max_response_length` (DAPO).")
    len: int = key(128, "Over the last N tokens of the maximum length, the penalty grows from 0 to its maximum.", ge=1)
    penalty_factor: float = key(1.0, "The maximum penalty, subtracted from the score.", ge=0)


class PartWeight(Section):
    weight: float = key(1.0, "Weight of the part.")
    normalize: bool | None = key(None, "Subtract the part's running mean and divide by its running standard deviation.")
    failed: Literal["fail", "skip"] = key(
        "fail", "If the part fails. fail: the sample fails. skip: the other parts count with this weight too."
    )


class Composite(Section):
    enable: bool = key(False, "Mix several rewards: the score is the weighted sum of the parts in `weights`.")
    weights: dict[str, float | PartWeight] = key(
        {},
        "Part -> weight, or {weight, normalize, failed: fail|skip}. Parts: rule_score (rule or your function), "
        "rm_score (reward model, or else judge, or else remote reward), api_score, remote_score, format_score.",
    )
    normalize: bool = key(
        False, "Normalise every part by its running mean and standard deviation, unless a part has its own `normalize`."
    )


class Format(Section):
    pattern: str | None = key(
        None, "Regular expression that a whole answer has to match; the part format_score is 1 if it does, else 0."
    )


class RewardModel(ClassifierKeys):
    timeout_s: float = key(
        10.0, "Time limit of one call of a reward function; after it the sample counts as failed.", gt=0, same_run=True
    )
    reward_manager: Literal["naive", "dapo", "batch"] = key(
        "naive",
        "How `custom_reward_function` is called. naive and dapo: once for each answer. batch: once for all answers to "
        "a prompt, with lists: data_sources, solution_strs, ground_truths, extra_infos.",
    )
    num_workers: int = key(2, "Processes that compute rewards during generation.", ge=1, same_run=True)
    max_failed_share: float = key(
        0.5, "Stop the run if a larger share of a step's rewards failed.", ge=0, le=1, same_run=True
    )
    normalize: bool = key(
        False, "Normalise the score by its running mean and standard deviation over the run, saved in checkpoints."
    )
    composite: Composite = section(Composite, "A weighted mix of several rewards.")
    format: Format = section(Format, "The format reward, a part of the mix.")
    remote: RemoteReward = section(RemoteReward, "Reward servers.")
    overlong_buffer: OverlongBuffer = section(OverlongBuffer, "DAPO's over-long penalty.")
    api: ApiJudge = section(ApiJudge, "A language model behind an API as the judge of the answers.")
    sandbox: Sandbox = section(Sandbox, "Limits of generated code, for data sources that are scored by running it.")


class CustomRewardFunction(Section):
    path: str | None = key(
        None,
        "Python file with your own reward function, which then scores every data source.",
        needs_consent=lambda path: bool(path) and path != IN_PYTHON,  # that one is not in a file
    )
    name: str = key("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = key({}, "Further keyword arguments of every call, also of the built-in rules.")
