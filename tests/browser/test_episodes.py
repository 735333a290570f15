"""Answers of several turns, in a browser."""

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser import chromium
from tests.browser.chromium import Page
from tests.view_episodes import MANY, write_episode_run
from tests.view_runs import HOSTILE

FIRST, SECOND, FAILED = ("[data-answer='1']", "[data-answer='2']", "[data-answer='3']")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("view") / "runs"  # alone: other tests have runs of this name
    write_episode_run(root / "episodes")
    with chromium.serving([root]) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def episodes(page: Page, served: str) -> Iterator[Page]:
    """The browser of the other tests, at another server."""
    own = Page(page.browser, served)
    own.size(1280)
    own.enter()
    yield own
    page.enter()


def labels(page: Page, answer: str) -> list[str]:
    return page.texts(f"{answer} .step-label")


def test_an_answer_is_shown_turn_by_turn(episodes: Page) -> None:
    episodes.open("episodes/step/1/prompt/0")
    turn, other = "Turn {}", "Environment, not trained"
    assert labels(episodes, FIRST) == [turn.format(1), other, turn.format(2), other, turn.format(3)]
    assert episodes.texts(f"{FIRST} .step-text") == ["8", "too low", "12?", "no", "I say 12."]
    assert episodes.texts(f"{FIRST} .badges .tag") == ["ended", "3 turns", "2 tool calls", "reward 0.750"]
    assert episodes.texts(f"{FIRST} .turn-reward") == ["reward 0.250", "reward 0.500"]
    episodes.wait(lambda: episodes.all(f"{FIRST} .token.masked"))
    masked = "return [...document.querySelectorAll(`${arguments[0]} .token.masked`)].map(n => n.textContent).join('')"
    assert episodes.script(masked, FIRST) == "too lowno"
    assert episodes.script("return document.querySelectorAll(`${arguments[0]} .policy .masked`).length", FIRST) == 0


def test_a_call_has_its_name_arguments_time_result_or_error(episodes: Page) -> None:
    episodes.open("episodes/step/1/prompt/0")
    assert episodes.texts(f"{FIRST} .call-head code") == ["check", "chek"]
    assert episodes.texts(f"{FIRST} .call-arguments") == ['{"number": 8}', '{"number": 9}']
    assert episodes.texts(f"{FIRST} .call-result") == ["too low"]
    assert episodes.texts(f"{FIRST} .call-error") == ["there is no tool 'chek'"]
    assert episodes.texts(f"{FIRST} .call-head .muted") == ["250 ms", "0.0 ms"]


def test_branches_are_tabs_that_say_what_began_them(episodes: Page) -> None:
    episodes.open("episodes/step/1/prompt/0")
    assert episodes.texts(f"{SECOND} [role=tab]") == ["Branch 1", "Branch 2"]
    assert episodes.texts(f"{SECOND} .step-text") == ["<think>a</think>7"]
    episodes.one(f"{SECOND} [role=tab]").send_keys(Keys.ARROW_RIGHT)
    episodes.wait(lambda: episodes.texts(f"{SECOND} .step-text") == ["<think>b</think>9"])
    assert "the chat template wrote it in another way" in episodes.text(f"{SECOND} .step.prompt summary")
    assert episodes.text("main h1") == "Step 1 / prompt 0"  # the arrow did not open another prompt
    assert episodes.texts(f"{SECOND} .ending") == ["turn limit"]


def test_an_episode_without_a_turn_says_why(episodes: Page) -> None:
    episodes.open("episodes/validation/0/prompt/0")
    assert episodes.texts(f"{FAILED} .ending") == ["environment failed"] and labels(episodes, FAILED) == []
    assert "ValueError: no such move" in episodes.text(f"{FAILED} .reason")


def test_a_key_moves_through_a_hundred_turns_and_tokens_are_made_where_they_are_seen(episodes: Page) -> None:
    episodes.open("episodes/step/1/prompt/1")
    assert len(labels(episodes, FIRST)) == 2 * MANY
    episodes.wait(lambda: episodes.all(f"{FIRST} .token"))
    made = "return [...document.querySelectorAll('.step')].filter(n => n.querySelector('.token')).length"
    assert episodes.script(made) < MANY
    for _ in range(3):
        episodes.press("t")
    episodes.wait(lambda: episodes.text(".step.current .step-label") == "Turn 3")
    episodes.press("T")
    episodes.wait(lambda: episodes.text(".step.current .step-label") == "Turn 2")
    for _ in range(MANY):
        episodes.press("t")
    episodes.wait(lambda: episodes.text(".step.current .step-label") == f"Turn {MANY}")
    inside = """const boxes = ['.turns', '.step.current'].map(n => document.querySelector(n).getBoundingClientRect());
        const [box, step] = boxes;
        return step.top >= box.top - 1 && step.bottom <= box.bottom + 1"""
    episodes.wait(lambda: episodes.script(inside))
    episodes.wait(lambda: episodes.all(".step.current .token"))


def test_colours_and_the_inspector_work_within_turns(episodes: Page) -> None:
    episodes.open("episodes/step/1/prompt/0")
    episodes.wait(lambda: episodes.all(f"{FIRST} .policy .token"))
    episodes.one("[data-colour=advantage]").click()
    episodes.wait(lambda: episodes.all(f"{FIRST} .policy .token.p8"))
    assert episodes.all(f"{FIRST} .environment .token.p8") == []
    episodes.one(f"{FIRST} .turns").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    episodes.wait(lambda: "Of the environment" in episodes.text(".inspector"))


@pytest.mark.parametrize("width", [390, *(pytest.param(width, marks=pytest.mark.long) for width in (640, 1280))])
def test_hostile_texts_are_text_and_no_wider_than_the_page(episodes: Page, width: int) -> None:
    episodes.size(width, 844)
    try:
        episodes.open("episodes/step/1/prompt/2")
        assert len(episodes.all(".answer")) == len(HOSTILE)
        episodes.wait(lambda: episodes.all(".token"))
        assert episodes.script("return document.documentElement.scrollWidth") <= width
        assert episodes.script("return document.querySelectorAll('main script, main img, main svg a').length") == 0
        assert episodes.texts(".call-head code")[0] == HOSTILE[0]
    finally:
        episodes.size(1280)


def test_turns_are_also_in_chinese(episodes: Page) -> None:
    episodes.open("episodes/step/1/prompt/0")
    episodes.one("#language").click()
    try:
        episodes.wait(lambda: labels(episodes, FIRST)[:2] == ["第 1 轮", "环境，不参与训练"])
        assert episodes.texts(f"{FIRST} .badges .tag")[0] == "正常结束"
    finally:
        episodes.one("#language").click()
