"""Guess a number, and the rooms: rewards, observations, and what known players reach."""

import random
from collections.abc import Callable
from random import Random

import pytest

from rloom.environments import guess_number, rooms
from rloom.environments.guess_number import GuessNumber
from rloom.environments.rooms import House, Rooms


def guessing(number: int) -> GuessNumber:
    game = GuessNumber()
    game.reset(reward_model={"ground_truth": str(number)}, extra_info={})
    return game


def test_the_environment_says_where_the_number_is_and_rewards_the_guess() -> None:
    game = guessing(5)
    assert game.step("4") == ("+", 0.0, False)
    assert game.step("I say 3, or rather 6.") == ("-", 0.0, False)
    assert game.step("5") == ("", 1.0, True)


def test_an_answer_without_a_number_takes_a_try() -> None:
    game = guessing(1)
    assert [game.step(text) for text in ("none", "9" * 5000, "2")] == [
        ("?", 0.0, False),
        ("-", 0.0, False),
        ("-", 0.0, True),
    ]


def found(player: Callable[[list[str]], int]) -> float:
    """Share of the test rows in which the player finds the number."""
    _, test = guess_number.rows()
    rewards = []
    for row in test:
        game, seen, done, reward = guessing(int(row["reward_model"]["ground_truth"])), [], False, 0.0
        while not done:
            text, reward, done = game.step(str(player(seen)))
            seen.append(text)
        rewards.append(reward)
    return sum(rewards) / len(rewards)


def middle(seen: list[str]) -> int:
    guess, step = 4, 2
    for sign in seen:
        guess, step = guess + (step if sign == "+" else -step), step // 2
    return guess


def test_a_player_who_halves_what_is_left_always_wins_and_fixed_guesses_win_3_of_7() -> None:
    assert found(middle) == 1.0
    assert found(lambda seen: (4, 2, 6)[len(seen)]) == 3 / 7
    assert found(lambda seen: 1) == 1 / 7


def test_the_demonstrations_are_played_by_the_rules() -> None:
    train, test = guess_number.rows()
    assert (len(train), [row["reward_model"]["ground_truth"] for row in test]) == (4096, [str(n) for n in range(1, 8)])
    won = 0
    for index, row in enumerate(train):
        game, messages = guessing(1 + index % 7), row["messages"][1:]
        for guess, answer in zip(messages[::2], [*messages[1::2], None], strict=True):
            text, reward, done = game.step(guess["content"])
            assert done is (answer is None) and (answer is None or text == answer["content"])
        won += reward == 1.0
    assert 0.35 < won / len(train) < 0.45  # a policy that copies the demonstrations has much to learn


def test_each_episode_of_a_training_row_draws_its_own_number() -> None:
    train, _ = guess_number.rows()
    drawn = []
    for seed in range(70):
        random.seed(seed)  # as the process of an episode does
        game = GuessNumber()
        game.reset(**train[0])
        drawn.append(game.number)
    assert set(drawn) == set(range(1, 8))
    assert {guessing(5).number for _ in range(20)} == {5}, "a row with a number keeps it"


def walk(house: int, actions: list[str]) -> tuple[str, float, bool]:
    game = Rooms()
    game.reset(extra_info={"house": house}, reward_model={})
    for action in actions:
        last = game.step(action)
    return last


def in_house(house: House) -> Rooms:
    game = Rooms(turns=4)
    game.house, game.place, game.has_key = house, house.start, False
    return game


def test_rooms_tell_what_is_there_and_reward_only_the_way_out() -> None:
    """Two rooms side by side: the start with the key, the door east of it."""
    left, right = (0, 0), (1, 0)
    game = in_house(House(start=left, key=left, door=right, passages=frozenset({(left, right), (right, left)})))
    assert game.look() == "Ways lead east. You see a key."
    assert game.step("I go EAST") == ("Ways lead west. You see the door to the outside.", 0.0, False)
    assert game.step("open door") == (
        "The door is locked. Ways lead west. You see the door to the outside.",
        0.0,
        False,
    )
    assert game.step("jump") == (rooms.NOT_AN_ACTION, 0.0, False)
    assert game.step("north")[1:] == (0.0, True)  # the fourth and last turn


def test_the_key_opens_the_door() -> None:
    left, right = (0, 0), (1, 0)
    game = in_house(House(start=left, key=left, door=right, passages=frozenset({(left, right), (right, left)})))
    assert game.step("take key") == ("You have the key. Ways lead east.", 0.0, False)
    assert game.step("take key") == ("There is no key. Ways lead east.", 0.0, False)
    assert game.step("First east, then open door? No: east") == (
        "Ways lead west. You see the door to the outside.",
        0.0,
        False,
    )
    assert game.step("open door") == ("", 1.0, True)


@pytest.mark.parametrize("split", [0, 1])
def test_the_shortest_solutions_win_every_house_in_time(split: int) -> None:
    rows = rooms.rows()[split][:200]
    for row in rows:
        actions = rooms.solution(rooms.house_of(row["extra_info"]["house"]))
        assert len(actions) == int(row["reward_model"]["ground_truth"]) <= rooms.TURNS - 3
        assert walk(row["extra_info"]["house"], actions)[1:] == (1.0, True)


def test_a_random_player_seldom_gets_out() -> None:
    random, outside = Random(0), 0.0
    houses = [row["extra_info"]["house"] for row in rooms.rows()[1]]
    for house in houses:
        game, done, reward = Rooms(), False, 0.0
        game.reset(extra_info={"house": house})
        while not done:
            _, reward, done = game.step(random.choice([*rooms.MOVES, rooms.TAKE, rooms.OPEN]))
        outside += reward
    assert 0 <= outside / len(houses) < 0.05


def test_no_house_of_the_test_rows_is_a_training_house() -> None:
    train, test = ({rooms.house_of(row["extra_info"]["house"]) for row in part[:1000]} for part in rooms.rows())
    assert len(test) == 256 and not train & test
