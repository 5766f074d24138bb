"""Which pages of a prompt storage has that this process does not know of: what to ask for, and the answer.

Pages are named by what they hold (`prefix_tree.key_under`), so whoever has stored one, this engine has it.
Takes no host page: what the answer says is read later, by `prefetch`.
"""
from __future__ import annotations

from penstock.core.kv.pages import Pages
from penstock.core.kv.prefix_tree import Copy, Node, key_under
from penstock.core.request import Request

PAGES_MAX = 1024          # asked for at once: a page's key takes 1 us


def keys(kv: Pages, r: Request) -> tuple[bytes, ...]:
    """Keys of the next pages behind those of `r` that can be had; the last token is always computed."""
    path, _ = kv.match(r, stored=True)
    if len(path) <= r.asked_from:
        return ()                              # the last answer was of no use: it could not be remembered
    size, r.asked_from = kv.cfg.page_size, len(path)
    end = min((r.num_tokens - 1) // size, r.cached_max // size, len(path) + PAGES_MAX, kv.cfg.disk_pages)
    at = kv.tree.digest(path[-1]) if path else kv.tree.root_digest(r.arrived.namespace)
    found = []
    for i in range(len(path), end):
        found.append(at := key_under(at, r.page_key(i, size)))
    return tuple(found)


def listed(kv: Pages, r: Request, present: bytes) -> bool:
    """Remember what storage has of the pages that it was asked for. Returns whether it has all of them: then
    it may have more."""
    size, tree = kv.cfg.page_size, kv.tree
    node, path = tree.root(r.arrived.namespace), list[Node]()
    for i in range(r.asked_from + len(r.asked)):
        new = i - r.asked_from
        if new >= 0 and not (new < len(present) and present[new]):
            break
        below = node.children.get(r.page_key(i, size))
        if below is None and new < 0:
            break                              # it has been evicted since: nobody could reach the others
        node = below or tree.child(node, r.page_key(i, size))
        tree.ref(node)
        path.append(node)
        if new >= 0:
            node.digest = r.asked[new]
            if not _remember(kv, node, present[new]):
                break
    complete = len(path) == r.asked_from + len(r.asked)
    tree.unref(path)
    if not path:
        tree.update_evictable(node)            # a root that nothing builds on
    return complete


def _remember(kv: Pages, node: Node, groups: int) -> bool:
    """False: there is no slot to be had."""
    for g, space in enumerate(kv.disk):
        if groups >> g & 1 and space not in node.copies:
            if not kv.moves.slot(g):
                return False
            kv.tree.attach(node, space, Copy(space.pool.acquire(1)[0]))
    return True
