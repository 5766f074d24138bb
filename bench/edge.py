"""The API process alone: streams of chat over an engine that echoes its prompts, of one tree or of several.

    python bench/edge.py [TREE ...] [--streams 256] [--seconds 5] [--rounds 3] [--profile OUT]

The API process has one core; its engine is `tests/e2e/http_fake.py` of the tree. Trees take turns. Prints,
as JSON, of each tree: chunks/s, processor time of the API process a chunk, and gaps between two arrivals at
one stream. With --profile, cProfile of the API process in OUT.
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

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps until the morning comes "


def body(number: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": f"stream {number}: {WORDS * 5}"}],
                       "stream": True, "ignore_eos": True, "max_tokens": 15_000}).encode()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()]


class Server:
    """The tree's `penstock serve` over its fake engine."""

    def __init__(self, tree: Path, core: int, profile: str | None) -> None:
        fake = tree / "tests/e2e/http_fake.py"
        how = [] if profile is None else ["-m", "cProfile", "-o", profile]
        self.process = subprocess.Popen(
            [sys.executable, *how, str(fake), "echo", "--port", "0", "--max-num-seqs", "512"],
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(tree / "src"), "PENSTOCK_FAKE_CALM": "1"})
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


def measured(server: Server, streams: int, seconds: float) -> dict[str, float]:
    """So many seconds, once each stream has had text."""
    links = selectors.DefaultSelector()
    os.kill(server.engine, signal.SIGSTOP)              # until all have been asked: chats want a core too
    for number in range(streams):
        at = socket.create_connection(server.at)
        asked = body(number)
        at.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
                   b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(asked) + asked)
        at.setblocking(False)
        links.register(at, selectors.EVENT_READ, number)
    before = -1.0
    while (now := cpu_s(server.process.pid)) > before:
        before = now
        time.sleep(1)
    os.kill(server.engine, signal.SIGCONT)
    last: dict[int, float] = {}
    gaps: list[float] = []
    chunks, began, cpu, now = 0, 0.0, 0.0, 0.0
    while not began or now < began + seconds:
        for key, _ in links.select():
            data, now = key.fileobj.recv(1 << 16), time.perf_counter()  # type: ignore[union-attr]
            assert data and b"[DONE]" not in data and b"error" not in data, f"a stream has ended: {data!r}"
            count = data.count(b'"content":"') - data.count(b'"content":""')
            if not count:
                continue
            if began:
                gaps.append(now - last[key.data])
                chunks += count
            last[key.data] = now
            if not began and len(last) == streams:
                began, cpu = now, cpu_s(server.process.pid)
    took, used = now - began, cpu_s(server.process.pid) - cpu
    for key in list(links.get_map().values()):
        key.fileobj.close()                                             # type: ignore[union-attr]
    gaps.sort()
    return {"chunks_per_s": chunks / took, "cpu_us_per_chunk": 1e6 * used / chunks, "cpu_share": used / took,
            "gap_p50_ms": 1e3 * gaps[len(gaps) // 2], "gap_p99_ms": 1e3 * gaps[int(.99 * len(gaps))],
            "gap_max_ms": 1e3 * gaps[-1]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile")
    args = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in args.trees}
    for _ in range(args.rounds):
        for tree, runs in found.items():
            server = Server(tree.resolve(), core, args.profile)
            try:
                runs.append(measured(server, args.streams, args.seconds))
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
