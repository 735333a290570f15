"""A small Hugging Face hub on localhost: what `HF_ENDPOINT` can name. It answers as told: files, or a fault."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    files: Mapping[str, Mapping[str, bytes]]  # repository ("datasets/openai/gsm8k", "owner/model") -> file -> content
    status: int = 200  # of every answer
    error_code: str | None = None  # the hub's header X-Error-Code
    delay_s: float = 0.0
    commit: str | None = COMMIT  # None: a server that is no hub
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method, path)
    tokens: set[str | None] = field(default_factory=set)  # the Authorization headers that arrived
    created: list[dict[str, Any]] = field(default_factory=list)  # the bodies of requests that create a repository
    uploaded: dict[str, bytes] = field(default_factory=dict)  # path -> content
    url: str = ""


@contextmanager
def hub_server(files: Mapping[str, Mapping[str, bytes]], **settings: Any) -> Iterator[HubServer]:
    hub = HubServer(files, **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_POST(self) -> None:
            """Creates any repository, and takes every file in the request itself, without large-file storage."""
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0].lstrip("/")
            hub.requests.append((self.command, path))
            hub.tokens.add(self.headers.get("Authorization"))
            answer = json.dumps(_written(hub, path, body)).encode()
            self.send_response(hub.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Nothing on the screen."""

        def answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].lstrip("/")
            hub.requests.append((self.command, path))
            hub.tokens.add(self.headers.get("Authorization"))
            time.sleep(hub.delay_s)
            found = _content(hub.files, path)
            status = 404 if hub.status == 200 and found is None else hub.status
            body = found if status == 200 and found is not None else b"{}"
            code = hub.error_code or ("RepoNotFound" if status == 404 and not _repository(hub.files, path) else None)
            code = "EntryNotFound" if status == 404 and code is None else code
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if hub.commit:
                    self.send_header("X-Repo-Commit", hub.commit)
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
                if code:
                    self.send_header("X-Error-Code", code)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                """The client stopped waiting."""

    return Handler


def _written(hub: HubServer, path: str, body: bytes) -> dict[str, Any]:
    if path == "api/repos/create":
        hub.created.append(json.loads(body))
        return {"url": f"{hub.url}/{hub.created[-1].get('organization') or 'me'}/{hub.created[-1]['name']}"}
    if "/preupload/" in path:
        names = [file["path"] for file in json.loads(body)["files"]]
        return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
    if "/commit/" in path:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                hub.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        repository = path.removeprefix("api/models/").partition("/commit/")[0]
        return {"commitUrl": f"{hub.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT}
    return {}


def _repository(files: Mapping[str, Mapping[str, bytes]], path: str) -> str | None:
    return next((name for name in files if _plain(path).startswith(f"{name}/")), None)


def _plain(path: str) -> str:
    """Without the prefix of the API: `api/models/owner/name` -> `owner/name/`."""
    return path.removeprefix("api/models/").removeprefix("api/") + "/"


def _content(files: Mapping[str, Mapping[str, bytes]], path: str) -> bytes | None:
    name = _repository(files, path)
    if name is None:
        return None
    if "/tree/" in path:
        if "/" in path.partition("/tree/")[2]:
            return None  # folders of optional files
        found = [{"type": "file", "path": p, "size": len(c), "oid": COMMIT} for p, c in files[name].items()]
        return json.dumps(found).encode()
    if path.startswith("api/"):
        siblings = [{"rfilename": file} for file in files[name]]
        owner = name.removeprefix("datasets/")
        return json.dumps({"id": owner, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}).encode()
    return files[name].get(path.removeprefix(f"{name}/resolve/").partition("/")[2])
