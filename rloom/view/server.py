"""The HTTP server: GET and HEAD of the page's files and of JSON, and POST of labels, for requests that `access` lets
through."""

import gzip
import json
import socketserver
import sys
from collections.abc import Mapping
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rloom.errors import RloomError
from rloom.language import FOLDER, read_catalogue
from rloom.view.access import ViewAccess
from rloom.view.http_errors import BadRequest, NotFound, RequestFault
from rloom.view.query import Query, to_json
from rloom.view.routes import API, answer, change, is_change
from rloom.view.run_cache import RunCache

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
CHINESE, CATALOGUE = "/chinese.js", FOLDER / "page.txt"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageFiles:
    """The page's files and the module with its Chinese texts. A request names an entry of this table, never a path."""

    def __init__(self, folder: Path = PAGE) -> None:
        files: Mapping[str, Path] = {
            file.name: file for file in sorted(folder.iterdir()) if file.suffix in CONTENT_TYPES and file.is_file()
        }
        self._by_address = {f"/{name}": file for name, file in files.items()}
        self._by_address["/"] = files[INDEX]

    def get(self, address: str) -> tuple[str, bytes] | None:
        """(content type, content), or None if there is no such file."""
        if address == CHINESE:
            texts = json.dumps(read_catalogue(CATALOGUE), ensure_ascii=False)
            return CONTENT_TYPES[".js"], f"export const CHINESE = {texts};\n".encode()
        file = self._by_address.get(address)
        return None if file is None else (CONTENT_TYPES[file.suffix], file.read_bytes())


ADDRESS = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
JSON = "application/json"
COMPRESSED_FROM = 16_384  # bytes; through ssh, sending costs more than compressing
IDLE_S = 60.0  # after which a connection is closed


class ViewServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # a page asks for its files at once

    def __init__(self, port: int, runs: RunCache, access: ViewAccess) -> None:
        self.runs, self.access, self.files = runs, access, PageFiles()
        super().__init__((ADDRESS, port), Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks a name server for this machine's name
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):  # the browser has left
            print(f"rloom view: {type(error).__name__}: {str(error)!a}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    server: ViewServer
    headers = Message()  # for a request whose headers cannot be read
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rloom", ""
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(writes=False)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        if is_change(self.path.partition("?")[0]):
            self._answer(writes=True)
        else:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)

    def _answer(self, *, writes: bool) -> None:
        cookie: dict[str, str] = {}
        try:
            path, query = self._checked(cookie, writes)
            if writes:
                content_type, content = JSON, to_json(change(self.server.runs, path, query))
            else:
                content_type, content = self._content(path, query)
            status = HTTPStatus.OK
        except RequestFault as fault:
            status, content_type, content = fault.status, JSON, to_json({"error": str(fault)})
        except (RloomError, OSError) as error:  # a file that is damaged, or was removed meanwhile
            status, content_type, content = HTTPStatus.NOT_FOUND, JSON, to_json({"error": str(error)})
        except Exception as error:  # a bug: the page and the terminal name it, the server goes on
            message = f"internal error: {type(error).__name__}: {error}"
            print(f"rloom view: {self.path.partition('?')[0]!a}: {message!a}", file=sys.stderr)
            status, content_type, content = HTTPStatus.INTERNAL_SERVER_ERROR, JSON, to_json({"error": message})
        self._send(status, content_type, content, cookie)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses: methods without a function here, requests that are no HTTP."""
        status = HTTPStatus(code)
        allowed: dict[str, str] = {}
        if status == HTTPStatus.NOT_IMPLEMENTED:
            status, allowed = HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"}
        self.close_connection = True  # the body of the request was not read
        self._send(status, JSON, to_json({"error": status.phrase}), {**allowed, "Connection": "close"})

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _checked(self, cookie: dict[str, str], writes: bool) -> tuple[str, Query]:
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True
            raise BadRequest("a request to the viewer has no body")
        path, _, parameters = self.path.partition("?")
        query = Query.parse(parameters)
        set_cookie = self.server.access.check(
            self.headers, query.all("token"), is_first_page=path == "/", writes=writes
        )
        if set_cookie is not None:
            cookie["Set-Cookie"] = set_cookie
        return path, query

    def _content(self, path: str, query: Query) -> tuple[str, bytes]:
        if path.startswith(API):
            return JSON, to_json(answer(self.server.runs, path, query))
        found = self.server.files.get(path)
        if found is None:
            raise NotFound("there is no such address")
        return found

    def _send(self, status: HTTPStatus, content_type: str, content: bytes, more: Mapping[str, str]) -> None:
        headers = {**HEADERS, "Content-Type": content_type, **more}
        if len(content) >= COMPRESSED_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
