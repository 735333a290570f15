"""A score is no accuracy: what the page calls a validation."""

from tests.browser.chromium import Page
from tests.browser.test_overview import chart


def test_a_score_is_named_so_and_is_no_percentage(page: Page) -> None:
    page.open("long")
    page.wait(lambda: page.all(chart("score", ".line")))
    tiles = dict(zip(page.texts(".tiles dt"), page.texts(".tiles dd"), strict=True))
    assert tiles["Validation score"].startswith("\u22120.125")
    assert "Validation accuracy" not in page.text("main")
    page.open("#/compare/" + ",".join(str(page.runs[name]) for name in ("long", "killed")))
    page.wait(lambda: page.all("table.accuracy tbody tr"))
    rows = {row[0]: row[1] for row in page.table("table.accuracy tbody")}
    assert rows["own"].startswith("\u22120.422 → \u22120.125") and "%" not in rows["own"]


def test_an_accuracy_stays_a_percentage(page: Page) -> None:
    page.open("finished")
    page.wait(lambda: page.all(chart("accuracy", ".line")))
    assert "%" in page.text(chart("accuracy", ".value"))
