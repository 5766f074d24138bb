"""Bytes of another process into typed messages: whatever the bytes, a message or ProtocolError."""
from __future__ import annotations

from typing import TypeVar

import msgspec

_M = TypeVar("_M")


class ProtocolError(Exception):
    """The other side sent something that is not a message of ours; the connection is closed."""


def decode(decoder: msgspec.msgpack.Decoder[_M], body: bytes | memoryview, protocol: str) -> _M:
    """The message in `body`. Raises ProtocolError only, which names the `protocol` and its version."""
    try:
        return decoder.decode(body)
    # msgspec documents the first; the others were seen on mutated frames.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as e:
        raise ProtocolError(f"{type(e).__name__}: not a message of {protocol}") from e
