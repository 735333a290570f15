"""The messages of an episode, as TRL's reward functions get them in `completions`."""

import pytest
import torch

from rloom.episodes.episode import Episode, Node
from rloom.episodes.record import Ending, EpisodeRecord, episode_sample
from rloom.episodes.template import RenderedConversation
from rloom.types import Prompt

QUESTION = {"role": "user", "content": "q"}
TOOL = {
    "type": "function",
    "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}


@pytest.mark.parametrize(
    ("form", "marked", "plain", "call", "content"),
    [
        (
            "auto",
            'So [TOOL_CALLS][{"name": "python", "arguments": {"code": "1"}}]',
            'So [{"name": "python", "arguments": {"code": "1"}}]',
            {"code": "1"},
            "So",
        ),
        (
            "auto",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python\n"
            '```json\n{"code": "1"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            'functionpython\n```json\n{"code": "1"}\n```',
            {"code": "1"},
            "",
        ),
        (
            "auto",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.python json"
            '<|message|>{"code": "1"}',
            'analysishmassistantcommentary to=functions.python json{"code": "1"}',
            {"code": "1"},
            "",
        ),
        ("code_block", "So\n```python\n1\n```", "So\n```python\n1\n```", {"code": "1\n"}, "So"),
        ("auto", "So\n```python\n1\n```", "So\n```python\n1\n```", None, "So\n```python\n1\n```"),
    ],
)
def test_completions_have_the_calls_of_every_form(form, marked, plain, call, content):
    before = RenderedConversation((QUESTION,), (TOOL,), "q")
    after = RenderedConversation((QUESTION, {"role": "assistant", "content": marked}), (TOOL,), "q", marked)
    answer = {"role": "assistant", "content": plain}
    tokens_L = torch.tensor([1])
    nodes = [
        Node(None, (QUESTION,), tokens_L, before),
        Node(0, (answer,), tokens_L, after, True, torch.zeros(1), request=1),
    ]
    record = EpisodeRecord(Episode(nodes), Ending.DONE, call_format=form)
    sample = episode_sample(Prompt(0, (QUESTION,), "q", (1,), "game"), record, "")
    made = {"tool_calls": [{"type": "function", "function": {"name": "python", "arguments": call}}]} if call else {}
    assert sample.episode is not None
    assert sample.episode.messages == ({"role": "assistant", "content": content, **made},)
