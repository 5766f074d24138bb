"""Who holds what: one acquire and one release for all leases of a request, and the way in.

`Core` says which phase a request enters; `KVCache` takes all that the phase requires or nothing, and gives
up what it does not allow, behind fences. The way in is one function, `enter`: the first admission, a resume
from host pages, a resume after a drop, a prefix hit in any tier, to device pages or to host pages.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from penstock.core.kv import growth, offload, prefetch, promote
from penstock.core.kv.growth import mirror
from penstock.core.kv.page_table import Column, add, own, pin, pinned, take_all, unpin
from penstock.core.kv.pages import NO_ROW, NONE_LEFT, Early, Found, Headroom, Pages, Shortage, Trial
from penstock.core.kv.pool import Fence
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.lifecycle import Lease, Phase, Place
from penstock.core.plan import Row, Tier
from penstock.core.request import FAILED_SAVES_MAX, Request


class KVCache(Pages):
    """Pages, rows and who has them. Every method keeps `check` true."""

    def acquire(self, r: Request, phase: Phase, leases: Collection[Lease], place: Place,
                headroom: Headroom = NONE_LEFT) -> Trial:
        """Make `r` hold what `phase` requires, or change nothing. On the way in so much must be left over
        that those of `headroom`, who run, can grow."""
        if Lease.ROW in leases and r.row is None:
            return enter(self, r, place, headroom)
        if phase in (Phase.PAUSED, Phase.STAGING):
            return offload.reserve(self, r, phase)
        if phase is Phase.FETCHING:
            return prefetch.reserve(self, r)
        if phase is Phase.RECEIVING:
            return receive(self, r, place, headroom)
        if Lease.HOT in leases and not any(t.hot for t in r.tables):
            return promote.take_hot_buffer(self, r)
        if phase is Phase.PROMOTING:
            return promote.reload(self, r, headroom)
        return True

    def release(self, r: Request, leases: Collection[Lease]) -> None:
        """Give up all of these leases that `r` holds."""
        if Lease.HOT in leases and any(t.hot for t in r.tables):
            self.keep(r)
        for lease in leases:
            if lease is Lease.ROW and r.row is not None:
                self.rows.release([r.row], Fence(r.last_issue))      # a promise of `Bind`
                r.row, r.bound = None, False
                self.promise(r, r.place, r.later, -1)
            elif lease is Lease.HOT:
                self._free_hot_buffer(r)
            elif lease is Lease.DRAM:
                for g, t in enumerate(r.tables):
                    self.drop_column(r, g, t.host)
                self.return_reserve(r)
            elif lease in (Lease.HBM, Lease.DEVICE_ONLY):
                for g, t in enumerate(r.tables):
                    if t.hosted == (lease is Lease.HBM):
                        self.drop_column(r, g, t.device)

    def _free_hot_buffer(self, r: Request) -> None:
        if any(t.hot for t in r.tables):
            r.is_resized = r.hot_ended = r.bound
        if r in self.grown:
            self.grown.remove(r)
        for g, t in enumerate(r.tables):
            for copy in take_all(t.hot):
                self.unpin(r, self.device[g], copy)
            t.kept = {}

    def grow(self, r: Request, upto: int) -> Literal[True] | Shortage:
        """Pages for positions below `upto` in every group, or nothing."""
        return growth.grow(self, r, upto)


# ---------------------------------------------------------------- the way in
@dataclass(slots=True)
class Load:
    """A page to be copied: `entry` of the table, from `source` to a page that is still to be had."""

    entry: int
    node: Node | None
    source: Copy
    target: Copy


@dataclass(slots=True)
class Claim:
    """The columns that a table will have. A page that is still to be had is -1."""

    up: list[Copy | None] = field(default_factory=list)      # on the device
    down: list[Copy | None] = field(default_factory=list)    # on the host
    loads: list[Load] = field(default_factory=list)      # host to device
    saves: list[Load] = field(default_factory=list)      # device to host
    hot_units: int = 0
    later: int = 0           # pages of its prompt that it takes when it comes to them

    def new_device(self) -> int:
        return self.hot_units + sum(c is not None and c.page < 0 for c in self.up)

    def new_host(self) -> int:
        return sum(c is not None and c.page < 0 for c in self.down)


def enter(kv: Pages, r: Request, place: Place, headroom: Headroom) -> Trial:
    """Give `r` a row and all the pages that its known tokens need in `place`, or change nothing. Of what is
    still to be computed it takes the first pages now; the others are promised to it."""
    if not kv.rows.free:
        return NO_ROW
    found = None
    if r.phase not in (Phase.PAUSED, Phase.RECEIVING):
        found = _find(kv, r)
        if place is Place.HOST and r.failed_saves >= FAILED_SAVES_MAX:
            kv.forget_path(r)                # computed in host pages, nothing is to be copied
            r.computed = r.retired = 0
    ways = [_way(kv, r, g, place) for g in range(len(r.tables))]
    later = [w.later for w in ways]
    kv.promise(r, place, later)
    trial = _are_filled(ways) and _make_room(kv, ways, headroom)
    if not trial:
        kv.promise(r, place, later, -1)
        for w in ways:
            _undo(kv, w)
        if r.phase in (Phase.QUEUED, Phase.DROPPED):
            kv.forget_path(r)
        if isinstance(trial, Shortage):
            trial.found = found
            trial.want = [n + w.later * ((place is Place.HOST and t.hosted) == (trial.tier is Tier.DRAM))
                          for n, w, t in zip(trial.want, ways, r.tables, strict=True)]
        return trial
    r.row = Row(kv.rows.acquire(1)[0])
    below = {id(n) for g, w in enumerate(ways) for n in _take(kv, r, g, w)}
    r.loads = len(below)
    r.is_saved = False
    r.capacity = kv.covered(r, place)
    if place is Place.HOST:
        kv.soften(r)
    elif r.may_host and kv.cfg.role != "prefill":
        for g, t in enumerate(r.tables):       # what a prompt leaves open must be there if it is to spill
            if t.hosted and t.end(r.computed) < len(t.device) and not r.later[g]:
                mirror(kv, g, t, len(t.device) - 1)
    return True


def receive(kv: Pages, r: Request, place: Place, headroom: Headroom) -> Trial:
    """Pages for the prompt of `r`, which another engine will write, or nothing. What is cached here is
    kept where it is; the rest begins at `retired`."""
    found = _find(kv, r)
    n = r.num_prompt
    ways: list[Claim] = []
    for g, t in enumerate(r.tables):
        way, begin, new = Claim(), t.begin(n), max(r.retired // t.unit, t.begin(n))
        on_host = place is Place.HOST and t.hosted
        way.up, way.down = [None] * new, [None] * new
        for i in range(begin, new):
            node = kv.node(r, t, i)
            assert node is not None, f"request {r.rid}: page {i} of {t.group.name} is lost"
            column, copy = way.up, node.good(kv.device[g])
            if copy is None:
                column, copy = way.down, node.good(kv.host[g])
            assert copy is not None, f"request {r.rid}: page {i} of {t.group.name} is lost"
            column[i] = pin(copy)
        column = way.down if on_host else way.up
        column += [pinned() for _ in range(t.end(n) - new)]
        ways.append(way)
    device, host = [w.new_device() for w in ways], [w.new_host() for w in ways]
    room = kv.make_both_free(kv.with_headroom(Tier.DRAM, host, headroom),
                             kv.with_headroom(Tier.HBM, device, headroom), has_pinned=True)
    if not room:
        for w in ways:
            _undo(kv, w)
        kv.forget_path(r)
        room.found = found
        return room
    r.loads = len({id(n) for g, w in enumerate(ways) for n in _take(kv, r, g, w)})
    return True


def _are_filled(ways: list[Claim]) -> Literal[True] | Early:
    """What is still being loaded cannot be copied on to the host yet: its load flies beside that copy."""
    return next((Early(f.source) for w in ways for f in w.saves if not f.source.ready), True)


def _make_room(kv: Pages, ways: list[Claim], headroom: Headroom) -> Literal[True] | Shortage:
    host = kv.with_headroom(Tier.DRAM, [w.new_host() for w in ways], headroom)
    device = kv.with_headroom(Tier.HBM, [w.new_device() for w in ways], headroom)
    room = kv.make_both_free(host, device, has_pinned=True)
    if room or room.tier is Tier.DRAM or not any(any(w.up) for w in ways if w.hot_units):
        return room
    for w in ways:                             # pages that it could do without are in its own way
        for i, copy in enumerate(w.up if w.hot_units else ()):
            if copy is not None:
                w.up[i] = None
                _give_back(kv, copy)
    return kv.make_both_free(host, device, has_pinned=True)


def _find(kv: Pages, r: Request) -> Found:
    """Name what of the known tokens has KV somewhere, and set `computed`."""
    old, (r.path, found) = r.path, kv.match(r)
    r.cut = found.cut
    for node in r.path:
        kv.tree.ref(node)
    for g, t in enumerate(r.tables):
        for i, copy in enumerate(t.host):      # what it has fetched may have been banished since
            if copy is not None and copy.node is not None and copy.node.banished:
                kv.drop_entry(r, g, t.host, i)
    kv.tree.unref(old)
    r.computed = r.retired = len(r.path) * kv.cfg.page_size
    return found


def _way(kv: Pages, r: Request, g: int, place: Place) -> Claim:
    """Pin what group g has of `r`, and say what is still to be had."""
    t, way = r.tables[g], Claim()
    known, done = min(len(r.tokens), r.compute_limit), t.end(r.computed)
    # A window moves on: its pages are taken as they are needed. Of everything else so many are sure to come.
    end = t.end(r.computed + 1) if t.group.reach else min(t.end(known), done + kv.cfg.take_pages)
    way.later = 0 if t.group.reach else t.end(known) - end
    begin = t.begin(r.computed)
    hosted = place is Place.HOST and t.hosted
    way.up = [None] * begin
    way.down = [None] * begin if hosted else []
    for i in range(begin, max(end, done)):
        node = kv.node(r, t, i)
        if hosted:
            way.down.append(_entry(kv, r, g, i, node, way, host=True) if i < done else pinned())
            way.up.append(_shared(kv, g, node))
        else:
            way.up.append(_entry(kv, r, g, i, node, way, host=False) if i < done else pinned())
    if hosted:
        way.hot_units = r.hot_units
    return way


def _shared(kv: Pages, g: int, node: Node | None) -> Copy | None:
    """A device page that a hosted row can read as long as nobody else needs the memory."""
    copy = node.good(kv.device[g]) if node is not None else None
    return pin(copy) if copy is not None and copy.ready else None


def _entry(kv: Pages, r: Request, g: int, i: int, node: Node | None, way: Claim, *, host: bool) -> Copy:
    """Page i of group g where it is wanted, or a new one that is filled from the other side. The device
    may still be loading what is to be saved, see `_are_filled`."""
    t = r.tables[g]
    sides = (t.device, kv.device[g], way.loads), (t.host, kv.host[g], way.saves)
    column, space, fills = sides[host]
    below, other, _ = sides[not host]
    copy, source = own(column, i), own(below, i)
    detached = kv.moves.detached
    if host and copy is not None and copy.node is not None and copy.node is node:
        kv.take_host_copy(node, g, source)            # it has fetched it, and may have to let go of that
    if copy is None or copy in detached:
        copy = None if node is None else kv.take_host_copy(node, g, source) if host else node.good(space)
    if copy is not None:
        return pin(copy)
    if (source is None or source in detached) and node is not None:
        source = node.good(other)
    assert source is not None and (host or source.ready), f"request {r.rid}: page {i} of group {g} is lost"
    target = pinned()
    fills.append(Load(i, node, pin(source), target))
    return target


def _undo(kv: Pages, way: Claim) -> None:
    for copy in [*way.up, *way.down, *(f.source for f in (*way.loads, *way.saves))]:
        if copy is not None and copy.page >= 0:
            _give_back(kv, copy)


def _give_back(kv: Pages, copy: Copy) -> None:
    unpin(copy)
    if copy.node is not None:
        kv.tree.update_evictable(copy.node)


def _take(kv: Pages, r: Request, g: int, way: Claim) -> list[Node]:
    """Get the pages, start the copies, and let go of what `r` had before. Returns the pages of its
    path that the device does not have."""
    t = r.tables[g]
    for space, column, extra in ((kv.device[g], way.up, way.hot_units), (kv.host[g], way.down, 0)):
        new = [c for c in column if c is not None and c.page < 0]
        pages = space.pool.acquire(len(new) + extra)
        for copy, page in zip(new, pages, strict=False):
            copy.page = page
        add(t.hot, pages[len(new):])
    _start(kv, r, g, way.loads, up=True)
    _start(kv, r, g, way.saves, up=False)
    t.first = t.begin(r.computed)
    kv.let_go(r, g, *t.replace(way.up, way.down))
    on_host = [n for i in range(len(way.down)) if own(way.up, i) is None
               and (n := kv.node(r, t, i)) is not None]
    return [*on_host, *(f.node for f in way.loads if f.node is not None)]


def _start(kv: Pages, r: Request, g: int, fills: list[Load], *, up: bool) -> None:
    """Begin to copy. A sealed page becomes the tree's copy, unless the tree has one meanwhile or its
    source is private."""
    src, dst = (kv.host[g], kv.device[g]) if up else (kv.device[g], kv.host[g])
    t = r.tables[g]
    nodes: list[Node] = []
    for f in fills:
        f.target.partial = f.source.partial
        if f.node is not None and dst not in f.node.copies and not f.source.partial:
            f.target.ready = False
            kv.tree.attach(f.node, dst, f.target)
        if f.node is not None and f.target.node is f.node and f.node.copies.get(src) is f.source:
            nodes.append(f.node)
        else:
            tokens = min(r.computed - f.entry * t.unit, t.unit)
            node = f.node if f.target.node is not None else None
            kv.moves.move_private(r, src, f.source, dst, f.target, tokens, node)
        unpin(f.source)
    kv.moves.move_nodes(nodes, src, dst)


# ---------------------------------------------------------------- until all is there
def missing(r: Request) -> list[Copy] | None:
    """Device pages that are still being loaded; None if something else is not in place either."""
    out: list[Copy] = []
    for t in r.tables:
        if not all(c is None or c.ready for c in t.host):
            return None
        if r.place is Place.DEVICE or not t.hosted:
            out += [c for c in t.device if c is not None and not c.ready]
    return out


def last_missing(columns: Iterable[Column]) -> list[Copy]:
    """One page that is not in place, if any: as long as it is not, they are not all."""
    for column in columns:
        for copy in reversed(column):          # pages come in order: it is among the last
            if copy is not None and not copy.ready:
                return [copy]
    return []
