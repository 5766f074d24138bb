"""Pages of every tier: their pools, the prefix tree, transfers, and what requests pin of them.

Whether so many pages can be had now is asked here; cached pages are evicted for that, and device pages that
hosted rows can do without are taken back. Knows no policy: who must give way is decided in `policy`.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.core.kv.listing import Entering, Matching, PrefixMatch, Returned, Shortage
from penstock.core.kv.moves import Moves
from penstock.core.kv.page_table import Column, PageTable, cut, give_up, own, pin, read, take, take_all, unpin
from penstock.core.kv.pool import Arena, Fence, Pool
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree, unmark_evictable
from penstock.core.lifecycle import Phase, Place
from penstock.core.plan import Group, StepId, Tier
from penstock.core.policy.sessions import Session
from penstock.core.request import Request
from penstock.core.settings import CoreConfig


def _arena(cfg: CoreConfig, tier: Tier, pages: int, base: int) -> Arena:
    """One tier's memory, carved into pages of each group."""
    slabs = pages // cfg.groups[0].slab_pages
    single = len(cfg.groups) == 1
    return Arena(slabs, [
        Pool(tier.value if single else f"{tier.value} {group.name}", pages if single else 0,
             base + g * cfg.group_base, group.slab_pages) for g, group in enumerate(cfg.groups)])


class Headroom(NamedTuple):
    """Rows that must still be able to grow by a page: those in device pages, and those in host pages."""

    device: int = 0
    host: int = 0


NONE_LEFT = Headroom()
PARTS = 8            # portions that are given up in one turn for requests that lack pages


class Pages(Matching):
    """Pools, prefix tree, transfers, and what the page tables of requests pin of them."""

    def __init__(self, cfg: CoreConfig) -> None:
        self.cfg = cfg
        self.rows = Pool("row", cfg.rows, cfg.row_base)
        self.arenas = {Tier.HBM: _arena(cfg, Tier.HBM, cfg.hbm_pages, cfg.hbm_base),
                       Tier.DRAM: _arena(cfg, Tier.DRAM, cfg.dram_pages, cfg.dram_base),
                       Tier.DISK: _arena(cfg, Tier.DISK, cfg.disk_pages, cfg.disk_base)}
        spaces = {tier: [TierGroup(tier, Group(g), pool, cfg.groups[g].snapshot)
                         for g, pool in enumerate(arena.pools)]
                  for tier, arena in self.arenas.items()}
        self.device, self.host, self.disk = (spaces[t] for t in (Tier.HBM, Tier.DRAM, Tier.DISK))
        self._spaces = spaces
        self._pools = [self.rows, *(pool for arena in self.arenas.values() for pool in arena.pools)]
        self.tree = Tree([*self.device, *self.host, *self.disk], cfg.store_root, cfg.retained_pages)
        self.moves = Moves(cfg, self.tree, self.device, self.host, self.disk, self.arenas[Tier.DISK])
        self._one = [tuple(int(k == g) for k in range(len(cfg.groups))) for g in range(len(cfg.groups))]
        self.keeps = any([group.keep for group in cfg.groups])
        self.issued = StepId(0)
        self.freed = 0                                   # units that came back, in all
        self.grown: list[Request] = []           # whose hot buffers have more than their least
        self.softening: list[Request] = []       # see `make_evictable`
        self.freeing = deque[Request]()          # have ended, and have pages that nobody has needed yet
        self.returned = deque[Returned]()
        self.entering: dict[Request, Entering] = {}
        self.part = max(1, cfg.take_pages // 2)  # pages that go at once, see `free_gradually`
        self.hits_left = cfg.hit_pages           # of this turn
        self.parts_left = PARTS                  # the same, of what `free_gradually` gives up for who lacks pages
        self.saves_left = cfg.save_pages         # the same: entries of paused requests
        self.may_start = True                    # the same: no long hit has got its row in this turn
        self.spent: object = None                # a long list, which takes long to free: in a later turn
        # Pages of each group that were sealed when the host was full.
        self.late = [deque[Node](maxlen=max(1, cfg.dram_pages)) for _ in cfg.groups]

    @property
    def retired(self) -> StepId:
        return self.moves.retired

    def in_flight(self, r: Request) -> bool:
        """Whether a step of `r` was issued and has not retired."""
        return r.last_issue > self.moves.retired

    def tables(self) -> list[PageTable]:
        """Empty page tables for a new request."""
        return [PageTable(group, group.page_tokens or self.cfg.page_size) for group in self.cfg.groups]

    # ---------------------------------------------------------------- room
    def drain(self) -> int:
        freed = 0
        for pool in self._pools:
            if pool.limbo:
                freed += pool.drain(self.moves.retired, self.moves.flying)
        self.freed += freed
        return freed

    def one_page(self, g: int) -> Sequence[int]:
        """A demand of one page of group g."""
        return self._one[g]

    def with_headroom(self, tier: Tier, want: Sequence[int], left: Headroom) -> Sequence[int]:
        """`want`, and of each group that is wanted a page more for each row that grows there: hosted groups
        do so where the KV of a row lives."""
        hosted, others = (left.device, left.device + left.host) if tier is Tier.HBM else (left.host, 0)
        return [n and n + (hosted if group.hosted else others)
                for n, group in zip(want, self.cfg.groups, strict=True)]

    def make_free(self, tier: Tier, want: Sequence[int], *,
                  has_pinned: bool = False) -> Literal[True] | Shortage:
        """Whether `want[g]` pages of each group are free now, evicting cached pages if that makes it so,
        and taking back what hosted rows can do without. Counts first: what would not be enough stays. Who has
        pinned pages for it may not have taken any that are promised to others."""
        arena = self.arenas[tier]
        if not (any(want) or (has_pinned and arena.num_reserved)):
            return True
        if not (arena.num_reserved or arena.short(want, promised=False)):
            return True
        if self.lacks(tier, want):
            return Shortage(tier, want, self.gives_up)
        self.reclaim(tier, want)
        assert not arena.short(want, promised=True), "what was counted could not be had"
        for pool in arena.pools:
            self.freed += pool.drain(self.retired, self.moves.flying)
        return not arena.short(want, promised=False) or Shortage(tier, want, waits_for_fence=True)

    def reclaim(self, tier: Tier, want: Sequence[int], *, drafts: bool = True) -> None:
        """Until `want` can be had or there is no more of it: what hot buffers have for nothing but hits, what
        is cached, what hosted rows read, and then, if `drafts`, what hot buffers have for these."""
        arena = self.arenas[tier]
        if tier is Tier.HBM:
            self.trim_hot_buffers(want)
        while (short := arena.short(want, promised=True)) and self._evict(tier, want, short):
            pass
        if short and tier is Tier.HBM:
            self.evict_read_pages(want)
            self.trim_hot_buffers(want, drafts=drafts)

    def make_both_free(self, host: Sequence[int], device: Sequence[int], *,
                       has_pinned: bool = False) -> Literal[True] | Shortage:
        """The same of both tiers: what one lacks costs the other nothing."""
        wants = (Tier.DRAM, host), (Tier.HBM, device)
        lacking = [Shortage(tier, want, self.gives_up) for tier, want in wants
                   if (has_pinned or any(want)) and self.lacks(tier, want)]
        return lacking[0] if lacking else self.make_free(*wants[0]) and self.make_free(*wants[1])

    def lacks(self, tier: Tier, want: Sequence[int]) -> int:
        """How much is missing for `want`, with all that can be had, also of requests that have ended, and
        of those that wait and have pinned a part of their prefix, the last first: as much of that as may still
        be given up in this turn. More comes in the next, see `is_short`."""
        while short := self.arenas[tier].lacks(want):
            if not self.gives_up:
                r = next((r for r, e in reversed(self.entering.items()) if e.pins or e.optional), None)
                if r is None:
                    break
                self.abandon(r)
            elif not self.parts_left:
                break
            else:
                self.parts_left -= 1
                self.free_gradually()
        return short

    def is_long(self, r: Request) -> bool:
        """Whether giving up all pages of `r` at once keeps others waiting."""
        columns = [column for t in r.tables for column in (t.device, t.host)]
        return not (r.moves or any(r.held.reserve)) and max(map(len, (r.path, *columns))) > self.cfg.take_pages

    def free_gradually(self, *, all: bool = False) -> None:
        """Give up some pages of a request that has ended, or all of all. The last ones go first: what others
        may find is worth least where it ends."""
        n = self.part                          # of its path, and of each of its columns
        while self.returned:
            self._return(self.returned[0], 2 * n)
            if not all:
                return
        while self.freeing:
            r = self.freeing[0]
            keep = max(0, len(r.path) - n)     # the path first: what is pinned has no place in an order of eviction
            self.forget_path(r, keep, used=True)
            rest = False
            for t, up, down in zip(r.tables, self.device, self.host, strict=True):
                named = keep * self.cfg.page_size // t.unit
                for space, column in (up, t.device), (down, t.host):
                    for copy in cut(column, min(n, len(column) - named)) if len(column) > named else ():
                        node = copy.node
                        self.unpin(r, space, copy)
                        if node is not None and not self.cfg.prefix_cache:
                            self.moves.discard_node(node)
                    rest = rest or bool(column)
            if not (rest or r.path):
                self.freeing.popleft()
            if not all:
                return

    def _return(self, back: Returned, n: int) -> None:
        gone = back.path[-n:]
        del back.path[-n:]
        self._unname(gone)
        for copy in back.pins[-n:]:
            unpin(copy)
            if copy.node is not None:
                self.tree.update_evictable(copy.node)
        del back.pins[-n:]
        if not (back.path or back.pins):
            self.returned.remove(back)

    @property
    def gives_up(self) -> bool:
        """Whether requests that have ended, or that waited, still have pages to give up."""
        return bool(self.freeing or self.returned)

    @property
    def hits_most(self) -> int:
        """Pages that a request which waits may still match and pin in this turn: all, if no other has a row."""
        return max(0, self.hits_left) if self.rows.num_held else 1 << 60

    def abandon(self, r: Request) -> None:
        """`r`, which waits, gives up the part of its prefix that it has pinned, in portions: if it begins anew in
        this turn, without a prefix cache too it finds that part again (sim seed 32127)."""
        if (entry := self.entering.pop(r, None)) is not None:
            self._give_back(r, entry.pins + entry.optional)
            if entry.nodes:
                r.hint(entry.nodes)

    def give_back(self, r: Request, pins: list[Copy]) -> None:
        """These pins, and the path of `r`, which was refused: in portions. All at once if no other request has a
        row, or no step is in flight: then nothing waits for it, and no later turn need come for the rest."""
        self._give_back(r, pins)
        while self.returned and (not self.rows.num_held or self.hits_left > self.cfg.hit_pages):
            self._return(self.returned[0], 1 << 60)

    def _give_back(self, r: Request, pins: list[Copy]) -> None:
        path = [] if r.phase is Phase.PAUSED else r.path      # who is paused named it before
        if pins or path:
            self.returned.append(Returned(pins, path))
        if r.phase is not Phase.PAUSED:
            r.hint(path)
            r.path = []

    def lose_pins(self, lost: frozenset[Copy]) -> None:
        """Copies have gone: requests that wait and have pinned one give up what they have."""
        for r in [r for r, e in self.entering.items() if not lost.isdisjoint(e.pins + e.optional)]:
            self.abandon(r)
        for back in [back for back in self.returned if not lost.isdisjoint(back.pins)]:
            self._return(back, len(back.pins) + len(back.path))

    def flush(self) -> None:
        """Hide from lookups what no live request needs; `give_up_flushed` frees it. None of it is retained any more.
        Requests that have ended give up all that they still have now: later it would be as if used after the flush."""
        self.free_gradually(all=True)
        self.tree.retained.flush()
        self.tree.flush()

    def reserve_pages(self, r: Request, place: Place, pages: Sequence[int], times: int = 1) -> None:
        """`r` takes so many pages of each group later, in `place`; -1: now, or never."""
        for g, (n, t) in enumerate(zip(pages, r.tables, strict=True)):
            if n:
                tier = Tier.DRAM if place.on_host and t.hosted else Tier.HBM
                self.arenas[tier].reserve_pages(g, times * n)
                r.held.reserved[g] += times * n

    def book(self, r: Request, tier: Tier, pages: Sequence[int]) -> None:
        """Promise so many pages of each group to what `r` does over several turns."""
        assert r.held.booked is None
        r.held.booked = tier, list(pages)
        for g, n in enumerate(pages):
            self.arenas[tier].reserve_pages(g, n)

    def use_booked(self, r: Request, g: int, n: int) -> None:
        """`r` takes n of these now, or does without."""
        if r.held.booked is not None:
            tier, pages = r.held.booked
            n = min(n, pages[g])
            pages[g] -= n
            self.arenas[tier].reserve_pages(g, -n)

    def unbook(self, r: Request) -> None:
        """What `r` was doing has ended."""
        for g, n in enumerate(r.held.booked[1] if r.held.booked is not None else ()):
            self.use_booked(r, g, n)
        r.held.booked = None

    def capacity_version(self, tier: Tier) -> tuple[int, ...]:
        """As long as this is the same, who was refused pages of `tier` would be again: pages that came to
        others of the same prefix, that came back, that can be had, that were evicted; and flushes."""
        spaces = self._spaces[tier]
        return (sum([space.joined for space in spaces]), self.freed, self.arenas[tier].num_evictable,
                sum([space.evicted for space in spaces]), self.tree.flushed)

    def is_short(self, r: Request, shortage: Shortage) -> bool:
        """Whether `r` cannot get these pages yet. False may be wrong: it has to be tried."""
        seen, found = self.capacity_version(shortage.tier), shortage.found
        if seen[-1] != shortage.capacity_version[-1] or (seen == shortage.capacity_version and self.gives_up):
            return False                       # it may need less without its prefix; or these give up pages
        more = seen[0] - shortage.capacity_version[0]
        if found is not None:
            more += found.lost * len(r.tables)
            last = found.last or self.tree.roots.get(r.arrived.namespace)
            if last is not None and self._next(r, last, found.pages) is not None:
                return False
        return seen == shortage.capacity_version or self.lacks(shortage.tier, shortage.want) > more

    def make_evictable(self, r: Request) -> None:
        """`r` decodes from host pages: those of the tree that it has on the device it reads from now on as
        long as nobody needs them more. It has no others there. Of a long table that goes over turns, in which
        its row is told of the pages on the host, and reads the others on the device: see `soften_some`."""
        if r.longest <= self.cfg.save_pages:
            self._soften(r, 0, r.longest)
        elif r.read_to is None:
            r.read_to = 0
            self.softening.append(r)
        else:
            r.read_to = 0

    def soften_some(self) -> bool:
        """Go on with that as far as this turn allows. Returns whether there is more to do."""
        for r in list(self.softening):
            assert r.read_to is not None
            end = min(r.longest, r.read_to + max(0, self.saves_left))
            self.saves_left -= end - r.read_to
            for g, t in enumerate(r.tables):
                if t.hosted:
                    self.remap(r, g, range(max(r.read_to, t.first), min(end, len(t.host))))
            self._soften(r, r.read_to, end)
            r.read_to = end
            if end == r.longest:
                self.stop_softening(r)
        return bool(self.softening)

    def stop_softening(self, r: Request) -> None:
        if r.read_to is not None:
            r.read_to = None
            self.softening.remove(r)

    def _soften(self, r: Request, begin: int, end: int) -> None:
        for g, t in enumerate(r.tables):
            for i in range(begin, min(end, len(t.device))) if t.hosted else ():
                copy = t.device[i]
                if copy is None or r in copy.readers:
                    continue
                if copy.node is None or not copy.ready:
                    self.drop_entry(r, g, t.device, i)
                    self.remap(r, g, (i,))
                else:
                    read(copy, r)
                    self.tree.update_evictable(copy.node)

    def pin_resident(self, r: Request) -> None:
        """`r` needs what it reads on the device, or is about to give it up."""
        self.stop_softening(r)
        for t in r.tables:
            for copy in t.device if t.hosted else ():
                if copy is not None and r in copy.readers:
                    give_up(copy, r)
                    pin(copy)

    def _evict(self, tier: Tier, want: Sequence[int], short: int) -> int:
        """Evict what serves nobody, else cached pages of a group that is short of them, else
        the oldest of any: as many as slabs, or of a single group pages, are short, and no more than that.
        Of windows with `keep` there are few, and one prompt would take all: then the oldest of any, always."""
        spaces = self._spaces[tier]
        if len(spaces) == 1:
            return self.tree.evict(spaces[0], short)
        for space in spaces:
            if (oldest := self.tree.oldest(space)) and oldest[0] < 0:
                return self.tree.evict(space, 1)
        for space, n in zip(spaces, want, strict=True):
            missing, per = n - space.pool.free - space.pool.in_limbo, space.pool.per_slab
            most = missing - per * max(0, -(-missing // per) - short)
            if missing > 0 and not self.keeps and (gone := self.tree.evict(space, most)):
                return gone
        return self.tree.evict_oldest(spaces, short)

    def evict_redundant(self, want: Sequence[int]) -> None:
        """Give up what nobody misses much, until `want` can be had or there is no more of it: the oldest
        cached pages as long as the host has them too, then what hosted rows read."""
        arena = self.arenas[Tier.HBM]
        for up, down, group in zip(self.device, self.host, self.cfg.groups, strict=True):
            while (group.hosted and arena.short(want, promised=True)
                   and (oldest := self.tree.oldest(up)) is not None and oldest[-1].ready(down)):
                self.tree.evict(up, 1)
        if arena.short(want, promised=True):
            self.evict_read_pages(want)

    def evict_read_pages(self, want: Sequence[int]) -> None:
        """Take back device pages that hosted rows read, until `want` can be had or there are no more."""
        arena = self.arenas[Tier.HBM]
        for space in self.device:
            while arena.short(want, promised=True) and (next := self.tree.oldest(space, read=True)):
                self._unmap(next[-1], space)

    def _unmap(self, node: Node, space: TierGroup) -> None:
        """Who reads this page reads it on the host from now on."""
        for r in node.copy_in(space).readers:
            assert isinstance(r, Request)
            t = r.tables[space.group]
            i = node.depth * self.cfg.page_size // t.unit - 1
            self.drop_entry(r, space.group, t.device, i)
            self.remap(r, space.group, (i,))
        self.tree.forget(node, space)

    def trim_hot_buffers(self, want: Sequence[int], *, drafts: bool = False) -> None:
        """Take back what hot buffers have beyond their least, or, without `drafts`, beyond what these need,
        until `want` can be had or there is no more of it: first from the row that misses least for each page
        that it has, of equal ones the youngest."""
        arena = self.arenas[Tier.HBM]
        while self.grown and (short := arena.short(want, promised=True)):
            rows = [r for r in self.grown if drafts or r.num_hot > r.hot_kept]
            if not rows:
                return
            r = min(rows, key=lambda r: (r.hot.missed / r.num_hot, *[-x for x in r.key]))
            least = r.hot.least if drafts else r.hot_kept
            for g, t in enumerate(r.tables):
                per = t.group.slab_pages if len(r.tables) > 1 else 1
                if (n := min(short * per, len(t.hot) - least)) > 0:
                    for copy in cut(t.hot, n):
                        self.unpin(r, self.device[g], copy)
            if r.num_hot == r.hot.least:
                self.grown.remove(r)
            r.resize()

    def remap(self, r: Request, g: int, entries: Sequence[int]) -> None:
        """What `r` has of these entries has changed: its row has news, if the device knows of it."""
        if r.reported.bound:
            r.reported.remapped[g].update(dict.fromkeys([i for i in entries if i < r.reported.lengths[g]]))
            r.look()

    # ---------------------------------------------------------------- pins
    def drop_entry(self, r: Request, g: int, column: Column, i: int) -> None:
        """Give up one page of a column."""
        if (copy := take(column, i)) is not None:
            self.unpin(r, self.device[g] if column is r.tables[g].device else self.host[g], copy)

    def drop_column(self, r: Request, g: int, column: Column) -> None:
        """Give up all pages of a column."""
        space = self.device[g] if column is r.tables[g].device else self.host[g]
        for copy in take_all(column):
            self.unpin(r, space, copy)

    def return_reserve(self, r: Request) -> None:
        """Host pages that `r` was to use, and did not."""
        for g, pages in enumerate(r.held.reserve):
            self.host[g].pool.release(pages, Fence(StepId(0)))
            r.held.reserve[g] = []

    def unpin(self, r: Request, space: TierGroup, copy: Copy) -> None:
        """`r` gives up one page: it goes back if it was its own, else it may be evicted."""
        give_up(copy, r)
        copy.used = max(copy.used, r.last_issue)
        if copy.node is not None:
            if not copy.pins:
                self.tree.update_evictable(copy.node)
        elif copy in self.moves.detached:
            self.moves.free_detached(copy)
        elif copy.page >= 0:
            unmark_evictable(copy)
            away = any(move in self.moves.to_peer for move in r.moves)
            space.pool.release([copy.page], Fence(copy.used, frozenset(r.moves), away))

    def name_path(self, r: Request, *, stored: bool = False) -> PrefixMatch:
        """The request names what `match` finds, and nothing else any more."""
        old, (r.path, found) = r.path, self.match(r, stored=stored)
        for node in r.path:
            self.tree.ref(node)
        if old:
            self.tree.unref(old)
        return found

    def forget_path(self, r: Request, keep: int = 0, *, used: bool = False) -> None:
        """The request no longer names any sealed page, but for the first `keep`. used: it has run with them."""
        gone = r.path[keep:]
        del r.path[keep:]                      # in place: the collector would look at each new list
        self._unname(gone, r.session if used else None)

    def _unname(self, gone: list[Node], user: Session | None = None) -> None:
        self.tree.unref(gone, user)
        if not self.cfg.prefix_cache:
            for node in reversed(gone):
                self.moves.discard_node(node)

    def covered(self, r: Request, place: Place) -> int:
        """Positions that the tables of `r` have pages for."""
        host = place.on_host
        return min([t.unit * len(t.host if host and t.hosted else t.device) for t in r.tables])

    def is_complete(self, r: Request) -> bool:
        """Whether a parked request still has all that it was parked with."""
        return all(own(t.device, i) or own(t.host, i)
                   for t in r.tables for begin, end in [(t.begin(r.computed), t.end(r.computed))]
                   if len(t.host) < end or None in t.host[begin:end] for i in range(begin, end))
