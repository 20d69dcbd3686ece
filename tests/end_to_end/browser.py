"""Chromium through its driver: what of the WebDriver protocol a test needs, without a package."""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def need_chromium() -> None:
    """Skip, saying so, without Chromium; where CI installs it, fail."""
    if not (shutil.which("chromedriver") and shutil.which("chromium")):
        give_up = pytest.fail if os.environ.get("MAECT_CI") else pytest.skip
        give_up("needs a browser: apt install chromium chromium-driver fonts-dejavu-core")


class Browser:
    """One window. Elements are found and clicked by scripts in the page."""

    def __init__(self, address: str, dark: bool, width: int, height: int) -> None:
        self.address = address
        options = {
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{session['sessionId']}"
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.devtools("Network.enable")
        self.devtools("Network.emulateNetworkConditions", offline=True, latency=0,
                      downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height,
                      deviceScaleFactor=1, mobile=width < 600)  # fmt: skip

    def _call(self, verb: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, method=verb)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:800]) from None

    def devtools(self, command: str, **arguments: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": arguments})

    def open(self, page: Path) -> None:
        self._call("POST", "/url", {"url": page.absolute().as_uri()})

    def script(self, text: str, *arguments: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": text, "args": list(arguments)})

    def wait_for(self, text: str, *arguments: Any, seconds: float = 30) -> Any:
        """Run a script until it gives something true."""
        deadline = time.monotonic() + seconds
        while not (found := self.script(text, *arguments)):
            assert time.monotonic() < deadline, f"waited {seconds} s for {text}"
            time.sleep(0.1)
        return found

    def frame(self, selector: str | None) -> None:
        """Go into an iframe, or with None back to the page."""
        found = "return arguments[0] && document.querySelector(arguments[0])"
        self._call("POST", "/frame", {"id": self.script(found, selector)})

    def errors(self) -> list[str]:
        """What the console has shown as an error since the last call."""
        lines = self._call("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "ERROR")]

    def close(self) -> None:
        self._call("DELETE", "")


@contextmanager
def browsing(dark: bool = False, width: int = 1280, height: int = 800) -> Iterator[Browser]:
    """A window without a network, closed at the end with its driver."""
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            said = iter(driver.stdout.readline, "")
            line = next(line for line in said if "started successfully on port" in line)
            port = line.rsplit(maxsplit=1)[1].rstrip(".")
            browser = Browser(f"http://127.0.0.1:{port}", dark, width, height)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
