"""Guess a number: after each guess the environment says whether the number is larger or smaller.

With 7 numbers and 3 guesses, a policy that takes the middle of what is left always finds the number, and one that does
not read what the environment answers finds at most 3 of 7. The texts are short and in the vocabulary of the embedded
model. A row has a demonstration (`messages`) for supervised fine-tuning. Most demonstrations are wrong: they teach the
form of the game.

The training rows have no number: each episode draws its own. Games with one number would have equal rewards as soon as
the policy always plays alike, and a group of equal rewards teaches nothing.
"""

import random
import re
from random import Random
from typing import Any

DATA_SOURCE = "rloom/guess_number"
LOWEST, HIGHEST, TRIES = 1, 7, 3
TRAIN_ROWS, SEED = 4096, 0
TAKES_MIDDLE = 0.45  # share of the demonstrations' guesses that are the middle of what is left; the others are 1
LARGER, SMALLER, NO_NUMBER = "+", "-", "?"
NUMBER = re.compile(r"\d+")


class GuessNumber:
    """The last number of an answer is the guess. Reward: 1 if the number was found."""

    def __init__(self, tries: int = TRIES) -> None:
        self.left = tries

    def reset(self, reward_model: dict[str, Any], **row: Any) -> None:
        self.number = int(reward_model["ground_truth"] or random.randint(LOWEST, HIGHEST))  # seeded by the episode

    def step(self, text: str) -> tuple[str, float, bool]:
        guesses = NUMBER.findall(text)
        self.left -= 1
        if not guesses:
            return NO_NUMBER, 0.0, self.left == 0
        guess = int(guesses[-1][:9])
        return answer(guess, self.number), float(guess == self.number), guess == self.number or self.left == 0


def answer(guess: int, number: int) -> str:
    if guess == number:
        return ""
    return LARGER if guess < number else SMALLER


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The demonstrations have each number equally often; the test rows are the games with each number."""
    draws = Random(SEED)
    numbers = range(LOWEST, HIGHEST + 1)
    played = [numbers[index % len(numbers)] for index in range(TRAIN_ROWS)]
    return (
        [row("", "train", index, game(number, draws)) for index, number in enumerate(played)],
        [row(str(number), "test", index, game(number, draws)) for index, number in enumerate(numbers)],
    )


def row(number: str, split: str, index: int, played: list[dict[str, str]]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{LOWEST}-{HIGHEST}?"}]
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt,
        "ability": "games",
        "reward_model": {"style": "rule", "ground_truth": number},
        "extra_info": {"split": split, "index": index},
        "messages": [*prompt, *played],
    }


def game(number: int, draws: Random) -> list[dict[str, str]]:
    """The messages of one demonstration after the prompt."""
    low, high, messages = LOWEST, HIGHEST, []
    for left in reversed(range(TRIES)):
        guess = (low + high) // 2 if draws.random() < TAKES_MIDDLE else LOWEST
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or not left:
            break
        messages.append({"role": "user", "content": answer(guess, number)})
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return messages
