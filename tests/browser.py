"""A real browser for the tests, driven over WebDriver's plain HTTP; nothing to install beside chromium itself."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new",
    "--no-sandbox",  # a container's root may not make one
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]
PATIENCE = 120  # seconds to start and to answer, on a loaded machine


def missing() -> str:
    """Which program is not there, "" if all are."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    return "" if driver and browser else "no chromium with chromedriver is installed; install both to see the page"


class Page:
    """An open page: scripts run in it, pictures taken of it, and what it asked the network for."""

    def __init__(self, address: str) -> None:
        self.address = address

    def open(self, file: Path) -> None:
        _call(f"{self.address}/url", {"url": file.as_uri()})

    def run(self, script: str, *values: object) -> Any:
        """The value of a script's `return`; `arguments` are the values."""
        return _call(f"{self.address}/execute/sync", {"script": script, "args": list(values)})

    def press(self, keys: str, selector: str) -> None:
        """Type into the element, as a keyboard would."""
        found = _call(f"{self.address}/element", {"using": "css selector", "value": selector})
        _call(f"{self.address}/element/{next(iter(found.values()))}/value", {"text": keys})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return _call(f"{self.address}/se/log", {"type": kind})

    def requested(self) -> list[str]:
        """Every address the page wanted since it was asked last."""
        events = [json.loads(one["message"])["message"] for one in self.log("performance")]
        return [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]

    def emulate(self, features: dict[str, str], media: str = "") -> None:
        """Look through other media features, such as a dark colour scheme, or as printed."""
        settings = {"media": media, "features": [{"name": name, "value": value} for name, value in features.items()]}
        self._command("Emulation.setEmulatedMedia", settings)

    def resize(self, width: int | None) -> None:
        """See the page in a window as wide, or in its own again."""
        if width is None:
            self._command("Emulation.clearDeviceMetricsOverride", {})
        else:
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            self._command("Emulation.setDeviceMetricsOverride", size)

    def photograph(self, path: Path, height: int | None = None, width: int | None = None) -> None:
        """The page, or so many pixels from its top, in a window as high: what is out of sight need not be drawn."""
        self.resize(width)
        width, whole = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        seen = min(whole, height or whole)
        size = {"width": width, "height": seen, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", size)
        near = "[...document.images].filter(image => image.getBoundingClientRect().top < arguments[0])"
        self.run(f"return Promise.all({near}.map(image => image.decode()))", seen)
        path.write_bytes(base64.b64decode(self._command("Page.captureScreenshot", {})["data"]))
        self._command("Emulation.clearDeviceMetricsOverride", {})

    def _command(self, name: str, settings: dict[str, Any]) -> Any:
        return _call(f"{self.address}/goog/cdp/execute", {"cmd": name, "params": settings})


@contextlib.contextmanager
def browse(scratch: Path, *, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    """A fresh browser with nothing remembered, closed afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=scratch
    )
    try:
        home = f"http://127.0.0.1:{port}"
        _await(home)
        options = {"args": [*FLAGS, f"--user-data-dir={scratch / 'profile'}", f"--window-size={width},{height}"]}
        wishes = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
        session = _call(f"{home}/session", {"capabilities": {"alwaysMatch": wishes}})["sessionId"]
        try:
            yield Page(f"{home}/session/{session}")
        finally:
            _call(f"{home}/session/{session}", None, "DELETE")
    finally:
        driver.terminate()
        driver.wait(PATIENCE)


def _await(home: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if _call(f"{home}/status", None, "GET")["ready"]:
                return
        except urllib.error.URLError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _call(address: str, body: object, method: str = "POST") -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)["value"]
