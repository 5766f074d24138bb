"""Ownership of every finite resource. Nothing returns to a free list except through a fence.

A unit is free, held, or in limbo: released, but a step or a copy that knows it may still touch it.
Who holds a unit, and how many share it, is the tree's and the request's knowledge, not the pool's.
"""
from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from penstock.core.plan import MoveId, StepId


@dataclass(frozen=True, slots=True)
class Fence:
    """Units behind it may still be touched by steps up to `step` and by `moves`."""

    step: StepId
    moves: frozenset[MoveId] = frozenset()


@dataclass(slots=True, eq=False)
class Pool:
    """`capacity` interchangeable units with ids from `base` on.

    Hands out the lowest ids first, and the neighbour of `near` where it can: pages that lie side by
    side are read without a gather.
    """

    name: str
    capacity: int
    base: int = 0
    held: set[int] = field(init=False, default_factory=set)
    limbo: deque[tuple[Fence, tuple[int, ...]]] = field(init=False, default_factory=deque)
    in_limbo: int = field(init=False, default=0)
    _free: set[int] = field(init=False)
    _order: list[int] = field(init=False)      # heap over _free; may name units taken meanwhile

    def __post_init__(self) -> None:
        self._order = list(range(self.base, self.base + self.capacity))
        self._free = set(self._order)

    @property
    def free(self) -> int:
        """Units that can be taken now."""
        return len(self._free)

    def acquire(self, n: int, near: int | None = None) -> list[int]:
        """Take n units. Asking for more than `free` is a bug of the caller."""
        assert 0 <= n <= len(self._free), f"{self.name}: {n} of {len(self._free)} free"
        taken: list[int] = []
        while len(taken) < n:
            unit = near + 1 if near is not None else -1
            if unit not in self._free:
                unit = heapq.heappop(self._order)
                if unit not in self._free:
                    continue
            self._free.remove(unit)
            taken.append(unit)
            near = unit
        self.held.update(taken)
        return taken

    def release(self, units: Sequence[int], fence: Fence) -> None:
        """Give units up; they become free once `drain` sees the fence pass."""
        if not units:
            return
        for unit in units:
            assert unit in self.held, f"{self.name}: {unit} released twice"
            self.held.remove(unit)
        self.limbo.append((fence, tuple(units)))
        self.in_limbo += len(units)

    def drain(self, retired: StepId, flying: Collection[MoveId]) -> int:
        """Free what no issued step and no flying move can touch any more. Returns how many."""
        if not self.limbo:
            return 0
        freed = 0
        keep: deque[tuple[Fence, tuple[int, ...]]] = deque()
        for fence, units in self.limbo:
            if fence.step <= retired and not any(m in flying for m in fence.moves):
                freed += len(units)
                self._free.update(units)
                for unit in units:
                    heapq.heappush(self._order, unit)
            else:
                keep.append((fence, units))
        self.limbo = keep
        self.in_limbo -= freed
        return freed

    def check(self) -> None:
        """Conservation: free + held + limbo = capacity, disjoint (RELIABILITY I1)."""
        limbo = [u for _, units in self.limbo for u in units]
        every = [*self._free, *self.held, *limbo]
        assert self.in_limbo == len(limbo)
        assert len(every) == self.capacity, f"{self.name}: {len(every)} != {self.capacity}"
        assert len(set(every)) == self.capacity, f"{self.name}: a unit has two owners"
        assert self._free <= set(self._order), f"{self.name}: a free unit cannot be found"
