"""Who may ask: only a page of this server, opened with the token.

Any web page in the user's browser can send requests to 127.0.0.1, and any user of the machine can connect to it. The
token excludes other users; the checks of Host, Origin and Sec-Fetch-Site exclude other web pages, also one whose name
resolves to 127.0.0.1 (DNS rebinding).
"""

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from email.message import Message
from threading import Lock

from rloom.errors import ConfigError
from rloom.view.http_errors import Forbidden

TOKEN_VARIABLE = "RLOOM_VIEW_TOKEN"
TOKEN_BYTES = 16
HOST = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::([0-9]{1,5}))?", re.IGNORECASE)
OWN_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")  # needs no escape in an address or a cookie

NO_TOKEN = "Open the address that `rloom view` printed: it contains the token of this server (?token=...)."
OTHER_HOST = "The viewer answers as localhost, 127.0.0.1 or [::1] only; through ssh, use ssh -L and one of these names."
OTHER_SITE = "The viewer answers its own page only; paste the address that `rloom view` printed into the address bar."


def choose_token(environment: Mapping[str, str]) -> str:
    """A new one of 128 bits, unless the environment sets one."""
    own = environment.get(TOKEN_VARIABLE)
    if not own:
        return secrets.token_urlsafe(TOKEN_BYTES)
    if not OWN_TOKEN.fullmatch(own):
        raise ConfigError(
            f"{TOKEN_VARIABLE}: {len(own)} characters; use 16 to 128 letters, digits, - and _, "
            "or unset it for a new token at each start"
        )
    return own


class ViewAccess:
    def __init__(self, token: str) -> None:
        self.token = token
        self._single_use: set[str] = set()
        self._lock = Lock()

    def single_use_token(self) -> str:
        """For the browser that this process starts: other users of the machine can read its command line."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            self._single_use.add(token)
        return token

    def check(self, headers: Message, given_tokens: Sequence[str], *, is_first_page: bool, writes: bool) -> str | None:
        """Raise Forbidden, or return the cookie to set. `given_tokens`: of the address.

        `writes`: the request changes a file, and has to name the page that it comes from, as browsers do."""
        host = _only(headers, "Host")
        known_host = HOST.fullmatch(host or "")
        if host is None or known_host is None:
            raise Forbidden(OTHER_HOST)
        cookie_name = f"rloom_view_{known_host[1] or 80}"  # cookies are shared by all ports of a host name
        in_address = any(map(self._is_token, given_tokens)) or (is_first_page and self._spend(given_tokens))
        # a link in another page may open the first page, since it has to contain the token
        opens_page = is_first_page and in_address and headers.get("Sec-Fetch-Mode") == "navigate"
        if not opens_page and (_is_from_elsewhere(headers, host) or (writes and _only(headers, "Origin") is None)):
            raise Forbidden(OTHER_SITE)
        if not in_address and not any(map(self._is_token, _cookies(headers, cookie_name))):
            raise Forbidden(NO_TOKEN)
        if not (is_first_page and in_address):
            return None
        return f"{cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _spend(self, given: Sequence[str]) -> bool:
        with self._lock:
            spent = self._single_use.intersection(given)
            self._single_use -= spent
        return bool(spent)


def _is_from_elsewhere(headers: Message, host: str) -> bool:
    if headers.get("Sec-Fetch-Site", "none").lower() not in ("none", "same-origin"):
        return True
    origins = headers.get_all("Origin", [])
    return any(origin.lower() != f"http://{host.lower()}" for origin in origins)


def _only(headers: Message, name: str) -> str | None:
    values = headers.get_all(name, [])
    return str(values[0]) if len(values) == 1 else None


def _cookies(headers: Message, name: str) -> list[str]:
    """The values of a cookie. Other servers on the same host name may have set any others."""
    pairs = (pair.strip().partition("=") for header in headers.get_all("Cookie", []) for pair in header.split(";"))
    return [value for key, _, value in pairs if key == name]
