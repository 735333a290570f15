"""Chromium through its driver: how it is started, and a page of the viewer as tests use it."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.remote.webelement import WebElement

from rloom.view.access import ViewAccess
from rloom.view.run_cache import Defaults, RunCache, no_defaults
from rloom.view.server import ViewServer

TOKEN = "token-of-the-tests"
WAIT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it refuses to start as root otherwise
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--lang=en-US",
)


def programs() -> tuple[str, str] | None:
    """Paths of browser and driver."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def start(browser: str, driver: str, profile: Path) -> webdriver.Chrome:
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


@contextlib.contextmanager
def serving(folders: Sequence[Path], port: int = 0, defaults: Defaults = no_defaults) -> Iterator[ViewServer]:
    with ViewServer(port, RunCache(folders, defaults), ViewAccess(TOKEN)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Page:
    """The page in the browser. Methods wait until what they look for is there."""

    def __init__(self, browser: webdriver.Chrome, address: str) -> None:
        self.browser, self.address = browser, address
        self.runs: dict[str, int] = {}

    def enter(self) -> None:
        """With the token; a cookie has it from then on."""
        self.browser.get(f"{self.address}/?token={TOKEN}")
        self.wait(lambda: self.script("return document.querySelector('main').dataset.shown !== undefined"))
        listed = self.script("return fetch('/api/runs').then(answer => answer.json())")["runs"]
        self.runs = {run["name"].split("/")[-1]: run["id"] for run in listed}

    def open(self, place: str) -> None:
        """`finished/step/3`: a run by its name and what follows; `#/compare/0,1`: the address itself."""
        if not place.startswith("#"):
            name, _, rest = place.partition("/")
            place = f"#/run/{self.runs[name]}" + (f"/{rest}" if rest else "")
        self.script(
            "document.querySelector('main').dataset.shown = '';"
            "if (location.hash === arguments[0]) dispatchEvent(new HashChangeEvent('hashchange'));"
            "else location.hash = arguments[0];",
            place,
        )
        self.wait(lambda: self.script("return document.querySelector('main').dataset.shown") != "")

    def script(self, code: str, *values: Any) -> Any:
        return self.browser.execute_script(code, *values)

    def wait(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(StaleElementReferenceException):
                if found := condition():
                    return found
            assert time.monotonic() < end, f"not within {WAIT_S} s; the page shows: {self.text('main')[:600]}"
            time.sleep(0.03)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> WebElement:
        return self.wait(lambda: self.all(selector))[0]

    def text(self, selector: str) -> str:
        """As it is in the document, shown or not."""
        return self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        found = "[...document.querySelectorAll(arguments[0])]"
        return self.script(
            f"return {found}.filter(node => node.checkVisibility()).map(node => node.textContent)", selector
        )

    def table(self, selector: str = "main tbody") -> list[list[str]]:
        rows = "[...document.querySelector(arguments[0]).rows].map(row => [...row.cells].map(cell => cell.textContent))"
        return self.script(f"return {rows}", selector)

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()

    def size(self, width: int, height: int = 900) -> None:
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", values)

    def prefer(self, scheme: str) -> None:
        """light or dark, as the system's setting says."""
        values = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", values)

    def offline(self, value: bool) -> None:
        self._network(offline=value, latency_ms=0)

    def latency(self, milliseconds: int) -> None:
        """Of every answer of the server."""
        self._network(offline=False, latency_ms=milliseconds)

    def _network(self, *, offline: bool, latency_ms: int) -> None:
        limits = {"offline": offline, "latency": latency_ms, "downloadThroughput": -1, "uploadThroughput": -1}
        self.browser.execute_cdp_cmd("Network.enable", {})
        self.browser.execute_cdp_cmd("Network.emulateNetworkConditions", limits)

    def tick(self) -> None:
        """The regular update at once: the page also makes one when its tab is shown again."""
        self.script("document.dispatchEvent(new Event('visibilitychange'))")

    def console(self) -> list[str]:
        """What was logged since the last call."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def other_hosts(self) -> list[str]:
        names = self.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        return [name for name in names if not name.startswith((self.address, "data:"))]
