"""The outputs of agents that ask with tokens: what of them is trained."""

import pytest
import torch

from rloom.batch import Batch
from rloom.episodes.agents.outputs import episode_of
from rloom.episodes.episode import Episode, Node
from rloom.episodes.record import episode_trajectories
from rloom.episodes.template import RenderedConversation
from rloom.types import Prompt, Score
from tests.unit.episodes.agent_runs import loop_driver, run

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


LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

class Gives(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        found = await self.server_manager.generate("1", prompt_ids=prompt, sampling_params=sampling_params)
        ids = found.token_ids
        mask = [kwargs["mask"]] * len(ids)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids, response_mask=mask, reward_score=0.5, metrics=AgentLoopMetrics()
        )
"""


def test_an_episode_without_a_token_to_train_is_scored_and_not_in_the_loss(tmp_path):
    (tmp_path / "loops.py").write_text(LOOP)
    place = f"{tmp_path / 'loops.py'}:Gives"
    records, _ = run(loop_driver(place, loops=(place,)), 2, rows={0: {"mask": 0}, 1: {"mask": 1}})
    prompt = Prompt(0, (), "", (), "game")
    trajectories = [
        one for number, record in enumerate(records) for one in episode_trajectories(record, prompt, number, Score(0.5))
    ]
    assert [(record.failure, record.reward, record.turns) for record in records] == [(None, 0.5, 1)] * 2
    batch = Batch.pack(trajectories)
    assert batch.valid_N.tolist() == [True, True] and batch.score_N.tolist() == [0.5, 0.5]
    assert batch.in_loss_N is not None and batch.in_loss_N.tolist() == [False, True]
