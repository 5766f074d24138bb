"""Pages that a request comes to have: all that it claims in several groups and tiers, or none; those that its
row writes next; and the mirrors of these on the host.

A claim pins what is there and notes what is still to be had; `commit` takes all of that, or gives all back.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from penstock.core.kv.listing import Entering, Shortage, TrialRefused
from penstock.core.kv.page_table import Column, PageTable, add, extend, pin, pinned, put, unpin
from penstock.core.kv.pages import NONE_LEFT, Headroom, Pages
from penstock.core.kv.pool import Pool
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.lifecycle import Phase, Place
from penstock.core.plan import HbmPage, Tier
from penstock.core.request import Request

_HBM, _DRAM, _TO_DEVICE = Tier.HBM, Tier.DRAM, Place.TO_DEVICE    # Python 3.11 takes 0.1 us to find a member of an Enum
_Why = TypeVar("_Why", bound=TrialRefused)


class Claim:
    """One trial of request `r`: ends with `commit` or `refuse`. path: it has just named its path, and forgets that if
    this fails."""

    def __init__(self, kv: Pages, r: Request, *, path: bool = False) -> None:
        self._kv, self._r, self._path = kv, r, path
        self.needed: list[Copy] = []
        self.optional: list[Copy] = []
        self._new = {tier: [list[Copy]() for _ in r.tables] for tier in (_DRAM, _HBM)}
        self._later: tuple[Place, Sequence[int]] | None = None

    def pin(self, copy: Copy) -> Copy:
        """A page that is there, or on its way."""
        self.needed.append(copy)
        return pin(copy)

    def pin_optional(self, copy: Copy) -> Copy:
        """One that it can do without: `commit` gives it back if it is in its own way, see `has_optional`."""
        self.optional.append(copy)
        return pin(copy)

    def want(self, tier: Tier, g: int) -> Copy:
        """A page that is still to be had: `commit` says which."""
        self._new[tier][g].append(copy := pinned())
        return copy

    def replace(self, tier: Tier, g: int, n: int, last: Iterable[Copy]) -> None:
        """The first n pages that were to be had are its own by now, but for some: these come last."""
        new = self._new[tier][g]
        del new[:n]
        new += last

    def reserve_pages(self, place: Place, pages: Sequence[int]) -> None:
        """So many pages of each group are taken later."""
        self._kv.reserve_pages(self._r, place, pages)
        self._later = place, pages

    @property
    def has_optional(self) -> bool:
        return bool(self.optional)

    def commit(self, headroom: Headroom = NONE_LEFT, beside: Sequence[int] = ()) -> Literal[True] | Shortage:
        """Take everything, or nothing. So much must be left over that those of `headroom` can grow, and
        so many host pages of each group as `beside` says."""
        kv, room = self._kv, self._room(headroom, beside)
        if not room and room.tier is _HBM and self.optional:
            self._give_back(self.optional)
            self.optional = []
            room = self._room(headroom, beside)
        if not room:
            return self.refuse(room)
        for tier, new in self._new.items():
            for pool, copies in zip(kv.arenas[tier].pools, new, strict=True):
                for copy, page in zip(copies, pool.acquire(len(copies)), strict=True):
                    copy.page = page
        return True

    def refuse(self, why: _Why) -> _Why:
        """Take nothing."""
        if self._later is not None:
            self._kv.reserve_pages(self._r, *self._later, -1)
        later = self._path or self._r.phase is Phase.PAUSED
        if later and len(self.needed) + len(self.optional) > self._kv.cfg.hit_pages:
            self._kv.give_back(self._r, self.needed + self.optional)
            return why
        self._give_back(self.optional)
        self._give_back(self.needed)
        if self._path:
            self._kv.forget_path(self._r)
        return why

    def _room(self, headroom: Headroom, beside: Sequence[int]) -> Literal[True] | Shortage:
        kv = self._kv
        host, device = (kv.with_headroom(tier, list(map(len, new)), headroom)
                        for tier, new in self._new.items())
        if beside:
            host = [n + more for n, more in zip(host, beside, strict=True)]
        return kv.make_both_free(host, device, has_pinned=bool(self.needed or self.optional))

    def _give_back(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            unpin(copy)
            if copy.node is not None:
                self._kv.tree.update_evictable(copy.node)


@dataclass(slots=True)
class Load:
    """A page to be copied: `entry` of the table, from `source` to a page that is still to be had."""

    entry: int
    node: Node | None
    source: Copy
    target: Copy
    at: int                  # of the pins of its claim, that of `source`


@dataclass(slots=True)
class GroupAllocation:
    """What a table will have."""

    up: list[Copy | None] = field(default_factory=list)      # its columns: on the device,
    down: list[Copy | None] = field(default_factory=list)    # and on the host
    loads: list[Load] = field(default_factory=list)      # host to device
    saves: list[Load] = field(default_factory=list)      # device to host
    buffer: list[Copy] = field(default_factory=list)
    reserved_pages: int = 0  # pages of its prompt that it takes when it comes to them
    pages: list[HbmPage] = field(default_factory=list)       # those of `up`, as far as it has KV; -1: none, or
                                                         # still to be had
    own: list[int] = field(default_factory=list)         # entries of which it has a private page so far
    late: deque[tuple[bool, Copy]] = field(default_factory=deque)    # of its pages those that are not in place,
                                                         # and whether they are on the host
    unseen: int = -1                                     # so many of `loads` start over turns; -1: not counted


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Entering):
    """The trial of such a request."""

    claim: Claim
    parts: list[GroupAllocation]
    is_fresh: bool = False   # its end was seen, and all that is cut from it was cut, in this turn,
    is_hinted: bool = False  # its nodes began with a hint
    again: bool = False      # or once more, with pages at its end that a group lacks: that may be long
    is_long: bool = False    # it has more loads than one turn may start
    loaded: bytearray = field(default_factory=bytearray)     # of its path: 1 for a page whose load was started


# ---------------------------------------------------------------- what a row writes next
def grow(kv: Pages, r: Request, upto: int) -> Literal[True] | Shortage:
    """Pages for positions below `upto`, in every group, or nothing."""
    host, promoting = r.place.on_host, r.place is _TO_DEVICE
    hbm, dram, new_up, new_down = [0] * len(r.tables), [0] * len(r.tables), 0, 0
    covered: list[int] = []                    # positions that each table will have pages for
    for g, t in enumerate(r.tables):
        on_host = host and t.hosted
        has, needs = len(t.host if on_host else t.device), -(-upto // t.unit)
        covered.append(t.unit * max(has, needs))
        if (n := needs - has) <= 0:
            continue
        if on_host:
            dram[g] = n
            if n > (free := kv.host[g].pool.free):
                new_down += n - free
        if promoting or not on_host:
            hbm[g] = n
            if n > (free := kv.device[g].pool.free):
                new_up += n - free
    # Where each new page could have a slab of its own, nobody need count slabs. A single pool has none.
    above, below = kv.arenas[_HBM], kv.arenas[_DRAM]
    if new_up > len(above.free) or new_down > len(below.free) or above.num_reserved or below.num_reserved:
        mine = [min(n, more) for n, more in zip(map(max, hbm, dram), r.held.reserved, strict=True)]
        kv.reserve_pages(r, r.place, mine, -1)  # it takes these now
        room = kv.make_both_free(dram, hbm)
        if not room:
            kv.reserve_pages(r, r.place, mine)
            return room
    for g, t in enumerate(r.tables):
        if up := hbm[g]:
            _append(kv.device[g].pool, t.device, up)
        if down := dram[g]:
            _append(kv.host[g].pool, t.host, down)
            if not up:
                extend(t.device, len(t.host))
        elif up and t.hosted and r.may_host and not r.held.reserved[g] and kv.cfg.role != "prefill":
            # Of a prompt only the last page is mirrored: the others are full when it is over.
            for i in range(len(t.device) - (up if r.phase is Phase.DECODE else 1), len(t.device)):
                mirror(kv, g, t, i)
    r.capacity = min(covered)
    return True


def _append(pool: Pool, column: Column, n: int) -> None:
    last = column[-1] if column else None
    add(column, pool.acquire(n, None if last is None else last.page))


def mirror(kv: Pages, g: int, t: PageTable, i: int) -> None:
    """A host page for entry i, which no step has written yet, if there is room: of a row that may spill,
    pages are on the host from their first token on. They go there when they are sealed, so it is worth
    evicting what is cached there."""
    pool = kv.host[g].pool
    if (pool.free and not kv.arenas[_DRAM].num_reserved) or kv.make_free(_DRAM, kv.one_page(g)):
        put(t.host, i, Copy(pool.acquire(1)[0]))


def drop_mirrors(kv: Pages, r: Request) -> bool:
    """Give up the host pages of a row that is on the device: a spill will have to copy."""
    if r.place is not Place.DEVICE or not any([any(t.host) for t in r.tables]):
        return False
    leave_mirrors(kv, r)
    for g, t in enumerate(r.tables):
        kv.drop_column(r, g, t.host)
    return True


def leave_mirrors(kv: Pages, r: Request) -> None:
    """What a row has on the host, and is about to give up, its steps write as long as it is not sealed."""
    for g, t in enumerate(r.tables):
        sealed = len(r.path) * kv.cfg.page_size // t.unit
        kv.remap(r, g, [i for i in range(sealed, len(t.host)) if t.host[i] is not None])
