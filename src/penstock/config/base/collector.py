"""Memory of a process that keeps what it has: Python's cycle collector, and what large bodies have taken."""
from __future__ import annotations

import asyncio
import ctypes
import gc

# Young objects as always. Larger young generations make fewer and longer pauses, 10 to 20 ms.
YOUNG, MIDDLE = 700, 10
LARGE_BYTES = 1 << 20       # a body: as objects it takes up to 100 times as much
TURNS = 16                  # or one young collection looks at what a thousand turns have made, 16 ms
TRIM_S = 1.0                # after it has come; most are refused or encoded by then

_waits: set[asyncio.TimerHandle] = set()


def spare(full: int) -> None:
    """Do not walk what there is now, which lives as long as the process; full: middle collections to each
    of all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, full)


class BetweenTurns:
    """Collects when a turn is over and the device has its step, in place of Python, which does so in the middle.
    As often as Python would, and at least each so many turns."""

    def __init__(self) -> None:
        gc.disable()
        self._turns = 0

    def collect(self, *, idle: bool) -> None:
        """After each turn. A full collection walks all cached pages: it waits until the process is idle."""
        self._turns += 1
        young, middle, old = gc.get_count()
        limits = gc.get_threshold()
        if young > limits[0] or self._turns >= TURNS:
            self._turns = 0
            gc.collect(2 if idle and old > limits[2] else int(middle > limits[1]))


def trim_later() -> None:
    """Give memory that is free back to the operating system, once for all large bodies of a second. The C
    library keeps it otherwise, 1 GiB after some bodies of 3 MB. On the running event loop."""
    if not _waits:
        def trim() -> None:
            _waits.clear()
            gc.collect(1)
            if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                give_back(0)

        _waits.add(asyncio.get_running_loop().call_later(TRIM_S, trim))
