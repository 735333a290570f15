"""A reward server that scores answers by rloom's rules: an example of the protocol in docs/reward_models.md.

python examples/reward_server/server.py --port 5000
rloom train reward_model.remote.urls=http://127.0.0.1:5000/get_reward
"""

import argparse
import asyncio
import hmac
import json
import os
import sys
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from a clone that is not installed

from rloom.rewards.pool import RulePool
from rloom.rewards.routing import registered
from rloom.types import Sample, Score

PATH = "/get_reward"


class RewardServer(ThreadingHTTPServer):
    """Scores the answers of each request in the processes of `rules`."""

    request_queue_size = 128  # connections that wait to be accepted

    def __init__(self, address: tuple[str, int], rules: RulePool, data_source: str, token: str | None) -> None:
        super().__init__(address, Handler)
        self.rules, self.data_source, self.token = rules, data_source, token

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        groups = [(sample,) for sample in samples(request, self.data_source)]
        scores = [score for [score] in asyncio.run(self.rules.score(groups))]
        return {
            "rewards": [{"error": score.reason} if score.value is None else score.value for score in scores],
            "scores": [score.accuracy for score in scores],
            "extra_logs": extra_logs(scores),
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open
    server: RewardServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != PATH:
            return self.reply(HTTPStatus.NOT_FOUND, {"error": f"use {PATH}"})
        if not self.is_authorized():
            return self.reply(HTTPStatus.UNAUTHORIZED, {"error": "the Bearer token is missing or wrong"})
        try:
            self.reply(HTTPStatus.OK, self.server.respond(json.loads(body)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.reply(HTTPStatus.BAD_REQUEST, {"error": f"{type(error).__name__}: {error}"})

    def is_authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return self.server.token is None or hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def reply(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line per request: a step sends hundreds."""


def samples(request: dict[str, Any], data_source: str) -> list[Sample]:
    """The answers of a request. OpenRLHF sends only `query`, `prompts` and `labels`."""
    prompts, queries, count = request["prompts"], request["query"], len(request["query"])
    stripped = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    columns = (
        request.get("data_sources", [data_source] * count),
        prompts,
        request.get("responses", stripped),
        request.get("ground_truths", request["labels"]),
        request.get("extra_infos", [{}] * count),
    )
    return [Sample(*row) for row in zip(*columns, strict=True)]


def extra_logs(scores: list[Score]) -> dict[str, list[float | None]]:
    """The further values of the rules, such as whether the answer had the expected format."""
    names = dict.fromkeys(name for score in scores for name in score.parts if name != "acc")
    return {name: [score.parts.get(name) for score in scores] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description="Score answers by rloom's rules, over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every interface")
    parser.add_argument("--port", type=int, default=5000, help="0: any free port")
    parser.add_argument("--num_workers", type=int, default=2, help="processes that compute the rules")
    parser.add_argument("--timeout_s", type=float, default=10.0, help="time limit of one answer")
    parser.add_argument(
        "--data_source", default="math_reasoning", help=f"rule of requests without data_sources: {registered()}"
    )
    parser.add_argument("--token_env", help="environment variable with the Bearer token that requests must send")
    given = parser.parse_args()
    token = os.environ[given.token_env] if given.token_env else None
    with closing(RulePool(num_workers=given.num_workers, timeout_s=given.timeout_s)) as rules:
        server = RewardServer((given.host, given.port), rules, given.data_source, token)
        print(f"Reward server: http://{given.host}:{server.server_port}{PATH}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("Reward server: stopped")


if __name__ == "__main__":
    main()
