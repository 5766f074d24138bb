"""The API process alone: streams of chat over an engine that echoes its prompts, of one tree or of several.

    python bench/edge.py [TREE ...] [--streams 256] [--crowd 0] [--step-s .002] [--seconds 5] [--rounds 3]
                         [--profile OUT]

The API process has one core; its engine is `tests/e2e/http_fake.py` of the tree. Trees take turns. Prints,
as JSON, of each tree: tokens/s (characters, of which a token of that engine has one), processor time of the
API process a token, and gaps between two arrivals at one stream: by the clock, and in processor time of the
API process, which is what they would be were no other on its core and the engine never late. With --crowd, so
many prompts of 100 tokens come at once, again and again, gaps are of the time until they are answered, and
first tokens are theirs. With --profile, cProfile of the API process in OUT.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_TEXT = re.compile(rb'"content":"((?:[^"\\\\]|\\\\.)*)"')
WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps until the morning comes "


def body(number: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": f"stream {number}: {WORDS * 5}"}],
                       "stream": True, "ignore_eos": True, "max_tokens": 15_000}).encode()


def question(number: int) -> bytes:
    """One of a crowd: none has the prefix of another."""
    ids = [(37 * number + 11 * i) % 200 + 20 for i in range(100)]
    return json.dumps({"prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True,
                       "return_token_ids": True}).encode()


def post(path: str, asked: bytes) -> bytes:
    return (b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % (path.encode(), len(asked)) + asked)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    return time.clock_gettime(~pid << 3 | 2)            # CPUCLOCK_SCHED, as clock_getcpuclockid makes it


def children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()]


class Server:
    """The tree's `penstock serve` over its fake engine."""

    def __init__(self, tree: Path, core: int, step_s: float, profile: str | None) -> None:
        fake = tree / "tests/e2e/http_fake.py"
        how = [] if profile is None else ["-m", "cProfile", "-o", profile]
        self.process = subprocess.Popen(
            [sys.executable, *how, str(fake), "echo", "--port", "0", "--max-num-seqs", "512"],
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(tree / "src"), "PENSTOCK_FAKE_CALM": "1",
                              "PENSTOCK_FAKE_STEP_S": str(step_s)})
        assert self.process.stdout is not None
        found = re.search(r"ready on http://(\S+):(\d+) ", line := self.process.stdout.readline())
        assert found, line
        self.at = found[1], int(found[2])
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():      # its children are where we are
            os.sched_setaffinity(int(task.name), {core})
        self.engine = next(int(pid) for pid in children(self.process.pid)
                           if b"--engine" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0


class Load:
    """Streams that run, crowds that come beside them, and what this client sees of both."""

    def __init__(self, server: Server, streams: int, crowd: int) -> None:
        self._server = server
        self._links = selectors.DefaultSelector()
        self._last: dict[int, tuple[float, float]] = {}
        self._crowd = [self._connect(-1 - n) for n in range(crowd)]
        self._sent, self._waiting = 0.0, 0
        self.gaps: list[tuple[float, float]] = []
        self.firsts: list[float] = []
        self.tokens, self.streams = 0, streams
        for number in range(streams):
            self._connect(number).sendall(post("/v1/chat/completions", body(number)))

    def _connect(self, number: int) -> socket.socket:
        at = socket.create_connection(self._server.at)
        self._links.register(at, selectors.EVENT_READ, number)
        return at

    def _ask(self) -> None:
        self._sent, self._waiting = time.perf_counter(), len(self._crowd)
        for number, at in enumerate(self._crowd):
            at.sendall(post("/v1/completions", question(number)))

    def _took(self, number: int, data: bytes, now: float, cpu: float) -> None:
        assert b"error" not in data, f"a stream has ended: {data!r}"
        if number < 0:
            if b'"token_ids":[' in data and b"HTTP/1.1" in data:
                self.firsts.append(now - self._sent)
            self._waiting -= data.count(b"[DONE]")
        elif count := sum(map(len, _TEXT.findall(data))):
            if number in self._last and (self._waiting or not self._crowd):
                self.gaps.append((now - self._last[number][0], cpu - self._last[number][1]))
            self.tokens += count
            self._last[number] = now, cpu

    def run(self, seconds: float) -> None:
        """Until so much later; the first time also until each stream has had text."""
        self.gaps, self.firsts, self.tokens = [], [], 0
        now = began = time.perf_counter()
        while now < began + seconds or self._waiting or len(self._last) < self.streams:
            if self._crowd and not self._waiting and len(self._last) == self.streams:
                self._ask()
            for key, _ in self._links.select():
                data = key.fileobj.recv(1 << 16)                        # type: ignore[union-attr]
                now = time.perf_counter()
                self._took(key.data, data, now, cpu_s(self._server.process.pid))

    def end(self) -> None:
        for key in list(self._links.get_map().values()):
            key.fileobj.close()                                         # type: ignore[union-attr]


def in_ms(name: str, values: list[float]) -> dict[str, float]:
    values.sort()
    return {f"{name}_{what}_ms": 1e3 * values[int(share * (len(values) - 1))]
            for what, share in (("p50", .5), ("p99", .99), ("max", 1.0))}


def measured(server: Server, streams: int, crowd: int, seconds: float) -> dict[str, float]:
    """So many seconds, once each stream has had text."""
    pid = server.process.pid
    os.kill(server.engine, signal.SIGSTOP)              # until all have been asked: chats want a core too
    load = Load(server, streams, crowd)
    before = -1.0
    while (now := cpu_s(pid)) > before + .01:
        before = now
        time.sleep(1)
    os.kill(server.engine, signal.SIGCONT)
    load.run(.2)
    began, cpu = time.perf_counter(), cpu_s(pid)
    load.run(seconds)
    took, used = time.perf_counter() - began, cpu_s(pid) - cpu
    load.end()
    return {"tokens_per_s": load.tokens / took, "cpu_us_per_token": 1e6 * used / load.tokens,
            "cpu_share": used / took, **in_ms("gap", [gap for gap, _ in load.gaps]),
            **in_ms("gap_cpu", [gap for _, gap in load.gaps]),
            **(in_ms("first_token", load.firsts) if crowd else {})}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--crowd", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=.002)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile")
    args = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in args.trees}
    for _ in range(args.rounds):
        for tree, runs in found.items():
            server = Server(tree.resolve(), core, args.step_s, args.profile)
            try:
                runs.append(measured(server, args.streams, args.crowd, args.seconds))
            finally:
                server.end()
    told: dict[str, Any] = {}
    for tree, runs in found.items():
        told[str(tree)] = {name: {"median": round(statistics.median(run[name] for run in runs), 2),
                                  "least": round(min(run[name] for run in runs), 2),
                                  "most": round(max(run[name] for run in runs), 2)} for name in runs[0]}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
