"""A real browser for tests: Debian's Chromium, driven by Selenium, which fetches nothing and finds no network.

The fixture `browser` is one process for all tests of a worker. Without Chromium and its driver tests are skipped with
the reason; `.ci/packages` installs them.
"""

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = (shutil.which(name, path=f"{os.defpath}:/usr/bin") for name in ("chromium", "chromedriver"))

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--force-device-scale-factor=1", "--hide-scrollbars",
)  # fmt: skip
"""As root there is no sandbox to be had; a container's /dev/shm is small."""


class Browser:
    """One window, as its user would see it; it opens files."""

    def __init__(self, arguments: tuple[str, ...] = ARGUMENTS) -> None:
        from selenium.webdriver import Chrome, ChromeOptions
        from selenium.webdriver.chrome.service import Service

        options = ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in arguments:
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(executable_path=DRIVER))

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of so many pixels; what was logged before is forgotten."""
        self._command("Emulation.setDeviceMetricsOverride",
                      width=width, height=height, deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(page.resolve().as_uri())
        self.run("for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame)")  # charts are drawn in frames

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns; `arguments[0]` and so on are the arguments. A promise is waited for."""
        waited = "const done = arguments[arguments.length - 1]; Promise.resolve((async function() { %s }).apply(null, arguments)).then(value => done([value, null]), error => done([null, String(error)]));"  # noqa: E501
        value, error = self.driver.execute_async_script(waited % script, *arguments)
        assert error is None, error
        return value

    def press(self, *keys: str) -> None:
        """Type keys, as `selenium.webdriver.Keys` names them, into what has the focus."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions = actions.send_keys(key)
        actions.perform()

    def complaints(self) -> list[str]:
        """Return what the console was told since the page was opened: errors of scripts, and requests that were
        refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, without those that are data."""
        import json

        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    def picture(self, path: Path, *, quality: int = 80, whole: bool = True) -> None:
        """The page as WebP or PNG by the name of the file; `whole`: also what is below the window."""
        kind = path.suffix.removeprefix(".")
        extra = {} if kind == "png" else {"quality": quality}
        taken = self._command("Page.captureScreenshot", format=kind, captureBeyondViewport=whole, **extra)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()

    def _command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)


def missing() -> str | None:
    """Return why there is no browser; None: there is one."""
    absent = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if path is None]
    return f"no {' and no '.join(absent)}: see .ci/packages" if absent else None


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser of this worker."""
    if reason := missing():
        pytest.skip(reason)
    browser = Browser()
    yield browser
    browser.close()
