"""Headless Chromium, driven through a pipe: a page at any width, what its scripts return, and pictures of it."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars")
# The beginnings of elements that reach beyond the window although no element around them scrolls, and of those that
# scroll without a sign at their edge.
CUT = """
(() => {
  const inside = element => element.getBoundingClientRect().right + scrollX <= innerWidth + 1;
  const style = element => getComputedStyle(element);
  const scrolls = element => ["auto", "scroll"].includes(style(element).overflowX);
  function cut(element) {
    if (!element.checkVisibility({opacityProperty: true}) || element.parentElement.closest("svg")) return false;
    if (scrolls(element) && element.scrollWidth > element.clientWidth + 1)
      return !inside(element) || !style(element).backgroundImage.includes("gradient");
    if (inside(element)) return false;
    for (let each = element; each !== document.body; each = each.parentElement)
      if (style(each).position === "fixed" || (scrolls(each) && inside(each))) return false;
    return true;
  }
  return [...document.querySelectorAll("body *")].filter(cut).map(element => element.outerHTML.slice(0, 100));
})()
"""


class Tab:
    """One tab of a browser."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb"), os.fdopen(back, "rb")
        self._number, self._session, self._rest = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        result: dict[str, Any] = self._until(lambda answer: answer.get("id") == self._number)["result"]
        return result

    def open(self, page: Path, width: int, height: int = 900, anchor: str = "") -> None:
        """Load a page of this width in CSS pixels, as a phone does if it is narrow."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page.as_uri() + anchor)
        self._until(lambda event: event.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives, also if it is a promise."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)[
            "result"
        ].get("value")

    def until(self, expression: str, part: str) -> str:
        """Return the text of an expression once it has a part; after 20 seconds in any case."""
        end = time.monotonic() + 20
        while part not in (text := str(self.value(expression))) and time.monotonic() < end:
            time.sleep(0.1)
        return text

    def picture(self, file: Path, whole: bool = True) -> None:
        """Write a PNG file of the page, or of the window only."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._back.fileno(), 1 << 20)
                assert read, "the browser has ended"
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            message: dict[str, Any] = json.loads(line)
            if wanted(message):
                assert "error" not in message, message
                return message


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start Chromium with a profile in this folder, and end it."""
    assert BROWSER is not None
    (own_in, to), (back, own_out) = os.pipe(), os.pipe()
    # Chromium reads its commands from file 3 and writes answers to file 4.
    command = f'exec 3<&{own_in} 4>&{own_out}; exec "$@"'
    words = [BROWSER, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    shell, null = ["bash", "-c", command, "-", *words], subprocess.DEVNULL
    running = subprocess.Popen(shell, pass_fds=(own_in, own_out), stdout=null, stderr=null)
    os.close(own_in)
    os.close(own_out)
    try:
        yield Tab(to, back)
    finally:
        running.terminate()
        running.wait(30)
