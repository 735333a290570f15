"""Starts TensorRT-LLM's OpenAIServer over its AsyncLLM, with the routes for weights and memory.

`trtllm-serve` builds the same server over an LLM that has no route for new weights. This file imports nothing of rloom,
so that the Python of an environment that has TensorRT-LLM and no rloom can run it (docs/rollout.md).
"""

import argparse
import asyncio
import inspect
import json
import os
import sys
import uuid
from typing import Any

WEIGHTS_ROUTE = "/update_weights"
IDENTITY_ROUTE, LABEL_ROUTE = "/weights_identity", "/weights_label"  # its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key-env", required=True, help="variable with the key that signs control requests")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of AsyncLLM, as JSON")
    given = parser.parse_args()
    # the workers of AsyncLLM belong to Ray: to a cluster of this server, not to the one that trains
    os.environ["TLLM_RAY_FORCE_LOCAL_CLUSTER"] = "1"
    asyncio.run(serve(given))


async def serve(given: argparse.Namespace) -> None:
    from tensorrt_llm import AsyncLLM
    from tensorrt_llm.serve import OpenAIServer

    llm = await AsyncLLM(model=given.model, backend="pytorch", **given.arguments)
    server = OpenAIServer(
        generator=llm,
        model=given.model,
        tool_parser=None,
        server_role=None,
        metadata_server_cfg=None,
        **control_arguments(OpenAIServer, os.environ[given.key_env]),
    )
    if WEIGHTS_ROUTE not in {route.path for route in server.app.routes}:
        sys.exit(f"this version of TensorRT-LLM has no route {WEIGHTS_ROUTE}; install 1.3 or newer")
    add_routes(server.app)
    await server(given.host, given.port)


class ServedWeights:
    """Which process this is, and the label of the weights that it was sent. None: its own, or those of a part."""

    def __init__(self) -> None:
        self.instance = uuid.uuid4().hex
        self.label: str | None = None

    async def identity(self) -> dict[str, str | None]:
        return {"instance": self.instance, "label": self.label}

    async def set_label(self, label: str | None = None) -> None:
        self.label = label


def add_routes(app: Any) -> None:
    """`app`: FastAPI's, which reads `label` from the query."""
    served = ServedWeights()
    app.add_api_route(IDENTITY_ROUTE, served.identity, methods=["GET"])
    app.add_api_route(LABEL_ROUTE, served.set_label, methods=["POST"])


def control_arguments(server: Any, key: str) -> dict[str, Any]:
    """Versions without these parameters have the routes for weights and memory always, and no key for them."""
    if "enable_rl_control_endpoints" not in inspect.signature(server).parameters:
        return {}
    return {"enable_rl_control_endpoints": True, "rl_control_api_key": key}


if __name__ == "__main__":
    main()
