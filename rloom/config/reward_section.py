"""The keys of the reward."""

from typing import Any, Literal

from rloom.config.remote_section import RemoteReward
from rloom.config.section import Section, key, section


class OverlongBuffer(Section):
    enable: bool = key(False, "Penalise answers that come close to `data.max_response_length` (DAPO).")
    len: int = key(128, "Over the last N tokens of the maximum length, the penalty grows from 0 to its maximum.", ge=1)
    penalty_factor: float = key(1.0, "The maximum penalty, subtracted from the score.", ge=0)


class Judge(Section):
    enable: bool = key(False, "Score answers with an API judge.")
    type: Literal["dashscope", "openai", "gemini", "claude"] = key("dashscope", "Provider of the judge.")
    model: str | None = key(None, "Model of the judge.")
    preset: str | None = key(None, "Prompts of the judge: math, code, dialogue or safety.")
    system_prompt: str | None = key(None, "System prompt of the judge.")
    scoring_prompt: str | None = key(None, "Prompt with the variables prompt, response and ground_truth.")
    base_url: str | None = key(None, "Address.")
    api_key_env: str | None = key(None, "Variable.")
    mode: str = key("pointwise", "Mode.")
    min_score: float = key(1.0, "Lowest score.")
    max_score: float = key(10.0, "Highest score.")
    temperature: float | None = key(0.0, "Temperature.")
    max_tokens: int = key(1024, "Length.")
    concurrency: int = key(32, "Calls at the same time.")
    requests_per_minute: int | None = key(None, "Limit.")
    tokens_per_minute: int | None = key(None, "Limit.")
    timeout_s: float = key(60.0, "Limit.")
    max_retries: int = key(5, "Limit.")
    cache_dir: str | None = key(None, "Folder.")
    input_price: float | None = key(None, "Price.")
    output_price: float | None = key(None, "Price.")
    budget: float | None = key(None, "Limit.")


class Composite(Section):
    enable: bool = key(False, "Mix several rewards.")
    weights: dict[str, Any] = key({}, "Weight of each part.")


class RewardModel(Section):
    path: str | None = key(None, "Reward model.")
    api: Judge = section(Judge, "API judge.")
    composite: Composite = section(Composite, "A weighted mix.")
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
    remote: RemoteReward = section(RemoteReward, "Reward servers.")
    overlong_buffer: OverlongBuffer = section(OverlongBuffer, "DAPO's over-long penalty.")


class CustomRewardFunction(Section):
    path: str | None = key(None, "Python file with your own reward function, which then scores every data source.")
    name: str = key("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = key({}, "Further keyword arguments of every call, also of the built-in rules.")
