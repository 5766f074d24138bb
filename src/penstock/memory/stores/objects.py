"""What a stored page of KV is, wherever it is stored, and what every store must do.

An object is 64 bytes of header, then the bytes of the host page, under a name made of the page's key and
its cache group. Nothing read from a store is trusted: an object is intact if its header is that of `header_of`.
"""
from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import xxhash

FORMAT = "v1"
# Magic, version, cache group, bytes of the page, key, xxh3-128 of all that and the page, nothing.
HEADER = struct.Struct("<4sHHQ16s16s16x")
LARGEST = 1 << 30           # bytes of an object that is read for people
_MAGIC, _VERSION = b"PNKV", 1


class Verdict(Enum):
    """What a read has found."""

    GOOD = "good"
    GONE = "gone"          # there is no such object
    BAD = "bad"            # what is there is not what was stored


def header_of(key: bytes, group: int, page: memoryview) -> bytes:
    """The header of an object."""
    blank = HEADER.pack(_MAGIC, _VERSION, group, len(page), key, bytes(16))
    return HEADER.pack(_MAGIC, _VERSION, group, len(page), key, _sum(blank, page))


def is_sealed(header: bytes | bytearray | memoryview, key: bytes, group: int, page: memoryview) -> bool:
    """Whether `header` is that of this page under this key and group."""
    return len(header) == HEADER.size and bytes(header) == header_of(key, group, page)


def unpack(data: memoryview, key: bytes, group: int, page: memoryview) -> Verdict:
    """A whole object into a page: copied only if it is what was stored."""
    if len(data) != HEADER.size + len(page) or not is_sealed(data[:HEADER.size], key, group,
                                                            data[HEADER.size:]):
        return Verdict.BAD
    page[:] = data[HEADER.size:]
    return Verdict.GOOD


def _sum(blank: bytes, page: memoryview) -> bytes:
    digest = xxhash.xxh3_128(blank)
    digest.update(page)
    return digest.digest()


class Store(ABC):
    """The objects of one kind of engine. Any thread may call anything. What is wrong with the world is an
    OSError, in bounded time where the world lets it be, but that an object is not there, or not what it
    should be. Iterators give what is known so far; the caller may stop early."""

    readonly: bool
    readers: int            # threads that read, and that write
    writers: int
    part: int               # pages that a thread asks for at once

    def check(self) -> str | None:
        """Ask it once whether it is there. Returns what people should know. Raises OSError."""
        next(iter(self.present([bytes(16)])))
        return None

    @abstractmethod
    def present(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Return, for each key, bits: g is set if there is a page of cache group g, for all that is known."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[Verdict]:
        """Read objects into `pages`, whose bytes are anything unless the verdict is GOOD."""

    @abstractmethod
    def put(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[int]:
        """Store pages, unless they are there. Yields the bytes that were written of each."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes], group: int) -> None:
        """Remove objects, those that are there."""

    @abstractmethod
    def used(self, keys: Sequence[bytes]) -> None:
        """Pages of all cache groups under these keys count as used now, those that are there, if what goes
        first is what was used longest ago. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it has open."""


class Bounded(Store):
    """A store whose quota is kept by engines."""

    @abstractmethod
    def sweep(self, quota: int | None, room: int) -> tuple[int, int]:
        """Make `room` if `quota` bytes have none. Returns bytes left, and removed. Raises OSError."""

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """What else could be stored. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object as a listing finds it, of any engine."""

    name: str                # what the store calls it
    kind: str                # the fingerprint of the engines that it is of
    bytes: int
    used: float              # seconds since 1970, as far as the store tells
    temporary: bool = False    # what somebody writes, or has left behind


class Inventory(ABC):
    """All that is stored at a place, of all engines, for people. Everything raises OSError."""

    @abstractmethod
    def objects(self) -> Iterator[Object]:
        """What there is of this format, and left-overs."""

    @abstractmethod
    def examine(self, o: Object) -> Verdict:
        """Read an object that was listed: whether it is what its name says."""

    @abstractmethod
    def remove(self, objects: Sequence[Object]) -> None:
        """Those that are still there."""

    def purge(self) -> None:
        """Remove all."""
        self.remove(list(self.objects()))

    def sweep(self, quota: int | None, room: int = 0) -> tuple[int, int]:
        """Remove what was used longest ago until `quota` bytes have `room`. Returns bytes that are left,
        and removed."""
        found = sorted(self.objects(), key=lambda o: o.used)
        before = left = sum(o.bytes for o in found)
        doomed = []
        for o in found if quota is not None else ():
            if left + room <= (quota or 0):
                break
            doomed.append(o)
            left -= o.bytes
        self.remove(doomed)
        return left, before - left


def examined(digits: str, group: str, data: memoryview) -> Verdict:
    """Whether a whole object is what a name with this key and group says."""
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return Verdict.BAD
    good = (len(key) == 16 and group.isascii() and group.isdecimal() and len(group) < 3
            and len(data) >= HEADER.size
            and is_sealed(data[:HEADER.size], key, int(group), data[HEADER.size:]))
    return Verdict.GOOD if good else Verdict.BAD
