"""A real browser for tests: Chromium without a screen, driven over its own protocol by the library kaleido brings."""

import asyncio
import base64
import json
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CALL_WITHIN_S = 60.0

T = TypeVar("T")


def chromium() -> str | None:
    """Returns the path of an installed Chromium or Chrome, None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Headless:
    """One browser with one page."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self._loop = asyncio.new_event_loop()
        self._size = width, height
        self._browser: Any = None
        self._tab: Any = None

    def __enter__(self) -> "Headless":
        import choreographer

        self._browser = choreographer.Browser(path=chromium(), headless=True)
        self._run(self._browser.open())
        self._tab = self._run(self._browser.create_tab("about:blank"))
        self.resize(*self._size)
        self.call("Runtime.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._browser.close())
        self._loop.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        answer: dict[str, Any] = self._run(self._tab.send_command(method, params=params))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def resize(self, width: int, height: int) -> None:
        """The page's size in CSS pixels."""
        self._size = width, height
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str, within_s: float = 60.0) -> Any:
        """Waits until an expression is true, and returns it."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            value = self.evaluate(script)
            if value:
                return value
            time.sleep(0.2)
        text = self.evaluate("document.body ? document.body.innerText : ''")
        raise AssertionError(f"not true within {within_s:g} s: {script}\non the page: {text[:3000]}")

    def shows(self, *texts: str, within_s: float = 60.0) -> None:
        """Waits until the page shows all of these texts."""
        listed = json.dumps(texts)
        self.wait_for(f"document.body && {listed}.every(text => document.body.innerText.includes(text))", within_s)

    def hover(self, x: float, y: float) -> None:
        """Moves the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Presses and releases the mouse there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def pdf(self, path: Path) -> None:
        """Writes the page as it would be printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def _run(self, action: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(action, CALL_WITHIN_S))
