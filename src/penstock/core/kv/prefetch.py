"""Fetching a known prefix from storage into host pages, before its request gets a row."""
from __future__ import annotations

from collections.abc import Iterator

from penstock.core.kv.claims import Claim
from penstock.core.kv.listing import Trial
from penstock.core.kv.page_table import Column, enter_pinned, own, put
from penstock.core.kv.pages import Pages
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.plan import Tier
from penstock.core.request import Request


def _wanted(kv: Pages, r: Request, path: list[Node]) -> Iterator[tuple[int, int, Node]]:
    """Group, entry and node of every page that a hit of `path` needs."""
    size = kv.cfg.page_size
    for g, t in enumerate(r.tables):
        end = len(path) * size
        for i in range(t.begin(end), t.end(end)):
            yield g, i, path[(i + 1) * t.unit // size - 1]


def stored(kv: Pages, r: Request) -> int:
    """Pages of the known prefix that only storage has."""
    path, _ = kv.match(r, stored=True)
    return len({id(node) for g, _, node in _wanted(kv, r, path) if not kv.is_reachable(node, g)})


def reserve(kv: Pages, r: Request) -> Trial:
    """Take the path as far as storage knows it, pin what the host has of it, and start reading the
    rest; or, without room in the host, change nothing."""
    kv.name_path(r, stored=True)
    claim, held = Claim(kv, r, path=True), list[tuple[Column, int, Copy]]()
    want, nodes = [0] * len(r.tables), set[int]()
    for g, i, node in _wanted(kv, r, r.path):
        if copy := node.good(kv.host[g]):
            held.append((r.tables[g].host, i, claim.pin(copy)))
        elif not node.good(kv.device[g]):
            want[g] += 1
            nodes.add(id(node))
    if not (room := claim.commit(beside=want)):
        return room
    for column, i, copy in held:
        enter_pinned(column, i, copy)
    r.storage.fetched = len(nodes)
    read(kv, r)
    return True


def read(kv: Pages, r: Request) -> None:
    """Start reading what is missing, in order, as much as storage may hold of the host at once. The rest
    is asked for when this has come; what comes after a page that cannot be had is not."""
    todo: list[list[Node]] = [[] for _ in r.tables]
    left, r.storage.has_more, r.storage.next_missing = kv.moves.reads_left, False, None
    for g, i, node in _wanted(kv, r, r.path):
        if own(r.tables[g].host, i) is not None:
            continue
        copy = node.good(kv.host[g])
        if copy is None:
            if node.good(kv.device[g]):
                continue
            r.storage.has_more = not left
            if (not left or node.find(kv.host[g]) is not None or not node.ready(kv.disk[g])
                    or not kv.make_free(Tier.DRAM, kv.one_page(g))):
                break
            copy = Copy(kv.host[g].pool.acquire(1)[0], ready=False)
            kv.tree.attach(node, kv.host[g], copy)
            todo[g].append(node)
            left -= 1
        put(r.tables[g].host, i, copy)
    for g, nodes in enumerate(todo):
        kv.moves.move_nodes(nodes, kv.disk[g], kv.host[g])


def is_fetched(kv: Pages, r: Request) -> bool:
    """Nothing that this request waits for is on its way any more; some of it may have failed. Its path
    may be long: it is walked anew when the page that was missing has come, and not again after the end."""
    if r.storage.next_missing is None or not all([_is_coming(kv, g, node) for g, node in r.storage.next_missing]):
        r.storage.next_missing = next(([(g, node)] for g, _, node in _wanted(kv, r, r.path)
                         if _is_coming(kv, g, node)), [])
    return not r.storage.next_missing


def _is_coming(kv: Pages, g: int, node: Node) -> bool:
    """Whether a page is on its way to the host, and not on the device."""
    copy = node.good(kv.host[g])
    return copy is not None and not copy.ready and node.good(kv.device[g]) is None
