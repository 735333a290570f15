"""The outputs of agents that ask with tokens: what of them is trained."""

import pytest
import torch

from rloom.episodes.agents.outputs import episode_of
from rloom.episodes.episode import Episode, Node
from rloom.episodes.template import RenderedConversation

PAST = RenderedConversation((), (), "")
PROMPT, ANSWER = [1, 2], [10, 11, 12, 13]


def recorded() -> Episode:
    """A prompt and an answer whose log-probs are -1 to -4."""
    answer_L, logprobs_L = torch.tensor(ANSWER), -torch.arange(1.0, 5.0)
    return Episode(
        [
            Node(None, ({"role": "user", "content": "q"},), torch.tensor(PROMPT), PAST),
            Node(0, ({"role": "assistant", "content": "a"},), answer_L, PAST, True, logprobs_L, request=1),
        ]
    )


def logprobs(outputs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """Of the trained tokens of each branch."""
    found = episode_of(recorded(), outputs, str)
    return [
        [value for turn in branch.turns for value in branch.logprobs_L[turn.start : turn.stop].tolist()]
        for branch in found.branches()
    ]


FIRST = [*PROMPT, *ANSWER[:2]]
WHOLE = [*PROMPT, *ANSWER]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([(FIRST, [0, 0, 1, 1]), (WHOLE, [0, 0, 1, 1, 1, 1])], [[-1, -2, -3, -4]]),
        ([(WHOLE, [0, 0, 1, 1, 1, 1]), (FIRST, [0, 0, 1, 1])], [[-1, -2, -3, -4]]),
        # the second output reads what the first one trains
        ([(FIRST, [0, 0, 1, 1]), (WHOLE, [0, 0, 0, 0, 1, 1])], [[-1, -2], [-3, -4]]),
        # both train the last two, and only the first one those before
        ([(WHOLE, [0, 0, 1, 1, 1, 1]), (WHOLE, [0, 0, 0, 0, 1, 1])], [[-1, -2, -3, -4]]),
        ([(WHOLE, [0, 0, 1, 0, 0, 1]), (WHOLE, [0, 0, 0, 1, 0, 1])], [[-1, -4], [-2]]),
    ],
)
def test_a_token_of_several_outputs_is_trained_once(outputs, expected):
    assert logprobs(outputs) == expected
