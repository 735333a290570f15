"""A stand-in for TensorRT-LLM: what rloom's start program uses of it, over the server of tests/fake_servers.py."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

from rloom.rollout.servers.arguments import TRTLLM, class_fields
from tests.fake_servers import refuse_unknown

FIELDS = (Path(__file__).parent / TRTLLM.file).read_text()


class AsyncLLM:
    def __init__(self, **arguments: Any) -> None:
        refuse_unknown(arguments, class_fields(FIELDS, TRTLLM.classes))

    def __await__(self) -> Generator[None, None, "AsyncLLM"]:
        yield
        return self
