"""Answers that several versions of the weights generated, in a browser."""

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.action_chains import ActionChains

from tests.browser import chromium
from tests.browser.chromium import Page
from tests.view_versions import write_versions_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("view") / "runs"
    write_versions_run(root / "versions")
    with chromium.serving([root]) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def versions(page: Page, served: str) -> Iterator[Page]:
    """The browser of the other tests, at another server."""
    own = Page(page.browser, served)
    own.size(1280)
    own.enter()
    yield own
    page.enter()


def test_an_answer_says_how_many_versions_it_has_and_each_token_says_its_own(versions: Page) -> None:
    versions.open("versions/step/3/prompt/0")
    assert versions.texts("[data-answer='1'] .badges .tag") == [
        "finished",
        "2 versions of the weights: as at the start … after step 2",
    ]
    assert versions.texts("[data-answer='2'] .badges .tag") == ["finished", "Weights after step 2"]
    versions.wait(lambda: versions.all("[data-answer='1'] .token"))
    for token, text in ((3, "as at the start"), (4, "after step 2")):
        node = versions.one(f"[data-answer='1'] .token:nth-child({token})")
        ActionChains(versions.browser).move_to_element(node).perform()
        versions.wait(lambda place=f"token {token} of": place in versions.text(".inspector"))
        assert versions.texts(".inspector dt")[-1] == "Weights" and versions.texts(".inspector dd")[-1] == text


def test_the_page_of_a_step_says_that_its_prompts_are_a_sample(versions: Page) -> None:
    versions.open("versions/step/3")
    versions.wait(lambda: versions.all("tbody tr"))
    assert versions.text("#drawn").startswith("A sample: 1 of the 512 prompts of this step, drawn at random.")
