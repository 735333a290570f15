"""The keys of the judge, and `rloom judge try`."""

from pathlib import Path

import pytest

from rloom import cli
from rloom.config.load import load_config
from tests.judge_server import KEY, faults_in_turn, serving

PREFIX = "reward_model.api"


def refusal(capsys: pytest.CaptureFixture[str], *keys: str) -> str:
    assert cli.main(["plan", *(f"{PREFIX}.{key}" for key in ("enable=True", *keys))]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["min_score=10"], "min_score=10 is not below reward_model.api.max_score=10; use 1 and 10"),
        (["budget=5"], "budget=5 needs the prices of a million tokens; set reward_model.api.input_price and"),
        (["input_price=1"], "output_price is not set and the other price is; set both, or neither"),
        (["budget=5", "input_price=1", "output_price=1", "cache_dir=null"], "budget=5 is recorded in"),
        (["base_url=localhost:8000"], "base_url=localhost:8000: it is not an address; use one such as http://"),
        (["type=qwen"], "it takes dashscope|openai|gemini|claude, by default dashscope"),
        (["api_key=x"], "there is no such key; did you mean reward_model.api.api_key_env?"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, *keys)


@pytest.mark.parametrize(
    "key",
    [f"api_key_env={KEY}", f"base_url=https://me:{KEY}@x/v1", f"base_url='https://x/v1?key={KEY}'", f"api_key={KEY}"],
)
def test_a_key_in_the_configuration_is_refused_and_not_shown(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, key)
    assert KEY not in text and "api_key_env" in text


def test_a_judge_that_is_not_enabled_has_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{PREFIX}.model=qwen-max"]) == 2
    assert "no judge scores the answers; set reward_model.api.enable=True" in capsys.readouterr().err


def test_the_cache_is_in_the_run_directory() -> None:
    config = load_config(["trainer.default_local_dir=outputs/mine"])
    assert config.reward_model.api.cache_dir == "outputs/mine/judge_cache"
    assert load_config([f"{PREFIX}.cache_dir=null"]).reward_model.api.cache_dir is None


def test_prompts_of_a_shell_command_arrive_as_typed() -> None:
    text = r"问题：{prompt}\n解答：{response}\n答案：{ground_truth}\n请评分1-10..."
    config = load_config([f"{PREFIX}.scoring_prompt='{text}'", f"{PREFIX}.system_prompt='你是专家，请评估...'"])
    assert (config.reward_model.api.scoring_prompt, config.reward_model.api.system_prompt) == (
        text,
        "你是专家，请评估...",
    )


def attempt(server_url: str, *arguments: str) -> int:
    keys = [f"{PREFIX}.type=openai", f"{PREFIX}.base_url={server_url}", f"{PREFIX}.max_retries=0"]
    return cli.main(["judge", "try", "--prompt", "6*7?", *arguments, *keys])


@pytest.fixture
def key_in_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("key_in_environment")
def test_try_shows_request_answer_score_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        prices = (f"{PREFIX}.input_price=2.5", f"{PREFIX}.output_price=10")
        prompt = f"{PREFIX}.scoring_prompt='Q: {{prompt}}\\nA: {{response}}\\nT: {{ground_truth}}'"
        given = ("--response", "42 [worth 8]", "--ground_truth", "42", prompt, *prices)
        assert attempt(server.base_url("openai"), *given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"Request: openai gpt-4o-mini at {server.base_url('openai')}",
        "Parameters: temperature 0, max_tokens 1024, structured output",
    ]
    user = lines.index("--- user")
    assert lines[user + 1 : user + 4] == ["Q: 6*7?", "A: 42 [worth 8]", "T: 42"]
    # 120 × 2.5 + 20 × 10 millionths
    assert lines[-4:-1] == [
        'Answer: {"reason": "as marked", "score": 8.0}',
        "Score: 8, scaled 0.7778",
        "Tokens: 120 in, 20 out; cost 0.0005",
    ]
    assert lines[-1].startswith("Time: ") and lines[-1].endswith(" s, 1 requests")
    assert list(tmp_path.iterdir()) == []  # no cache, no run directory


@pytest.mark.usefixtures("key_in_environment")
def test_try_compares_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        given = ("--response", "a [worth 1]", "--response", "b [worth 10]")
        assert attempt(server.base_url("openai"), *given, f"{PREFIX}.mode=groupwise") == 0
        shown = capsys.readouterr().out
        assert "Score of answer 1: 1, scaled 0.0000\nScore of answer 2: 10, scaled 1.0000\n" in shown
        assert attempt(server.base_url("openai"), *given) == 2
    assert "--response is given 2 times, and reward_model.api.mode=pointwise takes one" in capsys.readouterr().err


@pytest.mark.usefixtures("key_in_environment")
def test_try_ends_with_1_without_a_score(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(plan=faults_in_turn("500")) as server:
        assert attempt(server.base_url("openai"), "--response", "x") == 1
    assert "No score: HTTP 500: not now" in capsys.readouterr().out
    assert attempt("http://127.0.0.1:1/v1", "--response", "x", f"{PREFIX}.preset=math") == 1
    assert "No score: the prompt of the judge has {ground_truth}" in capsys.readouterr().out


def test_try_without_a_key_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("DASHSCOPE_API_KEY", raising=False)
    assert cli.main(["judge", "try", "--prompt", "p", "--response", "r"]) == 2
    assert "needs a key in the environment variable DASHSCOPE_API_KEY" in capsys.readouterr().err
