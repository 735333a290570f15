"""A viewer on a free port, and requests to it as a browser, or anything else, would send them."""

import gzip
import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.view.access import ViewAccess
from rloom.view.run_cache import Defaults, RunCache, no_defaults
from rloom.view.server import ViewServer

TOKEN = "a-token-for-tests-only"


@dataclass(frozen=True)
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Viewer:
    port: int
    access: ViewAccess

    def request(self, path: str, method: str = "GET", headers: Mapping[str, str | None] | None = None) -> Response:
        """Exactly this path; a header that is None is not sent."""
        sent = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        packed = answer.headers["Content-Encoding"] == "gzip"
        return Response(answer.status, answer.headers, gzip.decompress(body) if packed else body)

    def ask(self, path: str, headers: Mapping[str, str | None] | None = None) -> Response:
        """With the token in the cookie, as the page asks."""
        return self.request(path, headers={"Cookie": f"rloom_view_{self.port}={TOKEN}", **(headers or {})})

    def get(self, path: str) -> Any:
        """The JSON of an answer without a fault."""
        response = self.ask(path)
        assert response.status == 200, response.body
        return response.json()

    def fault(self, path: str) -> tuple[int, str]:
        response = self.ask(path)
        return response.status, response.json()["error"]


@contextmanager
def viewing(runs: Sequence[Path], defaults: Defaults = no_defaults) -> Iterator[Viewer]:
    access = ViewAccess(TOKEN)
    with ViewServer(0, RunCache(runs, defaults), access) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Viewer(server.server_port, access)
        finally:
            server.shutdown()
            thread.join()
