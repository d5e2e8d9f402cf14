"""One headless Chromium for all tests of the pages, driven over its DevTools pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEY_CODES = {"Enter": 13, " ": 32, "Tab": 9, "Escape": 27}
KEY_CODES |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
TEXT = {"Enter": "\r", " ": " "}


class Browser:
    """Chromium without a window. Messages are JSON, each ended by a zero byte; errors and requests are kept."""

    def __init__(self, folder: Path):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += ["--no-first-run", f"--user-data-dir={folder}", "about:blank"]
        # Chromium reads descriptor 3 and writes 4; a shell assigns them without code between fork and exec.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.ours_in, self.ours_out = ours_in, ours_out
        self.buffer, self.number, self.session = b"", 0, None
        self.errors, self.requests = [], []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # a script's focus() fires focus events

    # Messages

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.ours_out, json.dumps(message).encode() + b"\0")
        reply = self.wait_for(lambda found: found.get("id") == self.number)
        assert "error" not in reply, reply
        return reply["result"]

    def wait_for(self, wanted):
        """The next message that is wanted; without a time limit of its own (pytest's ends a hanging test)."""
        while True:
            while b"\0" in self.buffer:
                text, self.buffer = self.buffer.split(b"\0", 1)
                message = json.loads(text)
                self._note(message.get("method"), message.get("params", {}))
                if wanted(message):
                    return message
            read = os.read(self.ours_in, 1 << 20)
            assert read, "chromium ended"
            self.buffer += read

    def _note(self, method, parameters):
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"))
            or (method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"))
        ):
            self.errors.append(parameters)

    def close(self):
        self.session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()
        os.close(self.ours_in)
        os.close(self.ours_out)

    # The page

    def open(self, path: Path, width=1400, height=900, scheme="light", *, anchor="", fresh=True):
        """Load a page; `fresh` as on a first visit, without stored choices. Scrolling is not animated."""
        if fresh:
            self.call("Storage.clearDataForOrigin", origin="file://", storageTypes="local_storage")
        self.errors.clear()
        self.requests.clear()
        self.resize(width, height)
        self.media(scheme=scheme)
        if anchor:
            self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + anchor)
        self.wait_for(lambda found: found.get("method") == "Page.loadEventFired")
        self.frame()
        return self

    def resize(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, media="", scheme="light", motion="reduce"):
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=listed)

    def frame(self):
        """Wait until all changes are drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def one(self, selector, expression, index=0):
        """Evaluate an expression of `e`, the first element that matches, or the one with this index."""
        return self.run(f"(e => ({expression}))([...document.querySelectorAll({selector!r})].at({index}))")

    def each(self, selector, expression):
        return self.run(f"[...document.querySelectorAll({selector!r})].map(e => ({expression}))")

    def visible(self, selector):
        """How many matching elements are displayed. checkVisibility alone is wrong for groups of an SVG."""
        return sum(self.each(selector, "e.checkVisibility() && getComputedStyle(e).display !== 'none'"))

    def box(self, selector, index=0):
        """Left, top, right and bottom of an element in the window."""
        return self.one(selector, "(b => [b.left, b.top, b.right, b.bottom])(e.getBoundingClientRect())", index)

    # Input

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def show(self, selector, index=0):
        """Scroll an element into view. What is off the screen has no layout, so this takes two frames."""
        self.one(selector, "e.scrollIntoView({block: 'center'})", index)
        self.frame()
        self.frame()

    def point_at(self, selector, index=0):
        """Scroll an element into view and move the pointer to its middle, from outside of all elements."""
        self.mouse("mouseMoved", 2, 2)
        self.show(selector, index)
        left, top, right, bottom = self.box(selector, index)
        self.mouse("mouseMoved", (left + right) / 2, (top + bottom) / 2)
        return (left + right) / 2, (top + bottom) / 2

    def click(self, selector, index=0):
        self.one(selector, "e.dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true}))", index)
        self.frame()

    def key(self, key):
        more = {"text": TEXT[key]} if key in TEXT else {}
        more |= {"windowsVirtualKeyCode": KEY_CODES[key]} if key in KEY_CODES else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def choose(self, select, value):
        self.run(f"{select}.value = {value!r}; {select}.dispatchEvent(new Event('change'))")
        self.frame()

    def print_pdf(self, **options):
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, **options)["data"])

    def tooltip(self):
        return self.run("tooltip.hidden ? null : tooltip.innerText.split('\\n')")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
