"""The policy behind a URL, asked with the SDKs of OpenAI and Anthropic."""

import asyncio
import json
from collections.abc import AsyncIterable
from threading import Event

import httpx
import pytest
import torch

from rloom.episodes.base import EpisodeLimits
from rloom.episodes.gateway.server import Gateway
from rloom.episodes.record import Ending, episode_metrics, episode_trajectories
from rloom.episodes.session import Sessions
from rloom.errors import ConfigError
from rloom.rollout.base import Sampling
from rloom.types import Score
from tests.unit.episodes.conversations import encode, tokenizer_for
from tests.unit.episodes.gateway_runs import serving
from tests.waiting import wait_until

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds one.", "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "add", "description": "Adds one.", "parameters": SCHEMA, "strict": None}]
MESSAGE_TOOLS = [{"name": "add", "description": "Adds one.", "input_schema": SCHEMA}]
CALLS = [f'<tool_call>\n{{"name": "add",  "arguments": {{"a": {a}}}}}\n</tool_call>' for a in range(3)]
SCRIPT = [
    f"<think>\nI add.\n</think>\n\nFirst. {CALLS[0]}",
    CALLS[1],
    f"{CALLS[2]}\n{CALLS[0]}",
    "<think>x</think>It is 3.",
]
QUESTION = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Count."}]


@pytest.fixture(scope="module", autouse=True)
def sdks():
    """Imported here: every process of `make test` imports this file, and the SDKs take it seconds."""
    global anthropic, openai
    import anthropic
    import openai


@pytest.fixture(params=["sync", "async"])
def client(request):
    """make(SDK class, url) -> call(function of the client): of the SDK's synchronous or asynchronous client."""
    opened = []
    loop = asyncio.new_event_loop()

    def make(sdk, **arguments):
        name = {"openai": "OpenAI", "anthropic": "Anthropic"}[sdk.__name__]
        made = getattr(sdk, f"Async{name}" if request.param == "async" else name)(api_key="unused", **arguments)
        opened.append(made)
        return made

    def call(answer):
        return loop.run_until_complete(answer) if asyncio.iscoroutine(answer) else answer

    make.call = call
    yield make
    for made in opened:
        call(made.close())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture
def chat():
    with httpx.Client(timeout=60) as http:
        yield lambda url, **body: http.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "q"}], **body}
        )


def run_tool(arguments):
    return str(arguments["a"] + 1)


def test_four_turns_of_tools_over_chat_completions_are_one_branch(client):
    with serving(SCRIPT) as run:
        openai_client = client(openai, base_url=f"{run.url}/v1")
        messages, texts = list(QUESTION), []
        for _ in range(4):
            create = openai_client.chat.completions.create
            answer = client.call(create(model="any", messages=messages, tools=CHAT_TOOLS, temperature=1.0))
            message = answer.choices[0].message
            texts.append(message.content)
            messages.append(message.model_dump(exclude_none=True, exclude={"reasoning_content"}))
            for one in message.tool_calls or []:
                result = run_tool(json.loads(one.function.arguments))
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        assert texts == ["First.", None, None, "It is 3."]
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.reasoning_content == "x"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            len(run.requests[-1].tokens),
            len(run.sampled[-1]),
        )
        record = run.check()
    assert record.ending is Ending.DONE and record.turns == 4
    shown = tokenizer_for("chatml").decode(torch.cat([node.tokens_L for node in record.episode.nodes]))
    assert '"name": "add", "description": "Adds one."' in shown and "<|im_start|>user\n2<|im_end|>\n" in shown


def test_four_turns_of_tools_over_messages_are_one_branch(client):
    with serving(SCRIPT) as run:
        claude = client(anthropic, base_url=run.url)
        messages, kinds = [QUESTION[1]], []
        for _ in range(4):
            create = claude.messages.create
            answer = client.call(
                create(model="any", max_tokens=500, system="Be exact.", messages=messages, tools=MESSAGE_TOOLS)
            )
            kinds.append(([block.type for block in answer.content], answer.stop_reason))
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": run_tool(block.input)}],
                }
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        assert kinds == [
            (["thinking", "text", "tool_use"], "tool_use"),
            (["tool_use"], "tool_use"),
            (["tool_use", "tool_use"], "tool_use"),
            (["thinking", "text"], "end_turn"),
        ]
        assert answer.content[0].thinking == "x" and answer.content[1].text == "It is 3."
        run.check()


@pytest.mark.parametrize("stateful", [False, True])
def test_four_turns_of_tools_over_responses_are_one_branch(client, stateful):
    with serving(SCRIPT) as run:
        openai_client = client(openai, base_url=f"{run.url}/v1")
        items, previous, kinds = [QUESTION[1]], None, []
        for _ in range(4):
            create = openai_client.responses.create
            answer = client.call(
                create(
                    model="any",
                    instructions="Be exact.",
                    input=items,
                    tools=RESPONSE_TOOLS,
                    **({"previous_response_id": previous} if previous else {}),
                )
            )
            kinds.append([item.type for item in answer.output])
            items, previous = ([], answer.id) if stateful else ([*items, *answer.output], None)
            for one in answer.output:
                if one.type == "function_call":
                    output = run_tool(json.loads(one.arguments))
                    items.append({"type": "function_call_output", "call_id": one.call_id, "output": output})
        call = "function_call"
        assert kinds == [["reasoning", "message", call], [call], [call, call], ["reasoning", "message"]]
        assert answer.output_text == "It is 3." and answer.status == "completed"
        assert answer.usage.output_tokens == len(run.sampled[-1])
        run.check()


def test_the_three_apis_continue_each_others_conversation():
    """One agent may ask over one API and its sub-agent over another: the history is the same."""
    with serving(SCRIPT) as run, openai.OpenAI(base_url=f"{run.url}/v1", api_key="-") as client:
        first = client.chat.completions.create(model="m", messages=QUESTION, tools=CHAT_TOOLS).choices[0].message
        [call] = first.tool_calls
        with anthropic.Anthropic(base_url=run.url, api_key="-") as claude:
            used = {"type": "tool_use", "id": call.id, "name": "add", "input": {"a": 0}}
            said = {"role": "assistant", "content": [{"type": "text", "text": "First."}, used]}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "1"}
            messages = [QUESTION[1], said, {"role": "user", "content": [result]}]
            claude.messages.create(
                model="m", max_tokens=500, system="Be exact.", messages=messages, tools=MESSAGE_TOOLS
            )
        run.check()


def collected(stream):
    """The events of a stream of either kind of client."""
    if isinstance(stream, AsyncIterable):

        async def read():
            return [event async for event in stream]

        return read()
    return list(stream)


def test_streams_of_chat_completions_carry_text_calls_usage_and_log_probs(client):
    with serving([SCRIPT[2], SCRIPT[0]]) as run:
        create = client(openai, base_url=f"{run.url}/v1").chat.completions.create
        options = {"include_usage": True}
        asked = {"model": "m", "tools": CHAT_TOOLS, "stream": True, "stream_options": options, "logprobs": True}
        chunks = client.call(collected(client.call(create(messages=QUESTION, **asked))))
        calls = [one for chunk in chunks for choice in chunk.choices for one in choice.delta.tool_calls or []]
        assert [one.function.name for one in calls if one.id] == ["add", "add"]
        assert [one.function.arguments for one in calls if not one.id] == ['{"a": 2}', '{"a": 0}']
        last = chunks[-2].choices[0]
        assert last.finish_reason == "tool_calls" and chunks[-1].usage.completion_tokens == len(run.sampled[0])
        assert [one.logprob for one in last.logprobs.content] == [-0.5 * n for n in range(1, len(run.sampled[0]) + 1)]
        assert "".join(one.token for one in last.logprobs.content) == SCRIPT[2] + "<|im_end|>"
        chunks = client.call(collected(client.call(create(messages=[QUESTION[1]], **asked))))
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == "First."


def test_streams_of_messages_add_up_to_the_message():
    with serving([SCRIPT[0], "plain"]) as run, anthropic.Anthropic(base_url=run.url, api_key="-") as claude:
        asked = {"model": "m", "max_tokens": 400, "messages": [QUESTION[1]]}
        with claude.messages.stream(**asked, tools=MESSAGE_TOOLS) as stream:
            message = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[0].thinking == "I add." and message.content[2].input == {"a": 0}
        assert message.usage.output_tokens == len(run.sampled[0]) and message.stop_reason == "tool_use"
        with claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == "plain"


def test_async_streams_of_messages_and_responses():
    asyncio.run(read_async_streams())


async def read_async_streams():
    with serving([SCRIPT[0], SCRIPT[0]]) as run:
        async with anthropic.AsyncAnthropic(base_url=run.url, api_key="-") as claude:
            asked = {"model": "m", "max_tokens": 400, "messages": [QUESTION[1]], "tools": MESSAGE_TOOLS}
            async with claude.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        async with openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key="-") as client:
            async with client.responses.stream(model="m", input="Count.", tools=RESPONSE_TOOLS) as stream:
                answer = await stream.get_final_response()
            assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]


def test_streams_of_responses_add_up_to_the_response():
    with serving([SCRIPT[0], "plain"]) as run, openai.OpenAI(base_url=f"{run.url}/v1", api_key="-") as client:
        with client.responses.stream(model="m", input="Count.", tools=RESPONSE_TOOLS) as stream:
            events = list(stream)
            answer = stream.get_final_response()
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output[2].arguments == '{"a": 0}' and answer.output_text == "First."
        assert [event.sequence_number for event in events] == list(range(len(events)))
        stream = client.responses.create(
            model="m", input="Count.", stream=True, include=["message.output_text.logprobs"]
        )
        *_, completed = stream
        assert completed.type == "response.completed"
        [part] = completed.response.output[0].content
        assert [one.logprob for one in part.logprobs] == [-0.5 * n for n in range(1, len(run.sampled[1]) + 1)]


def test_a_session_is_named_by_its_path_or_its_key(chat):
    with serving(["a"] * 8) as run:
        for url in (run.url, f"{run.url}/v1"):
            assert chat(url).status_code == 200
        with openai.OpenAI(base_url=f"{run.gateway.url}/v1", api_key=run.session.key) as client:
            assert client.chat.completions.create(model="m", messages=QUESTION).choices[0].message.content == "a"
            assert [model.id for model in client.models.list()] == ["rloom"]
            assert client.models.retrieve("any/name").id == "any/name"
        with anthropic.Anthropic(base_url=run.gateway.url, api_key=run.session.key) as claude:
            assert claude.messages.create(model="m", max_tokens=9, messages=QUESTION[1:]).content[0].text == "a"
            assert [model.id for model in claude.models.list()] == ["rloom"]
            counted = claude.messages.count_tokens(model="m", messages=QUESTION[1:]).input_tokens
            assert counted == len(run.requests[-1].tokens)
        for url in (run.gateway.url, f"{run.gateway.url}/sessions/0"):
            refused = chat(url)
            assert refused.status_code == 401 and "Authorization: Bearer KEY" in refused.json()["error"]["message"]
        with pytest.raises(anthropic.AuthenticationError, match="names no running episode"):
            anthropic.Anthropic(base_url=run.gateway.url, api_key="wrong").models.list()


def test_requests_after_the_end_say_why(chat):
    with serving(["a"] * 2, limits=EpisodeLimits(1000, turns=1)) as run:
        assert chat(run.url).status_code == 200
        assert chat(run.url).json()["error"]["code"] == "episode_limit_reached"
        assert run.end().ending is Ending.TURNS
        for url in (run.url, run.gateway.url):
            header = {"authorization": f"Bearer {run.session.key}"}
            refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION}, headers=header, timeout=60)
            assert refused.status_code == 410 and "has ended (turn limit)" in refused.json()["error"]["message"]
        with (
            openai.OpenAI(base_url=f"{run.url}/v1", api_key="-") as client,
            pytest.raises(openai.APIStatusError) as error,
        ):
            client.responses.create(model="m", input="q")
        assert error.value.status_code == 410 and error.value.code == "episode_ended"
        assert httpx.post(f"{run.url}/rl/set_reward", json={"reward": 1}, timeout=60).status_code == 410


def test_rewards_of_the_episode_and_of_answers_add_up(chat):
    with serving(["a", "b"]) as run:
        ids = [chat(run.url, messages=[{"role": "user", "content": text}]).json()["id"] for text in ("x", "y")]
        header = {"authorization": f"Bearer {run.session.reward_key}"}
        give = lambda **body: httpx.post(f"{run.url}/rl/set_reward", json=body, headers=header, timeout=60)  # noqa: E731
        assert run.session.run.reward is None
        for key in (None, run.session.key, run.session.id, f"{run.session.reward_key}x"):
            wrong = {} if key is None else {"authorization": f"Bearer {key}"}
            refused = httpx.post(f"{run.url}/rl/set_reward", json={"reward": 100}, headers=wrong, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_reward_key")
        assert give(reward=0.5).json() == {"reward": 0.5, "id": None}
        assert give(reward=1, id=ids[0]).status_code == 200
        assert give(reward=0.25, id=ids[1]).status_code == 200
        assert give(reward=2, id=ids[0]).status_code == 200
        for wrong in (None, "1", True, [], 1e999, -(10**400)):
            body = json.dumps({"reward": wrong})
            refused = httpx.post(f"{run.gateway.url}/v1/rl/set_reward", content=body, headers=header, timeout=60)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "reward"
        assert give(reward=1, id="other").status_code == 404
        assert give(reward=1, id=f"{run.session.id}-1").status_code == 404 and len({*ids}) == 2
        record = run.end()
    assert (record.reward, record.counts["rewards_over_http"]) == (2.75, 4)
    assert [node.reward for node in record.episode.nodes if node.sampled] == [2.0, 0.25]


def test_an_answer_at_a_limit_is_a_part_and_then_an_error_that_sdks_do_not_retry(chat):
    with serving(["x" * 30] * 3, limits=EpisodeLimits(20)) as run:
        cut = chat(run.url, max_tokens=500).json()
        assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 20
        history = [{"role": "user", "content": "q"}, cut["choices"][0]["message"], {"role": "user", "content": "go on"}]
        with (
            openai.OpenAI(base_url=f"{run.url}/v1", api_key="-") as client,
            pytest.raises(openai.BadRequestError) as error,
        ):
            client.chat.completions.create(model="m", messages=history)
        assert error.value.code == "context_length_exceeded" and "data.max_response_length" in str(error.value)
        claude, error = anthropic.Anthropic(base_url=run.url, api_key="-"), anthropic.BadRequestError
        with claude, pytest.raises(error, match="prompt is too long"):
            claude.messages.create(model="m", max_tokens=9, messages=history)
        assert len(run.requests) == 1  # a second one would be a retry
        assert run.check().ending is Ending.TOKENS


def test_an_agents_own_limit_does_not_end_the_episode(chat):
    with serving(["x" * 30, "y"]) as run:
        cut = chat(run.url, max_completion_tokens=4).json()
        assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 4
        history = [{"role": "user", "content": "q"}, cut["choices"][0]["message"], {"role": "user", "content": "go on"}]
        assert chat(run.url, messages=history).json()["choices"][0]["message"]["content"] == "y"
        assert run.check().ending is Ending.DONE


def test_an_agent_that_shortens_its_history_after_a_limit_goes_on(chat):
    with serving(["x" * 30, "y"], limits=EpisodeLimits(20), prompt_tokens=30) as run:
        assert chat(run.url).json()["choices"][0]["finish_reason"] == "length"
        assert chat(run.url, messages=[{"role": "user", "content": "short"}]).status_code == 200
        record = run.end()
    assert (record.ending, record.branched) == (Ending.DONE, 1)
    assert [len(branch.turns) for branch in record.episode.branches()] == [1, 1]


def test_the_longest_prompt_of_the_run_bounds_branches_whatever_was_asked_first(chat):
    """A short first request does not take the tokens of a long one behind it."""
    long = [{"role": "user", "content": "z" * 60}]
    with serving(["x" * 90] * 2, limits=EpisodeLimits(20), prompt_tokens=100) as run:
        assert chat(run.url).json()["usage"]["completion_tokens"] == 20
        asked = chat(run.url, messages=long).json()["usage"]
        assert asked["prompt_tokens"] > 60 and asked["completion_tokens"] == 20
    with serving(["x" * 90] * 2, limits=EpisodeLimits(20)) as run:
        chat(run.url)
        assert chat(run.url, messages=long).json()["error"]["code"] == "context_length_exceeded"


def test_several_answers_are_siblings_of_one_question(chat):
    with serving(["a", "b", "c"]) as run:
        answer = chat(run.url, n=2, return_token_ids=True).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert sorted(texts) == ["a", "b"] and answer["usage"]["completion_tokens"] == 4
        assert [choice["token_ids"] for choice in answer["choices"]] == [
            encode(t + "<|im_end|>", "chatml") for t in texts
        ]
        assert answer["prompt_token_ids"] == list(run.requests[0].tokens)
        history = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "r"},
        ]
        chat(run.url, messages=history)
        record = run.end()
    assert record.branched == 0 and record.turns == 3
    parents = [node.parent for node in record.episode.nodes]
    assert parents == [None, 0, 0, 1 + texts.index("b"), 3]
    assert sorted(len(branch.turns) for branch in record.episode.branches()) == [1, 2]


def test_a_stop_text_ends_an_answer_and_what_was_sampled_up_to_it_is_recorded(chat):
    script = ["I look. Observation: 7 is made up", "done"]
    with serving(script) as run:
        answer = chat(run.url, stop=["Observation:"]).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("I look. ", "stop")
        history = [{"role": "user", "content": "q"}, answer["message"], {"role": "user", "content": "seen"}]
        with anthropic.Anthropic(base_url=run.url, api_key="-") as claude:
            last = claude.messages.create(model="m", max_tokens=99, messages=history, stop_sequences=["on", "none"])
        assert (last.content[0].text, last.stop_reason, last.stop_sequence) == ("d", "stop_sequence", "on")
        record = run.end()
    [branch] = record.episode.branches()
    tokens = [branch.tokens_L[turn.start : turn.stop].tolist() for turn in branch.turns]
    for kept, sampled, text in zip(tokens, run.sampled, ("I look. Observation:", "don"), strict=True):
        assert kept == sampled[: len(kept)]
        assert tokenizer_for("chatml").decode(kept).startswith(text)
        assert text not in tokenizer_for("chatml").decode(kept[:-1])
    assert branch.finished and record.branched == 0


def test_ignored_sampling_is_counted_and_said_once(chat, caplog):
    with serving(["a"] * 4, sampling=Sampling(999, temperature=0.7)) as run:
        chat(run.url, temperature=0.7, top_p=1.0, seed=None, user="me", metadata={"a": "b"}, parallel_tool_calls=True)
        assert run.session.run.counts["ignored_sampling"] == 0 and not caplog.records
        chat(run.url, temperature=0, top_p=0.9)
        chat(run.url, temperature=0.2, presence_penalty=0)
        [said] = caplog.messages
        assert "temperature, top_p" in said and "agent/ignored_sampling" in said
        assert chat(run.url, n="two").status_code == 400
        prompt = run.session.run.row.prompt
        metrics = episode_metrics(episode_trajectories(run.end(), prompt, 0, Score(1.0), 1.0))
    assert [metrics[f"agent/{name}"] for name in ("ignored_sampling", "refused_requests", "dropped_answers")] == [
        2,
        1,
        0,
    ]
    assert {request.sampling.temperature for request in run.requests} == {0.7}


REFUSED = {
    "chat/completions": [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "content[0]"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "I"}]}, "an answer cannot be continued"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"stop": [""]}, "stop"),
    ],
    "responses": [
        ({"input": "q", "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.type"),
        ({"input": "q", "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": "q", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "q", "background": True}, "background"),
        ({}, "input"),
    ],
    "messages": [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(path):
    with serving([]) as run:
        for body, field in REFUSED[path]:
            default = {} if path == "responses" else {"messages": QUESTION[1:]}
            refused = httpx.post(f"{run.url}/v1/{path}", json={**default, **body}, timeout=60)
            assert refused.status_code == 400, body
            assert field in refused.json()["error"]["message"], body
            assert refused.headers["x-should-retry"] == "false"
        missing = httpx.post(f"{run.url}/v1/responses", json={"input": "q", "previous_response_id": "none"}, timeout=60)
        assert missing.status_code == 404
        assert run.end().turns == 0


def test_without_tools_or_with_tool_choice_none_a_call_is_text(chat):
    with serving([CALLS[0]] * 3) as run:
        shown = [chat(run.url).json(), chat(run.url, tools=CHAT_TOOLS, tool_choice="none").json()]
        assert [one["choices"][0]["message"]["content"] for one in shown] == [CALLS[0]] * 2
        assert chat(run.url, tools=CHAT_TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_sub_agents_ask_at_the_same_time():
    """Eight conversations of three turns in one session, over both SDKs: each is one branch."""

    def script(prompt):
        return f"{prompt.count('assistant')} of {prompt.split('agent ')[1].split('<')[0]}"

    async def talk(number, url):
        messages = [{"role": "user", "content": f"agent {number}"}]
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-")
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="-")
        async with client, claude:
            for turn in range(1, 4):
                if number % 2:
                    answer = await client.chat.completions.create(model="m", messages=messages)
                    text = answer.choices[0].message.content
                else:
                    answer = await claude.messages.create(model="m", max_tokens=99, messages=messages)
                    text = answer.content[0].text
                assert text == f"{turn} of {number}"
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]

    async def talk_all(url):
        await asyncio.gather(*(talk(number, url) for number in range(8)))

    with serving(script) as run:
        asyncio.run(talk_all(run.url))
        record = run.end()
    assert (record.turns, record.branched) == (24, 7)
    branches = list(record.episode.branches())
    assert [len(branch.turns) for branch in branches] == [3] * 8
    trained = sorted(branch.tokens_L[turn.start : turn.stop].tolist() for branch in branches for turn in branch.turns)
    assert trained == sorted(run.sampled)


async def ask(url):
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{url}/v1/chat/completions", json={"messages": QUESTION})


def test_an_answer_whose_client_went_away_is_not_recorded_and_the_engine_goes_on(chat):
    with serving(["lost", "kept"]) as run:
        generates, release = Event(), run.released.wait
        run.released.clear()
        run.released.wait = lambda limit: generates.set() or release(limit)
        asked = run.runner.loop.start(ask(run.url))
        assert generates.wait(60)
        asked.cancel()  # closes the connection
        wait_until(lambda: run.session.run.counts["dropped_answers"] == 1)
        run.released.set()
        assert chat(run.url, messages=QUESTION).json()["choices"][0]["message"]["content"] == "kept"
        record = run.end()
    assert [node.messages[0]["content"] for node in record.episode.nodes if node.sampled] == ["kept"]
    assert (record.turns, record.branched, record.counts["dropped_answers"]) == (1, 0, 1)


def test_an_episode_that_ends_while_an_answer_is_generated_refuses_it_and_stays_as_it_is():
    with serving(["late"]) as run:
        run.released.clear()
        asked = run.runner.loop.start(ask(run.url))
        wait_until(lambda: run.session._requests)
        run.runner.loop.loop.call_soon_threadsafe(run.driver.over.set)
        refused = asked.result(60)
        assert refused.status_code == 410 and refused.json()["error"]["code"] == "episode_ended"
        run.released.set()
        record = run.end()
    assert record.turns == 0 and record.counts["dropped_answers"] == 1


def test_the_gateway_serves_the_episodes_of_the_next_step():
    """The end of a step cancels its requests, not the server; ports are free again after `stop`."""
    with serving(["a"]) as run:
        run.end()
        run.runner.loop.cancel_all()
        assert httpx.get(f"{run.url}/v1/models", timeout=60).status_code == 410

        async def start_again():
            gateway = Gateway()
            with pytest.raises(ConfigError, match=r"agent\.port=\d+: .*in use"):
                await gateway.start(Sessions(), int(run.gateway.url.rsplit(":")[-1]))
            await gateway.start(Sessions(), 0)
            port = int(gateway.url.rsplit(":")[-1])
            await gateway.stop()
            await gateway.start(Sessions(), port)
            await gateway.stop()

        run.runner.loop.run(start_again())
