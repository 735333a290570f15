"""Make the pictures of docs/reading_a_run.md again: python -m tests.browser.screenshots RUNS [FOLDER]

RUNS is a folder above two or more runs of `rloom train` with validations, one of them ill; a healthy one is shown. If
one has an environment, its answers are shown turn by turn.
"""

import argparse
import tempfile
import time
from pathlib import Path

from rloom.cli.view import defaults
from tests.browser import chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images" / "view"
WIDTH = 1280
MOST_BYTES = 200_000
WAIT_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=IMAGES)
    given = parser.parse_args()
    programs = chromium.programs()
    assert programs is not None, "needs chromium and chromedriver"
    given.folder.mkdir(parents=True, exist_ok=True)
    with chromium.serving([given.runs], defaults=defaults) as server, tempfile.TemporaryDirectory() as profile:
        browser = chromium.start(*programs, Path(profile))
        try:
            take_all(chromium.Page(browser, f"http://127.0.0.1:{server.server_port}"), given.folder)
        finally:
            browser.quit()


def take_all(page: chromium.Page, folder: Path) -> None:
    page.enter()
    ill = most_ill(page)
    others = [name for name in page.runs if page.runs[name] != ill] or list(page.runs)
    shown = max(others, key=lambda name: len(dumped(page, page.runs[name], "train")))
    run = page.runs[shown]
    steps = dumped(page, run, "train")
    mixed = most_spread(page, run, steps[1])
    ids = ",".join(str(number) for number in sorted(page.runs.values()))
    pictures = (
        ("runs", "#/", 420, "light"),
        ("overview", f"{shown}", 1000, "light"),
        ("overview-dark", f"{shown}", 1000, "dark"),
        ("prompts", f"{shown}/step/{steps[2]}?sort=spread&order=desc&text=What%20is", 560, "light"),
        ("answers", f"{shown}/step/{steps[1]}/prompt/{mixed}", 860, "light"),
        ("validation", f"{shown}/validation?outcome=fixed&text=What%20is", 800, "light"),
        ("timeline", f"{shown}/timeline?first=1&last=8", 760, "light"),
        ("compare", f"#/compare/{ids}", 900, "dark"),
        ("two-runs", f"#/compare/{run},{ill}?outcome=broken", 620, "light"),
        ("config", f"{shown}/config", 860, "light"),
    )
    turns = [name for name in page.runs if has_turns(page, page.runs[name])]
    pictures += tuple(("turns", f"{name}/{turns_place(page, page.runs[name])}", 860, "light") for name in turns[:1])
    for name, place, height, scheme in pictures:
        take(page, folder / f"{name}.png", place, WIDTH, height, scheme)
    take(page, folder / "phone.png", f"{shown}/step/{steps[1]}/prompt/{mixed}", 390, 844, "light")


def take(page: chromium.Page, file: Path, place: str, width: int, height: int, scheme: str) -> None:
    page.size(width, height)
    page.prefer(scheme)
    page.open(place)
    time.sleep(WAIT_S)  # charts are drawn once they are seen, findings and answers of two runs later
    if file.stem == "two-runs":
        page.script("document.querySelector('#two-runs').scrollIntoView(); scrollBy(0, -60)")
        time.sleep(WAIT_S)
    page.browser.save_screenshot(str(file))
    assert file.stat().st_size < MOST_BYTES, f"{file} has {file.stat().st_size} bytes"


def dumped(page: chromium.Page, run: int, kind: str) -> list[int]:
    return page.script(f"return fetch('/api/runs/{run}/dumps').then(answer => answer.json())")[kind]


def has_turns(page: chromium.Page, run: int) -> bool:
    return (
        "episode/turns/mean" in page.script(f"return fetch('/api/runs/{run}/metrics').then(a => a.json())")["metrics"]
    )


def turns_place(page: chromium.Page, run: int) -> str:
    step = dumped(page, run, "train")[-1]
    return f"step/{step}/prompt/{most_spread(page, run, step)}"


def most_ill(page: chromium.Page) -> int:
    """The run with the most severe finding, or any."""
    script = "return fetch('/api/findings').then(answer => answer.json())"
    while (found := page.script(script))["waiting"]:
        time.sleep(0.2)
    order = {None: 0, "note": 1, "warning": 2, "error": 3}
    badges = {int(number): badge["worst"] and badge["worst"]["severity"] for number, badge in found["badges"].items()}
    return max(badges, key=lambda number: order[badges[number]])


def most_spread(page: chromium.Page, run: int, step: int) -> int:
    address = f"/api/runs/{run}/train/{step}/prompts?sort=spread&order=desc&size=1"
    return page.script(f"return fetch('{address}').then(answer => answer.json())")["prompts"][0]["group"]


if __name__ == "__main__":
    main()
