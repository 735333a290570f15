"""The environments of rloom: what each is, its usual keys and how its data are made. Imports no torch.

`multi_turn.environment=NAME` selects one. Its class is imported in the processes of the environments.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rloom.plugins import Reference

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
LENGTH = "data.max_response_length"


@dataclass(frozen=True, kw_only=True)
class EnvironmentKind:
    description: str  # what happens, and what the reward is
    made: str  # its class, module:name
    keys: Mapping[str, object]  # usual ones
    rows: Reference | None = None  # generates the training and the test rows of `rloom data prepare NAME`
    data: tuple[str, ...] = ()  # other data sets of `rloom data prepare` that it is for
    # False: it only has tools, and the rule of the data source scores the last answer
    rewards: bool = True


ENVIRONMENTS: Mapping[str, EnvironmentKind] = {
    "guess_number": EnvironmentKind(
        description="Guess a number; the answer is + if it is larger, - if it is smaller. Reward: 1 if found.",
        made="rloom.environments.guess_number:GuessNumber",
        keys={f"{MULTI_TURN}.max_assistant_turns": 3, LENGTH: 96},
        rows="rloom.environments.guess_number:rows",
    ),
    "calculator": EnvironmentKind(
        description="Products that the policy cannot compute, with a tool that can. Reward: 1 for the right number.",
        made="rloom.environments.calculator:Calculator",
        keys={f"{MULTI_TURN}.max_assistant_turns": 3, LENGTH: 160},
        rows="rloom.environments.calculator:rows",
        rewards=False,
    ),
    "python": EnvironmentKind(
        description="A tool that runs Python programs in the sandbox. Reward: the rule of the data source.",
        made="rloom.environments.python:PythonTool",
        keys={f"{MULTI_TURN}.max_assistant_turns": 4, LENGTH: 1024},
        data=("gsm8k", "math", "arithmetic"),
        rewards=False,
    ),
    "sql": EnvironmentKind(
        description="Questions about generated SQLite databases, with a tool for queries. Reward: 1 if the last query "
        "has the same rows as the reference.",
        made="rloom.environments.sql:Sql",
        keys={f"{MULTI_TURN}.max_assistant_turns": 5, LENGTH: 1024},
        rows="rloom.environments.sql:rows",
    ),
    "search": EnvironmentKind(
        description="Questions about a generated corpus, with a tool that searches it. Reward: 1 for the right answer.",
        made="rloom.environments.search:Search",
        keys={f"{MULTI_TURN}.max_assistant_turns": 5, LENGTH: 1024},
        rows="rloom.environments.search:rows",
        rewards=False,
    ),
    "rooms": EnvironmentKind(
        description="A text game: find the key in a house of several rooms and leave by the locked door. Reward: 1 "
        "outside.",
        made="rloom.environments.rooms:Rooms",
        keys={f"{MULTI_TURN}.max_assistant_turns": 16, LENGTH: 2048},
        rows="rloom.environments.rooms:rows",
    ),
}
