"""A class whose public methods are tools, as in TRL: one object for each episode."""


class Sums:
    def reset(self, reward_model: dict, **row) -> None:
        """The columns of the row are the arguments. A text that is returned is added to the prompt."""
        self.truth = reward_model["ground_truth"]
        self.answer = ""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def submit(self, answer: str) -> str:
        """Give the final answer.

        Args:
            answer: The number.
        """
        self.answer = answer
        return "noted"

    def get_reward(self) -> float:
        """Called once, after the last turn."""
        return float(self.answer == self.truth)
