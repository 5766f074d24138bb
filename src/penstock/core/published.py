"""Which cached pages others know of: KV events, for routers that send a prompt where its prefix is.

`Published.news` compares the pages that have changed with what was said of them, once, at the end of each `advance`.
A page is published in a tier when a prompt finds it there: its copies in all groups that keep every token are there or
in a faster tier, and so is the page before it. Readers lose a page whose parent they do not know, so what is published
is closed under that. A turn looks at so many pages; where more have lost the page before them, readers forget all and
are told the rest again, over several turns. Knows no wire format and no socket.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from penstock.core.kv.pages import Pages
from penstock.core.kv.prefix_tree import Node
from penstock.core.plan import Cached, StoredPages, Tier
from penstock.core.settings import CoreConfig

TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)        # fastest first: bit t of a mask is TIERS[t]
FASTEST = (3, 0, 1, 0, 2, 0, 1, 0)              # of each mask; 3: in no tier


class Published:
    """`Node.published` is the number of the last `cleared` before it, the namespace, and a mask of tiers. Most pages
    have that tuple in common with the page before them."""

    def __init__(self, cfg: CoreConfig, kv: Pages) -> None:
        self._tree, self._num, self._size = kv.tree, cfg.published_tiers, cfg.page_size
        self._most = cfg.published_turn
        whole = [g for g, group in enumerate(cfg.groups) if not group.reach]
        self._spaces = [[spaces[g] for g in whole] for spaces in (kv.device, kv.host, kv.disk)[:self._num]]
        self._epoch = 0
        self._before: dict[Node, int] = {}     # of this turn: masks that have changed
        self.late = deque[Node]()              # may be published now, because the page before them is
        if self._num:
            self._tree.touched = {}
            self.again()

    def again(self) -> None:
        """Clear all, and publish what there is."""
        self._tree.was_flushed = True

    def mask(self, node: Node) -> int:
        """The tiers in which `node` is published."""
        said = node.published
        return said[2] if said is not None and said[0] == self._epoch else 0

    def news(self, goes_on: bool = True) -> Cached | None:
        """What has changed since the last call; of what can be found at last, some may follow later. goes_on: whether
        some of that follows now."""
        tree = self._tree
        if tree.touched is None or not (tree.touched or tree.was_flushed or (self.late and goes_on)):
            return None
        if not (cleared := tree.was_flushed):
            # A page is looked at after the page before it, so that it changes once.
            left = self._most
            for node in sorted(tree.touched, key=_depth):
                left = self._look(node, left)
                if left < 0:
                    cleared = True
                    break
        if cleared:
            self._clear()
        tree.touched.clear()
        for _ in range(self._most if goes_on else 0):
            if not self.late:
                break
            self._look(self.late.popleft(), self._most)
        changed, self._before = self._before, {}
        lost = [(node, old & ~self.mask(node)) for node, old in changed.items()]
        new = [(node, self.mask(node) & ~old) for node, old in changed.items()]
        # A page that was evicted and computed anew in one turn is two nodes with one key: neither lost nor new.
        gone = {self._hash(node): mask for node, mask in lost if mask}
        if same := {key: mask & gone[key] for node, mask in new if mask and (key := self._hash(node)) in gone}:
            lost, new = ([(node, mask and mask & ~same.get(self._hash(node), 0)) for node, mask in pairs]
                         for pairs in (lost, new))
        cached = Cached(cleared, tuple(self._removed(lost)), tuple(self._stored(new)))
        return cached if cached.cleared or cached.removed or cached.stored else None

    def _clear(self) -> None:
        """From now nothing is published. Hidden pages may stay in the tree, and lookups find those still in use."""
        self._tree.was_flushed, self._epoch = False, self._epoch + 1
        self._before.clear()
        self.late = deque(node for root in self._tree.roots.values() for node in root.children.values())

    # ---------------------------------------------------------------- the rule
    def _found(self, node: Node) -> int:
        """The tiers in which a prompt finds this page, going on from the page before it."""
        parent, key, flushed = node.parent, len(node.key), self._tree.flushed
        # A page of sparse decode has more numbers than tokens: it is for no prompt.
        plain = key in (4 * self._size, 8 * self._size + 1)
        if parent is None or node.banished or not (plain and node.serves) or node.last_used <= flushed:
            return 0
        first = 0 if parent.parent is None else FASTEST[self.mask(parent)]
        found, there = 0, [False] * len(self._spaces[0])      # in this tier or a faster one, by group
        for t, spaces in enumerate(self._spaces):
            ready = [node.ready(space) for space in spaces]
            there = [a or b for a, b in zip(there, ready, strict=True)]
            found |= (t >= first and any(ready) and all(there)) << t
        return found

    def _look(self, node: Node, left: int) -> int:
        """At this page; and if it is lost to those that build on it, at these. Returns how many more of those may be
        looked at of `left`, below 0 if that was not all."""
        stack = [node]
        while stack:
            node = stack.pop()
            old, new = self.mask(node), self._found(node)
            if old == new:
                continue
            self._before.setdefault(node, old)
            node.published = self._said(node, new)
            if FASTEST[new] > FASTEST[old]:
                left -= len(node.children)
                if left < 0:
                    break
                stack += node.children.values()
            elif FASTEST[new] < FASTEST[old]:
                self.late += node.children.values()
        return left

    def _said(self, node: Node, mask: int) -> tuple[int, int, int] | None:
        parent = node.parent
        if not mask or parent is None:
            return None
        before = parent.published
        if before is None or parent.parent is None:
            return self._epoch, parent.key[0], mask
        return before if before[2] == mask else (self._epoch, before[1], mask)

    # ---------------------------------------------------------------- in words
    def _hash(self, node: Node) -> int:
        return int.from_bytes(self._tree.digest(node)[:8]) >> 1

    def _removed(self, lost: Iterable[tuple[Node, int]]) -> Iterator[tuple[Tier, tuple[int, ...]]]:
        """Slowest tier first, deepest page first."""
        nodes = sorted([pair for pair in lost if pair[1]], key=lambda pair: -pair[0].depth)
        for t in reversed(range(self._num)):
            if hashes := tuple([self._hash(node) for node, mask in nodes if mask >> t & 1]):
                yield TIERS[t], hashes

    def _stored(self, new: Iterable[tuple[Node, int]]) -> Iterator[StoredPages]:
        """Fastest tier first, chains of pages from their first."""
        nodes = sorted([pair for pair in new if pair[1]], key=lambda pair: pair[0].depth)
        for t in range(self._num):
            ends: dict[Node | None, list[Node]] = {}          # by the last of each chain
            for node, mask in nodes:
                if mask >> t & 1:
                    chain = ends.pop(node.parent, [])
                    chain.append(node)
                    ends[node] = chain
            for chain in sorted(ends.values(), key=lambda chain: chain[0].depth):
                first, said = chain[0].parent, chain[0].published
                assert first is not None and said is not None
                yield StoredPages(TIERS[t], said[1], None if first.parent is None else self._hash(first),
                                  tuple(map(self._hash, chain)), tuple([bytes(node.key) for node in chain]))


def _depth(node: Node) -> int:
    return node.depth
