"""Processor time of the client of rollout servers, by the number of answers and their tokens.

    python benchmarks/servers.py
    python benchmarks/servers.py --engines vllm --answers 16384 --tokens 1024

The servers are processes that answer at once, in the form of their engine, with recorded tokens: what is measured is
the client alone (`ServerRollout`), from requests to completions. One JSON line for each case, with the seconds of
processor time of this process, which other programs on the machine change little.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measuring import machine

from rloom.rollout.base import Request, Sampling
from rloom.rollout.servers.client import ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.vllm import VllmApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import COLLECTIVE, ServerApi, TransferSettings

LABEL, ANSWERS_PER_PROMPT = "recorded", 8
APIS: dict[str, Callable[[], ServerApi]] = {"vllm": VllmApi, "sglang": SglangApi, "trtllm": TrtllmApi}


def recorded(tokens: int) -> dict[str, object]:
    """Answers by path, with all fields that vLLM sends for `logprobs=0` and `return_token_ids`. TensorRT-LLM's have the
    same form, without the texts of tokens."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 150_000, (tokens,), generator=drawn).tolist()
    logprobs = (-3 * torch.rand(tokens, generator=drawn, dtype=torch.float64)).tolist()
    texts = [f" word{token}" for token in ids]
    choice = {
        "index": 0,
        "text": "".join(texts),
        "token_ids": ids,
        "logprobs": {
            "text_offset": [sum(map(len, texts[:place])) for place in range(tokens)],
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": [{text: value} for text, value in zip(texts, logprobs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": ids[-1],
        "prompt_token_ids": torch.randint(0, 150_000, (256,), generator=drawn).tolist(),
    }
    meta = {
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
        "finish_reason": {"type": "stop"},
        "weight_version": LABEL,
    }
    return {
        "/v1/completions": {"id": "cmpl-1", "choices": [choice]},
        "/generate": {"text": "", "output_ids": ids, "meta_info": meta},
        "/collective_rpc": {"results": [["one process", LABEL]]},
        "/health": {},
        "/weights_identity": {"instance": "one process", "label": LABEL},
    }


@contextmanager
def served(file: Path) -> Iterator[tuple[int, Callable[[], int]]]:
    """Its port, and how many connections it has had, once it has ended."""
    command = [sys.executable, str(Path(__file__).with_name("replay_server.py")), str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), lambda: int(process.communicate()[0])
        process.kill()


@contextmanager
def client(engine: str, ports: Sequence[int], max_requests: int) -> Iterator[ServerRollout]:
    transfer = TransferSettings(COLLECTIVE, torch.device("cpu"), 1, timeout_s=60.0)
    rollout = ServerRollout(
        [ServerSpec(f"http://127.0.0.1:{port}", None, transfer) for port in ports],
        APIS[engine](),
        ClientSettings(WatchSettings(60.0, 10.0, 0), 3600.0, releases_memory=False, max_requests=max_requests),
        lambda weights: weights,
    )
    try:
        rollout.watched.version = 1
        rollout.loop.run(rollout.have_received(rollout.watched.servers, 1, LABEL))
        yield rollout
    finally:
        rollout.close()


def measure(engine: str, answers: int, tokens: int, given: argparse.Namespace) -> dict[str, object]:
    prompts = [
        tuple(torch.randint(0, 150_000, (given.prompt_tokens,)).tolist()) for _ in range(answers // ANSWERS_PER_PROMPT)
    ]
    requests = [Request(prompts[row // ANSWERS_PER_PROMPT], Sampling(tokens), row) for row in range(answers)]
    with ExitStack() as stack:
        file = Path(stack.enter_context(TemporaryDirectory())) / "answers.json"
        file.write_text(json.dumps(recorded(tokens)))
        servers = [stack.enter_context(served(file)) for _ in range(given.servers)]
        with client(engine, [port for port, _ in servers], given.max_requests) as rollout:
            cpu_s, began_s = time.process_time(), time.perf_counter()
            found = sum(len(completion.tokens_L) for _, completion in rollout.generate(requests))
            cpu_s, seconds = time.process_time() - cpu_s, time.perf_counter() - began_s
        assert found == answers * tokens
        connections = max(connections_of() for _, connections_of in servers)
    return {
        "engine": engine,
        "answers": answers,
        "tokens": tokens,
        "cpu_s": round(cpu_s, 1),
        "ms_an_answer": round(1000 * cpu_s / answers, 2),
        "seconds": round(seconds, 1),
        "connections_of_a_server": connections,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=APIS, default=["vllm"])
    parser.add_argument("--answers", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2, 512])
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--max_requests", type=int, default=512, help="that a server has at a time")
    given = parser.parse_args()
    print(
        f"# {machine(torch.device('cpu'))}, {given.servers} servers, prompts of {given.prompt_tokens} tokens",
        flush=True,
    )
    for engine in given.engines:
        for tokens in given.tokens:
            for answers in given.answers:
                print(json.dumps(measure(engine, answers, tokens, given)), flush=True)


if __name__ == "__main__":
    main()
