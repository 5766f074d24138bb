"""Policies that hold copies back, reorder or tear them: whatever the core's fences permit."""
from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from penstock.core.plan import Move
from penstock.memory.lateness import Promptly
from penstock.memory.mover import Mover


class Latest:
    """Every copy waits until nothing else is left to do, then runs alone: it reads its source as
    late as its fences permit, and every step that may run before it does."""

    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        return list(ready[:1]) if idle else []

    def tears(self, move: Move) -> bool:
        return False


class Shuffled:
    """Seeded disorder: a copy runs after a random number of polls, in any order, and the share
    `torn` of them fails half way."""

    def __init__(self, seed: int, *, torn: float = 0.0) -> None:
        self._rng = random.Random(seed)
        self._torn = torn

    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        chosen = [m for m in ready if self._rng.random() < 0.3]
        self._rng.shuffle(chosen)
        if idle and not chosen:
            chosen = [self._rng.choice(ready)]
        return chosen

    def tears(self, move: Move) -> bool:
        return self._rng.random() < self._torn


class Torn(Promptly):
    """Copies run at once, and a share of them fails half way."""

    def __init__(self, rng: random.Random, torn: float) -> None:
        self._rng, self._torn = rng, torn

    def tears(self, move: Move) -> bool:
        return self._rng.random() < self._torn


def tear(mover: Mover, seed: int, *, torn: float) -> None:
    """From now on copies in the thread of `mover` begin up to 20 ms late, and the share `torn` fails half
    way, as does that of copies that a step waits for."""
    thread, policy, rng = mover._thread, Torn(random.Random(seed), torn), random.Random(seed)
    assert thread is not None
    begin = thread._begin

    def late(move: Move) -> Any:
        time.sleep(0.02 * rng.random())
        return begin(move, torn=policy.tears(move))

    mover._lateness, thread._begin = policy, late
