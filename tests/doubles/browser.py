"""A headless Chromium over its pipe: JSON of the DevTools protocol between NULs; no library."""
from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

COMMAND = "chromium-headless-shell"
LIMIT_S = 120.0


class Browser:
    """One page. `close` always."""

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 1400) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def descriptors() -> None:
            os.dup2(os.dup(theirs_in), 3)
            os.dup2(os.dup(theirs_out), 4)
        # Its pages are ours: a sandbox needs what a container has not.
        self._process = subprocess.Popen(
            [str(shutil.which(COMMAND)), "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu",
             f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"],
            preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._rest = itertools.count(1), b""
        self.told: list[dict[str, Any]] = []            # events
        self._session: str | None = None
        [target] = [t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.ask("Target.attachToTarget", targetId=target["targetId"],
                                 flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._read()
            if got.get("id") == number:
                assert "error" not in got, got
                return got["result"]
            self.told.append(got)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], LIMIT_S)
            assert ready, "the browser says nothing"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def run(self, script: str) -> Any:
        """What a script in the page gives."""
        got = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def until(self, script: str, limit_s: float = LIMIT_S) -> Any:
        """What it gives, once that is true."""
        began = time.monotonic()
        while not (value := self.run(script)):
            assert time.monotonic() - began < limit_s, (script, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def key(self, name: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                     windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "Escape": 27}[name],
                     **({"text": text} if text and kind == "keyDown" else {}))

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def wrongs(self) -> list[str]:
        """What the page's console and its policy have complained of."""
        return [json.dumps(e) for e in self.told if e.get("method") in (
            "Runtime.exceptionThrown",) or (e.get("method") == "Log.entryAdded"
                                            and e["params"]["entry"]["level"] == "error")]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
