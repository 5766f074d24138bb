"""When a ready copy runs. Production copies promptly; tests plug in a policy of their own here.

Owns only that choice: which of the moves whose fence has passed run now, and in what order.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core.plan import Move


class Lateness(Protocol):
    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        """The moves to run now, in order. `ready` have their fence passed, in plan order; with
        `idle` nothing else is left to do, and at least one must be picked."""

    def tears(self, move: Move) -> bool:
        """Whether this copy stops half way and reports a failure."""


class Promptly:
    """Every copy runs right after the step that carries it, and none is torn."""

    def pick(self, ready: Sequence[Move], *, idle: bool) -> list[Move]:
        return list(ready)

    def tears(self, move: Move) -> bool:
        return False
