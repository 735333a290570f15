"""A finished episode, as rewards, training and metrics read it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rloom.batch import Trajectory
from rloom.episodes.base import AtLimit, EnvironmentReport, ToolSchema
from rloom.episodes.episode import Branch, Episode, Node
from rloom.episodes.template import readable
from rloom.episodes.tool_calls import AUTO, parse_tool_calls, without_calls
from rloom.types import (
    ENVIRONMENT_FAILED,
    EpisodeStep,
    EpisodeSummary,
    Message,
    Prompt,
    Sample,
    SampledEpisode,
    Score,
    ToolCall,
)


class Ending(Enum):
    """Why an episode ended. A metric each: episode/ended/turn_limit."""

    DONE = "done"  # the environment said so
    TURNS = "turn limit"
    TOKENS = "token limit"
    TURN_TOKENS = "turn token limit"
    USER_TURNS = "user turn limit"  # replies of tools and of the environment
    EPISODE_TOKENS = "episode token limit"
    TIME = "time limit"
    FAILED = "environment failed"  # it raised an error
    NO_ANSWER = "environment timeout"
    EXITED = "environment exited"  # its process
    WRONG_REPLY = "wrong reply"
    REFUSED = "messages refused"  # by the chat template
    PROMPT = "prompt limit"  # too long before the first answer: the episode has no score

    @property
    def metric(self) -> str:
        return f"episode/ended/{self.value.replace(' ', '_')}"

    @property
    def at_limit(self) -> bool:
        return self in LIMITS


LIMITS = (Ending.TURNS, Ending.TOKENS, Ending.TURN_TOKENS, Ending.USER_TURNS, Ending.EPISODE_TOKENS, Ending.TIME)


@dataclass(frozen=True)
class EpisodeRecord:
    """A finished episode."""

    episode: Episode
    ending: Ending
    reward: float | None = None  # of the environment: of all turns, and of the end
    failure: str | None = None  # why the environment failed
    rewritten: int = 0  # times the chat template wrote the past in another way, which began a branch
    branched: int = 0  # times an agent changed its history, which began a branch
    environment_seconds: float = 0.0
    at_limit: AtLimit = "score"
    counts: Mapping[str, int] = field(default_factory=dict)  # of an agent's requests; a metric each
    requested_tokens: int = 0  # of all requests for answers
    reused_tokens: int = 0  # of them: the engine had their keys and values
    report: EnvironmentReport = field(default_factory=EnvironmentReport)  # of the environment, at the end
    in_loss: bool = True  # False: the episode is scored, and nothing of it is trained
    no_reward: str = ""  # why the reward is not known
    call_format: str = AUTO  # of tool calls

    @property
    def turns(self) -> int:
        return len(self.episode.turns)

    @property
    def no_score(self) -> str | None:
        """Why the episode has no score, whatever the rewards give."""
        if self.failure is not None:
            return f"{ENVIRONMENT_FAILED}{self.failure}"
        if self.ending.at_limit and self.at_limit == "fail":
            return f"the episode ended at a limit: {self.ending.value}"
        return None

    @property
    def last_path(self) -> list[int]:
        """The nodes up to the answer to the last request. Concurrent answers may have finished in another order."""
        turns = self.episode.turns
        return self.episode.path(turns[-1] if turns else len(self.episode.nodes) - 1)

    @property
    def answer(self) -> Node | None:
        """The answer to the last request, which rules score."""
        node = self.episode.nodes[self.last_path[-1]]
        return node if node.sampled else None

    @property
    def messages(self) -> list[Message]:
        """Of the branch that ends with the answer to the last request."""
        return [message for index in self.last_path for message in self.episode.nodes[index].messages]

    @property
    def messages_with_calls(self) -> list[Message]:
        """Those messages, with the calls of answers in OpenAI's form, as TRL gives them to reward functions."""
        found: list[Message] = []
        for index in self.last_path:
            node = self.episode.nodes[index]
            for message in node.messages:
                # the marks of some models are special tokens, which the message of an answer does not have
                marked = {**message, "content": node.conversation.answer} if node.sampled else message
                found.append(with_calls(message, marked, self.call_format, node.conversation.tools))
        return found

    @property
    def prompt(self) -> Node:
        """The first messages of that branch. One that the chat template rewrote begins with its whole past: then those
        of the branch before."""
        nodes = self.episode.nodes
        root = nodes[self.last_path[0]]
        begun = [node for node in nodes if node.parent is None and not node.rewritten]
        before = [node for node in begun if node.messages == root.messages[: len(node.messages)]]
        return max(before, key=lambda node: len(node.messages), default=root) if root.rewritten else root

    @property
    def after_prompt(self) -> tuple[int, ...]:
        """The tokens after the prompt, in the last branch."""
        nodes, path, prompt = self.episode.nodes, self.last_path, self.prompt
        tokens, root = self.episode.tokens(path[-1]), nodes[path[0]]
        shared = common_prefix(tokens, prompt.tokens_L.tolist())
        # the past may be written with other marks before its first answer than the prompt, not with another prompt
        asked = message_text(prompt.messages[-1]).strip() if prompt.messages else ""
        end = prompt.conversation.text.rfind(asked) + len(asked)
        same = root is prompt or prompt.conversation.text[:end] == root.conversation.text[:end]
        return tuple(tokens[shared if same else len(root.tokens_L) :])

    @property
    def text(self) -> str:
        """What the policy wrote."""
        return "\n".join(self.episode.nodes[index].messages[0]["content"] for index in self.episode.turns)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are equal from the beginning on."""
    different = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(different, min(len(first), len(second)))


def episode_sample(prompt: Prompt, record: EpisodeRecord, text: str) -> Sample:
    """As a reward receives it: the response is the last turn. `text`: of the tokens after the prompt."""
    first, answer = record.prompt, record.answer
    return Sample(
        data_source=prompt.data_source,
        prompt=first.conversation.text,
        response="" if answer is None else str(answer.messages[0]["content"]),
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        messages=first.messages,
        prompt_tokens=tuple(first.tokens_L.tolist()),
        response_tokens=() if answer is None else tuple(answer.tokens_L.tolist()),
        columns=prompt.columns,
        episode=SampledEpisode(
            tuple(record.messages_with_calls[len(first.messages) :]),
            text,
            record.after_prompt,
            record.reward,
            episode_info(record),
            record.report.state,
            record.no_reward,
        ),
    )


def episode_info(record: EpisodeRecord) -> dict[str, Any]:
    """What a function finds in `extra_info` beside the row's own."""
    nodes = record.episode.nodes
    answers = [nodes[index] for index in record.episode.turns]
    return {
        "messages": record.messages,
        "final_answer": str(answers[-1].messages[0]["content"]) if answers else "",
        "num_turns": len(nodes),  # as in verl: the prompt, the answers, and what followed them
        "turn_scores": [node.reward for node in answers if node.reward is not None],
        "tool_calls": [asdict(call) for node in nodes for call in node.calls],
        "environment_reward": record.reward,
        "ending": record.ending.value,
        **record.report.facts,
    }


def with_calls(message: Message, marked: Message, form: str, tools: Sequence[ToolSchema]) -> Message:
    """The calls of an answer apart from its text, with arguments as mappings. `marked`: with its special tokens."""
    text = marked.get("content") or ""
    calls = parse_tool_calls(text, form, tools) if message["role"] == "assistant" and isinstance(text, str) else []
    made = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
        if call.error is None
    ]
    if not made:
        return message
    read = readable(marked)
    content = read["content"] if read.get("tool_calls") else without_calls(text, form, tools)
    return {**message, "content": content, "tool_calls": made}


def episode_trajectories(
    record: EpisodeRecord, prompt: Prompt, group: int, score: Score, turn_weight: float = 1.0
) -> list[Trajectory]:
    """One for each branch. An episode whose environment failed has no score, whatever the rewards gave.

    Rewards of turns are placed where they were given, and the rest of the score at the end.
    """
    if record.no_score is not None:
        score = Score.failed(record.no_score)
    branches = list(record.episode.branches())
    summary = episode_summary(record, branches)
    return [
        Trajectory(
            prompt=prompt,
            group=group,
            tokens_L=branch.tokens_L,
            logprobs_L=branch.logprobs_L,
            turns=branch.turns,
            finished=not record.ending.at_limit,
            score=score,
            text=record.text,
            episode=summary,
            branch=number,
            # without a reward of the episode the score is another one, and those of its turns are no part of it
            turn_rewards=turn_rewards(record.episode, branch, turn_weight)
            if score.ok and record.reward is not None
            else (),
            experts_LMK=branch.experts_LMK,
            in_loss=record.in_loss and not (record.ending.at_limit and record.at_limit == "mask"),
        )
        for number, branch in enumerate(branches)
    ]


def turn_rewards(episode: Episode, branch: Branch, weight: float) -> tuple[tuple[int, float], ...]:
    """(index of a token, part of the score) such that, without a discount, the return of each token of the branch is
    the sum of the rewards from its turn to the end of the episode, whatever other branches the turns between are in.

    A turn has its reward and those of later turns of other branches, up to the next turn of its own branch. What
    follows the last turn of the branch is in the rest of the score, at its last token. What turns before the branch
    were given is at its first token, which is not sampled: it is not in the rewards of this branch.
    """
    ends = {index: turn.stop - 1 for index, turn in zip(branch.trained, branch.turns, strict=True)}
    placed: dict[int, float] = {}
    place = 0
    for index in episode.turns:
        place, reward = ends.pop(index, place), episode.nodes[index].reward
        if reward is not None:
            placed[place] = placed.get(place, 0.0) + weight * reward
        if not ends:
            break
    return tuple(placed.items())


def episode_summary(record: EpisodeRecord, branches: Sequence[Branch]) -> EpisodeSummary:
    nodes = record.episode.nodes
    origins = [
        "prompt" if number == 0 else "template" if any(nodes[index].rewritten for index in branch.nodes) else "agent"
        for number, branch in enumerate(branches)
    ]
    return EpisodeSummary(
        record.ending.value,
        tuple(episode_steps(nodes, branch) for branch in branches),
        tuple(origins),
        record.reward,
        record.failure,
        record.environment_seconds,
        record.rewritten,
        record.branched,
        len(nodes[0].conversation.tools),
        dict(record.counts),
        record.requested_tokens,
        record.reused_tokens,
        record.report.metrics,
    )


def episode_steps(nodes: Sequence[Node], branch: Branch) -> tuple[EpisodeStep, ...]:
    steps: list[EpisodeStep] = []
    start = 0
    for place, index in enumerate(branch.nodes):
        node, stop = nodes[index], start + len(nodes[index].tokens_L)
        after = nodes[branch.nodes[place + 1]].messages if place + 1 < len(branch.nodes) else ()
        steps.append(
            EpisodeStep(
                source="policy" if node.sampled else "prompt" if node.parent is None else "environment",
                start=start,
                stop=stop,
                messages=tuple((str(one.get("role", "")), message_text(one)) for one in node.messages),
                trained=index in branch.trained,
                version=node.version,
                finished=node.finished,
                seconds=node.seconds,
                reward=node.reward,
                calls=node.calls or agent_calls(node, after),
            )
        )
        start = stop
    return tuple(steps)


def message_text(message: Message) -> str:
    """Content of other kinds than text is shown as it is written."""
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else str(content)


def agent_calls(answer: Node, after: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Calls that an agent ran itself: their results are in the messages that it sent next."""
    results = {message.get("tool_call_id"): message_text(message) for message in after}
    return tuple(
        ToolCall(call["function"]["name"], call["function"]["arguments"], results.get(call["id"], ""))
        for message in answer.shown or ()
        if answer.sampled
        for call in message.get("tool_calls", ())
    )


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of one step or one validation. Empty if its answers have one turn."""
    episodes = [t.episode for t in trajectories if t.episode is not None and t.branch == 0]
    if not episodes:
        return {}
    count = len(episodes)
    endings = Counter(episode.ending for episode in episodes)
    turns = [len(episode.turns) for episode in episodes]
    metrics = {
        "episode/turns/mean": sum(turns) / count,
        "episode/turns/max": float(max(turns)),
        "episode/environment_seconds": sum(episode.environment_s for episode in episodes) / count,
        "episode/failed": sum(episode.failure is not None for episode in episodes) / count,
        "episode/kv_reused": sum(one.reused_tokens for one in episodes)
        / max(1, sum(one.requested_tokens for one in episodes)),
        "episode/added_tokens": sum(map(added_tokens, episodes)) / count,
        "episode/repeated_tokens": sum(map(repeated_tokens, episodes)) / count,
        "episode/branches": sum(len(episode.branches) for episode in episodes) / count,
        "episode/rewritten_past": sum(episode.rewritten > 0 for episode in episodes) / count,
        "episode/branched": sum(episode.branched > 0 for episode in episodes) / count,
        **{ending.metric: endings[ending.value] / count for ending in Ending},
    }
    counted = sorted({name for episode in episodes for name in episode.requests})
    metrics |= {f"agent/{name}": sum(one.requests.get(name, 0) for one in episodes) / count for name in counted}
    return metrics | tool_metrics(episodes) | environment_metrics(episodes)


def tool_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Empty if there are no tools."""
    calls = [call for episode in episodes for call in episode.calls]
    metrics = {}
    if calls or any(episode.tools for episode in episodes):
        metrics = {
            "tool/calls": len(calls) / len(episodes),
            "tool/unused": sum(not episode.calls for episode in episodes) / len(episodes),
        }
    if calls:
        metrics |= {
            "tool/errors": sum(call.error is not None for call in calls) / len(calls),
            "tool/timeouts": sum(call.timed_out for call in calls) / len(calls),
            "tool/seconds/mean": sum(call.seconds for call in calls) / len(calls),
            "tool/seconds/max": max(call.seconds for call in calls),
        }
    return metrics


def environment_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Means of what environments and tools report, over the episodes that report it."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            found.setdefault(f"environment/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def added_tokens(episode: EpisodeSummary) -> int:
    """Tokens that the environment added after an answer, without those that a further branch repeats."""
    return sum(
        step.stop - step.start
        for branch in episode.branches
        for step in branch
        if step.source == "environment" and step.start > first_turn(branch)
    )


def repeated_tokens(episode: EpisodeSummary) -> int:
    """Tokens before the first turn that a further branch trains: the models read them once more."""
    return sum(map(first_turn, episode.branches[1:]))


def first_turn(branch: Sequence[EpisodeStep]) -> int:
    return next((step.start for step in branch if step.trained), 0)
