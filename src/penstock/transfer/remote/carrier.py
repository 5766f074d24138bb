"""What a transport does for a pair whose decode instance READs: one buffer at each end, and copies between them.

The reader starts and ends every copy, and it ends in a buffer of its own that no page is in: so whatever a
transport does late, only our own thread writes into our pages (ADR 0034). Knows no piece and no message.
Between two processes of one machine the buffers are one memory (`shared`).
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

SLOTS = 8                               # pieces that are offered and not taken yet
SLOT_BYTES = 8 << 20                    # of a piece at most, pages that follow one another: each costs 100 to 300 us
BUFFER_BYTES = SLOTS * SLOT_BYTES


class CarrierFault(Exception):
    """A copy that did not come about; another one may."""


class Carrier(Protocol):
    """One end of one connection.

    here    what the other end must know to read `buffer`
    buffer  this end's, of BUFFER_BYTES
    shared  it is the other end's too, so nothing is copied and no byte can be another
    """

    here: bytes
    buffer: memoryview
    shared: bool

    def meet(self, there: bytes) -> None:
        """The other end's `here`, once and before any `read`. Raises CarrierFault."""
        ...

    def read(self, at: int, length: int, limit_s: float) -> memoryview:
        """Bytes `at` and on of the other end's buffer, in this one's. Raises CarrierFault, and TimeoutError
        after `limit_s`: then it is used no more, for the copy may still come about."""
        ...

    def close(self) -> None: ...


Open = Callable[[str], Carrier]         # takes the address of this machine that the other end knows


def buffer_of(size: int) -> tuple[memoryview, int]:
    """Memory of its own, and its address."""
    data = bytearray(size)
    return memoryview(data), ctypes.addressof(ctypes.c_char.from_buffer(data))
