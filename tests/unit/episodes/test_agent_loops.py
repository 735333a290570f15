"""Agents that ask with tokens: verl's agent loops and OpenRLHF's executors, where neither is installed."""

import textwrap
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from rloom.episodes.agents.driver import AgentLoopDriver, OneTurnDriver
from rloom.episodes.agents.outputs import episode_of
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.episode import Episode, Node
from rloom.episodes.kinds import chosen_kinds, episode_faults
from rloom.episodes.record import Ending, episode_trajectories
from rloom.episodes.template import RenderedConversation
from rloom.errors import ConfigError, DataError, RloomError
from rloom.launch.early_checks import check_episodes
from rloom.launch.episodes import agent_loop_driver, check_agent_names
from rloom.types import Prompt, Score
from tests.helpers import configured
from tests.unit.episodes.agent_runs import (
    LIMITS,
    NAME,
    Letters,
    agent_driver,
    flat,
    kept,
    loop_driver,
    run,
    setup_of,
    texts_of,
    trained,
)
from tests.unit.episodes.conversations import encode, tokenizer_for
from tests.unit.episodes.engines import texts_for
from tests.unit.episodes.peers import extracted

LOOPS = textwrap.dedent(
    """
    import asyncio
    from uuid import uuid4
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
    from verl.utils.profiler import simple_timer
    from verl.utils.rollout_trace import rollout_trace_op

    @register("talks")
    class Talks(AgentLoopBase):
        def __init__(self, *args, turns=3, **kwargs):
            super().__init__(*args, **kwargs)
            self.turns = turns
            self.response_length = self.config.actor_rollout_ref.rollout.response_length

        async def ask(self, ids, sampling_params):
            return await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
            )

        def output(self, prompt, ids, mask, **more):
            return AgentLoopOutput(
                prompt_ids=ids[: len(prompt)], response_ids=ids[len(prompt) :], response_mask=mask, metrics={}, **more
            )

        @rollout_trace_op
        async def run(self, sampling_params, **kwargs):
            prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            ids, mask, metrics = list(prompt), [], {}
            for turn in range(self.turns):
                with simple_timer("generate_sequences", metrics):
                    found = await self.ask(ids, sampling_params)
                assert len(found.log_probs) == len(found.token_ids)
                ids += found.token_ids
                mask += [1] * len(found.token_ids)
                if turn + 1 < self.turns:
                    message = [{"role": "user", "content": "go on"}]
                    added = await self.apply_chat_template(message, remove_system_prompt=True)
                    ids += added
                    mask += [0] * len(added)
            return self.output(prompt, ids, mask, reward_score=float(kwargs.get("worth", 0.5)), num_turns=self.turns)

    class Faulty(Talks):
        async def run(self, sampling_params, what="", **kwargs):
            prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            if what == "invents":
                return self.output(prompt, prompt + [5, 6], [1, 1])
            found = await self.ask(prompt, sampling_params)
            ids = found.token_ids
            if what == "encodes again":
                ids = self.tokenizer(self.tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
            if what == "trains the prompt":
                return self.output(prompt[:-1], prompt + ids, [1] * (len(ids) + 1))
            if what == "samples otherwise":
                await self.ask(prompt + ids, {**sampling_params, "temperature": 0.1})
            if what == "unknown token":
                await self.ask([10**6], sampling_params)
            if what == "nothing":
                return []
            if what == "nothing at all":
                return None
            if what == "short mask":
                return self.output(prompt, prompt + ids, [1])
            if what == "raises":
                raise KeyError("tool")
            return self.output(prompt, prompt + ids, [1] * len(ids))

    class Branches(Talks):
        async def run(self, sampling_params, **kwargs):
            prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            tried = await asyncio.gather(*(self.ask(prompt, sampling_params) for _ in range(3)))
            first = prompt + tried[0].token_ids
            then = await self.ask(first + [7], sampling_params)
            long = self.output(prompt, first + [7] + then.token_ids,
                               [1] * len(tried[0].token_ids) + [0] + [1] * len(then.token_ids))
            other = self.output(prompt, prompt + tried[1].token_ids, [1] * len(tried[1].token_ids), reward_score=1.5)
            return [long, other]

    @register("waits for nothing")
    class Synchronous(Talks):
        def run(self, sampling_params, **kwargs):
            return 3

    class Samples(Talks):
        async def run(self, sampling_params, **kwargs):
            prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            tried = await asyncio.gather(*(self.ask(prompt, sampling_params) for _ in range(3)))
            return [self.output(prompt, prompt + one.token_ids, [1] * len(one.token_ids)) for one in tried]

    class Masks(Talks):
        async def run(self, sampling_params, **kwargs):
            prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            found = await self.ask(prompt, {**sampling_params, "max_tokens": 4})
            ids = found.token_ids
            return self.output(prompt, prompt + ids + [9, 9], [1, 0, 1, 1, 0, 0])
    """
)


TOOLS = textwrap.dedent(
    """
    from verl.tools.function_tool import function_tool

    @function_tool
    def one():
        'One.'
        return "1", 0.5, {}
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops")
    (folder / "my_loops.py").write_text(LOOPS)
    listed = [
        "- {name: long, _target_: my_loops.Talks, turns: 5}",
        "- {name: faulty, _target_: my_loops.Faulty}",
        "- {name: branches, _target_: my_loops.Branches}",
        "- {name: samples, _target_: my_loops.Samples}",
        "- {name: masks, _target_: my_loops.Masks}",
    ]
    (folder / "loops.yaml").write_text("\n".join(listed))
    return folder


@pytest.fixture(scope="module")
def loops(folder):
    """Driver of a default loop; one process has loaded the file for all tests."""
    with kept(agent_driver(setup_of(loops=(str(folder / "loops.yaml"),)))) as agents:
        yield lambda default: replace(
            agents, driver=AgentLoopDriver(agents.driver, {"single_turn_agent": OneTurnDriver()}, default)
        )


def test_a_loop_is_one_branch_with_the_recorded_log_probs_and_versions(loops):
    [record], [sampled] = run(loops("talks"), answer=lambda number, turn: "7" * (turn + 1))
    assert (record.ending, record.reward, record.failure, record.turns) == (Ending.DONE, 0.5, None, 3)
    assert trained(record) == sampled
    [trajectory] = episode_trajectories(record, Prompt(0, (), "", (), "game"), 0, Score(0.5))
    assert [turn.version for turn in trajectory.turns] == [0, 1, 2]
    lengths = [len(answer) for answer in sampled]
    assert trajectory.logprobs_L[trajectory.mask_L].tolist() == [-place for n in lengths for place in range(1, n + 1)]
    [text] = texts_of(record)
    assert text.count("<|im_start|>user\ngo on") == 2 and text.endswith("777<|im_end|>")


def test_the_row_names_its_loop_and_its_columns_are_arguments(loops):
    rows = {0: {"agent_name": "long", "worth": 2}, 1: {"agent_name": "single_turn_agent"}}
    records, sampled = run(loops("talks"), 3, rows=rows)
    assert [record.reward for record in records] == [2.0, None, 0.5]
    assert [len(answers) for answers in sampled] == [5, 1, 3]
    assert [trained(record) for record in records] == sampled


def test_rlooms_own_loops_are_chosen_by_their_names_beside_tools(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    tools = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}"
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    rows = {0: {"agent_name": "tool_agent"}, 1: {"agent_name": "single_turn_agent"}}
    call = '<tool_call>{"name": "one", "arguments": {}}</tool_call>'
    for default, turns in (("single_turn_agent", [2, 1, 1]), ("tool_agent", [2, 1, 2])):
        config = configured(tools, f"{key}={default}")
        assert list(chosen_kinds(config)) == ["agent_loop"] and not list(episode_faults(config))
        driver = agent_loop_driver(config, texts_for(NAME), LIMITS)
        records, _ = run(driver, 3, rows=rows, answer=lambda _, turn: "done" if turn else call)
        assert [record.failure for record in records] == [None] * 3
        assert [record.turns for record in records] == turns
        assert [record.reward for record in records] == [None] * 3  # 0.5 of the tool is not the score
        assert not chosen_kinds(configured(f"{key}={default}"))  # alone, answers have one turn
    contradiction = configured("actor_rollout_ref.rollout.multi_turn.environment=sql", f"{key}=single_turn_agent")
    assert ["keep one" in fault for fault in episode_faults(contradiction)] == [True]


def test_a_row_that_names_no_loop_is_an_error_at_the_start(loops):
    driver = loops("talks").driver
    rows = [
        Prompt(n, (), "", (), "game", columns={"agent_name": name}) for n, name in enumerate(("talks", "", "tlaks"))
    ]
    check_agent_names(None, driver, {"data.train_files": rows[:2]})
    with pytest.raises(DataError, match=r"data\.val_files, row 2 \(.*\): the row has agent_name='tlaks'"):
        check_agent_names(None, driver, {"data.train_files": rows[:2], "data.val_files": rows})
    [record], _ = run(loops("talks"), rows={0: {"agent_name": "tlaks"}})  # a row of `rloom chat`
    assert record.failure.startswith("agent_name='tlaks': the agent loops are single_turn_agent, ")


def test_rows_of_tool_agent_are_checked_against_the_tools_and_others_are_not(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    tools = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}"
    misspelt = {"extra_info": {"tool_selection": ["oen"]}}

    def rows(name):
        return {"data.train_files": [Prompt(3, (), "", (), "game", columns={"agent_name": name, **misspelt})]}

    for default, faulty in (("tool_agent", ("", "tool_agent")), ("single_turn_agent", ("tool_agent",))):
        config = configured(tools, f"actor_rollout_ref.rollout.agent.default_agent_loop={default}")
        with closing(agent_loop_driver(config, texts_for(NAME), LIMITS)) as driver:
            for name in ("", "tool_agent", "single_turn_agent"):
                if name not in faulty:
                    check_agent_names(config, driver, rows(name))
                    continue
                with pytest.raises(DataError, match=r"data\.train_files, row 3 .*tool_selection has 'oen'"):
                    check_agent_names(config, driver, rows(name))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("agent_loop_config_path=nothing.yaml", "nothing.yaml does not exist; give a YAML file"),
        ("agent_loop_config_path={}", "entry 2 has no _target_; it has name, target: it is a list of `- name: NAME`"),
        ("default_agent_loop=nothing.py:Loop", "nothing.py"),
    ],
)
def test_files_of_loops_are_checked_before_torch(tmp_path, override, sentence):
    file = tmp_path / "loops.yaml"
    file.write_text("[{name: a, _target_: a.A}, {name: b, target: a.B}]")
    with pytest.raises(ConfigError) as error:
        check_episodes(configured(f"actor_rollout_ref.rollout.agent.{override.format(file)}"))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a: {name: a}", "has a dict; it is a list of `- name: NAME`"), ("- [", "cannot be read (")],
)
def test_a_list_of_another_form_is_an_error_before_torch(tmp_path, text, sentence):
    file = tmp_path / "loops.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="agent_loop_config_path") as error:
        check_episodes(configured(f"actor_rollout_ref.rollout.agent.agent_loop_config_path={file}"))
    assert sentence in str(error.value)


def test_a_run_that_returns_no_output_or_cannot_be_awaited_says_so(loops):
    rows = {0: {"what": "nothing at all"}, 1: {"agent_name": "waits for nothing"}}
    records, _ = run(loops("faulty"), 2, rows=rows)
    assert records[0].failure == "run of Faulty returned None; return an AgentLoopOutput"
    assert records[1].failure == "run of Synchronous is not asynchronous; write `async def run`"


def test_a_class_can_be_named_as_the_default(folder):
    reference = f"{folder / 'my_loops.py'}:Talks"
    [record], [sampled] = run(loop_driver(reference, loops=(reference,)))
    assert trained(record) == sampled and record.reward == 0.5
    [record], [sampled] = run(agent_driver(setup_of(path=reference, kwargs={"turns": 2})))
    assert trained(record) == sampled and len(sampled) == 2


def test_tokens_that_were_not_sampled_fail_their_episode_with_the_reason(loops):
    whats = ["", "encodes again", "invents", "trains the prompt", "samples otherwise", "unknown token"]
    whats += ["nothing", "short mask", "raises"]
    rows = {n: {"what": what} for n, what in enumerate(whats)}
    # "higher" is one token of the tokenizer; sampled letter by letter, it is encoded in another way
    stop = encode("<|im_end|>", NAME)
    letters = [token for letter in "higher" for token in encode(letter, NAME)]
    assert encode("higher", NAME) != letters and tokenizer_for(NAME).decode(letters) == "higher"
    records, sampled = run(loops("faulty"), len(whats), rows=rows, answer=lambda number, turn: Letters(letters))
    assert sampled[1] == [letters + stop]
    found = dict(zip(whats, (record.failure for record in records), strict=True))
    assert found[""] is None and trained(records[0]) == sampled[0]
    place = len(records[0].episode.nodes[0].tokens_L)
    not_sampled = "of the agent's output has mask 1 and was not sampled after the tokens before it"
    assert found["encodes again"].startswith(f"token {place} {not_sampled}")
    assert found["invents"] == "the agent asked for no answer; send its requests to the policy that it is given"
    assert found["trains the prompt"].startswith(f"token {place - 1} {not_sampled}")
    assert "temperature=0.1, and the run samples with 1.0" in found["samples otherwise"]
    assert found["unknown token"] == "the agent asked with a prompt of unknown tokens"
    assert found["nothing"] == "the agent returned no output"
    assert "response_mask has 1 entries" in found["short mask"]
    assert found["raises"] == "KeyError: 'tool' (my_loops.py:64 in Faulty.run)"


def test_samples_with_the_same_tokens_are_all_trained(loops):
    [record], [sampled] = run(loops("samples"), answer=lambda number, turn: "7")
    assert trained(record) == sampled and sampled == [sampled[0]] * 3


def test_an_answer_that_was_continued_does_not_hide_an_equal_one():
    def node(parent, tokens, sampled):
        logprobs_L = -torch.ones(len(tokens)) if sampled else None
        return Node(parent, (), torch.tensor(tokens), RenderedConversation((), (), ""), sampled, logprobs_L)

    recorded = Episode(
        [node(None, [1, 2], False), node(0, [7], True), node(1, [3], False), node(2, [8], True), node(0, [7], True)]
    )
    found = episode_of(recorded, [([1, 2, 7], [0, 0, 1])] * 2, str)
    assert [node.tokens_L.tolist() for node in found.nodes if node.sampled] == [[7], [7]]


def test_outputs_are_branches_and_answers_in_none_of_them_are_left_out(loops):
    [record], [sampled] = run(loops("branches"), answer=lambda number, turn: "7" * (turn + 1))
    assert len(sampled) == 4 and record.reward == 1.5
    assert trained(record) == [sampled[0], sampled[3], sampled[1]]
    long, other = (branch.tokens_L.tolist() for branch in record.episode.branches())
    assert long[-len(sampled[3]) - 1] == 7 and other[: -len(sampled[1])] == long[: len(other) - len(sampled[1])]


def test_the_mask_of_a_loop_decides_which_sampled_tokens_are_trained(loops):
    [record], [sampled] = run(loops("masks"), answer=lambda number, turn: "7 8 9 1 2 3")
    assert len(sampled[0]) == 4
    assert trained(record) == [sampled[0][:1], sampled[0][2:]]
    [branch] = record.episode.branches()
    start = branch.turns[0].start
    assert branch.logprobs_L[start:].tolist() == [-1, 0, -3, -4]


def test_a_limit_gives_an_empty_answer_and_the_output_counts(loops):
    [record], [sampled] = run(loops("talks"), limits=EpisodeLimits(400, turns=2, call_s=20.0))
    assert (record.ending, record.failure, record.reward) == (Ending.TURNS, None, 0.5)
    assert trained(record) == sampled and len(sampled) == 2


def test_a_loop_that_cannot_be_imported_is_an_error_before_training(tmp_path):
    file = tmp_path / "loops.yaml"
    file.write_text("- {name: a, _target_: nothing_of_that_name.A}")
    with pytest.raises(RloomError, match="agent_loop_config_path") as error:
        loop_driver("a", loops=(str(file),))
    assert "_target_ nothing_of_that_name.A cannot be imported" in str(error.value)


# as their files have it; importing torch takes longer than the rest
TENSOR = "import torch\nnumber = lambda done: torch.tensor([float(done)])\n"
INSTANCES = textwrap.dedent(
    """
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

    class AgentInstance(AgentInstanceBase):
        def __init__(self, *args, **kwargs):
            self.turn = 0

        async def reset(self, states, **kwargs):
            return {"observation": states["observation"] + "(begin)"}

        async def step(self, states, **kwargs):
            self.turn += 1
            assert states["observation_text"].count("\\n<user> wrong") == self.turn - 1
            assert states["label"] == "7"
            done = states["action_text"] == states["label"]
            return {
                "rewards": number(done),
                "scores": number(done),
                "environment_feedback": "" if done else "\\n<user> wrong\\n<bot> ",
                "done": done,
                "sampling_params": states["sampling_params"],
                "extra_logs": {},
            }

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)

    class Own(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
            tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
            found = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            assert [set(one) for one in found.logprobs] == [{token} for token in found.token_ids]
            return {
                "prompt": prompt, "label": label, "reward": max_length + len(found.text), "scores": None,
                "observation_tokens": tokens + found.token_ids,
                "action_ranges": [(len(tokens), len(tokens) + len(found.token_ids))],
                "rollout_log_probs": None, "extra_logs": {},
            }
    """
)


@pytest.mark.parametrize(("name", "number"), [("AgentExecutor", TENSOR), ("AgentInstance", "number = float\n")])
def test_feedback_of_an_openrlhf_agent_is_added_as_it_is(tmp_path, name, number):
    file = tmp_path / "agent_func.py"
    file.write_text(number + INSTANCES)
    answers = ["5", "6", "7"]
    [record], [sampled] = run(agent_driver(setup_of(path=f"{file}:{name}")), answer=lambda _, turn: answers[turn])
    assert (record.failure, record.reward, record.turns) == (None, 1.0, 3)
    assert trained(record) == sampled
    start = "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n(begin)"
    feedback = "<|im_end|>\n<user> wrong\n<bot> "
    assert texts_of(record) == [f"{start}5{feedback}6{feedback}7<|im_end|>"]
    [branch] = record.episode.branches()
    added = branch.tokens_L[branch.turns[0].stop : branch.turns[1].start].tolist()
    assert added == encode("\n<user> wrong\n<bot> ", NAME)


def test_an_executor_of_the_users_own(tmp_path):
    file = tmp_path / "agent_func.py"
    file.write_text(INSTANCES)
    limits = EpisodeLimits(400, total_tokens=64)
    driver = agent_driver(setup_of(path=f"{file}:Own"))
    [record], [sampled] = run(driver, answer=lambda _, turn: "777", limits=limits)
    assert (record.failure, record.reward, trained(record)) == (None, 64 + 3, sampled)


def test_openrlhfs_example_runs_unchanged(tmp_path):
    path = "examples/python/agent_func.py"
    file = extracted("OpenRLHF+OpenRLHF", tmp_path, path) / path
    records, sampled = run(agent_driver(setup_of(path=f"{file}:AgentExecutor")), 4)
    assert [record.failure for record in records] == [None] * 4
    assert [trained(record) for record in records] == sampled
    assert all(record.reward in (0.0, 1.0) and 2 <= record.turns <= 4 for record in records)
    assert "\n\nHuman: [INCORRECT]" in texts_of(records[0])[0]


def test_verls_single_turn_loop_runs_unchanged(tmp_path):
    path = "verl/experimental/agent_loop/single_turn_agent_loop.py"
    file = extracted("volcengine+verl", tmp_path, path) / path
    loops = file.parent / "loops.yaml"
    loops.write_text(f"- {{name: theirs, _target_: {file.stem}.SingleTurnAgentLoop}}")
    driver = loop_driver("theirs", loops=(str(loops),))
    [record], [sampled] = run(driver)
    assert (record.failure, trained(record), flat(sampled)) == (None, sampled, flat(trained(record)))
