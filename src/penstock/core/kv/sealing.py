"""Sealing pages, and writing them through to the host.

A page whose tokens have all retired goes from its request into the prefix tree, where others find it.
"""
from __future__ import annotations

from penstock.core.kv.page_table import PageTable, own, put
from penstock.core.kv.pages import Pages
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree
from penstock.core.kv.promote import load
from penstock.core.lifecycle import Place
from penstock.core.plan import Tier
from penstock.core.request import Request

_TO_HOST, _TO_DEVICE = Place.TO_HOST, Place.TO_DEVICE


def seal(kv: Pages, r: Request) -> None:
    """Move pages whose tokens have all retired from the request into the tree."""
    size, first, path, tree = kv.cfg.page_size, len(r.path), r.path, kv.tree
    known = min(r.retired, r.num_tokens) // size
    forks = _extend(kv, r, known)
    ends = _ends(kv, r, forks) if kv.keeps else forks
    lower, stores = kv.cfg.dram_pages > 0, kv.cfg.disk_pages and kv.cfg.prefix_cache
    on_host, spills, returns = r.place.on_host, r.place is _TO_HOST, r.place is _TO_DEVICE
    store: list[tuple[int, Node]] = []
    for g, t in enumerate(r.tables):
        new: list[Node] = []
        device, host, unit = kv.device[g], kv.host[g], t.unit
        begin = first * size // unit
        if t.group.keep:                       # paths part behind pages that were sealed before
            begin = max(t.first, min([begin, *map(t.begin, forks[:1])]))
        for i in range(begin, known * size // unit):
            node = path[(i + 1) * unit // size - 1]
            up = t.device[i] if i < len(t.device) else None
            down = t.host[i] if i < len(t.host) else None
            # What storage is still to bring has been computed here: a read that hangs keeps it from nobody.
            known_below = False
            if node.find(host) is not None:
                mine = up or down
                mine = None if mine is None or mine.partial else mine
                known_below = kv.take_host_copy(node, g, mine) is not None
            # The copies of a page that was just sealed serve others, where the tree has none.
            stays = not t.group.keep or t.stays(i, ends)
            if up is not None and stays:
                _share(tree, node, device, up)
            if down is not None:
                if stays:
                    _share(tree, node, host, down)
                # What it has on the host alone stays: of a row there, or a hit of one that waits for a row.
                if up is not None and not ((on_host and t.hosted) or spills):
                    kv.drop_entry(r, g, t.host, i)        # it is the tree's now, or the tree has another
                elif up is not None and not up.ready and returns:
                    load(kv, r, g, [(i, node)])
            if not lower:
                continue
            if node.find(host) is None and node.ready(device):
                new.append(node)
            elif stores and not known_below and node.ready(host):
                store.append((g, node))            # written there at the source: no copy will end
        if new:
            write_through(kv, g, new, r)
        if t.reach:
            leave_behind(kv, r, g, t)
    if store:
        kv.moves.store(store)
    if lower and any(kv.late):
        _catch_up(kv)


def _extend(kv: Pages, r: Request, known: int) -> list[int]:
    """Name so many pages. Returns where paths part in front of a new one, ascending, if windows have `keep`."""
    size, path, tree = kv.cfg.page_size, r.path, kv.tree
    forks: list[int] = []                      # in this way: list[...]() takes twenty times as long
    for i in range(len(path), known):
        parent = path[-1] if path else tree.root(r.arrived.namespace)
        node = tree.child(parent, r.page_key(i, size))
        tree.ref(node)
        path.append(node)
        if kv.keeps and parent.num_children > 1:
            forks.append(i * size)
    return forks


def _ends(kv: Pages, r: Request, forks: list[int]) -> list[int]:
    """Where windows with `keep` stay beside its multiples: where paths part, and at a prompt's end. What a peer sends
    of that begins within a page: a decode instance goes on from the next page end."""
    size = kv.cfg.page_size
    last = [-(-r.num_prompt // size) * size] if kv.cfg.role == "decode" else []
    return sorted([(r.num_prompt - 1) // size * size, *last, *forks])


def _share(tree: Tree, node: Node, space: TierGroup, copy: Copy) -> None:
    if (copy.node is None and not copy.partial and node.find(space) is None
            and (copy.ready or copy.filled_by)):
        tree.attach(node, space, copy)


def write_through(kv: Pages, g: int, nodes: list[Node], r: Request) -> None:
    """Copy sealed pages to the host, as far as there is room; reserved pages are used first. The rest is
    copied when the next pages are sealed, if there is room then."""
    host, reserve = kv.host[g], r.held.reserve[g]
    pool, attach = host.pool, kv.tree.attach
    if (n := len(nodes) - len(reserve)) > 1 and (n := n - kv.lacks(Tier.DRAM, [n * k for k in kv.one_page(g)])) > 1:
        kv.make_free(Tier.DRAM, [n * k for k in kv.one_page(g)])     # evicts in one go
    for i, node in enumerate(nodes):
        if not (reserve or pool.free or kv.make_free(Tier.DRAM, kv.one_page(g))):
            kv.late[g] += nodes[i:]
            nodes = nodes[:i]
            break
        attach(node, host, Copy(reserve.pop() if reserve else pool.acquire(1)[0], None, False))
    kv.moves.save(nodes, kv.device[g], host)


def receive_below(kv: Pages, r: Request, g: int, first: int) -> list[Copy]:
    """Host copies of device pages that a peer is to write, whole ones from entry `first` on: it writes both,
    so that none is copied down when it is sealed. As many as there is room for, evicting what is cached."""
    t, pool = r.tables[g], kv.host[g].pool
    end = r.num_prompt // kv.cfg.page_size * kv.cfg.page_size // t.unit
    if t.reach or not kv.cfg.dram_pages or kv.arenas[Tier.DRAM].num_reserved:
        return []
    if end - first > 1:
        kv.make_free(Tier.DRAM, [(end - first) * k for k in kv.one_page(g)])     # evicts in one go
    for i in range(first, end):
        if not (pool.free or kv.make_free(Tier.DRAM, kv.one_page(g))):
            break
        put(t.host, i, Copy(pool.acquire(1)[0]))
    return [copy for copy in t.host[first:end] if copy is not None]


def _catch_up(kv: Pages) -> None:
    """Save pages that became full while the host had no room: without them the host's later pages cannot be found.
    At most `save_pages` of each group; the rest follows when the next page becomes full."""
    for late, device, host in zip(kv.late, kv.device, kv.host, strict=True):
        for _ in range(min(len(late), kv.cfg.save_pages)):
            if not (host.pool.free or kv.make_free(Tier.DRAM, kv.one_page(host.group))):
                break
            node = late.popleft()
            if node.ready(device) and node.find(host) is None and not node.banished:
                kv.tree.attach(node, host, Copy(host.pool.acquire(1)[0], ready=False))
                # At once: room for the next may be made of who has ended, and without a prefix cache of all
                # that was theirs (sim seed 921, draft_tokens=3).
                kv.moves.save([node], device, host)


def reuse(kv: Pages, r: Request) -> None:
    """It begins with pages that it has not computed: worth storing, where not everything is."""
    new = [node for node in r.path if not node.reused]
    for node in new:
        node.reused = True
    if kv.cfg.disk_pages and kv.cfg.prefix_cache:
        kv.moves.store([(g, node) for g, host in enumerate(kv.host) for node in new if node.ready(host)])


def leave_behind(kv: Pages, r: Request, g: int, t: PageTable) -> None:
    """The window has moved on: pages that no step will read again are given up."""
    begin = min(t.begin(r.retired), len(t.device))
    if begin <= t.first:
        return
    for i in range(t.first, begin):
        for column in (t.device, t.host):
            if own(column, i) is not None:
                kv.drop_entry(r, g, column, i)
    t.first = begin
