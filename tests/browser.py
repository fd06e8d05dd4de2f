"""Headless Chromium for tests of the page, driven over its DevTools protocol; its microphone is a WAV file."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Bound of the start, of every answer and of every wait (s).
PATIENCE_S = 60.0

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
    "--remote-debugging-port=0",
    "--window-size=1100,900",
]


class Browser:
    """One tab. ``problems`` collects exceptions, errors in the console and refusals by the content policy."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        done = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]["exception"]["description"]
        return done["result"].get("value")

    def wait(self, expression: str, within_s: float = PATIENCE_S) -> Any:
        """Until the expression is true; its value."""
        deadline = time.monotonic() + within_s
        # The page asks itself, once a picture: nothing has to sleep here.
        ask = f"(async () => {{ for (let i = 0; i < 20; i++) {{ const value = {expression}; if (value) return value;"
        ask += " await new Promise((resolve) => setTimeout(resolve, 20)); } return null; })()"
        while time.monotonic() < deadline:
            if value := self.evaluate(ask):
                return value
        raise AssertionError(f"not within {within_s:g} s: {expression}; the page shows: {self.text('body')!r}")

    def goto(self, url: str) -> None:
        """Load a page and forget what the last one did wrong."""
        self.call("Page.navigate", url="about:blank")
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str, text: str = "") -> None:
        """One key, as from a keyboard."""
        code = {"Tab": 9, "Escape": 27, "Enter": 13, " ": 32}[key]
        fields = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def look(self, scheme: str = "light", width: int = 1100, height: int = 900, motion: str = "no-preference") -> None:
        """Colours, size and motion that the user prefers."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        """A screenshot, PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def chromium(folder: Path, microphone: Path) -> Iterator[Browser]:
    """A browser whose microphone plays ``microphone`` over and over. Skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome on the PATH)")
    from websockets.sync.client import connect

    flags = [*_FLAGS, f"--user-data-dir={folder}", f"--use-file-for-fake-audio-capture={microphone.resolve()}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *flags, "about:blank"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            # A browser that is too busy to answer a ping is alive; every answer to a command is waited for anyway.
            patience = {"open_timeout": PATIENCE_S, "ping_interval": None}
            with connect(_tab(folder, process), max_size=None, proxy=None, **patience) as tab:
                yield Browser(tab)
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE_S)


def _tab(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Address of the first tab, once the browser has written its port."""
    deadline = time.monotonic() + PATIENCE_S
    port_file = folder / "DevToolsActivePort"
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            port = int(port_file.read_text().splitlines()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE_S) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            return str(tabs[0]["webSocketDebuggerUrl"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    raise AssertionError(f"Chromium did not start: {(folder / 'log').read_text(errors='replace')[-2000:]}")
