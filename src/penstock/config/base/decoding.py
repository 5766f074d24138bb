"""Typed messages to bytes and back: whatever the bytes of another process, a message or ProtocolError."""
from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_M = TypeVar("_M")
_ENCODER = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The other side sent something that is not a message of ours; the connection is closed."""


def decode(decoder: msgspec.msgpack.Decoder[_M], body: bytes | memoryview, protocol: str) -> _M:
    """The message in `body`. Raises ProtocolError only, which names the `protocol` and its version."""
    try:
        return decoder.decode(body)
    # msgspec documents the first; the others were seen on mutated frames.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as e:
        raise ProtocolError(f"{type(e).__name__}: not a message of {protocol}") from e


def encode(message: Any, bytes_max: int) -> bytes:
    """Raises ProtocolError: it is too long, or has an integer that msgpack cannot carry."""
    try:
        body = _ENCODER.encode(message)
    except OverflowError as e:
        raise ProtocolError(f"{type(message).__name__}: an integer is over 64 bits") from e
    if len(body) > bytes_max:
        raise ProtocolError(f"a message of {len(body)} bytes is over {bytes_max}")
    return body
