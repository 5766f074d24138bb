"""`penstock serve` over an echoing engine process (`tests/e2e/http_fake.py`), and what its answers are."""
from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

SCRIPT = str(Path(__file__).parents[1] / "e2e" / "http_fake.py")
# 30 s: it does not end before a test has done what it is about, however busy the machine.
LONG = {"prompt": [1, 2, 3], "max_tokens": 15_000}
WAIT_S = 120


class Server:
    """One `penstock serve` and what it printed."""

    def __init__(self, folder: Path, *flags: str, model: str = "fake",
                 verify: ssl.SSLContext | bool = True, under: Callable[[], object] | None = None) -> None:
        """under: called in its process before it runs."""
        self.events = folder / "events"
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, model, "--port", "0", "--debug-event-log", str(self.events), *flags],
            stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, preexec_fn=under)
        self.line = self.process.stdout.readline()
        found = re.search(r"ready on (https?://\S+) ", self.line)
        assert found, self.line + self.log.read_text()
        self.http = httpx.Client(base_url=found.group(1), timeout=WAIT_S,
                                 verify=verify,
                                 limits=httpx.Limits(keepalive_expiry=1))   # before the server drops it

    def post(self, path="completions", **body):
        return self.http.post("/v1/" + path, json=body)

    def socket(self) -> socket.socket:
        return socket.create_connection((self.http.base_url.host, self.http.base_url.port), WAIT_S)

    def raw(self, data: bytes) -> bytes:
        """The answer to these bytes, until the server closes."""
        with self.socket() as link:
            link.sendall(data)
            return b"".join(iter(lambda: link.recv(65536), b""))

    def started(self, **body) -> socket.socket:
        """A connection whose request has shown its first event."""
        link = self.socket()
        data = json.dumps({**LONG, "stream": True, **body}).encode()
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                     % len(data) + data)
        seen = b""
        while b"data: " not in seen:
            part = link.recv(65536)
            assert part, seen
            seen += part
        return link

    def until(self, condition):
        """Poll until `condition()` is true; its value."""
        end = time.monotonic() + WAIT_S
        while not (value := condition()):
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)
        return value

    def metric(self, name: str) -> float:
        found = re.search(rf"^penstock:{re.escape(name)} (\S+)$", self.http.get("/metrics").text,
                          re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def end(self, *signals: int) -> int:
        """The exit code after these signals."""
        for number in signals:
            self.process.send_signal(number)
        return self.process.wait(WAIT_S)


def events(answer: httpx.Response) -> list:
    """Data of a whole event stream, which must end in [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def error(answer: httpx.Response, status: int) -> dict:
    """The error, checked for OpenAI's shape."""
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return found
