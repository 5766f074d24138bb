"""A descriptor that threads make readable, for a loop that waits on several things in one place."""
from __future__ import annotations

import contextlib
import os
import weakref


class Waker:
    """`wake` from any thread; `fileno` is readable until `clear`. What there is to do is looked for behind
    `clear`, so that nothing that comes meanwhile is missed."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
