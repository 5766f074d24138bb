"""What an engine process says: bytes to messages, and the chunks of a choice until they are read.

Of what comes faster than it is read, chunks are joined; of what comes at once, a slice is acted on in each
turn of the event loop. Knows nothing of requests.
"""
from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from penstock.config.streams.frames import FrameBuffer, ProtocolError
from penstock.engine import wire

SLICE_CHUNKS = 2048         # between two looks at everybody else: about 10 ms with what 256 streams write


class Inbox:
    """What has arrived for one choice. Its client holds this and not the stream, so that a stream
    without a reader can be collected and aborted."""

    __slots__ = ("begun", "chunks", "error", "finished", "gated", "rid", "started", "waiter")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.chunks: deque[wire.OutputChunk] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.started = False
        self.begun = False              # tokens have come
        self.gated = False              # a gate will wake it
        self.finished = False
        self.error: Exception | None = None

    def add(self, chunk: wire.OutputChunk) -> None:
        """Into the last one, if that is unread and `chunk` is only more of the same."""
        if not (self.chunks and _joined(self.chunks[-1], chunk)):
            self.chunks.append(chunk)

    def wake(self) -> None:
        """Wake the task that waits for a chunk."""
        self.gated = False
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def _joined(last: wire.OutputChunk, chunk: wire.OutputChunk) -> bool:
    """Whether `last` says now what `chunk` says as well."""
    if chunk.cached_tokens is not None or chunk.kv_reads is not None or chunk.prompt is not None or (
            chunk.finish is not None or (last.logprobs is None) != (chunk.logprobs is None)):
        return False
    last.tokens.extend(chunk.tokens)
    if last.logprobs is not None and chunk.logprobs is not None:
        last.logprobs.extend(chunk.logprobs)
    return True


class Receiver(Protocol):
    def receive(self, message: wire.FromEngine) -> None:
        """Act on one message."""

    def link_lost(self) -> None:
        """The engine closed its end, or sent something that is not a message of ours."""


class EngineLink(asyncio.Protocol):
    """Bytes of the socket to messages of the client, without a task in between."""

    def __init__(self, client: Receiver) -> None:
        self._client = client
        self._reader = FrameBuffer(wire.FROM_ENGINE)
        self._messages: deque[wire.FromEngine] = deque()            # that wait for the next turn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        waits = bool(self._messages)
        try:
            self._messages += self._reader.feed(data)
        except ProtocolError:
            self._transport.close()
            return
        if not waits:
            self._slice()

    def _slice(self) -> None:
        left = SLICE_CHUNKS
        while self._messages and left > 0:
            message = self._messages.popleft()
            left -= len(message.chunks) if isinstance(message, wire.Chunks) else 1
            self._client.receive(message)
        if self._messages:
            self._transport.pause_reading()             # the engine's socket fills, and it waits
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._slice()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.link_lost()
