"""From the device to the host: what pausing and spills copy down, and what failed copies take away."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from operator import add

from penstock.core.kv.claims import Claim
from penstock.core.kv.listing import Shortage, Trial
from penstock.core.kv.page_table import own, put
from penstock.core.kv.pages import Pages
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.kv.sealing import write_through
from penstock.core.lifecycle import Phase, Place
from penstock.core.plan import Tier
from penstock.core.request import Request


def reserve(kv: Pages, r: Request, *, spills: bool) -> Trial:
    """Take the host pages that pausing or a spill needs at most, for what has no host copy; or nothing.
    Of a table that is too long for one look, a page for each full one is promised to it instead, but
    for the first that the host must keep anyway. If the host has not so many, a spill is refused. With
    half of them a pause goes on without a promise; a page that gets none stays on the device."""
    claim, spare = Claim(kv, r), [list[Copy]() for _ in r.tables]
    parts = [(0, 0) if spills and not t.hosted else
             (t.begin(r.computed), len(t.device) if spills else t.end(r.computed)) for t in r.tables]
    full = [max(0, min(end, len(r.path) * kv.cfg.page_size // t.unit) - begin)
            for t, (begin, end) in zip(r.tables, parts, strict=True)]
    unseen = [n if n > kv.cfg.look_pages else 0 for n in full]
    booked = [n and n - _num_kept(kv, r, g, parts[g][0], n) for g, n in enumerate(unseen)]
    beside = [n and end - begin - n for n, (begin, end) in zip(unseen, parts, strict=True)]
    want = list(map(add, booked, beside))
    if any(want) and kv.lacks(Tier.DRAM, want):
        booked = [0] * len(booked)
        if spills or kv.lacks(Tier.DRAM, [-(-n // 2) for n in want]):
            return Shortage(Tier.DRAM, want, kv.gives_up)
    for g, (t, (begin, end), n) in enumerate(zip(r.tables, parts, unseen, strict=True)):
        begin += n
        for i in _perhaps_bare(kv, r, g, begin, end):
            if own(t.host, i) is None and ((node := kv.node(r, t, i)) is None or (
                    kv.host_copy(node, g, own(t.device, i)) is None)):
                spare[g].append(claim.want(Tier.DRAM, g))
    if not (room := claim.commit()):
        return room
    for pages, copies in zip(r.held.reserve, spare, strict=True):
        pages += [copy.page for copy in copies]
    if any(booked):
        kv.book(r, Tier.DRAM, booked)
    if any([n > kv.saves_left for n, long in zip(full, unseen, strict=True) if not long]):
        kv.saves_left = 0                      # a look at so many was enough for this turn
    return True


def _num_kept(kv: Pages, r: Request, g: int, begin: int, n: int) -> int:
    """How many of the first of n entries, all full pages, are pinned on the host: by `r`, or by requests with the
    same first pages."""
    t, host = r.tables[g], kv.host[g]

    def may_go(i: int) -> bool:
        node = kv.node(r, t, begin + i)
        return node is None or (copy := node.find(host)) is None or not copy.pins

    return bisect_left(range(n), True, key=may_go)


def _perhaps_bare(kv: Pages, r: Request, g: int, begin: int, end: int) -> list[int]:
    """The entries from `begin` to `end` of which the host may have nothing that is in place. Most have that,
    and are not looked at any further."""
    host, size, unit = kv.host[g], kv.cfg.page_size, r.tables[g].unit
    nodes = r.path[(begin + 1) * unit // size - 1:end * unit // size:unit // size]
    bare = [i for i, node in enumerate(nodes, begin)
            if (copy := node.find(host)) is None or not copy.ready]
    return [*bare, *range(begin + len(nodes), end)]


def _save_open(kv: Pages, r: Request, g: int) -> None:
    """Start the copy of the page that is not full. It goes first: what is sealed can stay behind, or be found
    again."""
    t = r.tables[g]
    last = t.end(r.computed) - 1
    if last >= 0 and kv.node(r, t, last) is None and own(t.host, last) is None and r.held.reserve[g]:
        put(t.host, last, Copy(r.held.reserve[g].pop()))
        source, target = t.device[last], t.host[last]
        assert source is not None and target is not None
        kv.moves.move_private(r, kv.device[g], source, kv.host[g], target, r.computed - last * t.unit)


def _save_some(kv: Pages, r: Request, g: int, begin: int, end: int) -> None:
    """Of these entries, which have KV: start the copies of all that the host lacks, and pin the rest. Pages
    that the reserve does not cover, or that the host has promised to others, stay on the device."""
    t = r.tables[g]
    bare: list[Node] = []
    for i in _perhaps_bare(kv, r, g, begin, end):
        node, mine = kv.node(r, t, i), own(t.device, i)
        if node is None or own(t.host, i) is not None or (
                kv.take_host_copy(node, g, mine) or node.find(kv.host[g]) is not None):
            continue
        if node.find(kv.device[g]) is None and mine is not None and not mine.partial:
            kv.tree.attach(node, kv.device[g], mine)      # the tree's was evicted: ours serves
        if node.ready(kv.device[g]):
            bare.append(node)
    if bare:
        write_through(kv, g, bare, r)
    space, arena, want = kv.host[g], kv.arenas[Tier.DRAM], [-len(pages) for pages in r.held.reserve]
    for i in range(begin, end):
        node = kv.node(r, t, i)
        if node is not None and own(t.host, i) is None and (copy := node.good(space)):
            counts = copy.evictable_in is not None and arena.num_reserved > 0
            put(t.host, i, copy)
            if counts and own(t.device, i) is not None and arena.lacks(want) and kv.lacks(Tier.DRAM, want):
                kv.drop_entry(r, g, t.host, i)                # it is promised to another


def save(kv: Pages, r: Request) -> bool:
    """`r` is paused, and its steps have retired, or it is to go on from the host: pin host copies or start them,
    page by page, as far as this turn allows. Who is paused lets go of the device. Returns whether that is all."""
    spills = r.place is Place.TO_HOST
    waits = spills and kv.in_flight(r)         # of pages that steps write, it takes those that they write on both sides
    if kv.saves_left <= 0:
        return False
    if r.saving.at is None:
        r.saving.at = 0, 0
        for g in range(len(r.tables) if not spills else 0):
            _save_open(kv, r, g)
    g, at = r.saving.at
    while g < len(r.tables):
        t = r.tables[g]
        begin, end = t.begin(r.computed), t.end(r.computed)
        top = max(len(t.device), end) if t.hosted or not spills else 0
        to = min(top, at + kv.saves_left)
        if waits:
            sealed = len(r.path) * kv.cfg.page_size // t.unit
            to = next((i for i in range(max(at, sealed), to) if own(t.host, i) is None), to)
        if r.held.booked is not None:               # it needs no more than are left
            left = max(0, min(end, len(r.path) * kv.cfg.page_size // t.unit) - to)
            kv.use_booked(r, g, max(0, r.held.booked[1][g] - left))
        if spills and t.hosted and not waits:
            _save_open(kv, r, g)
        _save_some(kv, r, g, max(at, begin), min(to, end))
        r.saving.may_lack |= not spills and min(to, end) > len(t.device)
        for i in range(at, min(to, len(t.device))):
            below = own(t.host, i)
            if spills:
                if i >= end and below is None and r.held.reserve[g]:      # nothing is in them yet
                    put(t.host, i, below := Copy(r.held.reserve[g].pop()))
                if below is None or not below.ready:
                    r.saving.unsaved.append((g, i))
            elif not begin <= i < end or (below is not None and below.ready):
                kv.drop_entry(r, g, t.device, i)
            elif below is not None:
                r.saving.unsaved.append((g, i))
            elif t.device[i] is None:
                r.saving.may_lack = True
        kv.saves_left -= to - at
        r.saving.at = g, to
        if to < top:
            return False
        g, at = g + 1, 0
        r.saving.at = g, at
    kv.return_reserve(r)
    kv.unbook(r)
    r.saving.is_done = True
    if not spills:
        for g, t in enumerate(r.tables):       # the mirror of what its prompt would have left open
            for i in range(t.end(r.computed), len(t.host)):
                kv.drop_entry(r, g, t.host, i)
        let_go_of_device(kv, r)
    return True


def let_go_of_device(kv: Pages, r: Request) -> None:
    """A parked request keeps device pages that have no copy below, and those being copied. If these are many, it
    looks at as many as this turn allows, up to the first that is not in place."""
    left, flying, n = list[tuple[int, int]](), kv.moves.flying, len(r.saving.unsaved)
    if many := n > kv.cfg.save_pages:
        n = max(0, min(n, kv.saves_left))
    for at, (g, i) in enumerate(r.saving.unsaved[:n]):
        t = r.tables[g]
        below = own(t.host, i)
        if below is not None and not below.ready:
            left.append((g, i))
            if below.filled_by in flying:
                flying[below.filled_by].savers[r] = None
            if many:
                n = at + 1
                break
        elif below is not None:
            if (up := own(t.device, i)) is not None and up.node is None:
                kv.abandon(r)                  # it resumes, and has pinned what is its own (sim seed 31767)
            kv.drop_entry(r, g, t.device, i)
    kv.saves_left -= n if many else 0
    r.saving.unsaved[:n] = left
    r.saving.is_copying = bool(r.saving.unsaved)


def may_let_go(r: Request) -> bool:
    """Whether it can go on with that: the first page that it has not seen there is in place, or lost."""
    if not r.saving.is_copying:
        return False
    g, i = r.saving.unsaved[0]
    return (copy := own(r.tables[g].host, i)) is None or copy.ready


def is_copied(r: Request) -> bool:
    """Every page of a row that has saved all is on the host."""
    r.saving.unsaved = [(g, i) for g, i in r.saving.unsaved
                        if (copy := own(r.tables[g].host, i)) is None or not copy.ready]
    return not (r.saving.unsaved or r.moves)


def coming(r: Request) -> list[Copy]:
    """The last page that is on its way to the host, if any is, for a row that has saved all."""
    copies = [copy for g, i in r.saving.unsaved if (copy := own(r.tables[g].host, i)) is not None]
    return copies[-1:]


def lose(kv: Pages, r: Request, lost: Collection[Copy]) -> bool:
    """Copies that nobody may read have gone. Whether `r` counts on one of them; if it only waits,
    it forgets them, and keeps what the device still has."""
    found = False
    for g, t in enumerate(r.tables):
        for column in (t.device, t.host):
            for i, copy in enumerate(column):
                if copy is None or copy not in lost:
                    continue
                found = r.saving.may_lack = True
                if r.row is None or r.place is Place.TO_HOST:
                    kv.drop_entry(r, g, column, i)
                    node = kv.node(r, t, i)
                    if (r.phase is Phase.PAUSED and column is t.host and node is not None
                            and node.ready(kv.device[g])):
                        if own(t.device, i) is None:
                            put(t.device, i, node.copy_in(kv.device[g]))
    return found
