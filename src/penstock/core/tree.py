"""The prefix tree: one node per sealed page, any number of copies, one per tier.

Running, paused and cached requests share the same nodes. A node stays while it has a copy, a child
or a request that names it. Knows nothing of phases or plans; evicts what nobody pins, least
recently used first, deepest first, and never the last copy of a page that a request names.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.core.ledger import Fence, Pool
from penstock.core.plan import StepId, Tier

IN_USE = 1 << 62     # `last_used` of a page that a live request names: later than any clock


@dataclass(slots=True, eq=False)
class Copy:
    """One page in one tier. A private copy (`node` is None) belongs to a single request."""

    page: int
    node: Node | None = None
    ready: bool = True             # False while the Move that fills it is flying
    pins: int = 0                  # requests that need it where it is
    moves: int = 0                 # flying Moves that read or write it
    bad: bool = False              # reading it has failed: goes when its last Move has landed
    used: StepId = StepId(0)       # last issued step that may touch it


@dataclass(slots=True, eq=False)
class Node:
    """A sealed page: its tokens, its place, its copies. `refs` requests have it in their path."""

    key: Sequence[int]
    parent: Node | None            # None: a root, whose key is its namespace
    depth: int
    children: dict[Sequence[int], Node] = field(default_factory=dict)
    copies: dict[Tier, Copy] = field(default_factory=dict)
    refs: int = 0
    last_used: int = 0             # the tree's clock when the last request left it, or IN_USE

    def ready(self, tier: Tier) -> bool:
        copy = self.copies.get(tier)
        return copy is not None and copy.ready


class Tree:
    """All nodes, and the eviction order of each tier."""

    def __init__(self, pools: dict[Tier, Pool]) -> None:
        self.pools = pools
        self.roots: dict[int, Node] = {}
        self.evicted: dict[Tier, int] = {tier: 0 for tier in pools}
        self._clock = 0
        # Heaps of (last_used, -depth, entry, node); an entry counts only if the node still qualifies.
        self._order: dict[Tier, list[tuple[int, int, int, Node]]] = {tier: [] for tier in pools}
        self._entry = 0

    # ---------------------------------------------------------------- lookup and growth
    def root(self, namespace: int) -> Node:
        if namespace not in self.roots:
            self.roots[namespace] = Node((namespace,), None, 0)
        return self.roots[namespace]

    def match(self, namespace: int, tokens: Sequence[int], page_size: int, *,
              stored: bool = False) -> list[Node]:
        """The longest usable path of whole pages that leaves at least one token to compute; with
        `stored`, storage counts too."""
        path: list[Node] = []
        node = self.roots.get(namespace)
        while node is not None and (len(path) + 1) * page_size < len(tokens):
            at = len(path) * page_size
            node = node.children.get(tuple(tokens[at:at + page_size]))
            if node is None or not (self.usable(node) or (stored and self.fetchable(node))):
                break
            path.append(node)
        return path

    def usable(self, node: Node) -> bool:
        """Whether a request can get this page on the device: it is there, coming, or on the host."""
        return Tier.HBM in node.copies or node.ready(Tier.DRAM)

    def fetchable(self, node: Node) -> bool:
        """Whether storage has it, or it is on its way from there."""
        return Tier.DRAM in node.copies or node.ready(Tier.DISK)

    def child(self, parent: Node, key: Sequence[int]) -> Node:
        """The node of a page that was just sealed under `parent`, new or known."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, parent, parent.depth + 1)
        return node

    def attach(self, node: Node, tier: Tier, copy: Copy) -> None:
        assert tier not in node.copies and copy.node is None
        node.copies[tier], copy.node = copy, node

    def use(self, node: Node) -> None:
        """A request takes this node into its path. What is in use is evicted last, deepest first:
        a prefix without its end still serves, an end without its prefix does not."""
        node.refs += 1
        if node.last_used != IN_USE:
            node.last_used = IN_USE
            self.settle(node)          # its place in the eviction orders is another now

    def leave(self, path: Sequence[Node]) -> None:
        """A request gives up the end of its path. All of it was used now: a page is never older than
        the pages that build on it, so least recently used, deepest first, takes leaves first."""
        self._clock += 1
        for node in reversed(path):
            node.refs -= 1
            assert node.refs >= 0
            if not node.refs:
                node.last_used = self._clock
            self.settle(node)

    # ---------------------------------------------------------------- eviction
    def evictable(self, node: Node, tier: Tier) -> bool:
        copy = node.copies.get(tier)
        if copy is None or not copy.ready or copy.pins or copy.moves:
            return False
        elsewhere = any(c.ready for t, c in node.copies.items() if t is not tier)
        return elsewhere or not node.refs

    def settle(self, node: Node) -> None:
        """Look at a node again after anything about it changed: enter it into the eviction orders,
        or remove it if nothing is left of it."""
        for tier in node.copies:
            if self.evictable(node, tier):
                order = self._order[tier]
                if len(order) > 4 * self.pools[tier].capacity + 64:
                    self._compact(order, tier)
                self._entry += 1
                heapq.heappush(order, (node.last_used, -node.depth, self._entry, node))
        if node.copies or node.children or node.refs:
            return
        if node.parent is None:
            self.roots.pop(node.key[0], None)
        elif node.parent.children.get(node.key) is node:
            del node.parent.children[node.key]
            self.settle(node.parent)

    def evict(self, tier: Tier, n: int) -> int:
        """Give up to n copies back to the tier's pool, oldest first. Returns how many; they are free
        when the fence of their last use has passed."""
        gone, order = 0, self._order[tier]
        while gone < n and order:
            last_used, _, _, node = heapq.heappop(order)
            if last_used == node.last_used and self.evictable(node, tier):
                self.forget(node, tier)
                self.evicted[tier] += 1
                gone += 1
        return gone

    def _compact(self, order: list[tuple[int, int, int, Node]], tier: Tier) -> None:
        """Drop the entries that no longer say the truth, and repeats."""
        live = {id(e[3]): e for e in order if e[0] == e[3].last_used and self.evictable(e[3], tier)}
        order[:] = live.values()
        heapq.heapify(order)

    def forget(self, node: Node, tier: Tier) -> None:
        """Remove a copy that no Move touches, and release its page."""
        copy = node.copies.pop(tier)
        assert not copy.moves
        copy.node = None
        self.pools[tier].release([copy.page], Fence(copy.used))
        self.settle(node)

    # ---------------------------------------------------------------- for checks and metrics
    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())
