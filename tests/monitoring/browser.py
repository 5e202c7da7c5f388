"""Headless Chromium over its DevTools protocol: what a page asks for, complains about, and looks like."""

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import websocket
from PIL import Image

from patience import patient
from prometheus import fetch, until

PHONE = (390, 844)
PHASES_MS = {"data": 0.1, "transfer": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.2, "other": 0.0}
"""Of a step, for histories that tests write."""
DESKTOP = (1280, 900)


class ProtocolError(Exception):
    """The browser refuses a call, such as to a page that another page has just replaced."""


class Browser:
    """One tab. `requests` and `complaints` (console errors, exceptions, refused content) fill as it goes."""

    def __init__(self, processes: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        processes.start(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--remote-debugging-port=0",
                "--remote-allow-origins=*",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=(folder / "log").open("w"),
        )
        port_file = folder / "DevToolsActivePort"
        port = until(lambda: port_file.exists() and port_file.read_text().split(), "browser", 90)[0]
        targets = f"http://127.0.0.1:{port}/json/list"
        pages = until(lambda: [tab for tab in json.loads(fetch(targets)) if tab["type"] == "page"], "page")
        self._socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=patient(30))
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a DevTools method, taking in the events that come before its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise ProtocolError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["entry"]))

    def open(self, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Load a page at a size in CSS pixels."""
        self.resize(size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=url)

    def resize(self, size: tuple[int, int]) -> None:
        """Another window, or another way of holding it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )

    def forget(self) -> None:
        """Leave the page, and all that it asked for and complained about."""
        self.open("about:blank")
        self.wait_for("document.URL == 'about:blank'")
        self.requests.clear()
        self.complaints.clear()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def replace_text(self, old: str, new: str) -> None:
        """Other words in the page as it stands."""
        self.run(
            "(() => {const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);"
            "while (walk.nextNode()) walk.currentNode.data = walk.currentNode.data"
            f".replaceAll({json.dumps(old)}, {json.dumps(new)})}})()"
        )

    def wait_for(self, script: str, limit: float = 60.0) -> Any:
        """The first true value of a JavaScript expression, also of the page that replaces this one."""

        def value() -> Any:
            try:
                return self.run(script)
            except ProtocolError:
                return None

        return until(value, f"page on which {script}", limit)

    def foreign_requests(self, url: str) -> list[str]:
        """Requests that went elsewhere than to the origin of `url`."""
        own = urlsplit(url)[:2]
        return [each for each in self.requests if urlsplit(each)[:2] != own and not each.startswith("data:")]

    def is_too_wide(self) -> bool:
        """Whether a person would have to scroll sideways."""
        return bool(self.run("document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"))

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG, in a palette of its own: a third of the bytes."""
        height = self.run("document.scrollingElement.scrollHeight")
        width = self.run("document.scrollingElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        picture = Image.open(io.BytesIO(base64.b64decode(shot["data"])))
        picture.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)

    def press(self, key: str) -> None:
        """A key, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def place_of(self, selector: str, share: float = 0.5) -> tuple[float, float]:
        """A point of an element in the window, `share` of the way from its left, after scrolling to it."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])({where}.getBoundingClientRect())"
        )
        return box[0] + share * box[2], box[1] + box[3] / 2

    def hover(self, selector: str, share: float) -> None:
        """The mouse over an element."""
        x, y = self.place_of(selector, share)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def swipe(self, selector: str, start: float, stop: float) -> None:
        """A finger along an element, from one share of its width to another; it stays there."""
        x, y = self.place_of(selector, start)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        end = self.place_of(selector, stop)[0]
        for share in (0.25, 0.5, 0.75, 1.0):
            point = {"x": x + share * (end - x), "y": y}
            self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[point])

    def faults(self, axe: str) -> list[str]:
        """What axe (its script's text) finds on this page that is serious: rule and element, a line each."""
        self.run(f"{axe};1")
        found = self.run("axe.run().then(result => result.violations)")
        return [
            f"{each['id']} ({each['impact']}): {node['html'][:200]}"
            for each in found
            for node in each["nodes"]
            if each["impact"] in ("serious", "critical")
        ]

    def close(self) -> None:
        self._socket.close()
