"""A real browser without a window, which sees no network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")  # fmt: skip


class Browser:
    """Opens files, and runs scripts in what is open."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int) -> None:
        """Open a file without network, in a window of this width."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(path.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """Lines of the console since the last call; errors of scripts and of the policy are among them."""
        return [line["message"] for line in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """Addresses that were asked for since the last call, whether they were answered or not."""
        events = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith("data:")]


@contextmanager
def browser() -> Iterator[Browser]:
    """Skips the test, with the reason, where there is no browser, no driver of it, or no selenium."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (requirements-dev.txt)")
    binary, driver = (next(filter(None, map(shutil.which, names)), None) for names in (BROWSERS, DRIVERS))
    if binary is None or driver is None:
        missing = f"no browser ({', '.join(BROWSERS)})" if binary is None else f"no driver ({', '.join(DRIVERS)})"
        pytest.skip(f"there is {missing} on the PATH; on Debian: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    try:
        opened = selenium.Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        pytest.skip(f"{binary} does not start: {(error.msg or '').splitlines()[0]}")
    try:
        yield Browser(opened)
    finally:
        opened.quit()
