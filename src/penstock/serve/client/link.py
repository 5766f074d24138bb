"""The engine's socket to messages: so many at a time that nobody whose text has come waits long for his turn.

Knows no requests.
"""
from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import cast

from penstock.serve import wire

# Chunks of tokens before those that they wake have their turn: 5 to 10 ms. A socket's buffer holds 15,000.
AT_ONCE = 1024


class Link(asyncio.Protocol):
    """Without a task in between. `receive` is told each message, in order; `lost`, once, that no more come:
    the engine has closed its end, or sent something that is no message of ours."""

    def __init__(self, receive: Callable[[wire.FromEngine], object], lost: Callable[[], object]) -> None:
        self._receive, self._lost = receive, lost
        self._reader = wire.FrameReader()
        self._bodies: deque[bytes] = deque()
        self._paused = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._bodies += self._reader.feed(data)
        except wire.ProtocolError:
            self._close()
        if not self._paused:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        while self._bodies:                     # said before it went
            self._some()
        self._lost()

    def _go_on(self) -> None:
        self._some()
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if self._bodies:
            if not self._paused:
                self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)
        elif self._paused:
            self._transport.resume_reading()
        self._paused = bool(self._bodies)

    def _some(self) -> None:
        left = AT_ONCE
        with contextlib.suppress(wire.ProtocolError):
            while self._bodies and left > 0:
                message = wire.decode_from_engine(self._bodies.popleft())
                left -= len(message.chunks) if isinstance(message, wire.Chunks) else 1
                self._receive(message)
            return
        self._close()

    def _close(self) -> None:
        self._bodies.clear()
        assert self._transport is not None
        self._transport.close()
