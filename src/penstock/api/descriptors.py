"""Open files of this process: as many as it may have, and connections for which there are none left.

An idle connection makes way for a new one, the one that has been idle the longest first.

Owns the limit of the operating system and the count. What a refused client is answered is `limits`'.
"""
from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from penstock.api import logs
from penstock.config.base.errors import ConfigError

NEEDED = 64             # the engine's socket, helpers, libraries, and some connections
MOST = 1 << 20          # of a hard limit that is none
OPEN = Path("/proc/self/fd")
SPARE = 24              # kept from connections: new processes, files, sockets that are being refused
LOG_S = 10.0            # between two lines about refused connections


def raise_limit() -> int:
    """The soft limit becomes the hard one; how many files this process and its children may open. Raises
    ConfigError if a server does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < NEEDED:
        raise ConfigError(f"{soft} files may be open at once (ulimit -n): a server needs {NEEDED}, and one "
                          "more for each connection: raise the limit")
    return most if soft == resource.RLIM_INFINITY else soft


class Connections:
    """Those that are open. Of one thread."""

    def __init__(self, limit: int, refused: Callable[[], object]) -> None:
        """limit: of open files. refused: called for each connection that finds none."""
        own = len(os.listdir(OPEN)) if OPEN.exists() else 0
        self.most = max(1, limit - own - SPARE)
        self.open = 0
        self._idle: dict[int, Callable[[], object]] = {}       # what closes each, the longest idle first
        self._refused, self._told_at, self._untold = refused, -LOG_S, 0

    def admit(self) -> bool:
        """Whether a new one may stay; it then counts until `left`. At the limit an idle one is closed."""
        if self.open >= self.most and self._idle:
            self._idle.pop(next(iter(self._idle)))()
            self.open += 1                   # until the closed one has left
            return True
        if self.open < self.most:
            self.open += 1
            return True
        self._refused()
        self._untold += 1
        if (now := time.monotonic()) - self._told_at >= LOG_S:
            logs.error(f"connections: {self._untold} refused, {self.open} are open, as many as the limit of "
                       "open files leaves: raise it with ulimit -n")
            self._told_at, self._untold = now, 0
        return False

    def idle(self, id: int, close: Callable[[], object]) -> None:
        """This one waits for its client's next request. close: called if it is to make way."""
        self._idle[id] = close

    def busy(self, id: int) -> None:
        """This one is no longer idle, if it was."""
        self._idle.pop(id, None)

    def left(self) -> None:
        self.open -= 1
