"""What the environment adds to a conversation: sampled tokens are never encoded again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.episodes.template import TurnTemplate
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for

QUESTION = {"role": "user", "content": "guess"}


def conversation(name, answers, observations):
    """Tokens of the conversation as an episode records them; None where the template rewrites the past."""
    template, stop = TurnTemplate(tokenizer_for(name)), TEMPLATES[name][1]
    added = template.start([QUESTION])
    tokens = list(added.tokens)
    for answer, seen in zip(answers, observations, strict=True):
        tokens += [*encode(answer, name), *encode(stop, name)]
        past = template.answered(added.conversation, answer)
        added = template.add(past, [{"role": "user", "content": seen}], stop)
        if added is None:
            return None
        tokens += added.tokens
    return tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_the_whole_conversation(name):
    space = " " if name == "brackets" else ""  # that template writes one before an answer
    answers = [space + answer for answer in ("the number is 7", "8", "9 is right")]
    observations = ["higher", "lower than 9", "guess"]
    tokenizer = tokenizer_for(name)
    messages = [QUESTION]
    for answer, seen in zip(answers, observations, strict=True):
        opening = "<think>\n" if name == "opens reasoning" else ""
        messages += [{"role": "assistant", "content": opening + answer.strip()}, {"role": "user", "content": seen}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert conversation(name, answers, observations) == encode(whole, name)


@pytest.mark.parametrize("name", ["chatml", "headers", "turns"])
def test_white_space_that_the_template_strips_stays_as_it_was_sampled(name):
    tokenizer, stop = tokenizer_for(name), TEMPLATES[name][1]
    found = conversation(name, ["  7 \n\n"], ["higher"])
    sampled = [*encode("  7 \n\n", name), *encode(stop, name)]
    start = len(TurnTemplate(tokenizer).start([QUESTION]).tokens)
    assert found[start : start + len(sampled)] == sampled


def test_reasoning_that_the_template_drops_rewrites_the_past():
    assert conversation("drops reasoning", ["<think>hm</think>7"], ["higher"]) is None
    assert conversation("drops reasoning", ["7"], ["higher"]) is not None
    assert conversation("chatml", ["<think>hm</think>7"], ["higher"]) is not None


def test_an_opening_tag_of_the_template_is_a_part_of_the_answer():
    template = TurnTemplate(tokenizer_for("opens reasoning"))
    answered = template.answered(template.start([QUESTION]).conversation, "hm</think>7")
    assert answered.messages[-1]["content"] == "<think>\nhm</think>7"
    assert conversation("opens reasoning", ["hm</think>7"], ["higher"]) is not None


def test_a_list_of_tools_that_moves_rewrites_the_past():
    """A template that writes the tools before the last question."""
    moved = (
        "{%- for m in messages -%}{%- if loop.last -%}{{- 'Tools: ' + tools | tojson -}}{%- endif -%}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    )
    template = TurnTemplate(tokenizer_for("chatml"), moved)
    past = template.answered(template.start([QUESTION], [{"name": "add"}]).conversation, "7")
    assert template.add(past, [{"role": "user", "content": "higher"}], "<|im_end|>") is None


TEXT = st.text(alphabet="ab7 \n<>/think", max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_any_text_is_recorded_as_it_was_sampled(name, turns):
    """Hypothesis finds no answers and observations for which a recorded answer differs from the sampled one."""
    found = conversation(name, [answer for answer, _ in turns], [seen for _, seen in turns])
    if found is None:
        return
    place, stop = 0, TEMPLATES[name][1]
    for answer, _ in turns:
        sampled = [*encode(answer, name), *encode(stop, name)]
        starts = range(place, len(found) - len(sampled) + 1)
        place = next(start + len(sampled) for start in starts if found[start : start + len(sampled)] == sampled)
