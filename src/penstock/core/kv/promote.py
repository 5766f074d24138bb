"""From the host to the device: the hot buffer of a row, and its promotion, while the row goes on."""
from __future__ import annotations

import itertools
from collections.abc import Iterable

from penstock.core.kv.claims import Claim
from penstock.core.kv.page_table import add, enter_pinned, is_own, move, put, read, split
from penstock.core.kv.pages import Headroom, Pages, Trial
from penstock.core.kv.prefix_tree import Copy, Node, mark_evictable
from penstock.core.plan import Tier
from penstock.core.request import Request


def take_hot_buffer(kv: Pages, r: Request) -> Trial:
    """The hot buffer of a row that was resident: its own last pages, content and all."""
    want = [0] * len(r.tables)
    keep: dict[int, list[int]] = {}
    for g, t in enumerate(r.tables):
        if t.hosted:
            mine = [i for i, c in enumerate(t.device) if c is not None and is_own(c) and not c.moves]
            keep[g] = mine[-r.hot_units:]
            want[g] = r.hot_units - len(keep[g])
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
        kv.remap(r, g, range(t.first, len(t.host)))
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
    """Device pages for everything that a hosted row has on the host, and the first loads of what is
    sealed. The open page follows when it is sealed; pages begun from now on are on both sides."""
    adopt(kv, r)
    claim, lacks = Claim(kv, r, keep=True), list[tuple[int, int, Copy]]()
    for g, t in enumerate(r.tables):
        for i, copy in enumerate(t.device if t.hosted else ()):
            if copy is None:
                node = kv.node(r, t, i)
                found = node.good(kv.device[g]) if node is not None else None
                lacks.append((g, i, claim.pin(found) if found is not None else claim.want(Tier.HBM, g)))
    if not (room := claim.commit(headroom)):
        return room
    for g, i, copy in lacks:
        enter_pinned(r.tables[g].device, i, copy)
        if copy.node is None:
            copy.ready = False
    r.loading = [(g, i) for g, i, _ in lacks]
    load_next(kv, r)
    return True


def adopt(kv: Pages, r: Request) -> None:
    """A hosted row reads what the tree has on the device of its pages again. Pages that are still being
    loaded are left out: the row reads them on the host, and a load that fails is not its loss."""
    for g, t in enumerate(r.tables):
        for i, mine in enumerate(t.device if t.hosted else ()):
            node = kv.node(r, t, i) if mine is None else None
            if node is not None and (copy := node.good(kv.device[g])) and copy.ready:
                put(t.device, i, copy)
                read(copy, r)
                kv.tree.update_evictable(node)
                kv.remap(r, g, (i,))


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


def load_next(kv: Pages, r: Request) -> None:
    """Pages of a row that is being promoted are read once they have come. The next loads, or those that fly,
    are what it waits for. It goes on meanwhile, and what it and others miss comes over the same link: few fly
    at once."""
    r.loading = _tell_ready(kv, r, r.loading)
    missing = [c for g, i in r.loading if (c := r.tables[g].device[i]) is not None]
    flying = [c for c in missing if c.filled_by]
    r.blocked_on = flying[-1:] or missing[-1:]
    sealed = ((g, i, node) for g, i in r.loading if (node := kv.node(r, r.tables[g], i)) is not None)
    todo = list(itertools.islice(sealed, 0 if flying else kv.cfg.load_pages))
    for g in dict.fromkeys([g for g, _, _ in todo]):
        load(kv, r, g, [(i, node) for group, i, node in todo if group == g])
        r.blocked_on = [c for g, i, _ in todo[-1:] if (c := r.tables[g].device[i]) is not None]


def stop_reload(kv: Pages, r: Request) -> None:
    """A promotion is given up: it reads the pages that are in place, the others go."""
    kv.make_evictable(r)
    _tell_ready(kv, r, r.loading)


def leave_host(kv: Pages, r: Request) -> None:
    """A row that has come back to the device keeps only the mirrors of what is not sealed."""
    tables = kv.tables()
    for g, (t, left) in enumerate(zip(r.tables, tables, strict=True)):
        n = len(r.path) * kv.cfg.page_size // t.unit if t.hosted else len(t.host)
        if n > kv.cfg.take_pages:
            split(t.host, n, left.host)
        for i in range(min(n, len(t.host))):
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
