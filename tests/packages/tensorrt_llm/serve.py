"""OpenAIServer: signed control requests, as in versions that have a key for them."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fake_servers import FakeTrtllm, OwnRoutes, dies_once


class OpenAIServer:
    def __init__(
        self,
        generator: Any,
        model: str,
        tool_parser: None,
        server_role: None,
        metadata_server_cfg: None,
        enable_rl_control_endpoints: bool = False,
        rl_control_api_key: str | None = None,
    ) -> None:
        assert enable_rl_control_endpoints and rl_control_api_key
        self.model, self.key = Path(model), rl_control_api_key
        self.own_routes = OwnRoutes()
        routes = [SimpleNamespace(path=path) for path in FakeTrtllm.control_routes]
        self.app = SimpleNamespace(routes=routes, add_api_route=self.own_routes.add_api_route)

    async def __call__(self, host: str, port: int) -> None:
        print(f"process {os.getpid()}", flush=True)
        server = FakeTrtllm(self.model, port, die_at=dies_once(6, Path(os.environ["DIED"])))
        server.control_key, server.own_routes = self.key, self.own_routes
        await asyncio.to_thread(server.serve_forever)
