"""Two engines on one store, under load, of which one is killed at any moment, again and again."""
from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from pair_server import Server, said, serving

PROMPTS = [[(7 * i + 13 * n) % 96 + 1 for i in range(40 + 20 * n)] for n in range(8)]


def disk(answer: dict) -> int:
    """Tokens of it that storage had."""
    details = answer["usage"]["prompt_tokens_details"]
    assert sum(details["cached_tokens_details"].values()) == details["cached_tokens"]
    return details["cached_tokens_details"].get("storage", 0)


def answers(model: str, tmp_path: Path) -> list[list[int]]:
    """What an engine without storage says."""
    with serving(model, tmp_path, "--kv-cache-memory-bytes", "4M") as plain:
        return [said(plain.ask(prompt))[0] for prompt in PROMPTS]


def kill_and_kill(model: str, tmp_path: Path, host: tuple[str, ...], kills: int,
                  after: Callable[[Server], None]) -> tuple[int, int]:
    """Asserts that no token is wrong; `after` looks at the engine that was not killed. Returns answers, and
    those of them with hits."""
    dice, want = random.Random(4), answers(model, tmp_path)
    (tmp_path / "b").mkdir()
    asked = hits = 0

    def load(server: Server, seconds: float) -> None:
        nonlocal asked, hits
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            n = dice.randrange(8)
            try:
                answer = server.ask(PROMPTS[n])
            except httpx.HTTPError:
                return                            # it was killed
            assert said(answer)[0] == want[n]
            asked += 1
            hits += disk(answer) > 0

    with serving(model, tmp_path / "b", *host) as stays:
        for _ in range(kills):
            with serving(model, tmp_path, *host) as dies, ThreadPoolExecutor(6) as pool:
                running = [pool.submit(load, server, 3.0) for server in (dies, stays) for _ in range(3)]
                time.sleep(dice.random() * 2)
                os.kill(dies.process.pid, signal.SIGKILL)
                for one in running:
                    one.result()
            stays.http.post("/flush_cache")
        after(stays)
    return asked, hits
