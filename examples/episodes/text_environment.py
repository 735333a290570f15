"""A class that reads text and answers in text, in Gymnasium's form: `reset(**row)` and `step(text)`."""


class SecondTry:
    """Says whether the sum is right. One wrong answer is allowed; a right second answer gets half of the reward."""

    def reset(self, reward_model: dict, **row) -> None:
        self.truth = reward_model["ground_truth"]
        self.tries = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.tries += 1
        right = text.strip().endswith(self.truth)
        reward = 1.0 / self.tries if right else 0.0
        return "Wrong. Compute it again.", reward, right or self.tries == 2
