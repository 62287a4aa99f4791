"""Drives headless Chromium by its debugging protocol, with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 120  # seconds: machines may have other work
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
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


def find() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class _Socket:
    """As much of a web socket (RFC 6455) as the protocol needs: text both ways."""

    def __init__(self, port: int, path: str) -> None:
        self.wire = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.wire.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.wire.recv(4096)
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        assert b" 101 " in head.splitlines()[0], head

    def send(self, text: str) -> None:
        data = text.encode()
        size = len(data)
        # FIN + text; the length in 7, 16 or 64 bits; a mask of zeros leaves the data as it is
        if size < 126:
            length = bytes([0x80 | size])
        else:
            length = b"\xfe" + size.to_bytes(2, "big") if size < 65536 else b"\xff" + size.to_bytes(8, "big")
        self.wire.sendall(b"\x81" + length + b"\0\0\0\0" + data)

    def _take(self, size: int) -> bytes:
        while len(self.buffer) < size:
            more = self.wire.recv(1 << 16)
            if not more:
                raise ConnectionError("Chromium closed the connection")
            self.buffer += more
        taken, self.buffer = self.buffer[:size], self.buffer[size:]
        return taken

    def receive(self) -> str:
        message = b""
        while True:
            first, second = self._take(2)
            size = second & 0x7F
            if size > 125:
                size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
            data = self._take(size)
            if first & 0x0F in (0, 1, 2):  # a part of a message; others are control frames
                message += data
                if first & 0x80:
                    return message.decode()


class Browser:
    """One Chromium with one page. ``requests`` and ``console`` collect what the page fetched and logged."""

    def __init__(self, program: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="leadline-chromium-")
        self.process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={self.folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.requests: list[str] = []
        self.console: list[str] = []
        self.loaded = False
        self.last = 0
        self.session: str | None = None
        try:
            port, path = self._address()
            self.socket = _Socket(port, path)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _address(self) -> tuple[int, str]:
        """Chromium picks a free port and writes it into its folder."""
        file = Path(self.folder, "DevToolsActivePort")
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) == 2:
                return int(lines[0]), lines[1]
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"Chromium ended by itself, with code {code}")
            time.sleep(0.05)
        raise RuntimeError(f"Chromium did not start in {_PATIENCE} s")

    def _event(self, message: dict[str, Any]) -> None:
        what = message["params"]
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(what["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.console.append(f"{what['type']}: {[a.get('value', a.get('description')) for a in what['args']]}")
            case "Runtime.exceptionThrown":
                self.console.append(f"exception: {what['exceptionDetails']}")
            case "Log.entryAdded":
                self.console.append(f"{what['entry']['level']}: {what['entry']['text']}")
            case "Page.loadEventFired":
                self.loaded = True

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.last += 1
        wanted = self.last
        message = {"id": wanted, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.receive())
            if "method" in answer:
                self._event(answer)
            elif answer["id"] == wanted:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def open(self, file: Path) -> None:
        self.loaded = False
        self.requests.clear()
        self.console.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.until(lambda: self.loaded)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def until(self, true: Any) -> None:
        """Wait for a function, or a JavaScript expression, to become true."""
        end = time.monotonic() + _PATIENCE
        while not (self.run(true) if isinstance(true, str) else true()):
            if time.monotonic() > end:
                raise TimeoutError(f"still not true after {_PATIENCE} s: {true}")
            time.sleep(0.03)
            self.run("0")  # takes in what happened meanwhile

    def click(self, selector: str) -> None:
        """A real click in the middle of the element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, file: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._area(whole))["data"]
        file.write_bytes(base64.b64decode(data))

    def _area(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def close(self) -> None:
        """End this Chromium, and no other."""
        with contextlib.suppress(Exception):
            self.session = None
            self.socket.send(json.dumps({"id": self.last + 1, "method": "Browser.close"}))
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        with contextlib.suppress(AttributeError):
            self.socket.wire.close()
        shutil.rmtree(self.folder, ignore_errors=True)
