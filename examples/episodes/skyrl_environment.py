"""The same environment in SkyRL's form. `skyrl_gym` need not be installed."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class SecondTry(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.truth = extras["reward_model"]["ground_truth"]  # `extras` is the row
        self.max_turns = env_config.get("max_turns", 2)  # `env_config` is multi_turn.environment_kwargs
        self.right = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.right = action.strip().endswith(self.truth)
        done = self.right or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": "Wrong. Compute it again."}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=1.0 / self.turns if self.right else 0.0, done=done, metadata={}
        )

    def get_metrics(self) -> dict:
        return {"second_tries": float(self.turns == 2)}  # logged as environment/second_tries
