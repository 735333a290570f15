"""`rloom judge try`: one call, with all that is sent and received."""

import asyncio
from collections.abc import Sequence

from rloom.language import translate
from rloom.rewards.judge.client import Answer, Failed
from rloom.rewards.judge.judge import JudgeReward
from rloom.rewards.judge.settings import JudgeSettings
from rloom.rewards.judge.templates import MissingValue
from rloom.terminal import printable
from rloom.types import Sample


def try_judge(settings: JudgeSettings, prompt: str, responses: Sequence[str], ground_truth: str | None) -> bool:
    """Print request, answer, score, tokens and cost. False: there is no score."""
    reward = JudgeReward(settings)
    reward.check()
    group = tuple(Sample("try", prompt, response, ground_truth) for response in responses)
    return asyncio.run(call_and_print(reward, settings, group))


async def call_and_print(reward: JudgeReward, settings: JudgeSettings, group: tuple[Sample, ...]) -> bool:
    try:
        print_request(reward, settings, group)
        answer = await reward.ask(group)
    except (Failed, MissingValue) as error:
        print(printable(translate(f"No score: {error}")))
        return False
    finally:
        counted = reward.metrics()
        await reward.close_async()
    print_answer(reward, answer)
    cost = f"cost {counted['cost']:.3g}" if "cost" in counted else "cost unknown, since no prices are set"
    estimated = " (estimated)" if answer.reply.is_estimated else ""
    print(translate(f"Tokens: {answer.reply.input_tokens} in, {answer.reply.output_tokens} out{estimated}; {cost}"))
    print(translate(f"Time: {counted['latency_s']:.2f} s, {counted['requests']:.0f} requests"))
    return True


def print_request(reward: JudgeReward, settings: JudgeSettings, group: tuple[Sample, ...]) -> None:
    request = reward.request_for(group)
    temperature = "not sent" if request.temperature is None else f"{request.temperature:g}"
    print(translate(f"Request: {settings.type} {request.model} at {reward.base_url}"))
    print(translate(f"Parameters: temperature {temperature}, max_tokens {request.max_tokens}, structured output"))
    print(printable(f"--- system\n{request.system}\n--- user\n{request.user}\n---"))


def print_answer(reward: JudgeReward, answer: Answer) -> None:
    print(printable(f"{translate('Answer:')} {answer.reply.text}"))
    for number, score in enumerate(answer.verdict.scores, start=1):
        label = "Score" if len(answer.verdict.scores) == 1 else f"Score of answer {number}"
        print(translate(f"{label}: {score:g}, scaled {reward.scaled(score):.4f}"))
