"""The sections of episodes: answers of several turns."""

from typing import Annotated, Any, Literal

from rloom.config.base import GIVEN_IN_PYTHON, NamedIn, Section, key, names_code
from rloom.environments.kinds import ENVIRONMENTS
from rloom.episodes.kinds import ENVIRONMENT_GROUP


class MultiTurnSection(Section):
    kind: str | None = key(
        None,
        "Your own kind of episodes: an EpisodeKind as file.py:name or module:name, or the name that an installed "
        "package registers as an entry point of rloom.episode_kinds. null: the kind follows from the other keys.",
        needs_consent=bool,
    )
    enable: bool | None = key(
        None,
        "As verl's commands have it. True: answers have several turns, and another key says with what. null: if one "
        "does.",
    )
    environment: Annotated[str | None, NamedIn(ENVIRONMENTS, ENVIRONMENT_GROUP, (GIVEN_IN_PYTHON,))] = key(
        None,
        "What answers the policy between its turns: the name of an environment of rloom, or your own class or list of "
        "functions as file.py:name or module:name. null: one turn, unless tools or an agent are set.",
        needs_consent=names_code,
    )
    environment_kwargs: dict[str, Any] = key({}, "Arguments of the environment's class.")
    function_tool_path: str | None = key(
        None, "A Python file whose functions marked with @function_tool are tools.", needs_consent=bool
    )
    tool_config_path: str | None = key(
        None,
        "A YAML file that lists tools, as verl has it: classes of BaseTool, and MCP servers. Or a JSON file of MCP "
        'servers: {"mcpServers": {...}}.',
        needs_consent=bool,
    )
    interaction_config_path: str | None = key(
        None, "A YAML file that lists classes which answer the policy in place of a user.", needs_consent=bool
    )
    format: Literal[
        "auto",
        "hermes",
        "qwen",
        "qwen3_coder",
        "glm",
        "llama3_json",
        "mistral",
        "gpt-oss",
        "gemma",
        "gemma4",
        "deepseek",
        "code_block",
    ] = key(
        "auto",
        "The form in which calls of tools are read. hermes or qwen: that of Qwen2.5 and Qwen3. code_block: ```python, "
        "for models that were not trained to call tools. auto: every one but code_block.",
    )
    max_assistant_turns: int | None = key(None, "Turns of the policy in an episode. null: no limit.", ge=1)
    max_user_turns: int | None = key(
        None,
        "Answers of tools and of the environment in an episode; the policy answers the last one. null: no limit.",
        ge=1,
    )
    max_turn_length: int | None = key(
        None, "Tokens of one turn. null: what is left of `data.max_response_length`.", ge=1
    )
    max_episode_length: int | None = key(
        None,
        "Tokens of an episode after its first prompt, sampled and added, in all its branches. null: only the length of "
        "each branch is limited.",
        ge=1,
    )
    max_parallel_calls: int = key(
        1,
        "Calls of tools in one turn; further ones are not run. Async functions run at the same time, others one after "
        "the other.",
        ge=1,
    )
    max_tool_response_length: int | None = key(
        None,
        "Characters of one tool's result; longer ones are cut. null: 256 for verl's tools, as in verl, and no limit "
        "for others.",
        ge=1,
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "Which side of a long result is kept: left, right, or both without the middle."
    )
    tool_timeout_s: float = key(
        60.0,
        "Time limit of one call of a tool or one step of the environment; of an agent between two of its requests.",
        gt=0,
    )
    tool_error: Literal["text", "fail"] = key(
        "text", "A tool that raises an error or exceeds its limit: the policy reads the error, or the episode fails."
    )
    episode_timeout_s: float | None = key(None, "Time limit of an episode. null: none; 3600 for an agent.", gt=0)
    at_limit: Literal["score", "mask", "fail"] = key(
        "score",
        "An episode that ends at a limit of turns, tokens or time. score: it is scored like others; mask: it is scored "
        "and its tokens are not in the loss; fail: it has no score.",
    )
    max_environments: int = key(512, "Episodes that run at a time, each in a process.", ge=1)


class AgentSection(Section):
    path: str | None = key(
        None,
        "Your agent as file.py:name or module:name: `async def agent(base_url, row, **kwargs)`, which asks the policy "
        "at base_url with any client of OpenAI's or Anthropic's API, and returns a reward or {'reward': ...}; a class "
        "with `run(self, data, **extra)`; a class of verl's AgentLoopBase or of OpenRLHF's AgentExecutorBase.",
        needs_consent=bool,
    )
    command: str | None = key(
        None,
        "A program that is the agent: it finds the policy at OPENAI_BASE_URL or ANTHROPIC_BASE_URL, and the row as "
        "JSON on its standard input; it prints the reward as its last line: a number, or "
        '{"reward": ...}.',
        needs_consent=bool,
    )
    kwargs: dict[str, Any] = key({}, "Further arguments of the agent, or of its class.")
    rewards_over_http: bool = key(
        False,
        "For `command`: the row has `reward_key`, with which the program may send rewards to /rl/set_reward. A "
        "function of `path` that has the argument `reward_key` gets it there.",
    )
    default_agent_loop: str | None = key(
        None,
        "The agent loop of rows without a column `agent_name`: a name in `agent_loop_config_path`, or file.py:name of "
        "a class. null: single_turn_agent, or tool_agent with tools.",
        needs_consent=names_code,
    )
    agent_loop_config_path: str | None = key(
        None,
        "A YAML file that lists classes of AgentLoopBase: `name`, `_target_`, further arguments.",
        needs_consent=bool,
    )
    port: int = key(0, "Port of the policy's address on this machine. 0: a free one.", ge=0, le=65535)
