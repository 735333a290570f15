"""The keys of the API judge, and the rules over several of them."""

import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from rloom.config.section import Section, key
from rloom.errors import ConfigError

NAME = "reward_model.api"
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class ApiJudge(Section):
    enable: bool = key(False, "Score the answers with a language model behind an API.", needs_consent=bool)
    type: Literal["dashscope", "openai", "gemini", "claude"] = key(
        "dashscope",
        "The provider. openai with `base_url` is any OpenAI-compatible server, such as a local vLLM.",
        needs_consent=bool,
    )
    model: str | None = key(
        None,
        "Name of the model. null: qwen-plus (dashscope), gpt-4o-mini (openai), gemini-1.5-flash (gemini), "
        "claude-3-haiku-20240307 (claude).",
        needs_consent=bool,
    )
    base_url: str | None = key(
        None,
        "Address of the API, without credentials. null: that of DASHSCOPE_BASE_URL or DASHSCOPE_HTTP_BASE_URL, "
        "OPENAI_BASE_URL, GOOGLE_GEMINI_BASE_URL or ANTHROPIC_BASE_URL, or else the provider's own.",
        needs_consent=bool,
    )
    api_key_env: str | None = key(
        None,
        "Name of the environment variable that holds the key. null: DASHSCOPE_API_KEY; OPENAI_API_KEY; GEMINI_API_KEY "
        "or GOOGLE_API_KEY; ANTHROPIC_API_KEY or CLAUDE_API_KEY.",
        needs_consent=bool,
    )
    preset: str | None = key(
        None, "Prompts of the judge: math, code, dialogue, safety, or a YAML file of your own. null: general prompts."
    )
    language: Literal["auto", "en", "zh"] = key(
        "auto",
        "Language of the preset: en (English) or zh (Chinese). auto: Chinese for prompts with Chinese characters, else "
        "English.",
    )
    system_prompt: str | None = key(None, "System prompt of the judge. null: that of the preset.")
    scoring_prompt: str | None = key(
        None, "User prompt with {prompt}, {response} and {ground_truth}. null: that of the preset."
    )
    mode: Literal["pointwise", "groupwise"] = key(
        "pointwise",
        "pointwise: one call for each answer. groupwise: one call for all answers to a prompt, which it compares.",
    )
    min_score: float = key(1.0, "Lowest score that the judge gives; it becomes 0.")
    max_score: float = key(10.0, "Highest score that the judge gives; it becomes 1.")
    temperature: float | None = key(
        0.0, "Sampling temperature of the judge. null: not sent, for models that refuse it.", ge=0
    )
    max_tokens: int = key(1024, "Maximum length of the judge's answer in tokens, with its thinking.", ge=1)
    concurrency: int = key(32, "Maximum number of calls at the same time.", ge=1)
    requests_per_minute: int | None = key(None, "Maximum number of calls in a minute. null: no limit.", ge=1)
    tokens_per_minute: int | None = key(
        None, "Maximum number of tokens, read and written, in a minute. null: no limit.", ge=1
    )
    timeout_s: float = key(60.0, "Time limit of one attempt of a call.", gt=0)
    max_retries: int = key(5, "Further attempts after the first, before the sample counts as failed.", ge=0)
    cache_dir: str | None = key(
        "${trainer.default_local_dir}/judge_cache",
        "Folder of answers that need not be paid again, and of the money spent. null: no cache.",
        needs_consent=bool,
    )
    input_price: float | None = key(None, "Price of a million input tokens. null: cost is not reported.", ge=0)
    output_price: float | None = key(None, "Price of a million output tokens. null: cost is not reported.", ge=0)
    budget: float | None = key(
        None, "Stop the run when the calls recorded in `cache_dir` cost this much. null: no limit.", gt=0
    )


def judge_faults(judge: ApiJudge) -> Iterator[str]:
    """Values that may hold a key are not repeated in the sentence."""
    if judge.min_score >= judge.max_score:
        yield f"{NAME}.min_score={judge.min_score:g} is not below {NAME}.max_score={judge.max_score:g}; use 1 and 10"
    if judge.api_key_env is not None and not VARIABLE.fullmatch(judge.api_key_env):
        yield (
            f"{NAME}.api_key_env takes the name of an environment variable, in capitals, such as OPENAI_API_KEY; a key "
            "itself does not belong into the configuration, which is saved with the run (the value is not shown here)"
        )
    yield from address_faults(judge.base_url)
    yield from budget_faults(judge)


def check_judge(judge: ApiJudge, *, responses: int) -> ApiJudge:
    """For a call without a run."""
    faults = list(judge_faults(judge))
    if responses > 1 and judge.mode != "groupwise":
        faults.append(f"--response is given {responses} times, and {NAME}.mode={judge.mode} takes one; use groupwise")
    if faults:
        raise ConfigError("\n".join(faults))
    return judge


def address_faults(base_url: str | None) -> Iterator[str]:
    if base_url is None:
        return
    parts = urlsplit(base_url)
    if parts.username is not None or parts.password is not None or parts.query:
        yield (
            f"{NAME}.base_url contains credentials or a query, and the configuration is saved with the run (the value "
            f"is not shown here); put the key into an environment variable and name it with {NAME}.api_key_env"
        )
    elif parts.scheme not in ("http", "https") or not parts.netloc:
        yield f"{NAME}.base_url={base_url}: it is not an address; use one such as http://127.0.0.1:8000/v1"


def budget_faults(judge: ApiJudge) -> Iterator[str]:
    prices = {"input_price": judge.input_price, "output_price": judge.output_price}
    missing = [f"{NAME}.{name}" for name, price in prices.items() if price is None]
    if len(missing) == 1:
        yield f"{missing[0]} is not set and the other price is; set both, or neither"
    if judge.budget is None:
        return
    if missing:
        yield f"{NAME}.budget={judge.budget:g} needs the prices of a million tokens; set {' and '.join(missing)}"
    if not judge.cache_dir:
        yield f"{NAME}.budget={judge.budget:g} is recorded in {NAME}.cache_dir; set it to a folder"
