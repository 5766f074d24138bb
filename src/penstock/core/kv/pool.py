"""Ownership of every finite resource. Nothing returns to a free list except through a fence.

A unit is free, held, or in limbo: released, but a step or a copy that knows it may still touch it.
Who holds a unit, and how many share it, is the tree's and the request's knowledge, not the pool's; it is told
which of them are loose: held, and to be had by whoever needs them more.
Pools that share one memory take slabs of it and give them back when they are empty.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.plan import MoveId, StepId


class Fence(NamedTuple):
    """Units behind it may still be touched by steps up to `step` and by `moves`. With `away` that is
    for another engine to say: such units are not promised to anybody."""

    step: StepId
    moves: frozenset[MoveId] = frozenset()
    away: bool = False


NONE, FREE, HELD, LIMBO = range(4)     # what a unit is; NONE: its slab is the arena's
BLOCK = 4_096                          # units whose free ones are counted together


@dataclass(slots=True, eq=False)
class Pool:
    """`capacity` interchangeable units with ids from `base` on: slab s has `per_slab` of them.

    Hands out the lowest ids first, and the neighbour of `near` where it can: pages that lie side by
    side are read without a gather, and slabs run empty. A unit is a byte: a set or a heap of a million of
    them takes 10 to 30 ms in the turn in which it is built again.
    """

    name: str
    capacity: int                                # units now; an arena changes it
    base: int = 0
    per_slab: int = 1
    arena: Arena | None = None                   # None: its units are its own for ever
    free: int = field(init=False, default=0)     # units that can be taken without another slab
    num_held: int = field(init=False, default=0)
    limbo: deque[tuple[Fence, list[int]]] = field(init=False, default_factory=deque)
    in_limbo: int = field(init=False, default=0)
    away: int = field(init=False, default=0)     # of these, those that another engine may write
    held_in: dict[int, int] = field(init=False, default_factory=dict)      # slab -> units held, or away
    limbo_in: dict[int, int] = field(init=False, default_factory=dict)     # slab -> units in limbo
    spare_slabs: int = field(init=False, default=0)      # slabs with limbo alone: soon they go back
    num_evictable: int = field(init=False, default=0)    # units held that can be had: cached, or on loan
    fixed_in: dict[int, int] = field(init=False, default_factory=dict)     # as `held_in`, less what is loose
    evictable_slabs: int = field(init=False, default=0)  # slabs with nothing fixed
    changes: int = field(init=False, default=0)          # times that units changed hands,
    checked: int = field(init=False, default=-1)         # of which `check` found all in order
    _state: bytearray = field(init=False)        # of each unit that it can ever have, and one NONE at the end
    _free_in: list[int] = field(init=False)      # by block: units that are free,
    _has_free: bytearray = field(init=False)     # and whether there are any

    def __post_init__(self) -> None:
        self.reach(self.capacity)
        self._set_free(0, self.capacity)

    def reach(self, units: int) -> None:
        """It has none yet, and may come to have so many."""
        blocks = units // BLOCK + 1
        self._state, self._free_in, self._has_free = bytearray(units + 1), [0] * blocks, bytearray(blocks)

    @property
    def held(self) -> set[int]:
        """Units that somebody has; a new set: see `num_held`."""
        return set(self.units(HELD))

    def units(self, state: int) -> list[int]:
        """Those that are FREE, HELD or in LIMBO, lowest first."""
        return [unit for unit, is_now in enumerate(self._state, self.base) if is_now == state]

    def _set_free(self, begin: int, end: int) -> None:
        self._state[begin:end] = bytes((FREE,)) * (end - begin)
        self.free += end - begin
        while begin < end:
            block = begin // BLOCK
            n = min(end, (block + 1) * BLOCK) - begin
            self._free_in[block] += n
            self._has_free[block] = True
            begin += n

    def acquire(self, n: int, near: int | None = None) -> list[int]:
        """Take n units. Asking for more than there are is a bug of the caller."""
        arena, state, free_in = self.arena, self._state, self._free_in
        self.changes += 1
        while self.free < n and arena is not None and arena.free:
            if n == self.per_slab == 1:
                return [self._whole(arena.free.pop())]
            self._gain(arena.free.pop())
        assert 0 <= n <= self.free, f"{self.name}: {n} of {self.free} free"
        held_in, fixed_in, base = self.held_in, self.fixed_in, self.base
        taken: list[int] = []
        at = -1 if near is None else near - base
        last = len(state) - 1
        for _ in range(n):
            at += 1
            if not 0 <= at < last or state[at] != FREE:
                at = state.find(FREE, self._has_free.find(1) * BLOCK)
            state[at] = HELD
            block = at // BLOCK
            free_in[block] -= 1
            if not free_in[block]:
                self._has_free[block] = False
            taken.append(base + at)
            if arena is not None:
                slab = at // self.per_slab
                if not fixed_in[slab]:
                    self.evictable_slabs -= 1
                    self.spare_slabs -= not held_in[slab]
                held_in[slab] += 1
                fixed_in[slab] += 1
        self.free -= n
        self.num_held += n
        return taken

    def release(self, units: Sequence[int], fence: Fence) -> None:
        """Give units up; they become free once `drain` sees the fence pass."""
        if not units:
            return
        self.changes += 1
        state = self._state
        for unit in units:
            assert state[unit - self.base] == HELD, f"{self.name}: {unit} released twice"
            state[unit - self.base] = LIMBO
            if self.arena is not None and not fence.away:
                slab = self._slab(unit)
                self.held_in[slab] -= 1
                self.limbo_in[slab] += 1
                self.spare_slabs += not self.held_in[slab]
                self.fixed_in[slab] -= 1
                self.evictable_slabs += not self.fixed_in[slab]
        if self.limbo and self.limbo[-1][0] == fence:
            self.limbo[-1][1].extend(units)    # requests give up page by page; each entry is asked for ever
        else:
            self.limbo.append((fence, list(units)))
        self.num_held -= len(units)
        self.in_limbo += len(units)
        self.away += fence.away * len(units)

    def drain(self, retired: StepId, flying: Collection[MoveId]) -> int:
        """Free what no issued step and no flying move can touch any more. Returns how many."""
        if not self.limbo:
            return 0
        freed, state, free_in, has_free = 0, self._state, self._free_in, self._has_free
        keep: deque[tuple[Fence, list[int]]] = deque()
        for fence, units in self.limbo:
            if fence.step <= retired and not (fence.moves and any([m in flying for m in fence.moves])):
                freed += len(units)
                self.away -= fence.away * len(units)
                for unit in units:
                    at = unit - self.base
                    state[at] = FREE
                    free_in[at // BLOCK] += 1
                    has_free[at // BLOCK] = True
                self.free += len(units)
                if self.arena is not None:
                    self._lose(self.arena, units, self.held_in if fence.away else self.limbo_in)
            else:
                keep.append((fence, units))
        self.limbo = keep
        self.changes += freed
        self.in_limbo -= freed
        return freed

    # ---------------------------------------------------------------- what can be had
    def mark_evictable(self, unit: int) -> None:
        """This unit, which is held, can be had from now on."""
        self.num_evictable += 1
        self.changes += 1
        if self.arena is not None:
            slab = (unit - self.base) // self.per_slab
            self.fixed_in[slab] -= 1
            self.evictable_slabs += not self.fixed_in[slab]

    def unmark_evictable(self, unit: int) -> None:
        """It cannot any more, or is about to be released."""
        self.num_evictable -= 1
        self.changes += 1
        if self.arena is not None:
            slab = (unit - self.base) // self.per_slab
            self.evictable_slabs -= not self.fixed_in[slab]
            self.fixed_in[slab] += 1

    # ---------------------------------------------------------------- slabs
    def _slab(self, unit: int) -> int:
        return (unit - self.base) // self.per_slab

    def _gain(self, slab: int) -> None:
        self.held_in[slab] = self.limbo_in[slab] = self.fixed_in[slab] = 0
        self.spare_slabs += 1
        self.evictable_slabs += 1
        self.capacity += self.per_slab
        self._set_free(slab * self.per_slab, (slab + 1) * self.per_slab)

    def _whole(self, slab: int) -> int:
        """Nothing is free: gain a slab of one unit, and hold that."""
        self.held_in[slab], self.limbo_in[slab], self.fixed_in[slab] = 1, 0, 1
        self.capacity += 1
        self.num_held += 1
        self._state[slab] = HELD
        return self.base + slab

    def _lose(self, arena: Arena, units: Sequence[int], counted: dict[int, int]) -> None:
        """`units` have become free: slabs without any other go back to the arena."""
        for unit in units:
            slab = self._slab(unit)
            counted[slab] -= 1
            if counted is self.held_in:
                self.spare_slabs += not counted[slab]
                self.fixed_in[slab] -= 1
                self.evictable_slabs += not self.fixed_in[slab]
            if not self.held_in[slab] and not self.limbo_in[slab]:
                del self.held_in[slab], self.limbo_in[slab], self.fixed_in[slab]
                self.spare_slabs -= 1
                self.evictable_slabs -= 1
                first = slab * self.per_slab
                for at in range(first, first + self.per_slab):
                    self._state[at] = NONE
                    block = at // BLOCK
                    self._free_in[block] -= 1
                    self._has_free[block] = self._free_in[block] > 0
                self.free -= self.per_slab
                self.capacity -= self.per_slab
                arena.free.append(slab)

    def check(self) -> None:
        """Conservation: free + held + limbo = capacity, disjoint (RELIABILITY I1). Nothing to do if no unit
        has changed hands since that held."""
        if self.changes == self.checked:
            return
        if not (self.capacity or self.free or self.num_held or self.limbo):
            assert not (self.in_limbo or self.held_in or self.limbo_in or self.away or self.num_evictable
                        or any(self._state)), self.name
            self.checked = self.changes
            return
        limbo, state = [u for _, units in self.limbo for u in units], self._state
        assert self.in_limbo == len(limbo)
        owned = self.free + self.num_held + len(limbo)
        assert owned == self.capacity, f"{self.name}: {owned} != {self.capacity}"
        assert (state.count(FREE), state.count(HELD), state.count(LIMBO)) == (
            self.free, self.num_held, len(set(limbo))) and len(set(limbo)) == len(limbo) and all(
            [state[u - self.base] == LIMBO for u in limbo]), f"{self.name}: a unit has two owners"
        blocks = [state.count(FREE, at, at + BLOCK) for at in range(0, len(state), BLOCK)]
        assert self._free_in == blocks and list(self._has_free) == [n > 0 for n in blocks], (
            f"{self.name}: a free unit cannot be found")
        if self.arena is not None:
            assert self.capacity == len(self.held_in) * self.per_slab
            assert self.held_in.keys() == self.limbo_in.keys() == self.fixed_in.keys()
            assert self.spare_slabs == sum([not n for n in self.held_in.values()])
            assert sum(self.held_in.values()) == self.num_held + self.away
            assert sum(self.limbo_in.values()) == len(limbo) - self.away
            assert sum(self.fixed_in.values()) == self.num_held + self.away - self.num_evictable
            assert self.evictable_slabs == sum([not n for n in self.fixed_in.values()])
            assert all(n or self.limbo_in[slab] for slab, n in self.held_in.items()), "an empty slab"
        self.checked = self.changes


class Arena:
    """One memory of `slabs` slabs, and the pools that are carved from it, one for each cache group.

    A single pool owns everything from the start. Several take slabs as they need them, so that
    nothing is stranded with a group that has no use for it.
    """

    def __init__(self, slabs: int, pools: Sequence[Pool]) -> None:
        self.slabs = slabs
        self.pools = tuple(pools)
        self.reserved = [0] * len(self.pools)    # units that requests were admitted with and have not taken
        self.num_reserved = 0                    # all of them together
        shared = len(self.pools) > 1
        self.free: list[int] = list(range(slabs))[::-1] if shared else []
        if shared:
            for pool in self.pools:
                pool.arena = self
                pool.reach(slabs * pool.per_slab)

    @property
    def away(self) -> int:
        """Units that another engine may still write."""
        return sum([pool.away for pool in self.pools])

    @property
    def num_evictable(self) -> int:
        """Units that can be had, of all pools."""
        return sum([pool.num_evictable for pool in self.pools])

    def reserve_pages(self, g: int, n: int) -> None:
        """`n` more units of pool g are somebody's who has not taken them yet; less, if negative."""
        self.reserved[g] += n
        self.num_reserved += n

    def lacks(self, want: Sequence[int]) -> int:
        """The same as `short` if all that is loose were given up as well, and what is promised is kept."""
        if self.num_reserved:
            want = [n + more for n, more in zip(want, self.reserved, strict=True)]
        if len(self.pools) == 1:
            return max(0, self.short(want, promised=True) - self.pools[0].num_evictable)
        need, have = 0, len(self.free)
        for pool, n in zip(self.pools, want, strict=True):
            units = pool.free + pool.in_limbo - pool.away + pool.num_evictable - pool.evictable_slabs * pool.per_slab
            need += -(-max(0, n - units) // pool.per_slab)
            have += pool.evictable_slabs
        return max(0, need - have)

    def short(self, want: Sequence[int], *, promised: bool) -> int:
        """How much is missing for `want[k]` units of each pool; 0 if all can be taken now, or, with
        `promised`, as soon as fences have passed. In slabs, of a single pool in units."""
        if len(self.pools) == 1:
            pool = self.pools[0]
            return max(0, want[0] - pool.free - (pool.in_limbo - pool.away if promised else 0))
        need, have = 0, len(self.free)
        if not promised:                       # asked for each page that is taken
            for pool, n in zip(self.pools, want, strict=True):
                if n > pool.free:
                    need += -(-(n - pool.free) // pool.per_slab)
            return need - have if need > have else 0
        for pool, n in zip(self.pools, want, strict=True):
            units, spare = pool.free, 0
            if pool.in_limbo > pool.away:
                spare = pool.spare_slabs
                units += pool.in_limbo - pool.away - spare * pool.per_slab
            need += -(-max(0, n - units) // pool.per_slab)
            have += spare
        return max(0, need - have)

    def check(self) -> None:
        for pool in self.pools:
            pool.check()
        if len(self.pools) > 1:
            owned = self.free.copy()
            for pool in self.pools:
                owned += pool.held_in
            owned.sort()
            assert owned == list(range(self.slabs)), "a slab has two owners, or none"
