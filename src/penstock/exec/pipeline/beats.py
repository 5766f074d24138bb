"""Whether ranks live and get on: each says once a second what it waits for, the front makes of it who hangs.

A step may take minutes, and a first one compiles: that is no hang, as long as somebody computes. One is when
a rank says nothing at all (its process is stopped), or when all wait, for each other or for the front, and
none for anything new. Knows no processes and no sockets.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

BEAT_S = 1.0                # between two beats of a rank, and between two looks at them
FRONT, LANES, STAGE = "front", "lanes", "stage"         # whom a rank waits for; "" while it computes


class Waits:
    """What the thread that runs steps waits for, and how many waits there were. Any thread reads `now`."""

    def __init__(self) -> None:
        self.now = 0, ""                        # replaced whole

    @contextmanager
    def on(self, whom: str) -> Iterator[None]:
        number = self.now[0] + 1
        self.now = number, whom
        try:
            yield
        finally:
            self.now = number, ""


@dataclass(slots=True)
class Heard:
    """Of one rank: how many messages, and the number and kind of its wait as its last beat told it."""

    messages: int = 0
    wait: tuple[int, str] = 0, ""


class Watch:
    """Counts looks, not seconds: a machine that slept as a whole has no rank that hangs."""

    def __init__(self, num_ranks: int, silence_s: float) -> None:
        """silence_s: how long nothing may be heard of a rank, or get on."""
        self._looks = max(1, round(silence_s / BEAT_S))
        self._messages = [-1] * num_ranks
        self._silent = [0] * num_ranks
        self._waits: list[tuple[int, str]] = []
        self._stuck = 0

    def look(self, heard: Sequence[Heard]) -> tuple[list[int], str]:
        """Every BEAT_S: the ranks that hang, none as a rule, and why."""
        for i, one in enumerate(heard):
            self._silent[i] = self._silent[i] + 1 if one.messages == self._messages[i] else 0
            self._messages[i] = one.messages
        waits = [one.wait for one in heard]
        stuck = waits == self._waits and all(whom for _, whom in waits)
        self._stuck = self._stuck + 1 if stuck else 0
        self._waits = waits
        if silent := [i for i, looks in enumerate(self._silent) if looks >= self._looks]:
            return silent, f"nothing was heard of its process for {self._looks * BEAT_S:g} s"
        between = [i for i, (_, whom) in enumerate(waits) if whom != FRONT]
        if between and self._stuck >= self._looks:
            return between, f"all wait for each other, and nobody has computed for {self._looks * BEAT_S:g} s"
        return [], ""
