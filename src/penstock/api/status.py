"""A line now and then that says how busy a server is: what runs and waits, KV in use, tokens a second, hits.

Owns the arithmetic between two readings of the engines' numbers. Idle servers say nothing.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.api.logs import FIELDS
from penstock.engine.client.client import EngineDied
from penstock.engine.client.metrics import TIERS, USED

log = logging.getLogger("penstock.status")
PROMPT, OUTPUT, QUERIES = "executor_prefill_tokens_total", "generation_tokens_total", "prefix_queries"
HITS = tuple(f"prefix_{tier}_hits" for tier in TIERS)


def status(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, Any] | None:
    """The numbers of a line; None: nothing runs, waits or has been computed since `before`."""
    def since(name: str) -> float:
        # An engine that was started again counts from 0.
        return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))

    found: dict[str, Any] = {
        "running": int(now.get("requests_running", 0)), "waiting": int(now.get("requests_waiting", 0)),
        "prompt_tokens_per_s": round(since(PROMPT) / seconds, 1),
        "output_tokens_per_s": round(since(OUTPUT) / seconds, 1)}
    if not any(found.values()):
        return None
    found["kv_usage"] = {TIERS[tier]: round(now.get(used, 0.0) / pages, 3) for tier, used in USED.items()
                         if (pages := now.get(f"{tier}_pages"))}
    asked = since(QUERIES)
    found["prefix_hit_rate"] = round(sum(map(since, HITS)) / asked, 3) if asked else None
    return found


def line(numbers: Mapping[str, Any]) -> str:
    """`status` in words."""
    usage = ", ".join(f"{share:.1%} of {tier} KV" for tier, share in numbers["kv_usage"].items())
    rate = numbers["prefix_hit_rate"]
    parts = [f"{numbers['running']} running, {numbers['waiting']} waiting", *([usage] if usage else []),
             f"{numbers['prompt_tokens_per_s']} prompt tokens/s, "
             f"{numbers['output_tokens_per_s']} output tokens/s",
             *([] if rate is None else [f"prefix hit rate {rate:.1%}"])]
    return "status: " + "; ".join(parts)


async def report(stats: Callable[[], Awaitable[Mapping[str, float]]], interval_s: float) -> None:
    """A line each `interval_s` seconds while the server is busy, until cancelled."""
    before, began = await _read(stats), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now, ended = await _read(stats), time.monotonic()
        if now and (numbers := status(before, now, ended - began)) is not None:
            log.info("%s", line(numbers), extra={FIELDS: numbers})
        before, began = now or before, ended


async def _read(stats: Callable[[], Awaitable[Mapping[str, float]]]) -> Mapping[str, float]:
    try:
        return await stats()
    except EngineDied:              # of several, it is started again
        return {}
