"""Typed messages to bytes and back, the same on every stream between processes, machines and instances.

A message is a msgpack body in frames of at most 1 MiB. A frame is a head and a part of that body; the head has the
kind of the message, whether more of it follows, and the bytes of the part. Where others reach the stream each frame
is signed: its head also has an epoch, a counter, and an HMAC-SHA256 of all that under a key of the connection and of
the direction. Whatever the bytes, a message or ProtocolError. No pickle in any form. Knows no sockets, and nothing
of what is said: who checks that an id or a length makes sense is the receiver.
"""
from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

FRAME_BYTES_MAX = 1 << 20
_HEAD = struct.Struct("<BBxxI")         # kind; more of it follows; bytes of the part
_ORDER = struct.Struct("<QQ")           # epoch; counter
_MAC_BYTES = 32                         # HMAC of these two heads and what is covered
HEAD_BYTES = _HEAD.size
SIGNED_BYTES = HEAD_BYTES + _ORDER.size + _MAC_BYTES
_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")


class ProtocolError(Exception):
    """The other side sent something that is not a message of ours; the connection is closed."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What goes over a stream."""


class Kinds(Generic[M]):
    """The messages of one protocol, or of one direction of it: what a message is says its number, from `first` on."""

    def __init__(self, protocol: str, types: Sequence[type[Any]], bytes_max: int, first: int = 1) -> None:
        """protocol: its name and version, for errors. bytes_max: of one message."""
        self.bytes_max, self.protocol = bytes_max, protocol
        self.of = {cls: i for i, cls in enumerate(types, first)}
        self.decoders = {i: msgspec.msgpack.Decoder(cls) for cls, i in self.of.items()}

    def frames(self, message: M) -> bytes:
        """Its frames, not signed, one after the other. Raises ProtocolError as FrameWriter does."""
        return b"".join(FrameWriter(self).message(message))


class FrameWriter(Generic[M]):
    """Makes the frames of one direction of one connection, to be sent in the order in which they are made."""

    def __init__(self, kinds: Kinds[M], key: bytes = b"", epoch: int = 0) -> None:
        """key: with which they are signed; empty: they are not."""
        self._kinds, self._key, self._epoch, self._counter = kinds, key, epoch, 0

    def message(self, message: M) -> Iterator[bytes]:
        """Its frames. Raises ProtocolError: it is too long, or has an integer that msgpack cannot carry."""
        try:
            body = _ENCODER.encode(message)
        except OverflowError as e:
            raise ProtocolError(f"{type(message).__name__}: an integer is over 64 bits") from e
        if len(body) > self._kinds.bytes_max:
            raise ProtocolError(f"a message of {len(body)} bytes is over {self._kinds.bytes_max}")
        kind = self._kinds.of[type(message)]
        room = FRAME_BYTES_MAX - (SIGNED_BYTES if self._key else HEAD_BYTES)
        for at in range(0, len(body), room):
            part = body[at:at + room]
            yield self._head(kind, at + room < len(body), len(part), part) + part

    def _head(self, kind: int, more: bool, length: int, covered: bytes) -> bytes:
        head = _HEAD.pack(kind, more, length)
        if not self._key:
            return head
        head += _ORDER.pack(self._epoch, self._counter)
        self._counter += 1
        return head + hmac.digest(self._key, head + covered, "sha256")


class _Frames(Generic[M]):
    """Checks heads, puts the parts of one message together, and decodes it."""

    _others: tuple[int, ...] = ()       # kinds of frames that are no messages

    def __init__(self, kinds: Kinds[M], head_bytes: int) -> None:
        self._kinds, self._head_bytes = kinds, head_bytes
        self._known = {*kinds.decoders, *self._others}
        self._parts, self._parts_kind = bytearray(), 0

    def _checked(self, head: memoryview | bytearray, at: int = 0) -> tuple[int, int, int]:
        """Kind, whether more follows, and bytes, before any of these are awaited."""
        kind, more, length = _HEAD.unpack_from(head, at)
        if kind not in self._known or more > bool(kind) or length > FRAME_BYTES_MAX - self._head_bytes:
            raise ProtocolError(f"a frame of kind {kind}, {length} bytes")
        if self._parts_kind not in (0, kind):
            raise ProtocolError(f"a frame of kind {kind} inside a message of kind {self._parts_kind}")
        return kind, more, length

    def _joined(self, kind: int, more: int, part: memoryview) -> memoryview | None:
        """The body of a message that this part is the last of."""
        if len(self._parts) + len(part) > self._kinds.bytes_max:
            raise ProtocolError(f"a message of over {self._kinds.bytes_max} bytes")
        if more:
            self._parts += part
            self._parts_kind = kind
            return None
        if self._parts_kind:
            part, self._parts, self._parts_kind = memoryview(self._parts + part), bytearray(), 0
        return part

    def _decode(self, kind: int, body: memoryview) -> M:
        try:
            message: M = self._kinds.decoders[kind].decode(body)
        # msgspec documents the first; the others were seen on mutated frames.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as e:
            raise ProtocolError(f"{type(e).__name__}: not a message of {self._kinds.protocol}") from e
        return message


class FrameBuffer(_Frames[M]):
    """Frames that are not signed, out of bytes as they arrive; holds one unfinished frame, and one message in parts."""

    def __init__(self, kinds: Kinds[M]) -> None:
        super().__init__(kinds, HEAD_BYTES)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Messages that `data` completes, in order. Raises ProtocolError, of a length over the limit before anything
        of that length is allocated or awaited."""
        self._buffer += data
        found, at = list[M](), 0
        with memoryview(self._buffer) as view:
            while len(view) - at >= HEAD_BYTES:
                kind, more, length = self._checked(view, at)
                end = at + HEAD_BYTES + length
                if len(view) < end:
                    break
                with view[at + HEAD_BYTES:end] as part:
                    if (body := self._joined(kind, more, part)) is not None:
                        found.append(self._decode(kind, body))
                at = end
        del self._buffer[:at]
        return found


class FrameReader(_Frames[M]):
    """Reads the frames of one direction of one connection; holds one frame, and one message in parts."""

    def __init__(self, read: Callable[[memoryview], int], kinds: Kinds[M], key: bytes = b"", epoch: int = 0) -> None:
        """read: fills what it is given, less only at the end of the stream; returns how much. key: with which frames
        are signed; empty: they are not."""
        super().__init__(kinds, SIGNED_BYTES if key else HEAD_BYTES)
        self._read, self._key = read, key
        self._epoch, self._counter = epoch, 0
        self._head = memoryview(bytearray(self._head_bytes))
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX))

    def begin(self, epoch: int) -> None:
        """Frames of `epoch` come next."""
        self._epoch, self._counter = epoch, 0

    def next(self) -> Any:
        """The next message; None at the end of the stream. Raises ProtocolError for anything that the other end's
        FrameWriter did not make next, and OSError as `read` does."""
        while True:
            n = self._read(self._head)
            if n == 0:
                return None
            if n < self._head_bytes:
                raise ProtocolError("the stream ended inside a frame")
            if self._key:
                self._check_order()
            kind, more, length = self._checked(self._head)
            self._counter += 1
            if kind not in self._kinds.decoders:
                return self._other(length)
            part = self._fill(0, length)
            self._authenticate(part)
            if (body := self._joined(kind, more, part)) is not None:
                return self._decode(kind, body)

    def _other(self, length: int) -> object:
        """Read a frame of `_others`, which this has none of."""
        raise ProtocolError(f"a frame of {length} bytes that is no message")

    def _check_order(self) -> None:
        epoch, counter = _ORDER.unpack_from(self._head, HEAD_BYTES)
        if (epoch, counter) != (self._epoch, self._counter):
            raise ProtocolError(f"frame {counter} of epoch {epoch} where frame {self._counter} of epoch "
                                f"{self._epoch} comes next")

    def _fill(self, start: int, end: int) -> memoryview:
        view = self._buffer[start:end]
        if self._read(view) < len(view):
            raise ProtocolError("the stream ended inside a frame")
        return view

    def _authenticate(self, covered: memoryview) -> None:
        if not self._key:
            return
        mac = hmac.digest(self._key, bytes(self._head[:-_MAC_BYTES]) + covered, "sha256")
        if not hmac.compare_digest(mac, self._head[-_MAC_BYTES:]):
            raise ProtocolError("a frame that was not made with this connection's key, or not so")
