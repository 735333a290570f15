"""A finished episode, as rewards, training and metrics read it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from rloom.batch import Trajectory
from rloom.episodes.base import Report
from rloom.episodes.episode import Episode
from rloom.episodes.tool_calls import parse_tool_calls, without_calls
from rloom.types import Message, Prompt, Sample, Score


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
    counts: Mapping[str, int] = field(default_factory=dict)  # of an agent's requests; a metric each
    report: Report = field(default_factory=Report)  # of the environment, at the end

    @property
    def turns(self) -> int:
        return sum(node.sampled for node in self.episode.nodes)

    @property
    def messages(self) -> list[Message]:
        """Of the last branch."""
        return [message for index in self.last_path for message in self.episode.nodes[index].messages]

    @property
    def turn_messages(self) -> list[Message]:
        """Of the last branch, after the prompt."""
        return [message for index in self.last_path[1:] for message in self.episode.nodes[index].messages]

    @property
    def last_path(self) -> list[int]:
        """The nodes of the last branch: the prompt, answers, and what is between them."""
        return self.episode.path(len(self.episode.nodes) - 1)

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
        extra_info={**prompt.extra_info, "num_turns": len(record.last_path), **record.report.facts},
        messages=prompt.messages,
        prompt_tokens=prompt.tokens,
        response_tokens=tuple(tokens),
        columns=prompt.columns,
        conversation=tuple(record.messages),
        environment_reward=record.reward,
        turns=tuple(spoken(message) for message in record.turn_messages),
        environment_state=record.report.state,
    )


def spoken(message: Message) -> Message:
    """An answer in OpenAI's form, with arguments as mappings, as TRL gives it to reward functions."""
    calls = parse_tool_calls(message["content"]) if message["role"] == "assistant" else []
    made = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
        if call.error is None
    ]
    return {**message, "content": without_calls(message["content"]), "tool_calls": made} if made else message


def episode_trajectories(record: EpisodeRecord, prompt: Prompt, group: int, score: Score) -> list[Trajectory]:
    """One for each branch. An episode whose environment failed has no score, whatever the rewards gave."""
    if record.failure is not None:
        score = Score.failed(f"the environment failed: {record.failure}")
    # rewards of turns are placed where they were given if they are all of the score; a mix is given at the end
    placed = score.value is not None and record.reward is not None and abs(score.value - record.reward) < 1e-9
    branches = list(record.episode.branches())
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
            branch=number,
            turn_rewards=branch.rewards if placed and len(branches) == 1 else (),
            experts_LMK=branch.experts_LMK,
        )
        for number, branch in enumerate(branches)
    ]


def episode_metrics(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Of one step."""
    count = max(len(records), 1)
    endings = Counter(record.ending for record in records)
    calls = [call for record in records for node in record.episode.nodes for call in node.calls]
    counted = sorted({name for record in records for name in record.counts})
    return {
        "episode/turns/mean": sum(record.turns for record in records) / count,
        "episode/turns/max": float(max((record.turns for record in records), default=0)),
        "episode/tool_calls": len(calls) / count,
        "episode/tool_errors": sum(call.error is not None for call in calls) / max(len(calls), 1),
        "episode/environment_seconds": sum(record.environment_seconds for record in records) / count,
        "episode/rewritten_past": sum(record.rewritten for record in records) / count,
        "episode/branched": sum(record.branched for record in records) / count,
        **environment_metrics(records),
        **{f"episode/ended/{ending.value.replace(' ', '_')}": endings[ending] / count for ending in Ending},
        **{f"episode/{name}": sum(record.counts.get(name, 0) for record in records) / count for name in counted},
    }


def environment_metrics(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Means of what environments and tools report, over the episodes that report it."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.report.metrics.items():
            found.setdefault(f"environment/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
