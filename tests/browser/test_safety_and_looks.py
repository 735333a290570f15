"""What holds on every page: answers are text, updates, a server that goes away, themes, languages, a phone."""

import re
from pathlib import Path

import pytest

from rloom.runs.dumps.reader import Dumps
from tests import view_runs
from tests.browser.chromium import Page, serving
from tests.view_runs import HOSTILE, GrowingRun
from tests.waiting import wait_until

EVERY_PAGE = (
    "finished",
    "finished/step/3",
    "finished/step/4/prompt/2",
    "finished/prompt/10",
    "finished/validation",
    "finished/validation/8/prompt/1",
    "finished/validation-prompt/1",
    "finished/findings",
    "finished/timeline",
    "finished/search?text=step",
    "finished/config",
    "#/compare/0,1",
    "#/",
)


def background(page: Page) -> str:
    return page.script("return getComputedStyle(document.body).backgroundColor")


def test_markup_and_scripts_in_texts_are_shown_and_never_run(page: Page) -> None:
    page.open("hostile/step/1")
    assert HOSTILE[0] in page.text("table.prompts")
    for group, prompt in enumerate(HOSTILE):
        page.open(f"hostile/step/1/prompt/{group}")
        page.wait(lambda: len(page.all(".answer")) == 4)
        shown = prompt.encode("utf-8", "replace").decode()
        assert page.text(".prompt-text") == shown
        assert page.script("return document.querySelectorAll('main script, main img, main iframe').length") == 0
        assert page.script("return document.querySelectorAll('main a[href^=javascript]').length") == 0
        assert page.script("return document.documentElement.scrollWidth <= innerWidth"), prompt[:40]
    for place in (
        "hostile",
        "hostile/validation",
        "hostile/prompt/1",
        "hostile/findings",
        "hostile/config",
        "hostile/search?text=e",
        "#/",
    ):
        page.open(place)
        assert page.script("return document.querySelectorAll('main script, main img').length") == 0
    assert page.script("return window.hacked") is None


def test_the_page_follows_a_run_that_writes(page: Page, folder: Path) -> None:
    run = GrowingRun(folder / "growing", total_steps=5)
    run.write_step(1)
    run.write_step(2)
    with serving([folder / "growing"]) as server:
        live = Page(page.browser, f"http://127.0.0.1:{server.server_port}")
        live.enter()  # a single run opens at once
        live.wait(lambda: live.text("main h1").endswith("growing"))
        assert live.text(".run-head .badge") == "running"
        live.wait(lambda: len(live.all("[data-chart=entropy] circle")) == 2)
        live.script("window.loaded = 1; scrollTo(0, 150)")
        run.write_step(3)
        live.wait(lambda: len(live.all("[data-chart=entropy] circle")) == 3)  # by the page's own timer
        assert live.script("return [window.loaded, scrollY]") == [1, 150]
        wait_until(lambda: 3 in Dumps(folder / "growing").steps("train"))  # a thread writes them
        live.open("growing/step/last")
        assert live.text("main h1") == "Step 3"
        run.write_step(4)
        options = "return [...document.querySelector('#step').options].map(one => one.value)"
        live.wait(lambda: live.tick() or live.script(options) == ["1", "2", "3", "4"])
        assert live.text("main h1") == "Step 3"
        run.write_step(5)
        run.close()
        live.wait(lambda: live.tick() or live.text("#state").startswith("finished"))
        assert live.script("return window.loaded") == 1
        assert live.console() == []
    page.enter()


def test_pages_without_answers_show_the_first_ones_when_they_are_written(page: Page, folder: Path) -> None:
    run = GrowingRun(folder / "starting", total_steps=2)
    run.events.write("step", time=view_runs.START, step=1, metrics={"critic/score/mean": 0.5})
    with serving([folder / "starting"]) as server:
        live = Page(page.browser, f"http://127.0.0.1:{server.server_port}")
        live.enter()
        live.open("starting/step/last")
        assert "trainer.log_rollouts=True" in live.text("main")
        run.write_step(1)
        live.wait(lambda: live.tick() or live.text("main h1") == "Step 1")
        run.close()
        assert live.console() == []
    page.enter()


def test_an_axis_of_values_that_differ_by_rounding_has_few_ticks(page: Page) -> None:
    found = page.browser.execute_async_script(
        "const [done] = arguments; import('/curves.js').then(({ ticks, valueDomain }) =>"
        "done([ticks([0.3, 0.1 + 0.2], 5).length, ticks(valueDomain([0.3, 0.1 + 0.2], {}), 5)]))"
    )
    assert found[0] <= 50 and found[1] == [0.27, 0.28, 0.29, 0.3, 0.31, 0.32, 0.33]


def test_a_page_that_is_left_still_asks_for_its_own_run(page: Page) -> None:
    """While the next page waits for its answers, the old one may be updated. A wrong request is logged as an error."""
    for place in ("finished", "finished/step/last", "finished/validation", "finished/findings"):
        page.open(place)
        page.latency(200)
        page.script("location.hash = '#/compare/0,1'")
        page.script("return new Promise(done => setTimeout(done, 50))")
        page.tick()
        page.script("return new Promise(done => setTimeout(done, 400))")
        page.latency(0)


def test_a_lost_connection_is_shown_until_the_server_is_back(page: Page) -> None:
    page.open("finished")
    page.offline(True)
    page.tick()
    page.wait(lambda: page.text("#connection").startswith("Connection lost, retrying"))
    assert page.texts(".tiles dd") != []  # what was read stays
    page.offline(False)
    page.wait(lambda: page.tick() or not page.one("#connection").is_displayed())
    assert all("ERR_INTERNET_DISCONNECTED" in line for line in page.console())


@pytest.mark.parametrize("place", EVERY_PAGE)
def test_nothing_is_wider_than_a_phone(page: Page, place: str) -> None:
    page.size(390, 844)
    try:
        page.open(place)
        assert page.script("return document.documentElement.scrollWidth") == 390
    finally:
        page.size(1280)


def test_a_phone_shows_validation_and_prompts_and_the_name_of_the_run(page: Page) -> None:
    page.size(390, 844)
    inside = "return document.querySelector(arguments[0]).getBoundingClientRect().right <= 390"
    try:
        page.open("#/")
        assert page.script(inside, "table.runs .validated b") and page.script(inside, "table.runs .finding-badge, td")
        page.open("finished/step/3")
        assert page.script(inside, "td.excerpt > span")
        assert len(page.texts("table.prompts thead th")) == 3  # group, mean, prompt
        name = "const box = document.querySelector('.run-name'); return box.scrollWidth <= box.clientWidth + 1"
        assert page.script(name) and page.one(".run-name").rect["width"] > 300
    finally:
        page.size(1280)


def test_the_theme_is_that_of_the_system_or_the_one_chosen(page: Page) -> None:
    page.open("finished")
    light = background(page)
    page.prefer("dark")
    dark = background(page)
    assert light != dark
    page.one("#theme").click()  # light, whatever the system says
    assert background(page) == light
    page.browser.refresh()
    page.wait(lambda: page.all("#theme") and background(page) == light)
    page.one("#theme").click()
    page.prefer("light")
    assert background(page) == dark
    page.one("#theme").click()
    assert background(page) == light


def test_every_page_is_also_in_chinese(page: Page) -> None:
    page.open("finished")
    page.one("#language").click()
    page.wait(lambda: page.texts(".tabs a") == ["概览", "训练步", "验证", "时间线", "诊断", "搜索", "配置"])
    for place in EVERY_PAGE:
        page.open(place)
        assert re.search("[一-鿿]", page.text("main")), place
    page.browser.refresh()
    page.wait(lambda: page.script("return document.documentElement.lang") == "zh-CN")
    page.one("#language").click()
    page.wait(lambda: page.script("return document.documentElement.lang") == "en")


def test_every_page_has_one_title_labels_and_names_for_its_controls(page: Page) -> None:
    controls = (
        "[...document.querySelectorAll('button, a, input, select, summary')].filter(node => node.checkVisibility())"
    )
    named = "node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length"
    unnamed = f"return {controls}.filter(node => !({named})).map(node => node.className + ' ' + node.id)"
    for place in EVERY_PAGE:
        page.open(place)
        assert len(page.texts("h1")) == 1, place
        assert page.script(unnamed) == [], place
