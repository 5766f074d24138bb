"""When a ready copy runs. Production copies promptly; tests make copies late, reordered or torn.

Owns only that choice: which of the moves whose fence has passed run now, and in what order.
"""
from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from penstock.core.plan import Move


class Lateness(Protocol):
    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        """The moves to run now, in order. `ready` have their fence passed, in plan order; with
        `idle` nothing else is left to do, and at least one must be picked."""
        ...

    def tears(self, move: Move) -> bool:
        """Whether this copy stops half way and reports a failure."""
        ...


class Prompt:
    """Every copy runs right after the step that carries it, and none is torn."""

    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        return list(ready)

    def tears(self, move: Move) -> bool:
        return False


class Latest(Prompt):
    """Every copy waits until nothing else is left to do, then runs alone: it reads its source as
    late as its fences permit, and every step that may run before it does."""

    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        return list(ready[:1]) if idle else []


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
