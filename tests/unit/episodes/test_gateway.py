"""The policy behind a URL, asked with the SDKs of OpenAI and Anthropic."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
import torch

from rloom.episodes.base import Limits
from rloom.episodes.gateway.server import Gateway
from rloom.episodes.record import Ending, episode_metrics
from rloom.episodes.session import Sessions
from rloom.errors import ConfigError
from rloom.rollout.base import Sampling
from tests.unit.episodes.conversations import encode, tokenizer_for
from tests.unit.episodes.gateway_runs import serving

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
    with httpx.Client(timeout=20) as http:
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
    if hasattr(stream, "__aiter__"):

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
