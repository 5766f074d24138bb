"""Frames of a pair's stream: each from who has the key, bounded and in order, whatever bytes arrive.

A frame is a head, its HMAC-SHA256, and a body of at most 1 MiB together. The HMAC is under a key of the
connection and of the direction; it covers the head, which has the epoch and a counter, and the whole
body of a message, or, of a page frame, the page head, which has the checksum of the payload: that finds
damage, and an attacker on the way only where TLS is (ADR 0034). Raises ProtocolError only. No pickle in
any form.
"""
from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import msgspec
import xxhash

from penstock.config.base.decoding import ProtocolError, decode, encode
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Refused
from penstock.transfer.layout import PageSlice
from penstock.transfer.messages import (
    Ask,
    Beat,
    First,
    Greeting,
    Memory,
    Offer,
    Prompted,
    Said,
    SessionNews,
    Taken,
)

VERSION = 13
FRAME_BYTES_MAX = 1 << 20
MESSAGE_BYTES_MAX = 16 << 20
TOKENS_MAX = 64                         # that an End may carry
_HEAD = struct.Struct("<BBxxIQQ")       # kind; more of it follows; bytes of the body; epoch; counter
_MAC_BYTES = 32
HEAD_BYTES = _HEAD.size + _MAC_BYTES
_PAGE = struct.Struct("<QQHHHHQIHxxQ")   # transfer; generation; group; piece; checksum
PAGE_HEAD_BYTES = _PAGE.size
PAYLOAD_MAX = FRAME_BYTES_MAX - HEAD_BYTES - PAGE_HEAD_BYTES


class Kinds:
    """The messages of one protocol: a message's kind is its place; 0 is a page frame."""

    def __init__(self, protocol: str, types: Sequence[type[Any]]) -> None:
        self.protocol = protocol
        self.of = {cls: i for i, cls in enumerate(types, 1)}
        self.decoders = (None, *(msgspec.msgpack.Decoder(cls) for cls in types))


KINDS: tuple[type[Said], ...] = (Grant, Cancel, End, Refused, Drained,
                                 Greeting, Beat, Ask, First, Prompted, SessionNews, Memory, Offer, Taken)
PAIR = Kinds(f"pair protocol version {VERSION}", KINDS)


class PageHead(NamedTuple):
    """What a page frame brings: `piece` of a cache group, under (transfer, generation)."""

    transfer: int
    generation: int
    group: int
    piece: PageSlice
    checksum: int                       # xxh3-64 of the payload


class PageFrame(NamedTuple):
    """`payload` is the reader's buffer, and not checked yet."""

    head: PageHead
    payload: memoryview


def checksum(payload: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def connection_keys(key: bytes, version: int, nonces: tuple[bytes, bytes],
                    binding: bytes) -> tuple[bytes, bytes]:
    """Keys of what the dialling end sends and of what the listening end sends. Both have drawn a nonce,
    so no frame of another connection is right under them; nor is one of another TLS certificate, whose
    digest `binding` is."""
    connection = hmac.digest(key, b"penstock pair %d" % version + b"".join(nonces) + binding, "sha256")
    return hmac.digest(connection, b"dialling", "sha256"), hmac.digest(connection, b"listening", "sha256")


class Sealer:
    """Makes the frames of one direction of one connection, to be sent in the order in which they are made."""

    def __init__(self, key: bytes, epoch: int, kinds: Kinds = PAIR) -> None:
        self._key, self._epoch, self._counter, self._kinds = key, epoch, 0, kinds

    def message(self, message: Any) -> Iterator[bytes]:
        """Its frames. Raises ProtocolError if it is too long or has an integer that msgpack cannot carry."""
        body = encode(message, MESSAGE_BYTES_MAX)
        kind, room = self._kinds.of[type(message)], FRAME_BYTES_MAX - HEAD_BYTES
        for at in range(0, len(body), room):
            part = body[at:at + room]
            yield self._seal(kind, at + room < len(body), len(part), part) + part

    def page(self, head: PageHead, payload_bytes: int) -> bytes:
        """What goes before the payload, whose checksum is in `head`."""
        p = head.piece
        page = _PAGE.pack(head.transfer, head.generation, head.group, p.layer, p.layers, p.head, p.unit, p.units,
                          p.heads, head.checksum)
        return self._seal(0, False, len(page) + payload_bytes, page) + page

    def _seal(self, kind: int, more: bool, length: int, covered: bytes) -> bytes:
        head = _HEAD.pack(kind, more, length, self._epoch, self._counter)
        self._counter += 1
        return head + hmac.digest(self._key, head + covered, "sha256")


class SealedFrameReader:
    """Reads the frames of one direction of one connection; holds one frame, and one message in parts."""

    def __init__(self, read: Callable[[memoryview], int], key: bytes, epoch: int,
                 kinds: Kinds = PAIR) -> None:
        """read: fills what it is given, less only at the end of the stream; returns how much."""
        self._read, self._key, self._kinds = read, key, kinds
        self._epoch, self._counter = epoch, 0
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX))
        self._parts, self._parts_kind = bytearray(), 0

    def begin(self, epoch: int) -> None:
        """Frames of `epoch` come next."""
        self._epoch, self._counter = epoch, 0

    def next(self) -> Any:
        """The next message or page; None at the end of the stream. Raises ProtocolError for anything
        that the other end's Sealer did not make next, and OSError as `read` does."""
        while True:
            n = self._read(self._head)
            if n == 0:
                return None
            if n < HEAD_BYTES:
                raise ProtocolError("the stream ended inside a frame")
            kind, more, length = self._check_head()
            if kind == 0:
                return self._page(length)
            if (message := self._part(kind, more, length)) is not None:
                return message

    def _check_head(self) -> tuple[int, int, int]:
        kind, more, length, epoch, counter = _HEAD.unpack_from(self._head)
        if (epoch, counter) != (self._epoch, self._counter):
            raise ProtocolError(f"frame {counter} of epoch {epoch} where frame {self._counter} of epoch "
                                f"{self._epoch} comes next")
        if kind >= len(self._kinds.decoders) or more > bool(kind) or length > FRAME_BYTES_MAX - HEAD_BYTES:
            raise ProtocolError(f"a frame of kind {kind}, {length} bytes")
        if self._parts_kind not in (0, kind):
            raise ProtocolError(f"a frame of kind {kind} inside a message of kind {self._parts_kind}")
        self._counter += 1
        return kind, more, length

    def _page(self, length: int) -> PageFrame:
        if length <= PAGE_HEAD_BYTES:
            raise ProtocolError(f"a page frame of {length} bytes")
        page = self._fill(0, PAGE_HEAD_BYTES)
        self._authenticate(page)
        transfer, generation, group, layer, layers, head, unit, units, heads, digest = _PAGE.unpack(page)
        payload = self._fill(PAGE_HEAD_BYTES, length)
        piece = PageSlice(layer, layers, unit, units, head, heads)
        return PageFrame(PageHead(transfer, generation, group, piece, digest), payload)

    def _part(self, kind: int, more: int, length: int) -> Any:
        body = self._fill(0, length)
        self._authenticate(body)
        if len(self._parts) + length > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"a message of over {MESSAGE_BYTES_MAX} bytes")
        if more:
            self._parts += body
            self._parts_kind = kind
            return None
        if self._parts_kind:
            body, self._parts, self._parts_kind = memoryview(self._parts + body), bytearray(), 0
        decoder = self._kinds.decoders[kind]
        assert decoder is not None
        message = decode(decoder, body, self._kinds.protocol)
        _check_bounds(message)
        return message

    def _fill(self, start: int, end: int) -> memoryview:
        view = self._buffer[start:end]
        if self._read(view) < len(view):
            raise ProtocolError("the stream ended inside a frame")
        return view

    def _authenticate(self, covered: memoryview) -> None:
        mac = hmac.digest(self._key, bytes(self._head[:_HEAD.size]) + covered, "sha256")
        if not hmac.compare_digest(mac, self._head[_HEAD.size:]):
            raise ProtocolError("a frame that was not made with this connection's key, or not so")


def _check_bounds(message: Any) -> None:
    """Check the numbers of the core's messages, whose types have no bounds."""
    if not is_dataclass(message):
        return
    for f in fields(message):
        value = getattr(message, f.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if len(numbers) > TOKENS_MAX or not all(0 <= n < 1 << 63 for n in numbers):
            raise ProtocolError(f"{type(message).__name__}.{f.name} is out of bounds")
