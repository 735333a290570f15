"""HTTP requests to servers, in the form of their engine."""

from rloom.net.http import DirectConnections, Refused, Unreachable
from rloom.rollout.servers.wire import HEALTH, Call, ServerApi

HEALTH_TIMEOUT_S = 30.0  # SGLang generates a token for it, and waits up to 20 s


class Http:
    def __init__(self, wire: ServerApi, key: str | None, timeout_s: float) -> None:
        self.wire, self.key, self.timeout_s = wire, key, timeout_s
        self.connections = DirectConnections()

    async def send(self, url: str, call: Call, timeout_s: float | None = None) -> bytes:
        body = call.body
        return await self.connections.send(
            url,
            call.path,
            method="GET" if call.is_get else "POST",
            headers={"Content-Type": "application/json", **self.wire.headers(self.key, body)},
            body=body,
            limit_s=timeout_s or self.timeout_s,
        )

    async def is_healthy(self, url: str) -> bool:
        try:
            await self.send(url, HEALTH, HEALTH_TIMEOUT_S)
        except (Unreachable, Refused):
            return False
        return True

    async def close(self) -> None:
        await self.connections.close()
