"""The reward: a language model behind an API gives each answer a score, scaled to 0 to 1."""

import asyncio
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rloom.errors import RewardError
from rloom.language import is_chinese_text, translate
from rloom.net.retry import Backoff, Clock, RateLimits, SystemClock
from rloom.rewards.base import ScoringUnit
from rloom.rewards.judge.api import ChatRequest, JudgeApi
from rloom.rewards.judge.client import BudgetSpent, Failed, JudgeAnswer, JudgeClient, Prices, Usage
from rloom.rewards.judge.parsing import Range, Verdict, parse_group, parse_one
from rloom.rewards.judge.prompts import (
    AUTO,
    LANGUAGES,
    SCORE_SCHEMA,
    SCORES_SCHEMA,
    MissingValue,
    Prompts,
    load_prompts,
    prompt_of,
    question_about_all,
    question_about_one,
)
from rloom.rewards.judge.settings import (
    KEY,
    PROVIDERS,
    JudgeSettings,
    address_in,
    find_key,
    variable_fault,
)
from rloom.rewards.judge.store import AnswerStore
from rloom.terminal import printable
from rloom.types import Sample, SampleGroup, Score

CLOSING_LIMIT_S = 10.0


class JudgeReward:
    """A Reward, used after `check`. Its client is made in the event loop of the first `score` and belongs to it."""

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._settings, self._kind = settings, PROVIDERS[settings.type]
        self._key_variables = (settings.api_key_env,) if settings.api_key_env else self._kind.key_variables
        variables = os.environ if environment is None else environment
        self._key = find_key(self._key_variables, variables)
        self._headers = {header: variables.get(name) for name, header in self._kind.header_variables.items()}
        self._address = settings.base_url or address_in(variables, settings.type)  # None: the provider's own
        self._address_fault = None if settings.base_url else variable_fault(variables, settings.type)
        self._clock, self._backoff = clock or SystemClock(), backoff or Backoff()
        self._range = Range(settings.min_score, settings.max_score)
        self._prices = prices_of(settings)
        self._usage = Usage(with_cost=self._prices is not None)
        self._store = (
            AnswerStore(Path(os.path.expandvars(settings.cache_dir)).expanduser()) if settings.cache_dir else None
        )
        self._client: JudgeClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def unit(self) -> ScoringUnit:
        return ScoringUnit.PROMPT if self._settings.mode == "groupwise" else ScoringUnit.ANSWER

    @property
    def model(self) -> str:
        return self._settings.model or self._kind.model

    @property
    def base_url(self) -> str:
        return (self._address or self._kind.base_url).rstrip("/")

    @property
    def called_url(self) -> str:
        return self._kind.called(self.base_url)

    def check(self) -> None:
        """Prompts, address, key and cache folder, before anything is generated. Sends nothing."""
        assert self._prompts
        if self._address_fault is not None:
            raise RewardError(self._address_fault)
        self._check_key()
        if self._store is not None:
            self._store.open()

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        """RewardError: the budget is spent, or the cache cannot be written."""
        calls = [call for group in groups for call in self._calls(group)]
        try:
            found = await asyncio.gather(*map(self._score_call, calls))
        except BudgetSpent:
            await self._started().finish_sent()
            raise self._started().budget_error() from None
        scores = itertools.chain.from_iterable(found)
        return [list(itertools.islice(scores, len(group))) for group in groups]

    async def ask(self, group: SampleGroup) -> JudgeAnswer:
        """One call. Failed or MissingValue: no score, and why."""
        request = self.request_for(group)
        return await self._started().answer(request, functools.partial(self._parse, answers=len(group)))

    def request_for(self, group: SampleGroup) -> ChatRequest:
        groupwise = self.unit is ScoringUnit.PROMPT
        question = question_about_all if groupwise else question_about_one
        system, user = question(self._prompts[self._language(group)], group, self._range)
        return ChatRequest(
            model=self.model,
            system=system,
            user=user,
            temperature=self._settings.temperature,
            max_tokens=self._settings.max_tokens,
            schema=SCORES_SCHEMA if groupwise else SCORE_SCHEMA,
        )

    def scaled(self, score: float) -> float:
        return self._range.scaled(score)

    def metrics(self) -> Mapping[str, float]:
        return self._usage.metrics()

    def close(self) -> None:
        """From a thread other than the event loop's. The loop may have ended already."""
        if self._client is not None and self._loop is not None and self._loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(self._client.close(), self._loop)
            closing.result(CLOSING_LIMIT_S)
            self._client = None
        if self._store is not None:
            self._store.close()

    async def close_async(self) -> None:
        """In the event loop of the calls."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        self.close()

    @functools.cached_property
    def _prompts(self) -> Mapping[str, Prompts]:
        """By language."""
        return {language: load_prompts(self._settings, language) for language in LANGUAGES}

    def _language(self, group: SampleGroup) -> str:
        if self._settings.language != AUTO:
            return self._settings.language
        return "zh" if is_chinese_text(prompt_of(group[0])) else "en"

    def _calls(self, group: SampleGroup) -> list[SampleGroup]:
        """The samples of each call."""
        return [group] if self.unit is ScoringUnit.PROMPT else [(sample,) for sample in group]

    async def _score_call(self, group: SampleGroup) -> list[Score]:
        try:
            answer = await self.ask(group)
        except (Failed, MissingValue) as error:
            return [Score.failed(f"{self._settings.type} judge: {error}")] * len(group)
        detail = answer.verdict.reason
        return [
            Score.of(
                self.scaled(score),
                subject=f"the judge's score is {score:g} of {self._range}",
                detail=f"{score:g} of {self._range}{f': {detail}' if detail else ''}",
            )
            for score in answer.verdict.scores
        ]

    def _parse(self, text: str, *, answers: int) -> Verdict:
        if self.unit is ScoringUnit.PROMPT:
            return parse_group(text, self._range, answers)
        return parse_one(text, self._range)

    def _check_key(self) -> None:
        settings, variables = self._settings, self._key_variables
        own_server = self._address is not None and not self._kind.needs_key_at_other_addresses
        if self._key is None and (settings.api_key_env or not own_server):
            raise RewardError(
                f"{KEY}.type={settings.type} needs a key in the environment variable {' or '.join(variables)}: "
                f"export {variables[0]}=..., or name another variable with {KEY}.api_key_env"
            )
        if self._key is not None and not (self._key.reveal().isascii() and self._key.reveal().isprintable()):
            raise RewardError(
                f"the key in the environment variable {' or '.join(variables)} has characters that no key has, such as "
                "line breaks or typographic quotation marks; export it again"
            )

    def _started(self) -> JudgeClient:
        loop = asyncio.get_running_loop()
        if self._client is None:
            self._client, self._loop = self._connect(), loop
        assert self._loop is loop, "the connections belong to one event loop"
        return self._client

    def _connect(self) -> JudgeClient:
        settings = self._settings
        return JudgeClient(
            JudgeApi(settings.type, self.base_url, self._key, self._headers, settings.concurrency),
            settings,
            address=f"{settings.type} {self.base_url}",
            key=self._key,
            rates=RateLimits(settings.requests_per_minute, settings.tokens_per_minute, self._clock),
            backoff=self._backoff,
            clock=self._clock,
            store=self._store,
            prices=self._prices,
            usage=self._usage,
        )


def prices_of(settings: JudgeSettings) -> Prices | None:
    if settings.input_price is None or settings.output_price is None:
        return None
    return Prices(settings.input_price, settings.output_price)


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
    print(translate(f"Request: {settings.type} {request.model} at {reward.called_url}"))
    print(translate(f"Parameters: temperature {temperature}, max_tokens {request.max_tokens}, structured output"))
    print(printable(f"--- system\n{request.system}\n--- user\n{request.user}\n---"))


def print_answer(reward: JudgeReward, answer: JudgeAnswer) -> None:
    print(printable(f"{translate('Answer:')} {answer.reply.text}"))
    for number, score in enumerate(answer.verdict.scores, start=1):
        label = "Score" if len(answer.verdict.scores) == 1 else f"Score of answer {number}"
        print(translate(f"{label}: {score:g}, scaled {reward.scaled(score):.4f}"))
