"""What agents that ask with tokens set for an answer: what ends it is followed, and nothing is ignored silently."""

import textwrap

import pytest

from rloom.episodes.agents.by_tokens import TokenEngine, public
from rloom.episodes.agents.process import TokenAnswer
from tests.unit.episodes.agent_runs import agent_driver, loop_driver, run, setup_of, trained
from tests.unit.episodes.conversations import encode, tokenizer_for

NAME = "chatml"
LOOP = textwrap.dedent(
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
    from verl.experimental.agent_loop.tool_parser import ToolParser

    class Asks(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            prompt = await self.apply_chat_template(kwargs["raw_prompt"])
            # as verl's ToolAgentLoop
            parser = ToolParser.get_tool_parser("hermes", self.tokenizer)
            if parser.stop_token_ids:
                sampling_params["stop_token_ids"] = list(parser.stop_token_ids)
            sampling_params = {**sampling_params, **kwargs["given"]}
            found = await self.server_manager.generate("1", prompt_ids=prompt, sampling_params=sampling_params)
            await parser.extract_tool_calls(found.token_ids, [])
            return AgentLoopOutput(
                prompt_ids=prompt, response_ids=found.token_ids, response_mask=[1] * len(found.token_ids),
                reward_score=float(found.stop_reason == "completed"), metrics=AgentLoopMetrics(),
            )
    """
)
ANSWER = "one; two; three"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    file = tmp_path_factory.mktemp("loops") / "loops.py"
    file.write_text(LOOP)
    return f"{file}:Asks"


def test_what_ends_an_answer_is_followed_and_the_rest_is_refused_by_name(place):
    [semicolon] = set(encode(";", NAME)) & set(encode(ANSWER, NAME))
    given = {
        0: {},
        1: {"stop": "two"},
        2: {"stop": ["three", ";"]},
        3: {"stop_token_ids": [semicolon]},
        4: {"stop": [], "logit_bias": None, "bad_words": []},
        5: {"logit_bias": {"5": 1}},
        6: {"seed": 3},
        7: {"stop_token_ids": [-1]},
    }
    rows = {number: {"given": one} for number, one in given.items()}
    records, _ = run(loop_driver(place, loops=(place,)), len(rows), answer=lambda *_: ANSWER, rows=rows)
    assert [record.failure for record in records[:5]] == [None] * 5
    texts = [tokenizer_for(NAME).decode(tokens) for record in records[:5] for tokens in trained(record)]
    whole = f"{ANSWER}<|im_end|>"
    assert texts == [whole, "one; two", "one;", "one;", whole]
    assert [record.reward for record in records[:5]] == [1.0] * 5
    for record, name in zip(records[5:], ("logit_bias={'5': 1}", "seed=3", "stop_token_ids"), strict=True):
        assert name in record.failure


EXECUTOR = textwrap.dedent(
    """
    class SamplingParams:
        "As vLLM's: the fields that are not named here have their defaults."
        __struct_fields__ = ("temperature", "top_p", "top_k", "max_tokens", "n", "stop", "bad_words", "_all")

        def __init__(self, **given):
            defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16, "n": 1, "stop": [],
                        "bad_words": [], "_all": set()}
            for name, value in {**defaults, **given}.items():
                setattr(self, name, value)

    class AgentExecutor:
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
            params = SamplingParams(max_tokens=50, stop=[" two"], **({"bad_words": ["x"]} if label == "bad" else {}))
            [found] = (await llm_engine.generate(tokens, params)).outputs
            ends = len(tokens) + len(found.token_ids)
            return {"observation_tokens": tokens + found.token_ids, "action_ranges": [(len(tokens), ends)],
                    "reward": float(found.text == "one;")}
    """
)


def test_fields_of_vllms_sampling_params_are_followed_or_refused(tmp_path):
    file = tmp_path / "executor.py"
    file.write_text(EXECUTOR)
    [record], _ = run(agent_driver(setup_of(path=f"{file}:AgentExecutor")), answer=lambda *_: ANSWER)
    assert (record.failure, record.reward) == (None, 1.0)  # the stop text is not in the answer's text
    [tokens] = trained(record)
    assert tokenizer_for(NAME).decode(tokens) == "one; two"
    file.write_text(EXECUTOR.replace('if label == "bad"', "if True"))
    [record], _ = run(agent_driver(setup_of(path=f"{file}:AgentExecutor")), answer=lambda *_: ANSWER)
    assert "bad_words=['x']" in record.failure


def test_only_fields_that_are_not_the_default_are_compared():
    class Params:
        def __init__(self, temperature=1.0, future="a", seed=None):
            self.temperature, self.future, self.seed, self._private = temperature, future, seed, 3

    assert public(Params()) == {"temperature": 1.0}
    assert public(Params(future="b")) == {"temperature": 1.0, "future": "b"}


def test_the_text_of_an_answer_is_that_of_vllm():
    engine = TokenEngine(None, tokenizer_for(NAME))
    end = encode("<|im_end|>", NAME)
    stopped = TokenAnswer(encode("one; two", NAME), [], True)
    assert engine.text(stopped, [" two"], False) == "one;"
    assert engine.text(stopped, [" two"], True) == "one; two"
    assert engine.text(TokenAnswer([*encode("one", NAME), *end], [], True), [], False) == "one"
    assert engine.text(TokenAnswer(encode("one", NAME), [], False), [" two"], False) == "one"
