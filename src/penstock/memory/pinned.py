"""Host memory that a CUDA device reads and copies at the speed of the link: registered region by region in a
thread, so that the first pages can be used at once, and all of it after 0.6 s a GiB.
"""
from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None)
REGION_BYTES = 512 << 20
STOP_S = 10.0
PART_BYTES = 32 << 20           # made resident by one call, which keeps others from mapping memory meanwhile
MADV_POPULATE_WRITE = 23        # of Linux 5.14
_may = threading.Event()        # whether regions may be registered beside what the process does
_may.set()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Only the first region of a memory is registered meanwhile: capturing steps takes nine times as long
    beside a registration, as both need the driver."""
    _may.clear()
    try:
        yield
    finally:
        _may.set()


class NotPinned(RuntimeError):
    """Host memory cannot be registered with CUDA."""


@dataclass(slots=True)
class _Progress:
    """The thread's state, and all that it holds: a pool can go while it works."""

    address: int
    nbytes: int
    region: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    done: int = 0               # bytes registered, from the start
    stop: bool = False
    error: str = ""


class Pinned:
    """`memory`: uint8 [nbytes], what is given or, made here, zero; pages resident as they are registered. No
    copy may cross the border of two regions, which lie between pages of `stride` bytes."""

    def __init__(self, nbytes: int, stride: int, region_bytes: int = REGION_BYTES,
                 memory: Tensor | None = None) -> None:
        whole = math.lcm(stride, mmap.PAGESIZE)
        region = max(1, region_bytes // whole) * whole
        if memory is None:
            mapped = mmap.mmap(-1, nbytes)
            with contextlib.suppress(OSError):      # a kernel without them
                mapped.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.memory = memory
        self._progress = _Progress(self.memory.data_ptr(), nbytes, region)
        thread = threading.Thread(target=_register, args=(self._progress,), daemon=True, name="penstock-pin")
        thread.start()
        weakref.finalize(self, _release, self._progress, thread)

    def border(self, at: int) -> int:
        """Where the region ends that has the byte `at`."""
        return (at // self._progress.region + 1) * self._progress.region

    def wait(self, end: int) -> None:
        """Until the bytes before `end` are registered. Raises NotPinned where they cannot be."""
        p = self._progress
        if p.done >= end:
            return
        with p.changed:
            p.changed.wait_for(lambda: p.done >= end or bool(p.error))
        if p.done < end:
            raise NotPinned(f"host memory cannot be registered with CUDA after {p.done} bytes: {p.error}")


def _register(p: _Progress) -> None:
    while p.done < p.nbytes and not p.stop:
        size, error = min(p.region, p.nbytes - p.done), ""
        _populate(p, size)
        while p.done and not p.stop and not _may.wait(0.1):
            pass
        if p.stop:
            return
        try:
            torch.cuda.check_error(_runtime().cudaHostRegister(p.address + p.done, size, 0))
        except RuntimeError as e:
            error = str(e).splitlines()[0]
        with p.changed:
            p.error = error
            p.done += 0 if error else size
            p.changed.notify_all()
        if error:
            return


def _populate(p: _Progress, size: int) -> None:
    """Make the next region resident, so that registering it takes a fraction of the time in the driver. A
    kernel that cannot leaves it to the registration."""
    start, end = p.address + p.done, p.address + p.done + size
    for first in range(start, end, PART_BYTES):
        if p.stop or _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(min(PART_BYTES, end - first)),
                                   MADV_POPULATE_WRITE):
            return


def _release(p: _Progress, thread: threading.Thread) -> None:
    p.stop = True
    thread.join(STOP_S)
    for first in range(0, p.done, p.region):
        _runtime().cudaHostUnregister(p.address + first)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
