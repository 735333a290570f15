"""One browser and one server for all tests of the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.view.server import ViewServer
from tests import view_runs
from tests.browser import chromium

PROGRAMS = chromium.programs()
MANY_STEPS = 1000


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several runs, each with what one kind of page needs."""
    root = tmp_path_factory.mktemp("view") / "runs"
    view_runs.write_run(root / "finished")
    other = {**view_runs.CONFIG, "algorithm": {"adv_estimator": "rloo", "lam": 1.0, "gamma": 1.0}}
    view_runs.write_run(root / "other", steps=4, status="interrupted", config=other)
    view_runs.write_killed_run(root / "killed")
    view_runs.write_hostile_run(root / "hostile")
    write_long_run(root / "long")
    write_bare_run(root / "bare")
    view_runs.write_templated_run(root / "templated")
    write_ill_run(root / "ill")
    return root


def write_long_run(folder: Path) -> None:
    """A thousand steps of metrics: more than there are pixels."""
    run = view_runs.GrowingRun(folder, total_steps=MANY_STEPS)
    for step in range(1, MANY_STEPS + 1):
        score = 0.99 if step == 500 else step / MANY_STEPS / 2
        metrics = {"critic/score/mean": score, "actor/kl_loss": 1e-4 * step, "timing_s/gen": 1.0, "timing_s/step": 1.5}
        run.events.write("step", time=view_runs.START + step, step=step, metrics=metrics)
        run.last_step = step
    for step, score in ((1, -0.421875), (MANY_STEPS, -0.125)):  # of a reward that says nothing of right or wrong
        metrics = {"val-core/own/acc/mean@1": score}
        run.events.write(
            "validation", time=view_runs.START + MANY_STEPS, step=step, metrics=metrics, measures={"own": "score"}
        )
    run.close()


def write_ill_run(folder: Path) -> None:
    """The reward is 0 for every answer."""
    run = view_runs.GrowingRun(folder, total_steps=12)
    for step in range(1, 13):
        run.log_step(step, {"critic/score/mean": 0.0, "critic/score/max": 0.0, "critic/score/min": 0.0})
    run.last_step = 12
    run.close()


def write_bare_run(folder: Path) -> None:
    """It has started, and nothing more."""
    view_runs.GrowingRun(folder, total_steps=3).close("failed")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[ViewServer]:
    with chromium.serving([folder]) as server:
        yield server


@pytest.fixture(scope="session")
def session_page(server: ViewServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if PROGRAMS is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    browser = chromium.start(*PROGRAMS, tmp_path_factory.mktemp("profile"))
    page = chromium.Page(browser, f"http://127.0.0.1:{server.server_port}")
    page.size(1280)
    page.prefer("light")
    page.enter()
    yield page
    browser.quit()


@pytest.fixture
def page(session_page: chromium.Page) -> Iterator[chromium.Page]:
    """After every test: nothing was logged as an error, and no other host was asked for anything."""
    session_page.console()
    yield session_page
    assert session_page.console() == []
    assert session_page.other_hosts() == []
    assert session_page.script("return window.hacked") is None
