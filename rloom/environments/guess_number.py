"""Guess a number: after each guess the environment says whether it is higher or lower."""

import random
import re
from typing import Any

NUMBER = re.compile(r"\d+")


class GuessNumber:
    """The last number of an answer is the guess. Reward: 1 if the number was found."""

    def __init__(self, lowest: int = 1, highest: int = 15, tries: int = 4) -> None:
        self.lowest, self.highest, self.tries = lowest, highest, tries

    def reset(self, number: int | None = None, **row: Any) -> None:
        self.number = random.randint(self.lowest, self.highest) if number is None else number
        self.left = self.tries

    def step(self, text: str) -> tuple[str, float, bool]:
        guesses = NUMBER.findall(text)
        self.left -= 1
        if not guesses:
            return "?", 0.0, self.left == 0
        guess = int(guesses[-1][:9])
        if guess == self.number:
            return "", 1.0, True
        return "+" if guess < self.number else "-", 0.0, self.left == 0
