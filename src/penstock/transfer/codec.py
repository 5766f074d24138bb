"""Frames of a pair's stream: messages, and pages, each from who has the key, bounded and in order.

They are those of `config.streams.frames`, signed. A page frame is of kind 0: its HMAC covers the page head, which has
the checksum of the payload: that finds damage, and an attacker on the way only where TLS is (ADR 0034).
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import NamedTuple, get_args

import xxhash

from penstock.config.streams.frames import (
    FRAME_BYTES_MAX,
    SIGNED_BYTES,
    FrameReader,
    FrameWriter,
    Kinds,
    ProtocolError,
)
from penstock.transfer.layout import PageSlice
from penstock.transfer.messages import Said

VERSION = 13
MESSAGE_BYTES_MAX = 16 << 20
TOKENS_MAX = 64                         # that an End may carry
_PAGE = struct.Struct("<QQHHHHQIHxxQ")   # transfer; generation; group; piece; checksum
PAGE_HEAD_BYTES = _PAGE.size
PAYLOAD_MAX = FRAME_BYTES_MAX - SIGNED_BYTES - PAGE_HEAD_BYTES


PAIR: Kinds[Said] = Kinds(f"pair protocol version {VERSION}", get_args(Said), MESSAGE_BYTES_MAX)


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


class PairWriter(FrameWriter[Said]):
    def __init__(self, key: bytes, epoch: int) -> None:
        super().__init__(PAIR, key, epoch)

    def page(self, head: PageHead, payload_bytes: int) -> bytes:
        """What goes before the payload, whose checksum is in `head`."""
        p = head.piece
        page = _PAGE.pack(head.transfer, head.generation, head.group, p.layer, p.layers, p.head, p.unit, p.units,
                          p.heads, head.checksum)
        return self._head(0, False, len(page) + payload_bytes, page) + page


class PairReader(FrameReader[Said]):
    _others = (0,)

    def __init__(self, read: Callable[[memoryview], int], key: bytes, epoch: int) -> None:
        super().__init__(read, PAIR, key, epoch)

    def _decode(self, kind: int, body: memoryview) -> Said:
        """Checks the numbers of the core's messages too, whose types have no bounds."""
        message = super()._decode(kind, body)
        for f in fields(message) if is_dataclass(message) else ():
            value = getattr(message, f.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if len(numbers) > TOKENS_MAX or not all(0 <= n < 1 << 63 for n in numbers):
                raise ProtocolError(f"{type(message).__name__}.{f.name} is out of bounds")
        return message

    def _other(self, length: int) -> PageFrame:
        if length <= PAGE_HEAD_BYTES:
            raise ProtocolError(f"a page frame of {length} bytes")
        page = self._fill(0, PAGE_HEAD_BYTES)
        self._authenticate(page)
        transfer, generation, group, layer, layers, head, unit, units, heads, digest = _PAGE.unpack(page)
        payload = self._fill(PAGE_HEAD_BYTES, length)
        piece = PageSlice(layer, layers, unit, units, head, heads)
        return PageFrame(PageHead(transfer, generation, group, piece, digest), payload)
