"""Results of calls beside calls that cannot be read."""

from rloom.episodes.template import with_calls

UNREADABLE = '<tool_call>{"name": "f", "arguments": }</tool_call>'


def call(name):
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def result(text):
    return {"role": "tool", "name": "", "content": text}


def test_each_result_belongs_to_its_own_call():
    question = {"role": "user", "content": "q"}
    first = {"role": "assistant", "content": UNREADABLE + call("g") + UNREADABLE + call("h")}
    second = {"role": "assistant", "content": call("k")}
    results = [result(text) for text in ("error 1", "of g", "error 2", "of h")]
    found = list(with_calls([question, first, *results, second, result("of k")]))
    assert [one.get("tool_call_id") for one in found if one["role"] != "assistant"] == [
        *(None, None, "call00000", None, "call00001"),
        "call00002",
    ]
    assert [one["role"] for one in found] == ["user", "assistant", "user", "tool", "user", "tool", "assistant", "tool"]
    assert [one["function"]["name"] for one in found[1]["tool_calls"]] == ["g", "h"]
    assert [one["content"] for one in found[2:6]] == ["error 1", "of g", "error 2", "of h"]


def test_a_result_without_a_readable_call_is_a_message_of_the_user():
    answer = {"role": "assistant", "content": UNREADABLE}
    assert list(with_calls([answer, result("error")])) == [answer, {"role": "user", "name": "", "content": "error"}]
