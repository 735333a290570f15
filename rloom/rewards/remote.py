"""Scores from reward servers over HTTP. docs/reward_models.md describes the JSON bodies, which include OpenRLHF's.

request: {"query": [...], "prompts": [...], "labels": [...], "responses": [...], ...}, one entry per answer
response: {"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}, of which only rewards is required
"""

import asyncio
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rloom.errors import RewardError
from rloom.net.failover import NoServer, PooledServer, ServerPool
from rloom.net.http import HttpClient, RequestFailed, Unreachable, connection_fault, shortened
from rloom.rewards.base import ScoringUnit
from rloom.types import Sample, SampleGroup, Score, is_usable

EncodedSample = Mapping[str, str]  # field of the request -> JSON


class InvalidReply(RequestFailed):
    """A body that is not a response to the request."""


def encode(sample: Sample) -> EncodedSample:
    """ValueError or TypeError: the row holds a value that JSON does not have."""
    truth = sample.ground_truth
    fields = {
        "query": sample.prompt + sample.whole_response,
        "prompts": sample.prompt,
        "labels": "" if truth is None else truth,
        "responses": sample.whole_response,
        "data_sources": sample.data_source,
        "ground_truths": truth,
        "extra_infos": dict(sample.info),
    }
    return {name: json.dumps(value, allow_nan=False) for name, value in fields.items()}


def request_body(samples: Sequence[EncodedSample]) -> bytes:
    columns = (f'"{name}": [{", ".join(sample[name] for sample in samples)}]' for name in samples[0])
    return ("{" + ", ".join(columns) + "}").encode("ascii")


def read_reply(body: bytes, answers: int) -> list[Score]:
    """One score per answer. An entry without a number is a failed score; other faults are an InvalidReply."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidReply(f"returned a body that is not JSON ({shortened(str(error))})") from error
    try:
        return scores_in(reply, answers)
    except InvalidReply:
        raise
    except Exception as error:  # one that was not foreseen: only this request fails
        raise InvalidReply(
            f"returned a body that cannot be read ({type(error).__name__}: {shortened(str(error))})"
        ) from error


def scores_in(reply: Any, answers: int) -> list[Score]:
    if not isinstance(reply, dict) or reply.get("rewards") is None:
        raise InvalidReply(f"returned no 'rewards': {shortened(json.dumps(reply))}")
    rewards = column("rewards", reply["rewards"], answers)
    columns = extra_logs(reply, answers)
    if reply.get("scores") is not None:
        columns["acc"] = column("scores", reply["scores"], answers)
    return [score(reward, {name: values[i] for name, values in columns.items()}) for i, reward in enumerate(rewards)]


def extra_logs(reply: Mapping[str, Any], answers: int) -> dict[str, list[Any]]:
    """One value per answer; a single value counts for all of them."""
    found = reply.get("extra_logs") or {}
    if not isinstance(found, dict):
        raise InvalidReply(f"returned 'extra_logs' that are not an object: {shortened(json.dumps(found))}")
    return {
        name: column(f"extra_logs.{name}", values, answers) if isinstance(values, list) else [values] * answers
        for name, values in found.items()
    }


def column(name: str, values: Any, answers: int) -> list[Any]:
    if not isinstance(values, list) and answers == 1:  # a server for one answer per request, as OpenRLHF sends them
        return [values]
    if not isinstance(values, list):
        raise InvalidReply(
            f"returned {shortened(json.dumps(values))} as {name!r} of {answers} answers; it takes a list "
            "(reward_model.remote.batch_size=1 sends one answer per request)"
        )
    if len(values) != answers:
        raise InvalidReply(
            f"returned {len(values)} {name!r} for {answers} answers "
            "(reward_model.remote.batch_size=1 sends one answer per request)"
        )
    return values


def score(reward: Any, parts: Mapping[str, Any]) -> Score:
    """Numbers of `parts` become metrics; other entries are left out."""
    if isinstance(reward, dict) and "error" in reward:
        return Score.failed(f"reported an error: {shortened(str(reward['error']))}")
    if not is_number(reward):
        return Score.failed(f"returned {shortened(json.dumps(reward))} as a reward, which is not a finite number")
    numbers = {name: float(value) for name, value in parts.items() if is_number(value) and is_usable(value)}
    return Score.of(float(reward), numbers, subject=f"returned {shortened(json.dumps(reward))}")


def is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 10.0
# The server refuses this request, and would refuse it again; another split of its answers may be accepted.
REFUSALS = (400, 413, 422)
# The server failed on this request: perhaps on one of its answers.
FAULTS = (500,)


@dataclass(frozen=True)
class WaitingAnswer:
    """One answer, and where its score is awaited."""

    sample: EncodedSample
    result: "asyncio.Future[Score]"


@dataclass
class RequestCounts:
    requests: int = 0
    retries: int = 0
    latencies_s: list[float] = field(default_factory=list)  # of the requests that were answered


class RemoteReward:
    """A Reward over one or several servers. Answers that wait at the same time share a request, up to `batch_size`.

    All scores are computed in one event loop, that of the first call.
    """

    unit = ScoringUnit.ANSWER

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        max_retries: int,
        concurrency: int,
        batch_size: int,
        token_env: str | None = None,
    ) -> None:
        self._urls = urls
        self._timeout_s, self._max_retries = timeout_s, max_retries
        self._concurrency, self._batch_size = concurrency, batch_size
        self._headers = authorization(token_env)
        self._waiting: deque[WaitingAnswer] = deque()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references
        self._dispatcher: asyncio.Task[None] | None = None
        self._connection: tuple[asyncio.AbstractEventLoop, HttpClient, ServerPool] | None = None
        self._lock = threading.Lock()
        self._counts = RequestCounts()

    def check(self) -> None:
        """Some server answers HTTP. Those that do not are only named: a run survives them."""
        with ThreadPoolExecutor(len(self._urls)) as threads:
            found = threads.map(lambda url: connection_fault(url, self._timeout_s), self._urls)
            faults = {url: fault for url, fault in zip(self._urls, found, strict=True) if fault is not None}
        reasons = "; ".join(f"{url} {reason}" for url, reason in faults.items())
        if len(faults) == len(self._urls):
            raise RewardError(
                f"reward_model.remote.urls: no reward server answers: {reasons}. Start one, or correct the URL"
            )
        if faults:
            log.warning(f"Reward servers that do not answer yet: {reasons}. The others get their requests.")

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        return [list(scores) for scores in await asyncio.gather(*(self._score_group(group) for group in groups))]

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            counts, self._counts = self._counts, RequestCounts()
        found = {"requests": float(counts.requests), "retries": float(counts.retries)}
        if counts.latencies_s:
            found["latency_mean_s"] = sum(counts.latencies_s) / len(counts.latencies_s)
            found["latency_max_s"] = max(counts.latencies_s)
        return found

    def close(self) -> None:
        """Close the connections. Called from a thread other than that of the event loop, while it runs."""
        if self._connection is None:
            return
        loop, client, _ = self._connection
        self._connection = None
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(client.close(), loop).result(CLOSE_LIMIT_S)

    async def _score_group(self, group: SampleGroup) -> list[Score]:
        return await asyncio.gather(*(self._enqueue(sample) for sample in group))

    async def _enqueue(self, sample: Sample) -> Score:
        try:
            encoded = encode(sample)
        except (TypeError, ValueError) as error:
            return Score.failed(f"this row cannot be sent to a reward server as JSON: {error}")
        job = WaitingAnswer(encoded, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())
        return await job.result

    async def _dispatch(self) -> None:
        """Send what waits, as servers become free. It starts after the answers of this iteration of the loop are
        enqueued."""
        _, _, servers = self._connected()
        while self._waiting:
            try:
                server = await servers.acquire()
            except NoServer as error:
                jobs, self._waiting = self._waiting, deque()
                deliver(list(jobs), [Score.failed(str(error))] * len(jobs))
                return
            jobs_sent = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
            task = asyncio.create_task(self._serve(jobs_sent, server))
            server.answers += len(jobs_sent)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, jobs: Sequence[WaitingAnswer], server: PooledServer) -> None:
        try:
            deliver(jobs, await self._scores([job.sample for job in jobs], server))
        except Exception as error:  # an error of rloom: raised where the scores are awaited
            for job in jobs:
                if not job.result.done():
                    job.result.set_exception(error)

    async def _scores(self, samples: Sequence[EncodedSample], server: PooledServer | None) -> list[Score]:
        """`server`: one that was acquired for these answers. If the server refuses or fails on a request, each half of
        it is sent alone, so that one answer does not fail the others."""
        try:
            return await self._with_retries(samples, server)
        except NoServer as error:
            return [Score.failed(str(error))] * len(samples)
        except RequestFailed as error:
            if error.status not in (*REFUSALS, *FAULTS) or len(samples) == 1:
                return [Score.failed(str(error))] * len(samples)
        middle = len(samples) // 2
        halves = await asyncio.gather(self._scores(samples[:middle], None), self._scores(samples[middle:], None))
        return [*halves[0], *halves[1]]

    async def _with_retries(self, samples: Sequence[EncodedSample], server: PooledServer | None) -> list[Score]:
        _, _, servers = self._connected()
        attempts, failed_on = 0, None
        while True:
            if server is None:
                server = await servers.acquire(avoid=failed_on)
                server.answers += len(samples)
            try:
                return await self._request(samples, server, is_retry=attempts > 0)
            except RequestFailed as error:
                attempts += 1
                if error.status in REFUSALS or attempts > self._max_retries:
                    tries = "" if attempts == 1 else f" (the last of {attempts} attempts)"
                    error.args = (f"the reward server {server.url} {error}{tries}",)
                    raise
            finally:
                servers.release(server, len(samples))
            if not servers.has_other(server):
                await asyncio.sleep(servers.back_off_s(attempts))
            failed_on, server = server, None

    async def _request(self, samples: Sequence[EncodedSample], server: PooledServer, *, is_retry: bool) -> list[Score]:
        _, client, servers = self._connected()
        sent_at_s = time.monotonic()
        with self._lock:
            self._counts.requests += 1
            self._counts.retries += is_retry
        try:
            scores = read_reply(await self._post(client, server.url, request_body(samples)), len(samples))
        except RequestFailed as error:
            if error.status in REFUSALS:  # the server is not to blame
                servers.succeeded(server)
            else:
                servers.failed(server, error, sent_at_s=sent_at_s)
            raise
        servers.succeeded(server)
        with self._lock:
            self._counts.latencies_s.append(time.monotonic() - sent_at_s)
        return [named(score, server.url) for score in scores]

    async def _post(self, client: HttpClient, url: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await client.post(url, body)
        except TimeoutError as error:
            reason = f"did not answer in reward_model.remote.timeout_s={self._timeout_s:g} s"
            raise Unreachable(reason) from error

    def _connected(self) -> tuple[asyncio.AbstractEventLoop, HttpClient, ServerPool]:
        if self._connection is None:
            loop = asyncio.get_running_loop()
            connections = self._concurrency * len(self._urls)
            client = HttpClient(headers=self._headers, connections=connections)
            servers = ServerPool(self._urls, concurrency=self._concurrency, no_server_timeout_s=self._timeout_s)
            self._connection = loop, client, servers
        return self._connection


def authorization(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise RewardError(f"reward_model.remote.token_env={token_env}: this environment variable is not set")
    if not (token.isascii() and token.isprintable()):  # the HTTP library would repeat it in its error
        raise RewardError(f"reward_model.remote.token_env={token_env}: its value holds characters that no header may")
    return {"Authorization": f"Bearer {token}"}


def deliver(jobs: Sequence[WaitingAnswer], scores: Sequence[Score]) -> None:
    for job, score in zip(jobs, scores, strict=True):
        if not job.result.done():  # cancelled
            job.result.set_result(score)


def named(score: Score, url: str) -> Score:
    return score if score.reason is None else replace(score, reason=f"the reward server {url} {score.reason}")
