"""Drive a headless Chromium through chromedriver's WebDriver, with the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_PORT = re.compile(r"started successfully on port (\d+)")
_SECONDS = 120
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)


def is_there() -> bool:
    """Return whether this machine has Chromium and chromedriver."""
    return bool(shutil.which("chromedriver")) and any(map(shutil.which, CHROMIUM))


class Browser:
    """A window of the browser. Made by `open_browser`."""

    def __init__(self, driver: str, session: str) -> None:
        self._session = f"{driver}/session/{session}"

    def go(self, address: str) -> None:
        """Load a page and wait for it."""
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """Run the body of a function in the page and return its result. The page's policy does not apply to it."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, holds: Callable[[Any], bool], seconds: float = _SECONDS) -> Any:
        """Return the result of `script` as soon as `holds` is true of it. Raises TimeoutError with its last result."""
        end = time.monotonic() + seconds
        while True:
            found = self.run(script)
            if holds(found):
                return found
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: {found!r}")
            time.sleep(0.2)

    def size(self, width: int, height: int) -> None:
        """Set the size of the page, in CSS pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def theme(self, name: str) -> None:
        """Set the preferred theme: `light` or `dark`."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def picture(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """Return the console's lines since the last call: requests refused by the page's policy, and script errors."""
        return [line["message"] for line in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the session, and the browser with it."""
        self._ask("DELETE", "")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return _answer(method, f"{self._session}{path}", body)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Open a browser with a profile of its own, which is removed. Raises FileNotFoundError without chromedriver."""
    with tempfile.TemporaryDirectory(prefix="lockstep-browser-") as profile:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert driver.stdout is not None
            port = next(found[1] for line in driver.stdout if (found := _PORT.search(line)))
            address = f"http://127.0.0.1:{port}"
            options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = _answer("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
            browser = Browser(address, made["sessionId"])
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait()


def _answer(method: str, address: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None
