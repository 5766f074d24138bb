"""The page at `/`, and the stream of numbers that it draws.

The page is three files of its own and loads nothing else; it shows no data by itself, so it needs no key.
Owns how often numbers are asked for, and by how many.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.api.openai_format import event
from penstock.api.protocol.openai import ApiError
from penstock.engine.client.client import EngineDied
from penstock.engine.client.metrics import STATS_AGE, in_use
from penstock.engine.client.replicas import Engines

FILES = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"),
         "/page.js": ("page.js", "text/javascript"), "/markdown.js": ("markdown.js", "text/javascript")}
VIEWERS_MAX = 8
EVERY_S = 0.5
SELDOM_S = 5.0              # most of a long wait is for a step, and costs the engine nothing
SEEN_S_MAX = 2.0
REQUESTS_MAX = 256          # of those that are drawn one by one
SHARE = 0.01                # of an engine's time that one viewer may take
_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


class Page:
    """numbers: of all engines together, anew. shown: what else an event tells. over: the server ends."""

    def __init__(self, engines: Engines, numbers: Callable[[], Awaitable[dict[str, float]]],
                 shown: Callable[[], dict[str, Any]], over: Callable[[], bool]) -> None:
        self._engines, self._numbers, self._shown, self._over = engines, numbers, shown, over
        self._viewers = 0
        folder = resources.files("penstock.api") / "page_files"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def file(self, request: Request) -> Response:
        body, kind = self._files[request.url.path]
        return Response(body, media_type=kind, headers={
            "content-security-policy": _POLICY, "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer", "cache-control": "no-cache"})

    async def live(self, _: Request) -> Response:
        """Server-sent events until the client or the server goes. Raises ApiError: too many look."""
        if self._viewers == VIEWERS_MAX:
            raise ApiError(503, f"{VIEWERS_MAX} dashboards are open already", code="too_many_viewers")
        return StreamingResponse(self._events(), media_type="text/event-stream",
                                 headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _events(self) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            while not self._over():
                asked = time.monotonic()
                values, seen = await asyncio.gather(self._numbers(), self._seen())
                now = time.monotonic()
                yield event({**self._shown(), **seen, "at": now, "age": values.pop(STATS_AGE),
                             "values": in_use(values)})
                await asyncio.sleep(max(EVERY_S, min(SELDOM_S, (now - asked) / SHARE)))
        finally:
            self._viewers -= 1

    async def _seen(self) -> dict[str, Any]:
        """Requests and turns, each behind the number of its engine; none of one that does not answer."""
        requests: list[tuple[Any, ...]] = []
        turns: list[tuple[Any, ...]] = []
        live = 0
        for n, member in enumerate(self._engines.members):
            with contextlib.suppress(TimeoutError, EngineDied):
                async with asyncio.timeout(SEEN_S_MAX):
                    answer = await member.engine.shown()
                live += answer.live
                requests += [(n, *msgspec.structs.astuple(r)) for r in answer.requests]
                turns += [(n, *msgspec.structs.astuple(t)) for t in answer.turns]
        return {"live": live, "requests": requests[:REQUESTS_MAX], "turns": turns}
