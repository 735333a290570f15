"""Runs and the overview of one, in a browser."""

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Page
from tests.view_runs import STEPS, step_metrics, train_rows

FOUND = {
    "steps": 8,
    "findings": [
        {
            "kind": "kl_low",
            "severity": "warning",
            "steps": [1, 8],
            "title": {"en": "The KL is below <0.001>", "zh": "KL 低于 <0.001>"},
            "evidence": [{"en": "0.0004 in 8 steps", "zh": "8 步中为 0.0004"}],
            "causes": [{"en": "a small learning rate", "zh": "学习率过小"}],
            "changes": [{"key": "actor.optim.lr", "value": "3e-6", "why": {"en": "three times as much", "zh": "三倍"}}],
            "actions": [{"en": "look at <the answers>", "zh": "查看 <回答>"}],
            "begin_again": True,
        }
    ],
}


def chart(name: str, rest: str = "") -> str:
    return f'[data-chart="{name}"] {rest}'


def hover(page: Page, selector: str, share: float) -> None:
    """The pointer at a share of the element's width."""
    node = page.one(selector)
    page.script("arguments[0].scrollIntoView({block: 'center'})", node)
    offset = int((share - 0.5) * node.rect["width"])
    ActionChains(page.browser).move_to_element_with_offset(node, offset, 0).perform()


def smooth(page: Page, weight: float) -> None:
    slider = page.one("#smoothing")
    page.script("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", slider, weight)


def names(page: Page) -> list[str]:
    return [text.split("/")[-1] for text in page.texts("table.runs .run-cell > a")]


def test_the_list_has_every_run_with_its_state_and_numbers(page: Page) -> None:
    page.open("#/")
    rows = dict(zip(names(page), page.table(), strict=True))
    assert set(rows) == {"finished", "other", "killed", "hostile", "long", "bare", "templated", "ill"}
    assert rows["hostile"][2] == "failed<script>Error</script>"
    assert (rows["finished"][2], rows["finished"][4]) == ("finished", "8 / 8")
    assert (rows["other"][2], rows["other"][4]) == ("interrupted", "4 / 8")
    assert rows["other"][7].startswith("rloo")
    assert "40.0\u202f% → 100.0\u202f% sums" in rows["finished"][6]


def test_ill_runs_have_a_badge_and_a_colour(page: Page) -> None:
    page.open("#/")
    ill = f"tr[data-href='#/run/{page.runs['ill']}']"
    page.wait(lambda: page.texts(f"{ill} .finding-badge"))
    assert page.text(f"{ill} .finding-badge") == "✕1error"
    assert page.one(f"{ill} .finding-badge").get_attribute("title") == "Every reward is 0: nothing to learn from"
    colours = [page.one(f"tr[data-href='#/run/{page.runs[name]}']").value_of_css_property("background-color")
               for name in ("ill", "long")]  # fmt: skip
    assert colours[0] != colours[1]
    page.one(f"{ill} .finding-badge").click()
    page.wait(lambda: page.text("main h1") == "Findings")


def test_runs_are_sorted_and_filtered(page: Page) -> None:
    page.open("#/")
    page.wait(lambda: page.texts(".finding-badge"))
    page.one("[data-sort=findings]").click()
    page.wait(lambda: names(page)[0] in ("ill", "bare", "hostile"))  # those with an error
    page.one("[data-sort=name]").click()
    page.wait(lambda: names(page) == sorted(page.runs))
    page.one("[data-sort=name]").click()
    page.wait(lambda: names(page) == sorted(page.runs, reverse=True))
    page.one("[data-sort=accuracy]").click()
    # means of the last validations: 75, 62.5, 53.3 and 50 %
    page.wait(lambda: names(page)[:4] == ["other", "finished", "killed", "hostile"])
    page.one("#filter-state option[value=interrupted]").click()
    page.wait(lambda: names(page) == ["other"])
    page.open("#/?algorithm=grpo&text=fini%20qwen")
    assert names(page) == ["finished"]
    page.open("#/?text=nowhere")
    assert page.texts(".empty h2") == ["No run matches"]


def test_tags_and_hidden_runs_are_kept_beside_the_run(page: Page, folder: Path) -> None:
    page.open("#/")
    row = f"tr[data-href='#/run/{page.runs['long']}']"
    page.script("arguments[0].click()", page.one(f"{row} .edit-tags"))
    page.press("baseline, 基线", Keys.ENTER)
    page.wait(lambda: page.texts(f"{row} .tag") == ["baseline", "基线"])
    assert json.loads((folder / "long" / "labels.json").read_text(encoding="utf-8"))["tags"] == ["baseline", "基线"]
    page.script("arguments[0].click()", page.one(f"{row} .hide"))
    page.wait(lambda: "long" not in names(page))
    page.script("arguments[0].click()", page.one("#show-hidden"))
    page.wait(lambda: "long" in names(page))
    page.open("#/?tag=baseline&hidden=yes")
    assert names(page) == ["long"]
    page.script("arguments[0].click()", page.one(f"{row} .edit-tags"))
    page.script("document.querySelector('input.tags').value = '<b>'")
    page.press(Keys.ENTER)
    page.wait(lambda: page.text(".note").startswith("tags='<b>': use at most 20 tags"))
    assert "400 (Bad Request)" in "".join(page.console())
    (folder / "long" / "labels.json").unlink()


def test_the_configuration_can_be_searched(page: Page) -> None:
    page.open("finished/config")
    every = [row[0] for row in page.table("table.config tbody")]
    assert "algorithm.lam" in every and page.text(".toolbar .muted") == f"{len(every)} of {len(every)} keys"
    page.press("/", "lam 0.95")
    page.wait(lambda: [row[:2] for row in page.table("table.config tbody")] == [["algorithm.lam", "0.95"]])
    facts = dict(zip(page.texts(".start dt"), page.texts(".start dd"), strict=True))
    assert facts["Command"] == "rloom train algorithm.adv_estimator=grpoCopy"
    assert facts["Versions"] == "python 3.12.1torch 2.13.0" and facts["Git commit"] == "0123456789ab"
    assert page.texts(".notices li") == [" data.seed has no effect"]


def test_the_x_axis_is_steps_time_tokens_or_answers(page: Page) -> None:
    page.open("finished")
    assert page.texts("[data-axis]") == ["Steps", "Time", "Tokens", "Answers"]
    page.one("[data-axis=time]").click()
    page.wait(lambda: "4 min" in page.texts(chart("reward", ".axes text")))
    page.one("[data-axis=tokens]").click()  # 1,000 a step
    page.wait(lambda: "8000" in page.texts(chart("reward", ".axes text")))
    ids = f"{page.runs['finished']},{page.runs['other']}"
    page.open(f"#/compare/{ids}")  # the choice is remembered
    page.wait(lambda: "8000" in page.texts(chart("actor/entropy", ".axes text")))
    page.one("[data-axis=samples]").click()  # 24 a step
    page.wait(lambda: "150" in page.texts(chart("actor/entropy", ".axes text")))
    page.one("[data-axis=step]").click()
    page.wait(lambda: "8" in page.texts(chart("actor/entropy", ".axes text")))


def test_short_runs_are_not_smoothed(page: Page) -> None:
    page.open("finished")
    page.wait(lambda: page.all(chart("entropy", ".line")))
    assert page.all(".raw") == [] and not page.one("#smoothing").is_displayed()


def test_distributions_of_scores_and_lengths(page: Page) -> None:
    page.open("finished")
    node = page.wait(lambda: page.all(chart("distribution-score", ".heat")) and page.one(".spread"))
    page.script("arguments[0].scrollIntoView()", node)
    page.wait(lambda: [p for p in page.all(chart("distribution-score", ".heat")) if p.get_attribute("d")])
    # 13 of the 23 scores of step 8 are 1; quantiles of 5 % say it within that
    assert float(page.text(chart("distribution-score", ".value"))) == pytest.approx(13 / 23, abs=0.04)
    page.wait(lambda: page.text(chart("distribution-length", ".value")))
    lengths = [row["length"] for row in train_rows(STEPS)]
    shown = float(page.text(chart("distribution-length", ".value")))
    assert shown == pytest.approx(sum(lengths) / len(lengths), rel=0.05)


def test_a_chart_is_saved_as_svg_and_csv(page: Page) -> None:
    page.open("finished")
    page.wait(lambda: page.all(chart("entropy", ".line")))
    saved = (
        "const [which, done] = arguments; const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { URL.createObjectURL = make; blob.text().then(done); return make(blob); };"
        'document.querySelector(`[data-chart=entropy] figcaption button[aria-label*="${which}"]`).click();'
    )
    lines = page.browser.execute_async_script(saved, "CSV").splitlines()
    assert lines[:3] == ["step,actor/entropy", "1,1", "2,0.5"] and len(lines) == 1 + STEPS
    drawn = page.browser.execute_async_script(saved, "SVG")
    assert drawn.startswith("<svg") and "Entropy" in drawn and 'stroke="rgb(' in drawn and "var(" not in drawn
    cells = page.browser.execute_async_script(
        "const [done] = arguments; import('/export.js').then(({ toCsv }) =>"
        "done(toCsv([['=1+1', 'a,b', 'say \"x\"', -1, null]])))"
    )
    assert cells == '\'=1+1,"a,b","say ""x""",-1,\r\n'  # a spreadsheet takes no text for a formula


def test_tiles_and_curves_have_the_numbers_of_the_run(page: Page) -> None:
    page.open("finished")
    last = step_metrics(STEPS, train_rows(STEPS))
    tiles = dict(zip(page.texts(".tiles dt"), page.texts(".tiles dd"), strict=True))
    assert tiles["Reward"].startswith(f"{last['critic/score/mean']:.3f}")
    assert tiles["Tokens a second"].startswith("1008")
    assert page.text(".run-head progress + span").startswith("step 8 of 8")
    page.wait(lambda: page.all(chart("reward", ".line")))
    assert page.text(chart("reward", ".value")) == f"{last['critic/score/mean']:.3f}"
    page.wait(lambda: len(page.all(chart("entropy", "circle"))) == STEPS)
    page.wait(lambda: sorted(page.texts(chart("accuracy", ".name"))) == ["colours", "sums"])


def test_the_cursor_shows_the_same_step_on_all_charts(page: Page) -> None:
    page.open("finished")
    hover(page, chart("entropy", ".plot > svg"), 0.5)
    step = int(page.wait(lambda: page.text(chart("entropy", ".cursor-step"))))
    page.wait(lambda: page.text(chart("reward", ".cursor-step")) == str(step))
    assert page.text(chart("entropy", ".value")) == f"{1 / step:.3f}"
    assert page.text(chart("ppo_kl", ".value")) == f"{0.001 * step:.4f}"


def test_dragging_zooms_all_charts_and_the_button_resets(page: Page) -> None:
    page.open("long")
    svg = page.one(chart("reward", ".plot > svg"))
    width = svg.rect["width"]
    ActionChains(page.browser).move_to_element_with_offset(svg, int(-width / 4), 0).click_and_hold().move_by_offset(
        int(width / 4), 0
    ).release().perform()
    page.wait(lambda: page.one("#reset-zoom").is_enabled())
    for name in ("reward", "kl"):
        page.wait(lambda name=name: (found := labels(page, name)) and min(found) >= 150 and max(found) <= 600)
    page.one("#reset-zoom").click()
    page.wait(lambda: "1000" in page.texts(chart("kl", ".axes text")))


def labels(page: Page, name: str) -> list[int]:
    """Of the x axis."""
    return [int(text) for text in page.texts(chart(name, ".axes text[text-anchor=middle]"))]


def test_a_thousand_steps_are_drawn_with_a_few_points_a_pixel_and_keep_the_peak(page: Page) -> None:
    page.open("long")
    page.wait(lambda: page.one(chart("reward", ".line")).get_attribute("d"))
    smooth(page, 0)
    page.wait(lambda: not page.all(chart("reward", ".raw")))
    path = page.one(chart("reward", ".line")).get_attribute("d")
    points = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    width = page.one(chart("reward", ".plot > svg")).rect["width"]
    assert 300 < len(points) <= 4 * width
    highest = min(y for _, y in points)  # pixels count from the top
    assert sum(y == highest for _, y in points) == 1
    assert page.all(chart("reward", ".raw")) == []
    smooth(page, 0.9)
    page.wait(lambda: len(page.all(chart("reward", ".raw"))) == 1)


def test_healthy_ranges_are_shaded_and_the_axis_of_the_kl_is_logarithmic(page: Page) -> None:
    page.open("long")
    page.wait(lambda: page.all(chart("kl", ".band")))
    assert page.text(chart("kl", ".healthy")) == "healthy 0.001 to 0.1"
    button = page.one(chart("kl", "figcaption button"))
    assert button.get_attribute("aria-pressed") == "true"
    assert "0.01" in page.texts(chart("kl", ".axes text"))
    page.script("arguments[0].click()", button)
    page.wait(lambda: "0.06" in page.texts(chart("kl", ".axes text")))


def test_the_filter_finds_metrics_by_their_names(page: Page) -> None:
    page.open("finished")
    page.one(".others")
    page.press("/", "clipfrac")
    page.wait(lambda: page.texts(".others figure .chart-title") == ["actor/pg_clipfrac"])
    page.one("main input[type=search]").clear()


def test_a_step_of_the_bars_opens_in_the_timeline(page: Page) -> None:
    page.open("finished")
    hover(page, ".step-times .plot > svg", 0.5)
    page.one(".step-times .plot > svg").click()
    page.wait(lambda: page.texts(".stages tbody td.number"))
    assert page.texts(".stages code") == ["gen", "update_actor", "reward", "old_log_prob", "sync_weights"]
    assert page.texts(".stages td:nth-child(3)") == ["20.0 s", "10.0 s", "4.00 s", "3.00 s", "2.00 s"]
    assert page.texts(".tiles dd") == ["47.4\u202f%", "65.8\u202f%", "13.2\u202f%", "38.0 s"]


def test_the_steps_of_the_timeline_are_chosen_with_the_keyboard(page: Page) -> None:
    page.open("finished/timeline?first=3&last=4")

    def steps() -> list[str]:
        return [page.one(f"#{name}").get_attribute("value") for name in ("first", "last")]

    page.wait(lambda: len(page.all(".timeline rect.span")) == 10 and steps() == ["3", "4"])
    for key, expected in (("]", ["5", "6"]), ("[", ["3", "4"]), ("+", ["4", "4"]), ("-", ["3", "4"])):
        page.press(key)
        page.wait(lambda expected=expected: steps() == expected)
    assert page.text(".timeline rect.span title") == "gen, step 3: 20.0 s"


def test_a_killed_run_is_shown_as_killed_and_a_half_written_line_is_not_shown(page: Page) -> None:
    page.open("killed")
    assert page.text(".run-head .badge") == "killed"
    assert page.text(".run-head .note").startswith("The log of the run has no end")
    assert page.text(".run-head progress + span").startswith("step 3 of 8")
    assert "99" not in page.texts(chart("reward", ".axes text"))
    page.open("killed/step/last")
    assert page.script("return [...document.querySelector('#step').options].map(one => one.value)") == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("bare", "No step has ended yet"),
        ("bare/step/last", "trainer.log_rollouts=True"),
        ("bare/validation", "trainer.test_freq=5"),
        ("long/step/last", "trainer.log_rollouts=True"),
        ("long/timeline", "a version that did not record them"),
        ("#/run/99", "There is no run 99."),
        ("#/elsewhere", "There is no such page."),
        ("#/compare/", "Choose two or more runs"),
    ],
)
def test_a_page_without_data_says_why(page: Page, place: str, says: str) -> None:
    page.open(place)
    assert any(says in text for text in page.texts(".empty"))


def test_findings_are_listed_at_the_top_and_explained_on_their_page(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloom.view.routes.findings", lambda run: FOUND)
    page.open("finished")
    page.wait(lambda: page.texts(".findings-short li"))
    assert page.texts(".findings-short li") == ["!warningThe KL is below <0.001>steps 1 to 8"]
    page.one(".findings-short a").click()
    page.wait(lambda: page.text("main h1") == "Findings")
    assert page.texts(".finding li")[:2] == ["0.0004 in 8 steps", "a small learning rate"]
    assert page.texts(".finding .key-value") == ["actor.optim.lr=3e-6"]
    assert page.texts(".finding .changes li")[0] == "look at <the answers>"
    assert page.texts(".finding h3")[-1] == "What this run has learned cannot be used: begin again with these changes"
    monkeypatch.setattr("rloom.view.routes.findings", lambda run: {"steps": 8, "findings": []})
    page.wait(lambda: page.tick() or page.texts(".empty h2") == ["Nothing wrong was found"])


def test_runs_are_compared_by_curves_configuration_and_accuracy(page: Page) -> None:
    ids = [page.runs[name] for name in ("finished", "other")]
    page.open(f"#/compare/{ids[0]},{ids[1]}")
    page.wait(lambda: len(page.all(chart("actor/entropy", ".line"))) == 2)
    assert page.texts(chart("actor/entropy", ".name")) == ["finished", "other"]
    assert page.texts(chart("actor/entropy", ".value")) == ["0.125", "0.250"]
    rows = {row[0]: row[1:] for row in page.table("table.config tbody")}
    assert rows["algorithm.adv_estimator"] == ["grpo", "rloo"]
    assert rows["algorithm.lam"] == ["0.95", "1"]
    assert "algorithm.gamma" not in rows
    page.wait(lambda: page.all("table.accuracy tbody tr"))
    accuracy = {row[0]: row[1] for row in page.table("table.accuracy tbody")}
    assert set(accuracy) == {"colours", "sums"}
    box = page.one(f".run-choices input[value='{ids[1]}']")
    page.script("arguments[0].click()", box)
    page.wait(lambda: "Choose two or more runs" in page.text("main"))
