"""Whether ranks live and get on: each says once a second what it waits for, the executor makes of it who hangs.

A step may take minutes, and a first one compiles: that is no hang, as long as somebody computes. One is when
a rank says nothing at all (its process is stopped), when all wait, for each other or for the executor, and none
for anything new, or when a device does not end a step and nobody else computes. Knows no processes and no
sockets.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.config.streams.heartbeat import Heartbeat

BEAT_S = 1.0                # between two beats of a rank, and between two looks at them
EXECUTOR, TP_RANKS, STAGE = "executor", "TP ranks", "stage"   # whom a rank waits for; "" while it computes
DEVICE_MORE = 4             # a step on a device may take so many times what the longest so far has


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
class RankStatus:
    """Of one rank: how many messages, and as its last beat told it the number and kind of its wait, and the
    step that its device works on, counted from 1; 0: none."""

    messages: int = 0
    wait: tuple[int, str] = 0, ""
    step: int = 0


class Watch:
    """Counts looks, not seconds: a machine that slept as a whole has no rank that hangs."""

    def __init__(self, num_ranks: int, silence_s: float, device_s: float) -> None:
        """silence_s: how long nothing may be heard of a rank, or get on. device_s: how long a device may work
        on a step before `serves`."""
        self._beats = [Heartbeat(silence_s, BEAT_S) for _ in range(num_ranks)]
        self._looks, self._device_looks = (max(1, round(s / BEAT_S)) for s in (silence_s, device_s))
        self._steps = [0] * num_ranks
        self._same = [0] * num_ranks
        self._longest = 0
        self._serves = False
        self._waits: list[tuple[int, str]] = []
        self._stuck = 0

    def serves(self) -> None:
        """The longest step has run: none takes much longer."""
        self._serves = True

    def look(self, heard: Sequence[RankStatus]) -> tuple[list[int], str]:
        """Every BEAT_S: the ranks that hang, none as a rule, and why."""
        silent = [i for i, one in enumerate(heard) if self._beats[i].is_silent(one.messages)]
        waits = [one.wait for one in heard]
        stuck = waits == self._waits and all(whom for _, whom in waits)
        self._stuck = self._stuck + 1 if stuck else 0
        self._waits = waits
        if silent:
            return silent, f"nothing was heard of its process for {self._looks * BEAT_S:g} s"
        self._count_steps(heard)
        most = max(self._looks, DEVICE_MORE * self._longest) if self._serves else self._device_looks
        if on := [i for i, looks in enumerate(self._same) if looks >= most]:
            return on, f"its device has worked on one step for {most * BEAT_S:g} s"
        between = [i for i, (_, whom) in enumerate(waits) if whom != EXECUTOR]
        if between and self._stuck >= self._looks:
            return between, f"all wait for each other, and nobody has computed for {self._looks * BEAT_S:g} s"
        return [], ""

    def _count_steps(self, heard: Sequence[RankStatus]) -> None:
        """TP ranks wait on their devices for one that still compiles."""
        computes = any(not one.step and not one.wait[1] for one in heard)
        for i, one in enumerate(heard):
            if one.step and one.step == self._steps[i] and not computes:
                self._same[i] += 1
            else:
                self._longest = max(self._longest, self._same[i])
                self._same[i] = 0
            self._steps[i] = one.step
