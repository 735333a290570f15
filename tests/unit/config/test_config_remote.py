"""The keys of reward servers: spellings of the URLs, and values that may hold a secret."""

import pytest

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.load import load_config
from rloom.errors import ConfigError

MODEL = "actor_rollout_ref.model.path=a/model"
URLS = "reward_model.remote.urls"
A, B = "http://a:5000/get_reward", "https://b.example.com/v1/score"


def checked(*overrides: str) -> None:
    config = load_config([MODEL, *overrides])
    check(config, declared_needs(config))


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        (A, (A,)),
        (f"[{A}]", (A,)),
        (f"[{A},{B}]", (A, B)),
        (f"'{A},{B}'", (A, B)),  # OpenRLHF's --remote_rm_url
        (f"'{A} , {B},'", (A, B)),
        ("[]", ()),
    ],
)
def test_urls_are_one_a_list_or_a_text_with_commas(value: str, addresses: tuple[str, ...]) -> None:
    assert load_config([MODEL, f"{URLS}={value}"]).reward_model.remote.addresses == addresses
    checked(f"{URLS}={value}")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:sekret@a/x",
        "http://sekret@a/x",
        "https://a/x?key=sekret",
        "http://me:sek:ret@a:port/x",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"urls: a URL contains a user name, .*reward_model.remote.token_env"
    ) as caught:
        checked(f"{URLS}='{A},{url}'")
    assert "sek" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["a:5000/x", "localhost", "ftp://a/x", "http://", "http://a:99999/x", "http://a..b/x", "my_reward.py"]
)
def test_a_text_that_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"it is not a URL; use one such as http://127\.0\.0\.1:5000/get_reward"):
        checked(f"{URLS}='{url}'")


def test_a_token_in_place_of_its_variable_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="takes the name of an environment variable") as caught:
        checked(f"{URLS}={A}", "reward_model.remote.token_env=sk-1234")
    assert "1234" not in str(caught.value)


def test_keys_of_servers_without_a_server_are_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"remote\.batch_size=2: no effect in this run, .* set reward_model\.remote\.urls"
    ):
        checked("reward_model.remote.batch_size=2")
