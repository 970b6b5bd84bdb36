# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Chromium without a window, driven over the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "axe_script", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
#: Chromium reads its descriptor 3 and writes its descriptor 4, whichever numbers ours have.
_START = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD_CLOEXEC, 20) for n in sys.argv[1:3]);"
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, or ``None``."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def axe_script() -> str | None:
    """Return axe-core, of a package that holds it, or ``None``."""
    spec = importlib.util.find_spec("axe_playwright_python")
    return spec and Path(spec.origin or "").with_name("axe.min.js").read_text(encoding="utf-8")


class Browser:
    """One page in one browser. `requests` is what it asked for, `complaints` are its warnings and errors."""

    def __init__(self, program: str, profile: Path) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._last, self._buffer = 0, b""
        self._loaded = False
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._session: str | None = None
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 900)

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call one method of the protocol and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._write, left) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded, and drawn where it is one of ours."""
        self._loaded = False
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        self.evaluate(
            "new Promise((drawn) => { const look = () => document.documentElement.dataset.ready === 'false'"
            " ? setTimeout(look, 5) : drawn(); look(); })"
        )

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, and return when the page has dealt with it."""
        self.evaluate(
            f"(() => {{ const s = document.querySelector({json.dumps(selector)}); s.value = {json.dumps(value)};"
            "s.dispatchEvent(new Event('change')); document.body.offsetHeight; })()"
        )

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description") or str(found))
        return found["result"].get("value")

    def click(self, selector: str, double: bool = False) -> None:
        """Click the middle of the first element that fits, with the mouse."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "const t = e.getBoundingClientRect();"
            "if (t.top < 70 || t.bottom > innerHeight) e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for count in (1, 2) if double else (1,):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def drag(self, selector: str, dx: float, dy: float) -> None:
        """Press the mouse on an element, move it, and let go."""
        rect = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"[{rect}.x + 12, {rect}.y + 12]")
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        for part in (0.5, 1.0):
            move = {"x": x + dx * part, "y": y + dy * part}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **move)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + dx, y=y + dy, button="left")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press one key."""
        facts = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
        if len(key) == 1 or key == "Enter":
            facts["text"] = "\r" if key == "Enter" else key
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
        facts.pop("text", None)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def prefer(self, scheme: str, media: str = "") -> None:
        """Emulate what the reader's system prefers: ``"light"`` or ``"dark"``; `media` may be ``"print"``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def resize(self, width: int, height: int) -> None:
        """Give the window a size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def accessibility_findings(self, axe: str) -> list[str]:
        """Return what axe-core finds in the page once it is drawn: a rule, an element and a reason each."""
        self.evaluate(axe)
        self.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        found = self.evaluate(
            "Promise.allSettled(document.getAnimations().map((a) => a.finished))"
            ".then(() => axe.run({resultTypes: ['violations']})).then((r) => JSON.stringify(r.violations))"
        )
        return [
            f"{rule['id']}: {node['html'][:160]}: {node['failureSummary']}"
            for rule in json.loads(found)
            for node in rule["nodes"]
        ]

    def pdf(self) -> bytes:
        """Return the page as printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _next(self, timeout: float = 60.0) -> dict[str, Any]:
        """Return the next message, after events were noted."""
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {timeout:.0f} s")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise RuntimeError(f"Chromium ended (exit code {self._process.poll()})")
            self._buffer += got
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, facts: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(facts["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str([arg.get("value") for arg in facts["args"]]))
