"""A finished episode, as rewards, training and metrics read it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rloom.batch import Trajectory
from rloom.episodes.episode import Branch, Episode, Node
from rloom.types import EpisodeStep, EpisodeSummary, Message, Prompt, Sample, Score, ToolCall


class Ending(Enum):
    """Why an episode ended."""

    DONE = "done"  # the environment said so
    TURNS = "turn limit"
    TOKENS = "token limit"
    TURN_TOKENS = "token limit of a turn"
    TIME = "time limit"
    FAILED = "environment failed"


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

    @property
    def turns(self) -> int:
        return sum(node.sampled for node in self.episode.nodes)

    @property
    def messages(self) -> list[Message]:
        """Of the last branch."""
        nodes = self.episode.nodes
        return [message for index in self.episode.path(len(nodes) - 1) for message in nodes[index].messages]

    @property
    def text(self) -> str:
        """What the policy wrote."""
        return "\n".join(node.messages[0]["content"] for node in self.episode.nodes if node.sampled)


def episode_sample(prompt: Prompt, record: EpisodeRecord) -> Sample:
    """As a reward receives it: the response is what the policy wrote in all turns."""
    tokens = [token for node in record.episode.nodes if node.sampled for token in node.tokens_L.tolist()]
    return Sample(
        data_source=prompt.data_source,
        prompt=prompt.text,
        response=record.text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        messages=prompt.messages,
        prompt_tokens=prompt.tokens,
        response_tokens=tuple(tokens),
        columns=prompt.columns,
        conversation=tuple(record.messages),
        environment_reward=record.reward,
    )


def episode_trajectories(record: EpisodeRecord, prompt: Prompt, group: int, score: Score) -> list[Trajectory]:
    """One for each branch. An episode whose environment failed has no score, whatever the rewards gave."""
    if record.failure is not None:
        score = Score.failed(f"the environment failed: {record.failure}")
    # rewards of turns are placed where they were given if they are all of the score; a mix is given at the end
    placed = score.value is not None and record.reward is not None and abs(score.value - record.reward) < 1e-9
    branches = list(record.episode.branches())
    summary = episode_summary(record, branches)
    return [
        Trajectory(
            prompt=prompt,
            group=group,
            tokens_L=branch.tokens_L,
            logprobs_L=branch.logprobs_L,
            turns=branch.turns,
            finished=branch.finished and record.ending is Ending.DONE,
            score=score,
            text=record.text,
            episode=summary,
            branch=number,
            turn_rewards=branch.rewards if placed and len(branches) == 1 else (),
            experts_LMK=branch.experts_LMK,
        )
        for number, branch in enumerate(branches)
    ]


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
    )


def episode_steps(nodes: Sequence[Node], branch: Branch) -> tuple[EpisodeStep, ...]:
    steps: list[EpisodeStep] = []
    trained, start = {turn.start for turn in branch.turns}, 0
    for place, index in enumerate(branch.nodes):
        node, stop = nodes[index], start + len(nodes[index].tokens_L)
        after = nodes[branch.nodes[place + 1]].messages if place + 1 < len(branch.nodes) else ()
        steps.append(
            EpisodeStep(
                source="policy" if node.sampled else "prompt" if node.parent is None else "environment",
                start=start,
                stop=stop,
                messages=tuple((str(one.get("role", "")), message_text(one)) for one in node.messages),
                trained=node.sampled and start in trained,
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
        for call in (answer.shown or {}).get("tool_calls", ())
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
        "episode/environment_timeouts": sum(episode.timed_out for episode in episodes) / count,
        "episode/added_tokens": sum(map(added_tokens, episodes)) / count,
        "episode/repeated_tokens": sum(map(repeated_tokens, episodes)) / count,
        "episode/branches": sum(len(episode.branches) for episode in episodes) / count,
        "episode/rewritten_past": sum(episode.rewritten > 0 for episode in episodes) / count,
        "episode/branched": sum(episode.branched > 0 for episode in episodes) / count,
        **{f"episode/ended/{ending.value.replace(' ', '_')}": endings[ending.value] / count for ending in Ending},
    }
    return metrics | tool_metrics(episodes)


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
