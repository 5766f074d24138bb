"""From the host to the device: the hot buffer of a row, and its promotion, while the row goes on."""
from __future__ import annotations

import itertools

from penstock.core.kv.page_table import add, move, put
from penstock.core.kv.pages import Pages, Trial, resized
from penstock.core.kv.prefix_tree import Copy, Node, lend
from penstock.core.plan import Tier
from penstock.core.request import Request


def take_hot_buffer(kv: Pages, r: Request) -> Trial:
    """The hot buffer of a row that was resident: its own last pages, content and all."""
    want = [0] * len(r.tables)
    keep: dict[int, list[int]] = {}
    for g, t in enumerate(r.tables):
        if t.hosted:
            mine = [i for i, c in enumerate(t.device) if c is not None and c.pins == 1 and not c.moves]
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
                del copy.node.copies[kv.device[g]]
                copy.node = None
        add(t.hot, kv.device[g].pool.acquire(want[g]))
    kv.mark_reclaimable(r)
    return True


def grow_hot_buffer(kv: Pages, r: Request, n: int) -> None:
    """`n` pages more in each hosted group, which are free. They are a loan: others need pages more."""
    if r not in kv.grown:
        kv.grown.append(r)
    for g, t in enumerate(r.tables):
        if t.hosted:
            pool = kv.device[g].pool
            add(t.hot, pool.acquire(n))
            for copy in t.hot[-n:]:
                copy.loans = 1
                lend(copy, pool)
    resized(r)


def reload(kv: Pages, r: Request, headroom: int) -> Trial:
    """Device pages for everything that a hosted row has on the host, and the first loads of what is
    sealed. The open page follows when it is sealed; pages begun from now on are on both sides."""
    kv.end_loans(r)                            # what it has already is no loan any more
    want = [sum(c is None for c in t.device) if t.hosted else 0 for t in r.tables]
    for g, t in enumerate(r.tables):
        for i in range(len(t.device) if want[g] else 0):
            node = kv.node(r, t, i)
            if t.device[i] is None and node is not None and (copy := node.good(kv.device[g])):
                put(t.device, i, copy)
                want[g] -= 1
    room = kv.make_free(Tier.HBM, kv.with_headroom(Tier.HBM, want, headroom), has_pinned=True)
    if not room:
        kv.mark_reclaimable(r)
        return room
    for g, t in enumerate(r.tables):
        if pages := kv.device[g].pool.acquire(want[g])[::-1]:
            for i, copy in enumerate(t.device):
                if copy is None:
                    put(t.device, i, Copy(pages.pop(), ready=False))
    load_next(kv, r)
    return True


def load_next(kv: Pages, r: Request) -> None:
    """The next loads of a row that is being promoted, or those that fly, are what it waits for. It goes on
    meanwhile, and what it and others miss comes over the same link: few fly at once."""
    missing = [c for t in r.tables if t.hosted for c in t.device if c is not None and not c.ready]
    flying = [c for c in missing if c.filled_by]
    r.awaits = flying[-1:] or missing[-1:]
    left = 0 if flying else kv.cfg.load_pages
    for g, t in enumerate(r.tables):
        todo = ((i, node) for i, c in enumerate(t.device if t.hosted else ())
                if c is not None and not c.ready and (node := kv.node(r, t, i)) is not None)
        if entries := list(itertools.islice(todo, left)):
            load(kv, r, g, entries)
            left -= len(entries)
            r.awaits = [copy for copy in missing if copy is t.device[entries[-1][0]]]


def is_reloaded(r: Request) -> bool:
    """Every page of a row that is being promoted is on the device."""
    return not r.moves and all(c is not None and c.ready
                               for t in r.tables if t.hosted for c in t.device)


def stop_reload(kv: Pages, r: Request) -> None:
    """A promotion is given up: pages that are in place stay as a loan, the others go."""
    for g, t in enumerate(r.tables):
        for i, copy in enumerate(t.device if t.hosted else ()):
            if copy is not None and not (copy.ready and i < r.device_len[g] and kv.node(r, t, i)):
                kv.drop_entry(r, g, t.device, i)
                if i < r.device_len[g]:
                    r.unmapped[g].append(i)
    kv.mark_reclaimable(r)


def leave_host(kv: Pages, r: Request) -> None:
    """A row that has come back to the device keeps only the mirrors of what is not sealed."""
    for g, t in enumerate(r.tables):
        for i in range(len(t.host)):
            if t.host[i] is not None and (not t.hosted or kv.node(r, t, i) is not None):
                kv.drop_entry(r, g, t.host, i)


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
        if up not in node.copies:
            kv.tree.attach(node, up, target)
        private |= node.copies[up] is not target or node.copies.get(down) is not source
        target.ready = False
        pairs.append((source, target))
    kv.moves.move_sealed(pairs, down, up, r if private else None)
