"""40 grammars that are deep, cyclic, huge or explode, sent while a chat is streamed; then 64 usual.

    PYTHONPATH=src:bench/device python lab/bench/hostile_grammars.py [--tokens 300]

Prints, as JSON: gaps between the stream's tokens before and meanwhile, the slowest /health, what the hostile
ones were told, and the memory of the server's processes: before, behind those, behind the 64.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving import serving


def nested(depth: int, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = (
            {"type": "object", "properties": {"a": found}, "required": ["a"]}
            if kind == "object"
            else {"type": "array", "items": found}
            if kind == "array"
            else {kind: [found, {"type": "null"}]}
        )
    return found


def many(count: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"property{n}": {"type": "string"} for n in range(count)},
        **more,
    }


def schemas() -> list[dict[str, Any]]:
    ref = {"$ref": "#/$defs/a"}
    return [
        *(
            nested(d, k)
            for d, k in (
                (200, "object"),
                (700, "object"),
                (1500, "array"),
                (400, "anyOf"),
                (12, "oneOf"),
                (40, "allOf"),
            )
        ),
        {"$ref": "#"},
        {"$defs": {"a": ref}, **ref},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": ref}, **ref},
        {"$defs": {"a": {"allOf": [ref, {"type": "object"}]}}, **ref},
        {"$defs": {"a": {"type": "object", "properties": {"x": ref, "y": ref, "z": ref}}}, **ref},
        many(500),
        many(1400),
        many(900, additionalProperties=False),
        many(60, minProperties=30),
        {"enum": [f"word {n * 7919 % 100003}" for n in range(4000)]},
        {"const": "x" * 60_000},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "minLength": 100_000, "maxLength": 200_000},
        {"type": "array", "minItems": 10**6},
        {"type": "array", "items": many(50), "minItems": 500, "maxItems": 900},
        {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
        {"type": "number", "multipleOf": 1e-9},
        {"anyOf": [{"type": "string", "pattern": f"^(a|b|{n}){{1,60}}$"} for n in range(200)]},
        {"type": "object", "patternProperties": {f"^{n}.*{n}$": {} for n in range(300)}},
        {"oneOf": [many(n) for n in range(1, 40)]},
        {"allOf": [many(n) for n in range(1, 40)]},
    ]


REGEXES = [
    "(a{1,1000}){1,1000}",
    ".{0,100000}",
    "(.*a){40}",
    "(a|aa|aaa|aaaa){0,5000}",
    "\\p{L}{0,20000}",
    "([a-z]+)*([0-9]+)*" * 400,
    "(x+x+)+y",
    ".*" * 2000,
    "(" * 500 + "a" + ")" * 500,
    "(a?){5000}a{5000}",
    "[^a]{1,3000}b[^c]{1,3000}",
    "((a|b)*c(d|e)*){1,900}",
    "|".join(map(str, range(9000))),
]


class Streamed(threading.Thread):
    """One chat; `gaps` between its chunks."""

    def __init__(self, at: str, tokens: int) -> None:
        super().__init__()
        self.at, self.tokens, self.gaps = at, tokens, []
        self.start()

    def run(self) -> None:
        link = http.client.HTTPConnection(self.at, timeout=600)
        link.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(
                {
                    "messages": [{"role": "user", "content": "Tell a long story."}],
                    "stream": True,
                    "seed": 1,
                    "max_tokens": self.tokens,
                    "ignore_eos": True,
                }
            ),
            {"content-type": "application/json"},
        )
        answer, last = link.getresponse(), 0.0
        while line := answer.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last)
                last = now


def ask(at: str, body: dict[str, Any]) -> str:
    link = http.client.HTTPConnection(at, timeout=120)
    link.request(
        "POST",
        "/v1/completions",
        json.dumps({"prompt": "a", "max_tokens": 4, **body}),
        {"content-type": "application/json"},
    )
    answer = link.getresponse()
    answer.read()
    return str(answer.status)


def tree(pid: int) -> list[int]:
    below = [
        int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()
    ]
    return [pid, *(p for child in below for p in tree(child))]


def rss_mib(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in tree(pid))
    return pages * 4096 / (1 << 20)


def p99(gaps: list[float]) -> float:
    return round(1e3 * sorted(gaps)[int(0.99 * len(gaps))], 1)


def main() -> None:
    sys.setrecursionlimit(20_000)
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    hostile = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}}
        for s in schemas()
    ] + [{"structured_outputs": {"regex": r}} for r in REGEXES]
    assert len(hostile) == 40, len(hostile)
    with serving() as server:
        at, pid = urlsplit(server.url).netloc, server.process.pid
        assert ask(at, {"structured_outputs": {"regex": "a"}}) == "200"
        before = Streamed(at, args.tokens)
        before.join()
        memory = [rss_mib(pid)]
        meanwhile, told, health = Streamed(at, args.tokens), collections.Counter(), [0.0]
        while not meanwhile.gaps:
            time.sleep(0.01)
        senders = [
            threading.Thread(target=lambda mine=mine: told.update(ask(at, b) for b in mine))
            for mine in (hostile[n::4] for n in range(4))
        ]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders) and meanwhile.is_alive():
            began, link = time.perf_counter(), http.client.HTTPConnection(at, timeout=60)
            link.request("GET", "/health")
            link.getresponse().read()
            health.append(time.perf_counter() - began)
            link.close()
            time.sleep(0.05)
        for thread in (*senders, meanwhile):
            thread.join()
        memory.append(rss_mib(pid))
        usual = [
            ask(
                at,
                {
                    "structured_outputs": {
                        "json": {
                            "type": "object",
                            "properties": {
                                f"key{n}": {"type": "string"},
                                "tags": {"type": "array", "items": {"enum": ["a", str(n)]}},
                            },
                        }
                    }
                },
            )
            for n in range(64)
        ]
        memory.append(rss_mib(pid))
        processes = len(tree(pid))
    print(
        json.dumps(
            {
                "gap_p99_ms": {"before": p99(before.gaps), "meanwhile": p99(meanwhile.gaps)},
                "gap_max_ms": {
                    "before": round(1e3 * max(before.gaps), 1),
                    "meanwhile": round(1e3 * max(meanwhile.gaps), 1),
                },
                "health_max_ms": round(1e3 * max(health), 1),
                "hostile": told,
                "usual": collections.Counter(usual),
                "processes": processes,
                "rss_mib": [round(m, 1) for m in memory],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
