"""The keys of reward servers, and the rules for their addresses."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from rloom.config.section import Section, key

NAME = "reward_model.remote"
EXAMPLE = "http://127.0.0.1:5000/get_reward"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RemoteReward(Section):
    urls: str | list[str] = key(
        [],
        "Score the answers with the reward servers at these URLs: one, a list, or one text with commas. They share the "
        "requests by load.",
        needs_consent=bool,
    )
    token_env: str | None = key(
        None,
        "Name of the environment variable whose value is sent as Bearer token. null: no token.",
        needs_consent=bool,
        same_run=True,
    )
    batch_size: int = key(16, "Maximum number of answers in one request.", ge=1, same_run=True)
    concurrency: int = key(8, "Maximum number of requests at the same time at each URL.", ge=1, same_run=True)
    timeout_s: float = key(
        60.0, "Time limit of one request, and of the wait for a server while none of them answers.", gt=0, same_run=True
    )
    max_retries: int = key(4, "Further attempts of a request, before its answers count as failed.", ge=0, same_run=True)

    @property
    def addresses(self) -> tuple[str, ...]:
        texts = [self.urls] if isinstance(self.urls, str) else self.urls
        return tuple(url.strip() for text in texts for url in text.split(",") if url.strip())


def remote_faults(remote: RemoteReward) -> Iterator[str]:
    """Values that may hold a password or a token are not repeated in the sentence."""
    for url in remote.addresses:
        yield from address_faults(url)
    if remote.token_env is not None and not VARIABLE.fullmatch(remote.token_env):
        yield (
            f"{NAME}.token_env takes the name of an environment variable, such as REWARD_TOKEN, and not the token "
            "itself, because the configuration is saved with the run (the value is not shown here)"
        )


def address_kind(url: str) -> tuple[bool, bool]:
    """(has a user name, a password or a query; is an address)."""
    try:
        parts = urlsplit(url)
        has_secrets = "@" in parts.netloc or bool(parts.query)
        return has_secrets, parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are no address
        return "@" in url or "?" in url, False


def is_plain_address(url: str) -> bool:
    return address_kind(url) == (False, True)


def address_faults(url: str) -> Iterator[str]:
    has_secrets, is_address = address_kind(url)
    if has_secrets:
        yield (
            f"{NAME}.urls: a URL contains a user name, a password or a query, and the configuration is saved with the "
            f"run (the value is not shown here); put a token into an environment variable and name it with "
            f"{NAME}.token_env"
        )
    elif not is_address:
        yield f"{NAME}.urls={url}: it is not a URL; use one such as {EXAMPLE}"
