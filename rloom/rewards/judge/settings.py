"""The keys `reward_model.api.*`, as this package reads them. It imports no configuration; the section fits this."""

from typing import Protocol

KEY = "reward_model.api"  # for messages


class JudgeSettings(Protocol):
    @property
    def type(self) -> str: ...

    @property
    def model(self) -> str | None: ...

    @property
    def base_url(self) -> str | None: ...

    @property
    def api_key_env(self) -> str | None: ...

    @property
    def preset(self) -> str | None: ...

    @property
    def system_prompt(self) -> str | None: ...

    @property
    def scoring_prompt(self) -> str | None: ...

    @property
    def mode(self) -> str: ...

    @property
    def min_score(self) -> float: ...

    @property
    def max_score(self) -> float: ...

    @property
    def temperature(self) -> float | None: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def requests_per_minute(self) -> int | None: ...

    @property
    def tokens_per_minute(self) -> int | None: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def max_retries(self) -> int: ...

    @property
    def cache_dir(self) -> str | None: ...

    @property
    def input_price(self) -> float | None: ...

    @property
    def output_price(self) -> float | None: ...

    @property
    def budget(self) -> float | None: ...
