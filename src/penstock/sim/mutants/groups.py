"""Seeded bugs of cache groups: windows, snapshots, slabs, one group forgotten, page identity."""
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv import allocate, growth, sealing
from penstock.core.kv.allocate import Claim
from penstock.core.kv.cache import KVCache
from penstock.core.kv.pool import Arena, Pool
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.lifecycle import Place
from penstock.core.plan import Advance, Event, Grow, StepId, Tier
from penstock.core.request import Request, Table
from penstock.sim.mutants.registry import Real, instead_of, mutant, swapped


# ---------------------------------------------------------------- boundaries
@instead_of(KVCache, "match", mode="model=3")
def hit_one_page_short(real: Real, have: KVCache, r: Request, *, stored: bool = False) -> list[Node]:
    """Where groups keep only a part, the last boundary that all of them can serve is not used."""
    path: list[Node] = real(have, r, stored=stored)
    del path[-1:]
    while path and not have._serves(r, path, stored):
        path.pop()
    return path


# ---------------------------------------------------------------- windows
@instead_of(sealing, "leave_behind")
def window_given_up_one_page_early(real: Real, have: KVCache, r: Request, g: int, t: Table) -> None:
    """A window gives up the page that its first position is in."""
    settled, r.settled = r.settled, r.settled + t.unit
    real(have, r, g, t)
    r.settled = settled


@instead_of(sealing, "leave_behind")
def window_left_as_planned(real: Real, have: KVCache, r: Request, g: int, t: Table) -> None:
    """A window moves on with the steps that are planned, not with those that have retired."""
    settled, r.settled = r.settled, r.computed
    real(have, r, g, t)
    r.settled = settled


@instead_of(sealing, "leave_behind")
def window_left_as_planned_without_a_fence(real: Real, have: KVCache, r: Request, g: int, t: Table) -> None:
    """A window moves on with the steps that are planned, and its pages are free at once."""
    last, r.last_issue = r.last_issue, StepId(0)
    window_left_as_planned(real, have, r, g, t)
    r.last_issue = last


# ---------------------------------------------------------------- prefix hits
class _Hits(Core):
    """A prefix hit that some group cannot serve: the request starts with a page that is empty."""

    def advance(self, events: Sequence[Event]) -> Advance:
        with swapped(allocate, "_entry", _or_empty), swapped(KVCache, "_serves", self.serves):
            return super().advance(events)

    @staticmethod
    @abstractmethod
    def serves(real: Real, have: KVCache, r: Request, path: list[Node], stored: bool) -> bool:
        """What is taken for a boundary that every group can serve."""


def _or_empty(real: Real, have: KVCache, r: Request, g: int, i: int, node: Node | None, way: Claim, *,
              host: bool) -> Copy:
    try:
        copy: Copy = real(have, r, g, i, node, way, host=host)
        return copy
    except AssertionError:
        if host:
            raise
        return allocate._new()


@mutant()
class SnapshotHitInsideAnInterval(_Hits):
    """A prefix hit ends where no snapshot was taken."""

    @staticmethod
    def serves(real: Real, have: KVCache, r: Request, path: list[Node], stored: bool) -> bool:
        end = len(path) * have.cfg.page_size
        inside = any(t.group.snapshot and end % t.unit for t in r.tables)
        return bool(real(have, r, path, stored) or (inside and not stored))


@mutant()
class PrefixHitWithoutItsWindow(_Hits):
    """A prefix hit is the longest that one group can serve."""

    @staticmethod
    def serves(real: Real, have: KVCache, r: Request, path: list[Node], stored: bool) -> bool:
        end = len(path) * have.cfg.page_size
        inside = any(t.group.snapshot and end % t.unit for t in r.tables)
        return bool(real(have, r, path, stored) or (not inside and not stored))


@instead_of(Request, "page_key")
def decode_identity_left_out_of_the_key(real: Real, r: Request, index: int, page_size: int) -> Sequence[int]:
    """Pages that a selecting decode wrote are shared with requests that compute exactly."""
    return tuple(r.tokens[index * page_size:(index + 1) * page_size])


@instead_of(Request, "page_key", 400, mode="alike=1,page_size=4,pauses=30,hot_pages=1,model=1")
def end_of_the_prompt_left_out_of_the_key(real: Real, r: Request, index: int,
                                          page_size: int) -> Sequence[int]:
    """A page that decode finished is shared whatever part of it was a prompt."""
    key: Sequence[int] = real(r, index, page_size)
    return key[:page_size + 1]


# ---------------------------------------------------------------- one group forgotten
@instead_of(schedule, "_grows")
def grow_of_one_group_only(real: Real, r: Request) -> list[Grow]:
    """The device is told of the new pages of one cache group."""
    grows: list[Grow] = real(r)
    return grows[:1]


@instead_of(schedule, "_grows")
def grow_one_entry_too_early(real: Real, r: Request) -> list[Grow]:
    """New pages take the place of the last that the row has."""
    return [g._replace(index=g.index - 1) for g in real(r)]


@instead_of(KVCache, "covered")
def capacity_of_the_first_group(real: Real, have: KVCache, r: Request, place: Place) -> int:
    """A row is believed to have pages as far as its first group has."""
    t = r.tables[0]
    return t.unit * len(t.host if place is Place.HOST and t.group.hosted else t.device)


@instead_of(KVCache, "_release_column")
def release_forgets_a_group(real: Real, have: KVCache, r: Request, g: int, *, host: bool) -> None:
    """The pages of the last cache group are forgotten, not given back."""
    if g and g == len(r.tables) - 1:
        (r.tables[g].host if host else r.tables[g].device).clear()
    real(have, r, g, host=host)


@instead_of(growth, "grow")
def growth_beyond_what_a_group_has(real: Real, have: KVCache, r: Request, upto: int) -> bool:
    """Growth asks whether the first cache group has room."""
    def first(right: Real, self: KVCache, tier: Tier, want: Sequence[int]) -> bool:
        return bool(right(self, tier, [n * (not g) for g, n in enumerate(want)]))

    with swapped(KVCache, "make_free", first):
        return bool(real(have, r, upto))


# ---------------------------------------------------------------- slabs
@instead_of(Pool, "_lose")
def slab_returned_while_a_unit_is_held(real: Real, pool: Pool, arena: Arena, units: Sequence[int],
                                       counted: dict[int, int]) -> None:
    """A slab changes hands while somebody holds one of its pages."""
    if counted is pool.limbo_in:
        for unit in units:
            pool.held_in[pool._slab(unit)] = 0
    real(pool, arena, units, counted)


@instead_of(Pool, "_lose")
def slab_returned_while_a_unit_is_in_limbo(real: Real, pool: Pool, arena: Arena, units: Sequence[int],
                                           counted: dict[int, int]) -> None:
    """A slab changes hands while a step may still touch one of its pages."""
    slabs = [pool._slab(unit) for unit in units]
    if counted is pool.limbo_in:
        for slab in slabs:
            counted[slab] = slabs.count(slab)
    real(pool, arena, units, counted)
