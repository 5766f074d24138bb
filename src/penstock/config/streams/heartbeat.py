"""How the ends of a stream know that the other one lives, the same on every stream that has a far end."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from penstock.config.streams.frames import Message

BEATS = 4                       # in the time after which silence is an end


class Beat(Message, frozen=True):
    """The sender lives."""


class Heartbeat:
    """One end: how often it says that it lives, at least, and after which silence the other is gone."""

    def __init__(self, silence_s: float, interval_s: float | None = None) -> None:
        self.silence_s = silence_s
        self.interval_s = silence_s / BEATS if interval_s is None else interval_s
        self._ended = threading.Event()
        self._heard, self._looks = -1, 0

    def begin(self, say: Callable[[], None]) -> None:
        """`say` now and each interval, in a thread of its own, until `end` or a ConnectionError."""
        def run() -> None:
            with contextlib.suppress(ConnectionError):
                say()
                while not self._ended.wait(self.interval_s):
                    say()
        threading.Thread(target=run, daemon=True, name="penstock-beat").start()

    def end(self) -> None:
        """Idempotent."""
        self._ended.set()

    def is_silent(self, heard: int) -> bool:
        """To be asked each interval, where no socket tells. heard: messages of the other end so far. Looks are
        counted, not seconds: no end is silent because its machine has slept as a whole."""
        self._looks = self._looks + 1 if heard == self._heard else 0
        self._heard = heard
        return self._looks >= max(1, round(self.silence_s / self.interval_s))
