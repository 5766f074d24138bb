"""Policies that hold copies back, reorder or tear them: whatever the core's fences permit."""
from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.core.plan import Move


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
