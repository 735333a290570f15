"""The sections of the reward, and the rules over several keys of one of them."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from rloom.config.base import GIVEN_IN_PYTHON, PassKeys, PassSection, Section, Switch, key, section
from rloom.errors import ConfigError

JUDGE = "reward_model.api"
KEY_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


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
        same_run=True,
    )
    api_key_env: str | None = key(
        None,
        "Name of the environment variable that holds the key. null: DASHSCOPE_API_KEY; OPENAI_API_KEY; GEMINI_API_KEY "
        "or GOOGLE_API_KEY; ANTHROPIC_API_KEY or CLAUDE_API_KEY.",
        needs_consent=bool,
        same_run=True,
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
    concurrency: int = key(32, "Maximum number of calls at the same time.", ge=1, same_run=True)
    requests_per_minute: int | None = key(
        None, "Maximum number of calls in a minute. null: no limit.", ge=1, same_run=True
    )
    tokens_per_minute: int | None = key(
        None, "Maximum number of tokens, read and written, in a minute. null: no limit.", ge=1, same_run=True
    )
    timeout_s: float = key(60.0, "Time limit of one attempt of a call.", gt=0, same_run=True)
    max_retries: int = key(
        5, "Further attempts after the first, before the sample counts as failed.", ge=0, same_run=True
    )
    cache_dir: str | None = key(
        "${trainer.default_local_dir}/judge_cache",
        "Folder of answers that need not be paid again, and of the money spent. null: no cache.",
        needs_consent=bool,
        same_run=True,
    )
    input_price: float | None = key(
        None, "Price of a million input tokens. null: cost is not reported.", ge=0, same_run=True
    )
    output_price: float | None = key(
        None, "Price of a million output tokens. null: cost is not reported.", ge=0, same_run=True
    )
    budget: float | None = key(
        None, "Stop the run when the calls recorded in `cache_dir` cost this much. null: no limit.", gt=0, same_run=True
    )


def judge_faults(judge: ApiJudge) -> Iterator[str]:
    """Values that may hold a key are not repeated in the sentence."""
    if judge.min_score >= judge.max_score:
        yield f"{JUDGE}.min_score={judge.min_score:g} is not below {JUDGE}.max_score={judge.max_score:g}; use 1 and 10"
    if judge.api_key_env is not None and not KEY_VARIABLE.fullmatch(judge.api_key_env):
        yield (
            f"{JUDGE}.api_key_env takes the name of an environment variable, in capitals, such as OPENAI_API_KEY; a "
            "key itself does not belong into the configuration, which is saved with the run (the value is not shown "
            "here)"
        )
    yield from base_url_faults(judge.base_url)
    yield from budget_faults(judge)


def check_judge(judge: ApiJudge, *, responses: int) -> ApiJudge:
    """The judge of `rloom judge`, which has no run, checked."""
    faults = list(judge_faults(judge))
    if responses > 1 and judge.mode != "groupwise":
        faults.append(f"--response is given {responses} times, and {JUDGE}.mode={judge.mode} takes one; use groupwise")
    if faults:
        raise ConfigError("\n".join(faults))
    return judge


def base_url_faults(base_url: str | None) -> Iterator[str]:
    if base_url is None:
        return
    parts = urlsplit(base_url)
    if parts.username is not None or parts.password is not None or parts.query:
        yield (
            f"{JUDGE}.base_url contains credentials or a query, and the configuration is saved with the run (the value "
            f"is not shown here); put the key into an environment variable and name it with {JUDGE}.api_key_env"
        )
    elif parts.scheme not in ("http", "https") or not parts.netloc:
        yield f"{JUDGE}.base_url={base_url}: it is not an address; use one such as http://127.0.0.1:8000/v1"


def budget_faults(judge: ApiJudge) -> Iterator[str]:
    prices = {"input_price": judge.input_price, "output_price": judge.output_price}
    missing = [f"{JUDGE}.{name}" for name, price in prices.items() if price is None]
    if len(missing) == 1:
        yield f"{missing[0]} is not set and the other price is; set both, or neither"
    if judge.budget is None:
        return
    if missing:
        yield f"{JUDGE}.budget={judge.budget:g} needs the prices of a million tokens; set {' and '.join(missing)}"
    if not judge.cache_dir:
        yield f"{JUDGE}.budget={judge.budget:g} is recorded in {JUDGE}.cache_dir; set it to a folder"


REMOTE = "reward_model.remote"
REMOTE_EXAMPLE = "http://127.0.0.1:5000/get_reward"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RemoteSection(Section):
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
        return tuple(separate_urls(self.urls))


def separate_urls(given: str | list[str]) -> list[str]:
    """Of one text, or of several; each may have several URLs with commas."""
    texts = [given] if isinstance(given, str) else given
    return [url.strip() for text in texts for url in text.split(",") if url.strip()]


def remote_faults(remote: RemoteSection) -> Iterator[str]:
    """Values that may hold a password or a token are not repeated in the sentence."""
    for url in remote.addresses:
        yield from remote_address_faults(url)
    if remote.token_env is not None and not VARIABLE.fullmatch(remote.token_env):
        yield (
            f"{REMOTE}.token_env takes the name of an environment variable, such as REWARD_TOKEN, and not the token "
            "itself, because the configuration is saved with the run (the value is not shown here)"
        )


def address_kind(url: str) -> tuple[bool, bool]:
    """(has a user name, a password or a query; is an address)."""
    try:
        parts = urlsplit(url)
        has_secrets = "@" in parts.netloc or bool(parts.query)
        host = (parts.hostname or "").encode("idna")
        return has_secrets, parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # brackets, a name or a port that are no address
        return "@" in url or "?" in url, False


def is_plain_address(url: str) -> bool:
    return address_kind(url) == (False, True)


def remote_address_faults(url: str) -> Iterator[str]:
    has_secrets, is_address = address_kind(url)
    if has_secrets:
        yield (
            f"{REMOTE}.urls: a URL contains a user name, a password or a query, and the configuration is saved with "
            f"the run (the value is not shown here); put a token into an environment variable and name it with "
            f"{REMOTE}.token_env"
        )
    elif not is_address:
        yield f"{REMOTE}.urls={url}: it is not a URL; use one such as {REMOTE_EXAMPLE}"


class RewardFsdp(Section):
    param_offload: bool | None = key(
        None,
        "Keep the reward model in host memory while it does not score. null: if it shares its workers with other "
        "roles. No effect on a CPU.",
        same_run=True,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Data type of weights and computation. auto: bfloat16 on a GPU, float32 on a CPU."
    )


class RewardNetwork(Section):
    path: str | None = key(None, "Another name of `reward_model.path`.")
    trust_remote_code: bool = key(
        False, "Another name of `reward_model.trust_remote_code`.", needs_consent=bool, same_run=True
    )
    input_tokenizer: str | None = key(
        None,
        "Tokenizer of the answers that are scored. rloom decodes them with the policy's, so only null and the value of "
        "`actor_rollout_ref.model.path` are accepted. The reward model's own tokenizer and chat template encode the "
        "conversation again.",
    )
    use_remove_padding: bool = key(
        True,
        "Score packed conversations without padding, where the family allows it. False: pad each pass.",
        same_run=True,
    )
    normalize: bool = key(
        False,
        "Scores are (output - mean) / std, with `mean` and `std` of the reward model's config.json, where OpenRLHF "
        "saves them.",
    )
    fsdp_config: RewardFsdp = section(RewardFsdp, "Offload and data type.")


class ClassifierKeys(PassSection):
    pass_keys: ClassVar[PassKeys] = PassKeys("micro_batch_size", "use_dynamic_bsz", "forward_max_token_len_per_gpu")

    enable: bool | None = key(None, "Score answers with a reward model. null: if its path is set.")
    path: str | None = key(
        None,
        "Folder or hub name of a sequence classifier (AutoModelForSequenceClassification), with its tokenizer and chat "
        "template. `embedded`: the model that is part of rloom with an untrained head, to try a command.",
    )
    trust_remote_code: bool = key(
        False, "Run the Python files of the reward model's repository.", needs_consent=bool, same_run=True
    )
    model: RewardNetwork = section(RewardNetwork, "The reward model, in verl's spelling.")
    micro_batch_size_per_gpu: int | None = key(
        None, "Conversations per forward pass. null: by token budget.", ge=1, same_run=True
    )
    micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    use_dynamic_bsz: bool | None = key(
        None, "Fill forward passes up to the token budget. null: if no micro-batch size is given.", same_run=True
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "Token budget of a forward pass; where conversations are padded, padding counts.", ge=1, same_run=True
    )
    use_torch_compile: bool = key(True, "Compile the layers of a packed reward model on a GPU.", same_run=True)
    max_length: int | None = key(None, "Maximum tokens of a conversation. null: the limit of the reward model.", ge=1)
    truncation: Literal["error", "left", "right"] = key(
        "error",
        "For conversations over the maximum. error: the score has failed; left, right: remove tokens on that side.",
    )
    label_weights: list[float] | None = key(
        None, "With several labels: the score is the sum of their outputs times these weights. null: their mean."
    )

    @property
    def model_path(self) -> str | None:
        """The reward model of this run; None: there is none."""
        return None if self.enable is False else self.path or self.model.path

    @property
    def trusts_code(self) -> bool:
        return self.trust_remote_code or self.model.trust_remote_code


class SandboxSection(Section):
    timeout_s: float = key(
        60.0,
        "Wall time of one run of a program, on a machine that is too busy to give it `cpu_s` before. A problem with "
        "inputs for stdin runs the program once for each test; other problems run all tests in one run.",
        gt=0,
    )
    total_timeout_s: float = key(60.0, "Wall time for all runs of one answer; tests left after it have failed.", gt=0)
    cpu_s: int = key(
        10,
        "Time of one run in which it computes or sleeps, without the time in which it waits for a processor. A row can "
        "set less: time_limit_s in its ground truth, or a reference solution in extra_info.answer, of whose processor "
        "time an answer may take ten times, and at least 1 s.",
        ge=1,
    )
    memory_mb: int = key(1024, "Address space of each process, in MiB.", ge=64)
    file_mb: int = key(64, "Size of a file, and with namespaces of the whole scratch folder, in MiB.", ge=1)
    processes: int = key(8, "Processes and threads of one run, together.", ge=1)
    output_kb: int = key(
        1024, "What one run may print, and what one call of a function may return, in KiB; with more it is ended.", ge=1
    )
    partial_credit: bool = key(False, "Score the share of tests that passed, instead of 1 for all and 0 otherwise.")
    isolation: Literal["auto", "required", "none"] = key(
        "auto",
        "auto: namespaces, or else Landlock and seccomp; an error at the start where the machine has neither. "
        "required: namespaces, or an error. none: without namespaces and with whatever else the machine has, even "
        "nothing. What protects is listed at the start.",
        needs_consent=lambda value: value not in ("auto", "required"),  # generated code without a barrier
        same_run=True,
    )


class OverlongBuffer(Section):
    enable: bool = key(False, "Penalise answers that come close to `data.max_response_length` (DAPO).")
    len: int = key(128, "Over the last N tokens of the maximum length, the penalty grows from 0 to its maximum.", ge=1)
    penalty_factor: float = key(1.0, "The maximum penalty, subtracted from the score.", ge=0)


class PartWeight(Section):
    weight: float = key(1.0, "Weight of the part.")
    normalize: bool | None = key(None, "Subtract the part's running mean and divide by its running standard deviation.")
    failed: Literal["fail", "skip"] = key(
        "fail", "If the part fails. fail: the sample fails. skip: the other parts count with this weight too."
    )


class Composite(Section):
    enable: bool = key(False, "Mix several rewards: the score is the weighted sum of the parts in `weights`.")
    weights: dict[str, float | PartWeight] = key(
        {},
        "Part -> weight, or {weight, normalize, failed: fail|skip}. Parts: rule_score (rule or your function), "
        "rm_score (reward model, or else judge, or else remote reward), api_score, remote_score, format_score, "
        "environment_score (of an environment, tools or an agent), those of `reward_model.kinds`.",
    )
    normalize: bool = key(
        False, "Normalise every part by its running mean and standard deviation, unless a part has its own `normalize`."
    )


class Format(Section):
    pattern: str | None = key(
        None, "Regular expression that a whole answer has to match; the part format_score is 1 if it does, else 0."
    )


class RewardModel(ClassifierKeys):
    timeout_s: float = key(
        10.0, "Time limit of one call of a reward function; after it the sample counts as failed.", gt=0, same_run=True
    )
    reward_manager: Literal["naive", "dapo", "prime", "batch"] = key(
        "naive",
        "How `custom_reward_function` is called. naive, dapo and prime: once for each answer. batch: once for all "
        "answers to a prompt, with lists: data_sources, solution_strs, ground_truths, extra_infos.",
    )
    num_workers: int = key(
        2,
        "Processes that compute rewards during generation. While programs run for over 0.25 s, up to as many more.",
        ge=1,
        same_run=True,
    )
    max_failed_share: float = key(
        0.5, "Stop the run if a larger share of a step's rewards failed.", ge=0, le=1, same_run=True
    )
    normalize: bool = key(
        False, "Normalise the score by its running mean and standard deviation over the run, saved in checkpoints."
    )
    truncated_score: float | None = key(
        None,
        "For answers and episodes that ended at a limit, after `overlong_buffer`. 0 to 1: their score is multiplied by "
        "it. Below 0: it is their score. null: their score counts as it is.",
        le=1,
    )
    score_range: list[float] | None = key(
        None,
        "Limits of the score in training, [low, high], after the penalties. null: none.",
        min_length=2,
        max_length=2,
    )
    kinds: list[str] = key(
        [],
        "Kinds of rewards of your own, each a RewardKind: file.py:name, module:name, or a name that an installed "
        "package registers as an entry point of rloom.reward_kinds. docs/extending.md has an example.",
        needs_consent=bool,
    )
    composite: Composite = section(
        Composite, "A weighted mix of several rewards.", switch=Switch("enable", "one reward alone is the score")
    )
    format: Format = section(Format, "The format reward, a part of the mix.")
    remote: RemoteSection = section(
        RemoteSection, "Reward servers.", switch=Switch("urls", "there are no reward servers", on="")
    )
    overlong_buffer: OverlongBuffer = section(
        OverlongBuffer, "DAPO's over-long penalty.", switch=Switch("enable", "over-long answers are not penalised")
    )
    api: ApiJudge = section(
        ApiJudge,
        "A language model behind an API as the judge of the answers.",
        switch=Switch("enable", "no judge scores the answers"),
    )
    sandbox: SandboxSection = section(
        SandboxSection, "Limits of generated code, for data sources that are scored by running it."
    )


class CustomRewardFunction(Section):
    path: str | None = key(
        None,
        "Python file with your own reward function, which then scores every data source.",
        needs_consent=lambda path: bool(path) and path != GIVEN_IN_PYTHON,  # that one is not in a file
    )
    name: str = key("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = key({}, "Further keyword arguments of every call, also of the built-in rules.")
