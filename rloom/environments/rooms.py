"""A text game: a house of rooms in a grid, a key in one of them and a locked door to the outside in another.

The house is a function of its seed. Moving against a wall or opening the door without the key takes a turn and changes
nothing.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

DATA_SOURCE = "rloom/rooms"
WIDTH, HEIGHT, TURNS = 3, 3, 16
TRAIN_ROWS, TEST_ROWS, SEED = 4096, 256, 0
MOVES: Mapping[str, tuple[int, int]] = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
TAKE, OPEN = "take key", "open door"
ACTION = re.compile(r"\b(north|south|west|east|take key|open door)\b", re.IGNORECASE)
NOT_AN_ACTION = f"That is not an action. Actions: {', '.join(MOVES)}, {TAKE}, {OPEN}."
INSTRUCTION = (
    "You are in a house. One room has a key, another one the locked door to the outside. Find the key, take it, and "
    f"open the door. In each turn write one action: {', '.join(MOVES)}, {TAKE} or {OPEN}. You have {TURNS} turns."
)
Place = tuple[int, int]  # column, row


@dataclass(frozen=True)
class House:
    start: Place
    key: Place
    door: Place
    passages: frozenset[tuple[Place, Place]]  # both directions

    def ways(self, place: Place) -> dict[str, Place]:
        """The directions that lead from a room to another one."""
        near = {name: (place[0] + dx, place[1] + dy) for name, (dx, dy) in MOVES.items()}
        return {name: other for name, other in near.items() if (place, other) in self.passages}


class Rooms:
    """The last action named in an answer counts. Reward: 1 if the policy gets outside within its turns."""

    def __init__(self, turns: int = TURNS) -> None:
        self.left = turns

    def reset(self, extra_info: dict[str, Any], **row: Any) -> str:
        self.house = house_of(int(extra_info["house"]))
        self.place, self.has_key = self.house.start, False
        return f"\n\n{self.look()}"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left -= 1
        actions = ACTION.findall(text)
        if not actions:
            return NOT_AN_ACTION, 0.0, self.left == 0
        action = actions[-1].casefold()
        if action == OPEN and self.place == self.house.door and self.has_key:
            return "", 1.0, True
        return self.happened(action), 0.0, self.left == 0

    def happened(self, action: str) -> str:
        if action == OPEN:
            return f"{'The door is locked.' if self.place == self.house.door else 'There is no door.'} {self.look()}"
        if action == TAKE:
            if self.place != self.house.key or self.has_key:
                return f"There is no key. {self.look()}"
            self.has_key = True
            return f"You have the key. {self.look()}"
        ways = self.house.ways(self.place)
        if action not in ways:
            return f"There is a wall. {self.look()}"
        self.place = ways[action]
        return self.look()

    def look(self) -> str:
        things = [
            *(["a key"] if self.place == self.house.key and not self.has_key else []),
            *(["the door to the outside"] if self.place == self.house.door else []),
        ]
        seen = f" You see {' and '.join(things)}." if things else ""
        return f"Ways lead {', '.join(self.house.ways(self.place))}.{seen}"


def house_of(seed: int) -> House:
    """All rooms can be reached: the passages are a random spanning tree and two more. The shortest solution fits."""
    random = Random(seed)
    places = [(column, line) for column in range(WIDTH) for line in range(HEIGHT)]
    walls = [(one, other) for one in places for other in places if one < other and distance(one, other) == 1]
    random.shuffle(walls)
    part = {place: place for place in places}

    def root(place: Place) -> Place:
        return place if part[place] == place else root(part[place])

    tree, others = [], []
    for one, other in walls:
        if root(one) == root(other):
            others.append((one, other))
        else:
            part[root(one)] = root(other)
            tree.append((one, other))
    passages = {pair for one, other in (*tree, *others[:2]) for pair in ((one, other), (other, one))}
    start, key, door = random.sample(places, 3)
    return House(start, key, door, frozenset(passages))


def distance(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def solution(house: House) -> list[str]:
    """A shortest list of actions."""
    return [*path(house, house.start, house.key), TAKE, *path(house, house.key, house.door), OPEN]


def path(house: House, start: Place, end: Place) -> list[str]:
    before: dict[Place, tuple[Place, str]] = {}
    waiting, seen = deque([start]), {start}
    while waiting:
        place = waiting.popleft()
        for name, other in house.ways(place).items():
            if other not in seen:
                seen.add(other)
                before[other] = place, name
                waiting.append(other)
    found: list[str] = []
    while end != start:
        end, name = before[end]
        found.insert(0, name)
    return found


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Houses whose shortest solution takes all turns but three at most. No test house is a training house."""
    random, taken = Random(SEED), set()
    made: list[int] = []
    while len(made) < TRAIN_ROWS + TEST_ROWS:
        seed = random.randrange(2**31)
        house = house_of(seed)
        if house not in taken and len(solution(house)) <= TURNS - 3:
            taken.add(house)
            made.append(seed)
    return (
        [row(seed, "train", index) for index, seed in enumerate(made[:TRAIN_ROWS])],
        [row(seed, "test", index) for index, seed in enumerate(made[TRAIN_ROWS:])],
    )


def row(seed: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": INSTRUCTION}],
        "ability": "games",
        "reward_model": {"style": "rule", "ground_truth": str(len(solution(house_of(seed))))},
        "extra_info": {"split": split, "index": index, "house": seed},
    }
