"""Storage that is full, hung, dead or slow in the middle of 200 requests: it costs hits, and nothing else.

Every answer is what an engine without storage says. What it costs is printed: the longest gap between two
tokens of a stream beside it, and how many requests waited for storage, and for how long.
"""
from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pair_server import Server, said, serving
from pipeline_engine import checkpoint
from stores import Proxy, running

pytestmark = pytest.mark.soak

REQUESTS, FROM, CLIENTS, PROMPTS = 200, 50, 6, 40
HOST = "--kv-cache-memory-bytes", "3M", "--kv-offloading-size", "3M", "--max-num-seqs", "8"
TMPFS = ("unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"')
FAULTS = ["none", "full", "hung", "dead", "slow"]
FETCHING = re.compile(r'^penstock:requests_in_phase\{phase="fetching"\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("faulty"))


def prompts() -> list[list[int]]:
    """Of four families that begin alike; together more than the host tier has room for."""
    dice = random.Random(5)
    heads = [[dice.randrange(97) for _ in range(300)] for _ in range(4)]
    return [[*heads[n % 4], *(dice.randrange(97) for _ in range(dice.randrange(50, 500)))]
            for n in range(PROMPTS)]


@dataclass
class Watched:
    """What a stream beside the others, and a look at the metrics now and then, have seen."""

    gaps: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)


@contextmanager
def watched(server: Server) -> Iterator[Watched]:
    seen, ends = Watched(), threading.Event()

    def stream() -> None:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 900, "temperature": 0, "stream": True,
                "ignore_eos": True}
        while not ends.is_set():
            with server.http.stream("POST", "/v1/completions", json=body) as answer:
                last = None
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        assert "error" not in json.loads(line[6:])
                        if last is not None:
                            seen.gaps.append(now - last)
                        last = now
                    if ends.is_set():
                        return

    def look() -> None:
        while not ends.wait(0.1):
            found = FETCHING.search(server.http.get("/metrics").text)
            seen.waiting.append(float(found[1]) if found else 0.0)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(stream), pool.submit(look)]
        try:
            yield seen
        finally:
            ends.set()
            for job in jobs:
                job.result()


def place(fault: str, folder: Path):
    return nullcontext() if fault == "full" else running("valkey", folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_storage_fails_no_request_and_changes_no_token(model, tmp_path, fault):
    asked, order = prompts(), random.Random(6).choices(range(PROMPTS), k=REQUESTS)
    with serving(model, tmp_path, "--kv-cache-memory-bytes", "8M") as plain:
        want = [said(plain.ask(prompt))[0] for prompt in asked]
    if fault == "full" and shutil.which("unshare") is None:
        pytest.skip("needs unshare, of util-linux")
    store = tmp_path / "store"
    store.mkdir()
    with place(fault, tmp_path / "server") as real:
        proxy = None if real is None else Proxy(real.port)
        url = f"file://{store}" if proxy is None else f"valkey://127.0.0.1:{proxy.port}"
        under = (*TMPFS, str(store)) if fault == "full" else ()
        key = tmp_path / "key"
        key.write_text("0123456789abcdef")
        key.chmod(0o600)
        flags = *HOST, "--kv-storage", url, "--kv-storage-key", str(key)
        num, lock, took = iter(range(REQUESTS)), threading.Lock(), [0.0] * REQUESTS

        def begin() -> None:
            if fault == "hung":
                proxy.holds.set()
                threading.Timer(60.0, proxy.holds.clear).start()
            elif fault == "dead":
                real.kill()
            elif fault == "slow":
                proxy.delay_s = 0.1            # some 100 times what an answer takes

        def client(server: Server) -> int:
            hits = 0
            while True:
                with lock:
                    i = next(num, None)
                    if i == FROM:
                        begin()
                if i is None:
                    return hits
                began = time.monotonic()
                answer = server.ask(asked[order[i]])
                took[i] = time.monotonic() - began
                assert answer["status"] == 200 and said(answer)[0] == want[order[i]], (fault, i)
                hits += answer["usage"]["prompt_tokens_details"]["cached_tokens_details"].get("storage", 0)

        with serving(model, tmp_path, *flags, under=under) as server:
            with watched(server) as seen, ThreadPoolExecutor(CLIENTS) as pool:
                hits = sum(job.result() for job in [pool.submit(client, server) for _ in range(CLIENTS)])
            text = server.http.get("/metrics").text
            assert server.http.get("/health").status_code == 200
        count = {name: float(value) for name, value in
                 re.findall(r"^penstock:storage_(\w+) (\S+)$", text, re.MULTILINE)}
    gaps = sorted(seen.gaps)
    print(f"{fault}: {REQUESTS} answers, {hits} tokens of storage; gap of a stream {1e3 * gaps[-1]:.0f} ms "
          f"at most, {1e3 * gaps[len(gaps) // 2]:.1f} median, {1e3 * gaps[len(gaps) * 99 // 100]:.0f} of 99 %"
          f"; at most {max(seen.waiting):.0f} requests waited for storage; an answer took {max(took):.2f} s, "
          f"{sorted(took)[REQUESTS // 2]:.2f} median;",
          {name: n for name, n in count.items() if n and ("total" in name or name == "up")})
    assert len(gaps) > 100 and "Traceback" not in (tmp_path / "log").read_text()
    match fault:
        case "none":
            assert hits and count["up"] == 1 and not count["failed_total"]
        case "full":
            assert count["refused_full_total"] and count["up"] == 1
        case "hung" | "dead":
            assert count["failed_total"] + count["lookups_late_total"] > 0
        case "slow":
            assert count["read_objects_total"] or count["lookups_late_total"]
