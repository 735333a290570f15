"""What a machine knows of itself."""

import os
import sys

import pytest

from rloom.runtime.nodes import agree_on_token, interface_of, reachable


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # an address that is nobody's


def test_nobody_listens_on_a_port_that_nobody_opened() -> None:
    assert not reachable("127.0.0.1:1", timeout_s=0.5)


def test_machines_of_one_run_come_to_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    tokens = []
    for _ in range(2):
        agree_on_token("10.0.0.1:6379")
        tokens.append(os.environ.pop("RAY_AUTH_TOKEN"))
    assert tokens[0] == tokens[1] and len(tokens[0]) == 64
    agree_on_token("10.0.0.1:6380")
    assert os.environ["RAY_AUTH_TOKEN"] != tokens[0]


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_TOKEN", "my secret"), ("RAY_AUTH_MODE", "disabled")])
def test_what_the_user_says_of_tokens_counts(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    agree_on_token("10.0.0.1:6379")
    assert os.environ[name] == value and ("RAY_AUTH_TOKEN" in os.environ) == (name == "RAY_AUTH_TOKEN")
