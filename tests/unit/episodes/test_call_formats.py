"""Calls of tools in the forms that models write, and the keys that ask for tools."""

from contextlib import closing

import pytest

from rloom.config.checks import all_faults
from rloom.config.derived import declared_needs
from rloom.config.load import load_config
from rloom.environments.kinds import ENVIRONMENTS
from rloom.environments.sql import table_of
from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.record import Ending
from rloom.episodes.runner import EnvironmentDriver, EpisodeRow, EpisodeRunner
from rloom.episodes.tool_calls import FORMATS, ParsedCall, parse_tool_calls, without_calls
from rloom.errors import ConfigError
from rloom.launch.episodes import environment_driver
from rloom.rewards.routing import rule_for
from rloom.rollout.base import Sampling
from rloom.types import Prompt
from tests.helpers import configured
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.engines import answer_all, completed, texts_for
from tests.unit.episodes.test_contracts import SCHEMA

COUNT = [ParsedCall("count", {"number": 3})]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "count", "arguments": {"number": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=count>\n<parameter=number>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>count\n<arg_key>number</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "count", "parameters": {"number": 3}}',
    "mistral": '[TOOL_CALLS]count[ARGS]{"number": 3}',
    "gpt-oss": '<|channel|>commentary to=functions.count <|constrain|>json<|message|>{"number": 3}<|call|>',
    "gemma": "```tool_code\nprint(count(number=3))\n```",
    "gemma4": "<|tool_call>call:count{number:3}<tool_call|>",
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>count\n```json\n"
        '{"number": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read_by_its_format_and_by_auto(name):
    text = f"<think>count</think>\nI count. {WRITTEN[name]}" if name != "llama3_json" else WRITTEN[name]
    for format in (name, "auto"):
        assert parse_tool_calls(text, format, [SCHEMA]) == COUNT
        assert without_calls(text, format) == ("" if name == "llama3_json" else "<think>count</think>\nI count.")


def test_a_form_without_types_reads_them_from_the_tool():
    text = WRITTEN["glm"]
    assert parse_tool_calls(text)[0].arguments == {"number": "3"}
    assert parse_tool_calls(text.replace("3", "three"), "glm", [SCHEMA])[0].arguments == {"number": "three"}


def test_a_block_of_code_is_a_call_where_the_format_says_so():
    def tool(name: str, *arguments: str) -> dict:
        properties = {argument: {"type": "string"} for argument in arguments}
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    tools = [tool("python", "code"), tool("query", "sql"), tool("move", "x", "y")]
    text = (
        "So:\n```python\nprint(`1`)\n```\nand\n```sql\nSELECT 1\n```\n```move\n1\n```\n```json\n{}\n```\n```python\nx ="
    )
    calls = [ParsedCall("python", {"code": "print(`1`)\n"}), ParsedCall("query", {"sql": "SELECT 1\n"})]
    assert parse_tool_calls(text, "code_block", tools) == calls
    assert parse_tool_calls(text, "auto", tools) == []
    assert parse_tool_calls(text, "code_block") == []
    assert parse_tool_calls("```python\nprint(1)```", "code_block", tools) == [
        ParsedCall("python", {"code": "print(1)"})
    ]


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("hermes", WRITTEN["glm"], "not valid JSON"),
        ("qwen3_coder", WRITTEN["hermes"], "<function=NAME>"),
        ("qwen3_coder", "<tool_call><function=count><parameter=number>3</function></tool_call>", "has no </parameter>"),
        ("glm", WRITTEN["hermes"], "<arg_key>KEY</arg_key>"),
        ("llama3_json", '{"name": "count", "parameters": {', "not valid JSON"),
        ("mistral", "[TOOL_CALLS] count", "must be followed by a list"),
        ("mistral", "[TOOL_CALLS]count[ARGS]{", "arguments are not valid JSON"),
        ("gpt-oss", " to=functions.count<|message|>three<|call|>", "arguments are not valid JSON"),
        ("gemma", "```tool_code\ncount(3)\n```", "name(argument=value)"),
        ("gemma", "```tool_code\ncount(number=open('x'))\n```", "plain values"),
        ("gemma", "```tool_code\ncount(\n```", "not valid Python"),
        ("gemma4", "<|tool_call>count{number:3}<tool_call|>", "call:NAME{KEY:VALUE}"),
        ("deepseek", "<｜tool▁call▁begin｜>count<｜tool▁sep｜>3<｜tool▁call▁end｜>", "must be a JSON object"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_nothing_is_filled_in(name, text, reason):
    (found,) = parse_tool_calls(text, name, [SCHEMA])
    assert reason in found.error and not isinstance(found.arguments, dict)


def test_other_text_has_no_calls():
    for text in ("7", "{}", "a <tool> b", "```python\nprint(1)\n```", "<think><tool_call>{}</tool_call>"):
        assert all(parse_tool_calls(text, name) == [] for name in [*FORMATS, "auto"])


def faults(*overrides: str) -> list[str]:
    config = load_config(overrides)
    return [fault for fault in all_faults(config, declared_needs(config)) if "multi_turn" in fault]


def test_enable_alone_says_what_to_set():
    (fault,) = faults("actor_rollout_ref.rollout.multi_turn.enable=True")
    assert "nothing says what is between the turns" in fault and "tool_config_path" in fault
    assert faults("actor_rollout_ref.rollout.multi_turn.enable=False") == []
    tools = "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py"
    assert faults(tools, "actor_rollout_ref.rollout.multi_turn.enable=True") == []
    (fault,) = faults(tools, "actor_rollout_ref.rollout.multi_turn.enable=False")
    assert "remove one of the two" in fault


SELECT = "SELECT COUNT(*) FROM books"
BLOCKS = {  # what a small model writes: it guesses the result, and writes it behind the block
    "python": (
        "A program:\n```python\ndef total():\n    return 36 / 2\ntotal()\n```",
        "\nIt prints 17.\n\n#### 17",
        "The program gives 18.0.\n\n#### 18.0",
        "return what it prints. The program. It must print its results.\n```python\n...\n```\n",
        "18.0",
    ),
    "sql": (
        f"```sql\n{SELECT}\n```",
        "\nThere are 99 books.",
        "There are some books.",
        "Run one SELECT on the database and return its rows. The query, in SQLite's dialect.\n```sql\n...\n```\n",
        "COUNT(*)",
    ),
}


@pytest.mark.parametrize("template", ["chatml", "brackets", "calls apart"])
@pytest.mark.parametrize("name", BLOCKS)
def test_an_answer_ends_with_its_block_of_code_and_the_next_one_follows_the_result(name, template):
    call, guessed, final, described, result = BLOCKS[name]
    table = next(seed for seed in range(100) if table_of(seed).name == "books")
    row = {"extra_info": {"database": table}, "reward_model": {"ground_truth": SELECT}}
    limits = EpisodeLimits(4000, turns=3, call_s=30.0, result_characters=200)
    setup = EnvironmentSetup(ENVIRONMENTS[name].made, {}, limits, call_format="code_block")
    pool = EnvironmentPool(setup, most=1)
    texts = texts_for(template, "code_block")
    question = ({"role": "user", "content": "How many?"},)
    prompt = Prompt(0, question, "", (), "", columns=row)
    stop = encode(TEMPLATES[template][1], template)
    written = [[*encode(call + guessed, template), *stop], [*encode(final, template), *stop]]
    pieces = []

    def answer(index, request):
        """In pieces, as the episode asks for it."""
        text = texts.decode(request.tokens)
        begun = sum(map(len, pieces)) if result not in text else 0
        found = completed(index, request, written[result in text][begun:], -1.0, 0)
        pieces.append(found.tokens_L.tolist())
        return found

    runner = EpisodeRunner(EnvironmentDriver(pool, pool.load()), texts, limits)
    with closing(runner), runner.started([EpisodeRow(0, 0, prompt, hash)], Sampling(4000), shares=1) as turns:
        record = answer_all(turns, answer)[0]
    assert (record.ending, record.failure, record.turns) == (Ending.DONE, None, 2)
    assert [record.episode.nodes[index].messages[0]["content"].strip() for index in record.episode.turns] == [
        call,
        final,
    ]
    [branch] = record.episode.branches()
    text = tokenizer_for(template).decode(branch.tokens_L)
    assert text.count(described) == 1 and text.index(described) < text.index(call) < text.rindex(result)
    assert guessed.strip() not in text and "<tools>" not in text
    assert record.reward == (1.0 if name == "sql" else None)
    if name == "python":
        score = rule_for("openai/gsm8k").compute_score("openai/gsm8k", record.answer.messages[0]["content"], "18")
        assert score["score"] == 1.0


def test_a_tool_with_two_arguments_cannot_be_called_by_a_block(tmp_path):
    (tmp_path / "tools.py").write_text(TWO_ARGUMENTS)
    keys = "actor_rollout_ref.rollout.multi_turn"
    config = configured(f"{keys}.function_tool_path={tmp_path / 'tools.py'}", f"{keys}.format=code_block")
    with pytest.raises(
        ConfigError, match=r"format=code_block: the tool add has 2 arguments, and a block of code is one"
    ):
        environment_driver(config, texts_for("chatml", "code_block"), EpisodeLimits(100))


TWO_ARGUMENTS = """
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> int:
    "Add.\\n\\nArgs:\\n    a: One.\\n    b: Another."
    return a + b
"""
