"""The rows of uses.py about rewards."""

from rloom.config.reward_model_section import ClassifierKeys
from rloom.config.use import Use

REWARD_MODEL = "reward_model"

REWARD_USES: list[Use] = [
    Use(
        ["reward_model.overlong_buffer"],
        lambda run: run.config.reward_model.overlong_buffer.enable,
        "over-long answers are not penalised; set reward_model.overlong_buffer.enable=True",
        error=True,
        switch="reward_model.overlong_buffer.enable",
        apart_from=["reward_model.overlong_buffer.enable"],
    ),
    Use(
        ["trainer.pools.reward"],
        lambda run: run.config.reward_model.model_path is not None,
        "there is no reward model; set reward_model.path, or remove the key",
        error=True,
    ),
    Use(
        [f"{REWARD_MODEL}.{name}" for name in ClassifierKeys.model_fields],
        lambda run: run.config.reward_model.model_path is not None,
        "there is no reward model; set reward_model.path",
        error=True,
        switch=f"{REWARD_MODEL}.enable",
        harmless=(False,),
        apart_from=[f"{REWARD_MODEL}.enable"],
    ),
    Use(
        ["reward_model.remote"],
        lambda run: bool(run.config.reward_model.remote.addresses),
        "there are no reward servers; set reward_model.remote.urls",
        error=True,
        switch="reward_model.remote.urls",
        apart_from=["reward_model.remote.urls"],
    ),
    Use(
        ["reward_model.sandbox"],
        lambda run: run.config.custom_reward_function.path is None,
        "{custom_reward_function.path} scores every data source; the built-in rules for code read it",
    ),
    Use(
        ["reward_model.api"],
        lambda run: run.config.reward_model.api.enable,
        "no judge scores the answers; set reward_model.api.enable=True",
        error=True,
        switch="reward_model.api.enable",
        apart_from=["reward_model.api.enable"],
    ),
    Use(
        ["custom_reward_function.name"],
        lambda run: run.config.custom_reward_function.path is not None,
        "the run uses the built-in rules; set custom_reward_function.path=FILE",
        error=True,
        harmless=("compute_score",),
    ),
]
