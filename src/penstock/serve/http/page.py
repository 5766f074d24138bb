"""The page at `/`, and the stream of numbers that it draws.

The page is three files of its own and asks nobody else; it shows nothing by itself, so it wants no key.
Owns how often numbers are asked for, and by how many.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.serve.http.format import event
from penstock.serve.http.types import ApiError
from penstock.serve.metrics import STATS_AGE

FILES = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"),
         "/page.js": ("page.js", "text/javascript")}
VIEWERS_MAX = 8
EVERY_S = 0.5
SHARE = 0.01                # of an engine's time that one viewer may take
_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


class Page:
    """numbers: of the engine, anew. shown: what each event tells beside. over: the server ends."""

    def __init__(self, numbers: Callable[[], Awaitable[dict[str, float]]],
                 shown: Callable[[], dict[str, Any]], over: Callable[[], bool]) -> None:
        self._numbers, self._shown, self._over = numbers, shown, over
        self._viewers = 0
        folder = resources.files("penstock.serve") / "page"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def file(self, request: Request) -> Response:
        body, kind = self._files[request.url.path]
        return Response(body, media_type=kind, headers={
            "content-security-policy": _POLICY, "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer", "cache-control": "no-cache"})

    async def live(self, _: Request) -> Response:
        """Server-sent events until the client or the server goes. Raises ApiError: too many look."""
        if self._viewers == VIEWERS_MAX:
            raise ApiError(503, f"{VIEWERS_MAX} pages are open already", code="too_many_viewers")
        return StreamingResponse(self._events(), media_type="text/event-stream",
                                 headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _events(self) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            while not self._over():
                asked = time.monotonic()
                values = await self._numbers()
                now = time.monotonic()
                yield event({**self._shown(), "at": now, "age": values.pop(STATS_AGE), "values": values})
                await asyncio.sleep(max(EVERY_S, (now - asked) / SHARE))
        finally:
            self._viewers -= 1
