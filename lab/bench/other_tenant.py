"""A short chat alone, and beside eight clients of another key that send 118,000 messages each, all the time.

    PYTHONPATH=src:bench/device python lab/bench/other_tenant.py

Prints medians and the largest of 30 chats each, how many times slower they are beside the others, and what
the others were told. An upper bound: the clients take processor too.
"""
from __future__ import annotations

import collections
import http.client
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from serving import serving

CHATS, CLIENTS, MESSAGES = 30, 8, 118_000
KEYS = ("large-0123456789abcdef", "short-0123456789abcdef")


def post(at: http.client.HTTPConnection, key: str, body: bytes) -> int:
    at.request("POST", "/v1/chat/completions", body,
               {"content-type": "application/json", "authorization": f"Bearer {key}"})
    answer = at.getresponse()
    answer.read()
    return answer.status


def large(netloc: str, told: object) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}] * MESSAGES}).encode()
    while True:
        at = http.client.HTTPConnection(netloc, timeout=60)
        try:
            told.put(post(at, KEYS[0], body))           # type: ignore[attr-defined]
        except OSError:
            told.put(0)                                 # type: ignore[attr-defined]
        at.close()


def chats(netloc: str) -> list[float]:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
    took = []
    for _ in range(CHATS):
        at, began = http.client.HTTPConnection(netloc, timeout=60), time.perf_counter()
        status = post(at, KEYS[1], body)
        took.append(time.perf_counter() - began)
        assert status == 200, status
        at.close()
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("\n".join(KEYS))
        with serving("--threads", "1", "--api-key-file", str(keys)) as server:
            netloc = urlsplit(server.url).netloc
            chats(netloc)                               # warm
            alone, told = chats(netloc), multiprocessing.Queue()
            others = [multiprocessing.Process(target=large, args=(netloc, told), daemon=True)
                      for _ in range(CLIENTS)]
            for other in others:
                other.start()
            time.sleep(2)
            beside = chats(netloc)
            for other in others:
                other.kill()
            statuses = collections.Counter(told.get() for _ in range(told.qsize()))
    for name, took in (("alone", alone), ("beside", beside)):
        print(f"{name}: median {median(took):.3f} s, most {max(took):.3f}")
    print(f"{median(beside) / median(alone):.1f} times; the others heard {dict(statuses)}")


if __name__ == "__main__":
    main()
