"""From the host to the device: the hot buffer of a row, and its promotion, while the row goes on; and the loads of
a request that waits, where they are too many for one turn."""
from __future__ import annotations

import itertools
from collections.abc import Iterable

from penstock.core.kv.claims import Entry, Load
from penstock.core.kv.listing import Shortage, Trial
from penstock.core.kv.page_table import add, give_up, is_own, move, pin, put, split, unpin
from penstock.core.kv.pages import Headroom, Pages
from penstock.core.kv.prefix_tree import Copy, Node, mark_evictable
from penstock.core.lifecycle import Place
from penstock.core.plan import HbmPage, Tier
from penstock.core.request import Request


def take_hot_buffer(kv: Pages, r: Request) -> Trial:
    """The hot buffer of a row that was resident: its own last pages, content and all."""
    want = [0] * len(r.tables)
    keep: dict[int, list[int]] = {}
    for g, t in enumerate(r.tables):
        if t.hosted:
            last = range(max(0, len(t.device) - r.hot.least - kv.cfg.look_pages), len(t.device))
            mine = [i for i in last if (c := t.device[i]) is not None and is_own(c) and not c.moves]
            keep[g] = mine[-r.hot.least:]
            want[g] = r.hot.least - len(keep[g])
    room = kv.make_free(Tier.HBM, want)
    if not room:
        return room
    for g, entries in keep.items():
        t = r.tables[g]
        for i in entries:
            copy = move(t.device, i, t.hot)
            t.kept[copy.page] = i
            if copy.node is not None:
                kv.tree.detach(copy.node, kv.device[g])
        add(t.hot, kv.device[g].pool.acquire(want[g]))
        sealed = len(r.path) * kv.cfg.page_size // t.unit
        all_at_once = r.longest <= kv.cfg.save_pages      # else of full pages those that it keeps on the device
        kv.remap(r, g, range(t.first, len(t.host)) if all_at_once else
                 [*entries, *range(sealed, len(t.host))])
    r.resize()
    kv.make_evictable(r)
    return True


def grow_hot_buffer(kv: Pages, r: Request, n: int) -> None:
    """`n` pages more in each hosted group, which are free. Others need them more."""
    if r not in kv.grown:
        kv.grown.append(r)
    for g, t in enumerate(r.tables):
        if t.hosted:
            pool = kv.device[g].pool
            add(t.hot, pool.acquire(n))
            for copy in t.hot[-n:]:
                mark_evictable(copy, pool)
    r.resize()


def reload(kv: Pages, r: Request, headroom: Headroom) -> Trial:
    """Promise device pages for everything that a hosted row has on the host. They are taken over turns, and what is
    sealed is loaded; the open page follows when it is sealed, and pages begun from now on are on both sides. What it
    reads on the device is counted as if it had still to be had: a look at all takes too long."""
    want = [len(t.device) if t.hosted else 0 for t in r.tables]
    wanted = kv.with_headroom(Tier.HBM, want, headroom)
    if kv.lacks(Tier.HBM, wanted):
        return Shortage(Tier.HBM, wanted, kv.gives_up)
    kv.stop_softening(r)
    kv.book(r, Tier.HBM, want)
    r.promotion.reload_at, r.promotion.loading = 0, []
    load_next(kv, r)                           # what cannot be had now is seen in the next turn
    return True


def _reload_some(kv: Pages, r: Request) -> bool:
    """Go on with that as far as this turn allows. False: its pages cannot be had."""
    assert r.promotion.reload_at is not None
    begin, room = r.promotion.reload_at, True
    while room and r.promotion.reload_at < min(r.longest, begin + min(kv.saves_left, kv.cfg.load_pages)):
        for g, t in enumerate(r.tables):
            if t.hosted and not (room := _reload_entry(kv, r, g, r.promotion.reload_at)):
                if not kv.arenas[Tier.HBM].short(kv.one_page(g), promised=True):
                    break                      # it is behind fences
                return False
        r.promotion.reload_at += room
    kv.saves_left -= r.promotion.reload_at - begin
    if r.promotion.reload_at == r.longest:
        r.promotion.reload_at = None
        kv.unbook(r)
    return True


def _reload_entry(kv: Pages, r: Request, g: int, i: int) -> bool:
    """Entry i, which `r` has on the host, gets a device page. False: there is none yet."""
    t, space = r.tables[g], kv.device[g]
    if (copy := t.device[i]) is not None:
        if r in copy.readers:                  # else it came since: pages begun from then on are on both sides
            kv.use_booked(r, g, 1)
            give_up(copy, r)
            pin(copy)
        elif not copy.ready:                   # a load of before it was hosted, which its steps wait for
            r.promotion.loading.append((g, i))
        return True
    node = kv.node(r, t, i)
    found = node.good(space) if node is not None else None
    kv.use_booked(r, g, 1)
    if found is None:
        if not kv.make_free(Tier.HBM, kv.one_page(g)):
            kv.use_booked(r, g, -1)
            return False
        found = Copy(space.pool.acquire(1)[0], ready=False)
    put(t.device, i, found)
    r.promotion.loading.append((g, i))
    return True


def _tell_ready(kv: Pages, r: Request, entries: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The row reads those of its pages that are in place. Returns the others."""
    waiting: list[tuple[int, int]] = []
    for g, i in entries:
        copy = r.tables[g].device[i]
        if copy is not None and copy.ready:
            kv.remap(r, g, (i,))
        else:
            waiting.append((g, i))
    return waiting


def load_next(kv: Pages, r: Request) -> bool:
    """Pages of a row that is being promoted are read once they have come. The next loads, or those that fly,
    are what it waits for. It goes on meanwhile, and what it and others miss comes over the same link: few fly
    at once. False: what it was promised cannot be had."""
    few = len(r.promotion.loading) <= kv.cfg.load_pages
    if few and r.promotion.reload_at is not None and not _reload_some(kv, r):
        return False
    r.promotion.loading = _tell_ready(kv, r, r.promotion.loading)
    if not few and not r.promotion.loading and r.promotion.reload_at is not None:      # no event may come for more
        if not _reload_some(kv, r):
            return False
        r.promotion.loading = _tell_ready(kv, r, r.promotion.loading)
    missing = [c for g, i in r.promotion.loading if (c := r.tables[g].device[i]) is not None]
    flying = [c for c in missing if c.filled_by]
    r.blocked_on = flying[-1:] or missing[-1:]
    sealed = ((g, i, node) for g, i in r.promotion.loading if (node := kv.node(r, r.tables[g], i)) is not None)
    todo = list(itertools.islice(sealed, 0 if flying else kv.cfg.load_pages))
    for g in dict.fromkeys([g for g, _, _ in todo]):
        load(kv, r, g, [(i, node) for group, i, node in todo if group == g])
        r.blocked_on = [c for g, i, _ in todo[-1:] if (c := r.tables[g].device[i]) is not None]
    return True


def stop_reload(kv: Pages, r: Request) -> None:
    """A promotion is given up: it reads the pages that are in place, the others go."""
    kv.make_evictable(r)
    for g, i in _tell_ready(kv, r, r.promotion.loading):
        kv.drop_entry(r, g, r.tables[g].device, i)
        kv.remap(r, g, (i,))


def leave_host(kv: Pages, r: Request) -> None:
    """A row that has come back to the device keeps only the mirrors of what is not sealed."""
    tables = kv.tables()
    for g, (t, left) in enumerate(zip(r.tables, tables, strict=True)):
        n = len(r.path) * kv.cfg.page_size // t.unit if t.hosted else len(t.host)
        if n > kv.cfg.take_pages:
            split(t.host, n, left.host)
        for i in range(min(n, len(t.host)) if not left.host else 0):
            if t.host[i] is not None:
                kv.drop_entry(r, g, t.host, i)
    if any([left.host for left in tables]):
        kv.freeing.append(r.part(tables, []))  # it gives them up in later turns


def load(kv: Pages, r: Request, g: int, entries: list[tuple[int, Node]]) -> None:
    """Fill device pages that a promotion has reserved, of pages that are sealed: all in one Move."""
    t, up, down = r.tables[g], kv.device[g], kv.host[g]
    pairs: list[tuple[Copy, Copy]] = []
    private = False
    for i, node in entries:
        source, target = t.host[i], t.device[i]
        assert source is not None and target is not None
        if target.filled_by:
            continue
        if node.find(up) is None:
            kv.tree.attach(node, up, target)
        private |= node.copy_in(up) is not target or node.find(down) is not source
        target.ready = False
        pairs.append((source, target))
    kv.moves.move_sealed(pairs, down, up, r if private else None)


# ---------------------------------------------------------------- before there is a row
def load_some(kv: Pages, r: Request, entry: Entry, headroom: Headroom) -> bool:
    """Start as many loads of a hit or a resume as this turn allows, if it has more than one turn may start. The tree
    gets those pages on the device as well, so an abandoned trial leaves them cached. False: what is left is
    for `commit`, which also says what is lacking."""
    parts, most = entry.parts, kv.hits_most
    if most > kv.cfg.hit_pages:
        return False                           # it is alone, or no event need come: all at once
    if parts[0].unseen < 0:
        entry.is_long = many = sum([len(w.loads) for w in parts]) > kv.cfg.hit_pages
        entry.loaded = bytearray(many * len(r.path))
        for w in parts:
            w.unseen = many * len(w.loads)
    if not any([w.unseen for w in parts]):
        return entry.is_long and not most      # the row is the next turn's, also of private pages (sim seed 401411)
    if not most:
        return True
    known, want = min(r.num_tokens, r.compute_limit), list[int]()
    for t, w in zip(r.tables, parts, strict=True):
        hosted = t.hosted and entry.place is Place.HOST
        more = r.hot.least if hosted else 1 if t.reach else t.end(known) - t.end(r.computed)
        want.append(len(w.loads) + more)
    if kv.lacks(Tier.HBM, kv.with_headroom(Tier.HBM, want, headroom)):
        return False
    for w in parts:
        while w.late and w.late[0][1].ready:
            w.late.popleft()
    left = -(-most // 3) if sum([len(w.late) for w in parts]) <= kv.cfg.look_pages else 0
    for g, w in enumerate(parts):
        n = min(left, w.unseen)
        if n and kv.make_free(Tier.HBM, [n * k for k in kv.one_page(g)]):
            _load_nodes(kv, g, entry, n)
            kv.hits_left -= 3 * n              # it takes so much longer than to pin them
            left -= n
    kv.hits_left = min(kv.hits_left, 0)        # the rest, or its row, is the next turn's, not the next call's
    return True


def _load_nodes(kv: Pages, g: int, entry: Entry, n: int) -> None:
    """Start the next n of these loads. Those that are not from the tree to the tree are few, and left."""
    up, down, w = kv.device[g], kv.host[g], entry.parts[g]
    some, rest, nodes = w.loads[:n], list[Load](), list[Node]()
    new = [f for f in some if f.node is not None and f.node.find(down) is f.source and f.node.find(up) is None]
    for f, page in zip(new, up.pool.acquire(len(new)), strict=True):
        assert f.node is not None
        f.target.page, f.target.ready = page, False
        kv.tree.attach(f.node, up, f.target)
        entry.loaded[f.node.depth - 1] = 1
        nodes.append(f.node)
    for f in some:
        if f.node is None or (copy := f.node.good(up)) is None:
            rest.append(f)
            continue
        w.up[f.entry], w.pages[f.entry], entry.pins[f.at] = copy, HbmPage(copy.page), copy
        if not copy.ready:
            w.late.append((False, copy))
        unpin(f.source)
        if copy is not f.target:               # it came since
            pin(copy)
            if f.source.node is not None:
                kv.tree.update_evictable(f.source.node)
    kv.moves.move_nodes(nodes, down, up)
    w.loads[:n] = []
    w.loads += rest
    w.unseen -= n
    entry.claim.replace(Tier.HBM, g, n, [f.target for f in rest])
