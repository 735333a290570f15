"""Who gets an answer of the viewer, and what can be read through it."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rloom.errors import ConfigError
from rloom.view.access import choose_token
from rloom.view.server import HEADERS, PageFiles
from tests.view_client import TOKEN, Response, Viewer, viewing
from tests.view_runs import write_run

ADDRESSES = (
    *("/", "/index.html", "/api/runs", "/api/runs/0/metrics", "/api/runs/0/train/1/prompts/0", "/no/such"),
    *("/api/findings", "/api/compare/validation", "/api/runs/0/config", "/api/runs/0/search", "/api/runs/0/labels"),
    "/api/runs/0/distributions",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    above = tmp_path_factory.mktemp("view")
    (above / "secret.json").write_text('"secret"')
    (above / "runs" / "secret.html").parent.mkdir()
    (above / "runs" / "secret.html").write_text("secret")
    write_run(above / "runs" / "sums" / "grpo", steps=1)
    return above


@pytest.fixture(scope="module")
def viewer(folder: Path) -> Iterator[Viewer]:
    with viewing([folder / "runs"]) as started:
        yield started


def refused(response: Response) -> bool:
    return response.status == 403 and response.json().keys() == {"error"} and "Set-Cookie" not in response.headers


@pytest.mark.parametrize("path", ADDRESSES)
def test_without_the_token_nothing_is_answered(viewer: Viewer, path: str) -> None:
    own, other = f"rloom_view_{viewer.port}", "rloom_view_1"
    assert refused(viewer.request(path))
    for wrong in ("", "wrong", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "%00", "%ff%fe", "é"):
        given = f"?token={wrong}" if wrong.isascii() else "?token=%C3%A9"
        assert refused(viewer.request(path + given))
        assert refused(viewer.request(path, headers={"Cookie": f"{own}={wrong}"}))
    assert refused(viewer.request(path, headers={"Cookie": f"{other}={TOKEN}"}))
    assert refused(viewer.request(path, headers={"Cookie": f"x{own}={TOKEN}; {own}; ={TOKEN}; {own}=x={TOKEN}"}))
    assert refused(viewer.request(path, headers={"Authorization": f"Bearer {TOKEN}"}))


def test_the_first_page_sets_a_cookie_that_other_sites_do_not_send(viewer: Viewer) -> None:
    first = viewer.request(f"/?token={TOKEN}")
    assert first.status == 200 and first.headers["Content-Type"] == "text/html; charset=utf-8"
    assert first.headers["Set-Cookie"] == f"rloom_view_{viewer.port}={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    cookie = first.headers["Set-Cookie"].split(";")[0]
    with_others = viewer.request("/api/runs", headers={"Cookie": f"_xsrf=2|a|b; bad[]cookie; {cookie}; theme=dark"})
    assert with_others.status == 200 and "Set-Cookie" not in with_others.headers


def test_the_token_in_the_address_is_enough_for_any_address(viewer: Viewer) -> None:
    assert viewer.request(f"/api/runs?token={TOKEN}").status == 200
    assert "Set-Cookie" not in viewer.request(f"/api/runs?token={TOKEN}").headers


def test_through_ssh_the_cookie_has_the_port_of_the_browsers_side(viewer: Viewer) -> None:
    first = viewer.request(f"/?token={TOKEN}", headers={"Host": "localhost:9000"})
    assert first.headers["Set-Cookie"].startswith(f"rloom_view_9000={TOKEN};")
    cookie = {"Host": "localhost:9000", "Cookie": f"rloom_view_9000={TOKEN}"}
    assert viewer.request("/api/runs", headers={**cookie, "Origin": "http://localhost:9000"}).status == 200


def test_a_single_use_token_opens_the_first_page_once(viewer: Viewer) -> None:
    once = viewer.access.single_use_token()
    assert refused(viewer.request(f"/api/runs?token={once}"))
    first = viewer.request(f"/?token={once}")
    assert first.status == 200 and f"={TOKEN};" in first.headers["Set-Cookie"]
    assert refused(viewer.request(f"/?token={once}"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:8817"])
def test_the_names_of_this_machine_are_answered(viewer: Viewer, host: str) -> None:
    assert viewer.request(f"/api/runs?token={TOKEN}", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", "evil.example:8817", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0"),
        *("127.0.0.1:8817@evil.example", "localhost:", "localhost:x", "127.0.0.2", "::1", "[::ffff:127.0.0.1]"),
        *("localhost:8817, evil.example", "http://localhost", "localhost/", "localhost:123456"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/runs"])
def test_another_host_name_is_refused(viewer: Viewer, host: str | None, path: str) -> None:
    assert refused(viewer.request(f"{path}?token={TOKEN}", headers={"Host": host}))


def test_two_host_headers_are_refused(viewer: Viewer) -> None:
    asked = f"GET /api/runs?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert raw(viewer, asked).startswith("HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://{host}"},
        {"Origin": "http://{host}.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "Cross-Site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Origin": "http://{host}"},
    ],
)
@pytest.mark.parametrize("path", ["/index.html", "/api/runs"])
def test_other_pages_of_the_browser_are_refused(viewer: Viewer, headers: Mapping[str, str], path: str) -> None:
    sent = {name: value.format(host=f"127.0.0.1:{viewer.port}") for name, value in headers.items()}
    assert refused(viewer.request(f"{path}?token={TOKEN}", headers=sent))
    assert refused(viewer.ask(path, headers=sent))
    assert refused(viewer.ask("/", headers=sent))


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_the_viewers_own_page_is_answered(viewer: Viewer, headers: Mapping[str, str]) -> None:
    sent = {name: value.format(port=viewer.port) for name, value in headers.items()}
    assert viewer.ask("/api/runs", headers=sent).status == 200


def test_a_link_with_the_token_opens_the_first_page_from_anywhere_and_nothing_else(viewer: Viewer) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert viewer.request(f"/?token={TOKEN}", headers=link).status == 200
    assert refused(viewer.request("/?token=wrong", headers=link))
    assert refused(viewer.request(f"/?token={TOKEN}", headers={**link, "Sec-Fetch-Mode": "no-cors"}))
    assert refused(viewer.request(f"/api/runs?token={TOKEN}", headers=link))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "FETCH"])
@pytest.mark.parametrize("path", ["/", "/api/runs"])
def test_only_get_and_head_are_methods(viewer: Viewer, method: str, path: str) -> None:
    answer = viewer.request(f"{path}?token={TOKEN}", method, {"Content-Length": "0"})
    assert (answer.status, answer.headers["Allow"], answer.headers["Connection"]) == (405, "GET, HEAD", "close")
    assert answer.json() == {"error": "Method Not Allowed"}


def test_head_has_the_headers_of_get_and_no_body(viewer: Viewer) -> None:
    for path in ("/", "/api/runs", "/no/such"):
        got = viewer.ask(path)
        head = viewer.request(path, "HEAD", {"Cookie": f"rloom_view_{viewer.port}={TOKEN}"})
        assert (head.status, head.body, head.headers["Content-Length"]) == (got.status, b"", str(len(got.body)))


@pytest.mark.parametrize("header", [{"Content-Length": "5"}, {"Transfer-Encoding": "chunked"}, {"Content-Length": "x"}])
def test_a_request_with_a_body_is_not_read_as_two(viewer: Viewer, header: Mapping[str, str]) -> None:
    answer = viewer.request(f"/api/runs?token={TOKEN}", headers=header)
    assert (answer.status, answer.json()["error"]) == (400, "a request to the viewer has no body")


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret.json", "/..%2fsecret.json", "/%2e%2e/secret.json", "/%2e%2e%2fsecret.json", "/..\\secret.json"),
        *("/..%5csecret.json", "/....//secret.json", "/%252e%252e%252fsecret.json", "/..%c0%afsecret.json"),
        *("//secret.html", "/secret.html", "/./secret.html", "/index.html/../../__init__.py", "/../server.py"),
        *(
            "/%2e%2e/server.py",
            "/page/index.html",
            "/index.html%00.css",
            "/index%2ehtml",
            "/INDEX.HTML",
            "/index.html/",
        ),
        *("/server.py", "/etc/passwd", "//etc/passwd", "///etc/passwd", "/file:///etc/passwd", "/.", "/..", "/~root"),
        *("http://evil.example/", "http://127.0.0.1/api/runs", "secret.html", "*"),
        *("/api", "/api/", "/api/runs/", "/api/runs/0", "/api/runs/0/", "/api/runs/0/secret.json", "/api//runs"),
        *("/api/runs/0/../../secret.json", "/api/runs/..%2f..%2fsecret.json/config", "/api/runs/0/config/..;/x"),
        *("/api/runs/%30/config", "/api/runs/0/config%0a", "/api/runs/٣/config", "/api/runs/0/train%2f1/prompts"),
        *("/api/runs/0/../0/train/1/prompts", "/api/runs/0/train/../1/prompts", "/api/runs/0/events.jsonl"),
    ],
)
def test_nothing_but_the_table_of_addresses_can_be_read(viewer: Viewer, path: str) -> None:
    if path.isascii():
        answer = viewer.ask(path)
        assert (answer.status, answer.json()) == (404, {"error": "there is no such address"})
    else:
        cookie = f"Host: localhost\r\nCookie: rloom_view_80={TOKEN}"
        assert raw(viewer, f"GET {path} HTTP/1.1\r\n{cookie}\r\n\r\n").startswith("HTTP/1.1 404 ")


@pytest.mark.parametrize("number", ["-1", "1", "+0", "00x", "0x0", "1e0", "0.0", " 0", "NaN", "9" * 15, "9" * 400])
@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/{}/metrics",
        "/api/runs/{}/train/1/prompts",
        "/api/runs/{}/search?text=a",
        "/api/runs/{}/distributions",
        "/api/runs/0/train/{}0/prompts",
        "/api/runs/0/validation/{}/prompts/0",
        "/api/runs/0/train/1/prompts/{}7",
        "/api/runs/0/prompts/{}3/history",
        "/api/runs/0/validation/prompts/{}6/history",
    ],
)
def test_a_number_that_names_nothing_is_not_found(viewer: Viewer, path: str, number: str) -> None:
    given = path.format(number.replace(" ", "%20"))
    status, error = viewer.fault(given)
    assert status == 404 and error and "Traceback" not in error


@pytest.mark.parametrize(
    "parameters",
    [
        *("page=-1", "page=x", "page=1.5", f"page={'9' * 16}", "size=-1", "size=501", "size=1e3", "sort=secret"),
        *(
            "sort=__class__",
            "order=up",
            "min=x",
            "min=nan",
            "max=inf",
            "max=1;2",
            "&".join(f"a{i}=1" for i in range(99)),
        ),
    ],
)
def test_parameters_out_of_range_are_named(viewer: Viewer, parameters: str) -> None:
    status, error = viewer.fault(f"/api/runs/0/train/1/prompts?{parameters}")
    assert status == 400 and (parameters.split("=")[0] in error or "parameters" in error)


def test_every_answer_has_the_headers_that_protect_the_browser(viewer: Viewer) -> None:
    cookie = {"Cookie": f"rloom_view_{viewer.port}={TOKEN}"}
    answers = [
        *(viewer.ask(path) for path in ADDRESSES),
        *(viewer.request(path) for path in ADDRESSES),
        viewer.ask("/api/runs/0/train/1/prompts?page=x"),
        viewer.request("/", "POST"),
        viewer.request("/api/runs", "HEAD", cookie),
        viewer.request("/", headers={"Host": "evil.example"}),
    ]
    assert {answer.status for answer in answers} == {200, 400, 403, 404, 405}
    for answer in answers:
        assert {name: answer.headers.get_all(name) for name in HEADERS} == {n: [v] for n, v in HEADERS.items()}
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
        assert answer.headers["Content-Type"] in ("text/html; charset=utf-8", "application/json")
    assert HEADERS["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in HEADERS["Content-Security-Policy"] and HEADERS["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "request_text",
    ["GARBAGE\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", f"GET /{'a' * 70_000} HTTP/1.1\r\n\r\n", "\x00\xff\r\n"],
)
def test_what_is_no_http_gets_an_error_with_the_same_headers(viewer: Viewer, request_text: str) -> None:
    answered = raw(viewer, request_text)
    assert "Traceback" not in answered and '{"error":' in answered
    if answered.startswith("HTTP/1.1"):
        assert "nosniff" in answered and int(answered.split()[1]) in (400, 414, 505)
    assert viewer.ask("/api/runs").status == 200


def test_the_server_listens_on_this_machine_only(viewer: Viewer) -> None:
    with socket.socket() as other:  # another address of the same interface is free: the port is not bound to all
        other.bind(("127.0.0.2", viewer.port))
    assert "python" not in viewer.ask("/").headers["Server"].lower()


def test_only_files_of_the_page_with_a_known_type_are_in_the_table(tmp_path: Path) -> None:
    for name in ("index.html", "app.js", "look.css", "notes.txt", "__init__.py", ".hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.js").mkdir()
    files = PageFiles(tmp_path)
    assert files.get("/") == files.get("/index.html") == ("text/html; charset=utf-8", b"index.html")
    assert files.get("/app.js") == ("text/javascript; charset=utf-8", b"app.js")
    assert files.get("/look.css") == ("text/css; charset=utf-8", b"look.css")
    for name in ("/notes.txt", "/__init__.py", "/.hidden", "/folder.js", "", "/index.htm"):
        assert files.get(name) is None


def test_a_token_is_new_at_every_start_unless_the_environment_has_one() -> None:
    first, second = choose_token({}), choose_token({"RLOOM_VIEW_TOKEN": ""})
    assert first != second and min(len(first), len(second)) == 22  # 128 bits, 6 in each character
    assert choose_token({"RLOOM_VIEW_TOKEN": "my-own_token-0123"}) == "my-own_token-0123"


@pytest.mark.parametrize(
    "own", ["short", "x" * 15, "x" * 129, "with space 0123456", "semi;colon-0123456", "ümläut-0123456789"]
)
def test_a_token_that_is_short_or_needs_escapes_is_an_error_that_does_not_print_it(own: str) -> None:
    with pytest.raises(ConfigError, match=r"RLOOM_VIEW_TOKEN: .* characters; use 16 to 128 letters") as error:
        choose_token({"RLOOM_VIEW_TOKEN": own})
    assert own not in str(error.value)


def raw(viewer: Viewer, text: str) -> str:
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=60) as connection:
        connection.sendall(text.encode("utf-8"))
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")
