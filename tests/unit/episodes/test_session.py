"""What an agent sends back is found in its episode again; other histories begin branches, which are counted."""

import json

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import EpisodeWriter, Texts
from rloom.rollout.base import Completion
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.gateway_runs import serving

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"b": [1, 2], "a": "é"}}</tool_call>'


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


@pytest.fixture
def http():
    with httpx.Client(timeout=60) as http:
        yield http


def ask(http, run, messages, **body):
    answer = http.post(f"{run.url}/v1/chat/completions", json={"messages": messages, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def talk(http, run, turns, **body):
    """A conversation in which the agent drops the reasoning."""
    messages = []
    for turn in range(turns):
        messages.append(user(f"question {turn}"))
        answer = ask(http, run, messages, **body)
        messages.append(assistant(answer["content"]))
    return messages


def test_an_agent_without_reasoning_in_its_history_continues_the_sampled_tokens(http):
    with serving([f"<think>{n}</think>\n\nanswer {n}" for n in range(3)]) as run:
        talk(http, run, 3)
        run.check()
    assert "<think>0</think>" in tokenizer_for("chatml").decode(run.requests[2].tokens)


def test_a_template_that_drops_reasoning_begins_a_branch_a_turn_and_the_agent_none(http):
    with serving([f"<think>{n}</think>\n\nanswer {n}" for n in range(4)], name="drops reasoning") as run:
        talk(http, run, 4)
        record = run.end()
    assert (record.rewritten, record.branched, record.turns) == (3, 0, 4)
    branches = list(record.episode.branches())
    trained = [branch.tokens_L[turn.start : turn.stop].tolist() for branch in branches for turn in branch.turns]
    assert trained == run.sampled
    last = tokenizer_for("drops reasoning").decode(run.requests[3].tokens)
    assert "think" not in last and [f"answer {n}" in last for n in range(4)] == [True, True, True, False]


def test_an_opening_tag_of_the_template_belongs_to_the_reasoning(http):
    with serving([f"hm {n}\n</think>\n\nanswer {n}" for n in range(3)], name="opens reasoning") as run:
        messages = talk(http, run, 3)
        assert [message["content"] for message in messages[1::2]] == ["answer 0", "answer 1", "answer 2"]
        run.check()


FORMS = {
    "as received": lambda message: message,
    "arguments with other spaces": lambda message: with_arguments(message, '{"a":"é",  "b":[1,2]}'),
    "arguments in ASCII": lambda message: with_arguments(message, json.dumps({"a": "é", "b": [1, 2]})),
    "content is empty": lambda message: {**message, "content": ""},
    "no content": lambda message: {name: value for name, value in message.items() if name != "content"},
    "an empty list of parts": lambda message: {**message, "content": []},
    "null fields": lambda message: {**message, "refusal": None, "audio": None, "function_call": None},
    "another id": lambda message: {**message, "tool_calls": [{**message["tool_calls"][0], "id": "other"}]},
}


def with_arguments(message, written):
    call = message["tool_calls"][0]
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": written}}]}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_found_again_in_every_form_that_clients_send(http, form):
    with serving([CALL, "3"]) as run:
        answer = FORMS[form](ask(http, run, [user("q")], tools=TOOLS))
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
        ask(http, run, [user("q"), answer, result], tools=TOOLS)
        run.check()


def test_arguments_have_the_types_of_their_tool(http):
    """The form of Qwen3-Coder has none."""
    written = "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    with serving([written, "5"]) as run:
        answer = ask(http, run, [user("q")], tools=[{"type": "function", "function": tool}])
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 5}


def test_ids_of_calls_are_equal_in_every_run(http):
    """Templates may write them, and every draw is a function of seed, step and row."""
    ids = []
    for _ in range(2):
        with serving([CALL * 2, CALL]) as run:
            first = ask(http, run, [user("q")], tools=TOOLS)
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in first["tool_calls"]]
            second = ask(http, run, [user("q"), first, *results], tools=TOOLS)
            ids.append([call["id"] for answer in (first, second) for call in answer["tool_calls"]])
            run.check()
    assert ids == [["call00000", "call00001", "call00002"]] * 2


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([user("summary of what happened")], id="compaction"),
        pytest.param([user("q"), assistant("another answer"), user("r")], id="an edited answer"),
        pytest.param([user("q "), assistant("one"), user("r")], id="a question with a space"),
        pytest.param([user("edited"), assistant("one"), user("r")], id="an edited question"),
        pytest.param([{"role": "system", "content": "new"}, user("q"), assistant("one"), user("r")], id="a new system"),
        pytest.param([user("q"), assistant("one"), user("other")], id="another second question"),
    ],
)
def test_a_changed_history_begins_a_branch_that_is_counted(http, history):
    with serving(["one", "two", "three", "four"]) as run:
        ask(http, run, [user("q")])
        ask(http, run, [user("q"), assistant("one"), user("r")])
        ask(http, run, history)
        ask(http, run, [*history, assistant("three"), user("s")])
        record = run.end()
    assert (record.branched, record.turns) == (1, 4)
    branches = list(record.episode.branches())
    trained = [branch.tokens_L[turn.start : turn.stop].tolist() for branch in branches for turn in branch.turns]
    assert sorted(trained) == sorted(run.sampled)
    assert [len(branch.turns) for branch in branches] == [2, 2]


def test_other_tools_begin_a_branch(http):
    with serving(["one", "two"]) as run:
        ask(http, run, [user("q")])
        ask(http, run, [user("q"), assistant("one"), user("r")], tools=TOOLS)
        assert run.end().branched == 1


def test_of_answers_with_the_same_text_the_one_with_the_sent_reasoning_goes_on(http):
    with serving(["<think>a</think>7", "<think>b</think>7", "x", "y"]) as run:
        first, _ = (ask(http, run, [user("q")]) for _ in range(2))
        ask(http, run, [user("q"), first, user("r")])
        ask(http, run, [user("q"), assistant("7"), user("s")])
        record = run.end()
    parents = [node.parent for node in record.episode.nodes]
    assert parents == [None, 0, 0, 1, 3, 2, 5] and record.branched == 0


def test_a_failure_of_rloom_is_an_error_of_one_request(http, monkeypatch, caplog):
    with serving(["a"]) as run:
        with monkeypatch.context() as patch:
            patch.setattr(EpisodeWriter, "read", lambda *_: {}["missing"])
            failed = http.post(f"{run.url}/v1/messages", json={"messages": [user("q")]})
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "api_error"
        assert caplog.messages == ["a request of an agent failed: KeyError: 'missing'"]
        assert ask(http, run, [user("q")])["content"] == "a"


TEXTS = st.text(alphabet="ab7 \n<>/think{}", max_size=10)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_tree_of_conversations_records_what_was_sampled(data):
    """Random answers, questions and points to go on from: the tokens before an answer are those of the recorded path,
    and every sampled token is trained once."""
    name = data.draw(st.sampled_from(sorted(TEMPLATES)))
    tokenizer, stop = tokenizer_for(name), TEMPLATES[name][1]
    (stop_token,) = encode(stop, name)
    decode = lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)  # noqa: E731
    writer = EpisodeWriter(Texts(TurnTemplate(tokenizer), decode, {stop_token: stop}))
    histories, sampled = [[]], []
    for turn in range(data.draw(st.integers(1, 5))):
        messages = [*data.draw(st.sampled_from(histories)), user(f"{turn} {data.draw(TEXTS)}")]
        leaf = writer.read(messages)
        assert writer.read(messages) == leaf  # asked again
        tokens = [*encode(data.draw(TEXTS), name), stop_token]
        node = writer.answer(leaf, Completion(0, torch.tensor(tokens), torch.zeros(len(tokens)), True, 0))
        assert writer.episode.tokens(node) == [*writer.episode.tokens(leaf), *tokens]
        sampled.append(tokens)
        histories.append(writer.heard(node))
        assert histories[-1][: len(messages)] == messages
    branches = list(writer.episode.branches())
    trained = [branch.tokens_L[turn.start : turn.stop].tolist() for branch in branches for turn in branch.turns]
    assert sorted(trained) == sorted(sampled)


def test_a_stop_text_in_what_the_template_wrote_before_the_answer_ends_nothing(http):
    with serving(["first\nsecond"], name="opens reasoning") as run:  # its prompt ends with <think>\n
        answer = ask(http, run, [user("question")], stop=["\n"])
        run.end()
    assert (answer["reasoning_content"], answer["content"]) == ("first", "")
