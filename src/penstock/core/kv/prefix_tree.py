"""The prefix tree: one node per sealed page, any number of copies of it.

Running, paused and cached requests share the nodes. A node stays while it has a copy, a child or a request that names
it. A copy lives in a `TierGroup`: one tier of one cache group. Knows nothing of phases or plans. Evicts unpinned pages,
least recently used first, deepest first; before all others states that only lead to another, and pages without a later
state, at which no prompt continues. Pages that are only read come last: those of the last request to be served first.
"""
from __future__ import annotations

import hashlib
import itertools
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from penstock.core.kv.pool import Fence, Pool
from penstock.core.plan import Group, MoveId, StepId, Tier
from penstock.core.policy.sessions import Retained, Session, claim

IN_USE = 1 << 62     # `last_used` of a page that a live request names: later than any clock


class Reader(Protocol):
    """A request that reads a page while no other needs it, and has it elsewhere too."""

    @property
    def key(self) -> tuple[int, int]: ...      # order of service: smaller first


@dataclass(slots=True, eq=False)
class TierGroup:
    """Pages of one cache group in one tier: whose ids a page number belongs to."""

    tier: Tier
    group: Group
    pool: Pool
    states: bool = False           # of snapshots: who goes on from one needs none before it
    evicted: int = 0
    joined: int = 0                # copies that came to pages which the tree had elsewhere: less is missing
    # Copies that can be had, by `Copy.number`, next first: what nobody reads, and what is read. See `place`.
    order: SortedKeyList = field(default_factory=lambda: SortedKeyList(key=attrgetter("number")))
    read: SortedKeyList = field(default_factory=lambda: SortedKeyList(key=attrgetter("number")))

    def __repr__(self) -> str:
        return self.pool.name


def _flag(bit: int) -> Any:
    return property(lambda c: c.flags & bit > 0, lambda c, on: setattr(c, "flags", c.flags & ~bit | bit * on))


@dataclass(slots=True, eq=False)
class Copy:
    """One page in one space. A private copy (`node` is None) belongs to a single request."""

    page: int
    node: Node | None = None
    ready: bool = True             # False while the Move that fills it is flying
    pins: int = 0                  # requests that need it where it is
    readers: tuple[Reader, ...] = ()   # others that have it on the host too, and can do without it here
    evictable_in: Pool | None = None      # it is counted there as evictable, see `Tree.update_evictable`
    order: SortedKeyList | None = None     # of eviction, which has its one entry,
    number: int = -1               # and the number of that, or of the last one
    moves: int = 0                 # flying Moves that read or write it
    flags: int = 0                 # bits, because a pool may have millions of these: see below
    used: StepId = StepId(0)       # last issued step that may touch it
    filled_by: MoveId = MoveId(0)    # the Move that fills it, while it is not ready
    space: TierGroup | None = None   # of a node's copy: where it is,
    next: Copy | None = None         # and the node's copy in the next space
    partial = _flag(1)             # holds only what its owner's window needs: never the tree's
    bad = _flag(2)                 # reading it has failed: goes when its last Move has landed
    inner = _flag(4)               # a state whose node leads to another state, and nowhere else


@dataclass(slots=True, eq=False)
class Node:
    """A sealed page: its tokens, its place, its copies. `refs` requests have it in their path.
    Nearly all nodes have one child at most, and one to three copies: a dict for either would take 232 bytes."""
    key: Sequence[int]             # see `pack`; of a root its namespace
    parent: Node | None            # None: a root, whose key is its namespace
    depth: int
    only: Node | None = None       # its child, if it has one,
    more: dict[Sequence[int], Node] | None = None  # or its children
    first: Copy | None = None      # its copies, each with the `next`, in the order in which they came
    refs: int = 0
    last_used: int = 0             # the tree's clock when the last request left it, or IN_USE
    banished: bool = False         # damaged, or computed from what is: nobody finds it
    reused: bool = False           # a request has begun with it
    serves: bool = True            # of models with states: there is one here or behind it
    digest: bytes = b""            # its key in storage, when somebody has asked for it
    published: tuple[int, int, int] | None = None      # see `core.published`
    session: Session | None = None  # whose requests alone have used it; None: none has

    def find(self, space: TierGroup) -> Copy | None:
        """Its copy in this space, if there is one."""
        copy = self.first
        while copy is not None and copy.space is not space:
            copy = copy.next
        return copy

    def copy_in(self, space: TierGroup) -> Copy:
        """The same of a space that it must have a copy in."""
        copy = self.find(space)
        assert copy is not None, f"{space}: no copy of this page"
        return copy

    @property
    def copies(self) -> dict[TierGroup, Copy]:
        """By space; a new dict: see `find`."""
        found, copy = dict[TierGroup, Copy](), self.first
        while copy is not None:
            assert copy.space is not None
            found[copy.space], copy = copy, copy.next
        return found

    @property
    def children(self) -> Mapping[Sequence[int], Node]:
        """By key, oldest first; a new dict most of the time: see `child` and `num_children`."""
        return self.more or ({} if self.only is None else {self.only.key: self.only})

    @property
    def num_children(self) -> int:
        return len(self.more) if self.more else int(self.only is not None)

    def child(self, key: Sequence[int]) -> Node | None:
        only = self.only if self.only is not None and self.only.key == key else None
        return self.more.get(key) if self.more else only

    def add_child(self, node: Node) -> None:
        if self.more:
            self.more[node.key] = node
        elif self.only is not None:
            self.more, self.only = {self.only.key: self.only, node.key: node}, None
        else:
            self.only = node

    def drop_child(self, node: Node) -> None:
        if self.more:
            del self.more[node.key]
            if len(self.more) == 1:
                [self.only], self.more = self.more.values(), None
        else:
            assert self.only is node
            self.only = None

    def ready(self, space: TierGroup) -> bool:
        return (copy := self.find(space)) is not None and copy.ready

    def good(self, space: TierGroup) -> Copy | None:
        """The copy that is there or on its way, unless reading it has failed."""
        copy = self.find(space)
        return None if copy is None or copy.bad else copy


DEPTH_BITS = 32      # bits of a number of an eviction order for the depth,
ENTRY_BITS = 48      # and for the count of entries, which decides between pages of the same place


def place(node: Node, copy: Copy, late: int) -> int:
    """The place of a page in the eviction order of its space, smallest first. Unread pages: by last use, then deepest
    first, but inner states and pages that serve no prompt before all (negative). Read ones: by first reader, depth."""
    if not copy.readers:
        first = copy.inner or not (node.serves or node.refs)
        return ((node.last_used + late - 2 * IN_USE * first + 1) << DEPTH_BITS) - 1 - node.depth
    priority, seq = min([reader.key for reader in copy.readers])
    return (((-priority << 64) - seq) << DEPTH_BITS) + node.depth


def mark_evictable(copy: Copy, pool: Pool) -> None:
    copy.evictable_in = pool                   # it goes to the next request that needs a page
    pool.mark_evictable(copy.page)


def unmark_evictable(copy: Copy) -> None:
    """It cannot be had, or is about to be given up: it leaves its eviction order."""
    if (pool := copy.evictable_in) is not None:
        copy.evictable_in = None
        pool.unmark_evictable(copy.page)
        if copy.order is not None:
            copy.order.remove(copy)
            copy.order = None


def pack(numbers: Sequence[int]) -> bytes:
    """The key of a page among its siblings: its tokens, and what else distinguishes it. No hash, so no two pages are
    taken for one. A number has 4 bytes; if one of them is too large for that all have 8, and a last byte says so."""
    try:
        return array("i", numbers).tobytes()
    except OverflowError:
        return array("q", numbers).tobytes() + b"q"


def unpack(key: Sequence[int]) -> Sequence[int]:
    return key if not isinstance(key, bytes) else array("q", key[:-1]) if len(key) % 4 else array("i", key)


def key_under(parent: bytes, key: Sequence[int]) -> bytes:
    """The key of a page in storage: 16 bytes of its parent's key and its own 64-bit numbers, alike on every machine."""
    numbers = array("q", unpack(key))
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.blake2b(parent + numbers.tobytes(), digest_size=16).digest()


class Tree:
    """All nodes, and the eviction order of each space."""

    def __init__(self, spaces: Sequence[TierGroup], store_root: bytes = b"", retained: int = 0) -> None:
        self.spaces, self._store_root, self.retained = tuple(spaces), store_root, Retained(retained)
        self._states = [space for space in spaces if space.states]
        self.roots: dict[int, Node] = {}
        self._clock = 0
        self.flushed = -1              # its value at the last flush: nobody finds pages last used before that
        self.to_flush: list[TierGroup] = []   # spaces that may still have some
        self._entry = 0
        self._banished = -(1 << 64)    # the last root that no request asks for: they are no namespaces
        self.touched: dict[Node, None] | None = None   # nodes that `core.published` is to look at, if it is in use
        self.was_flushed = False

    # ---------------------------------------------------------------- growth
    def root(self, namespace: int) -> Node:
        if namespace not in self.roots:
            self.roots[namespace] = Node((namespace,), None, 0)
        return self.roots[namespace]

    def child(self, parent: Node, key: Sequence[int]) -> Node:
        """The node of a page that was just sealed under `parent`, new or known."""
        node = parent.child(key)
        if node is None:
            node = Node(key, parent, parent.depth + 1, banished=parent.banished, serves=not self._states)
            parent.add_child(node)
            if parent.num_children == 2:
                self._look_above(parent, self._states)
        return node

    def digest(self, node: Node) -> bytes:
        """The key of a page in storage. Of a banished one only if it was asked for before."""
        chain: list[Node] = []
        while not node.digest and node.parent is not None:
            chain.append(node)
            node = node.parent
        found = node.digest or self.root_digest(node.key[0])
        for below in reversed(chain):
            found = below.digest = key_under(found, below.key)
        return found

    def root_digest(self, namespace: int) -> bytes:
        return key_under(self._store_root, (namespace,))

    def banish(self, node: Node) -> None:
        """Nobody finds this page any more, nor what builds on it. Requests that name it are computed
        again, see `core.faults`; when they leave it, its copies are the first to be evicted."""
        parent = node.parent
        if parent is None or parent.child(node.key) is not node:
            return
        self.retained.cut(self, node)
        parent.drop_child(node)
        self.touch(node)
        self._look_above(parent, self._states)
        self._look_serving(parent)
        self._banished -= 1
        node.parent = self.root(self._banished)
        node.parent.add_child(node)
        for below in list(self.below(node)):
            below.banished = True
            if not below.refs:
                below.last_used = 0
                self.update_evictable(below)
        self.update_evictable(parent)

    def touch(self, node: Node) -> None:
        """What a lookup finds of this page may have changed."""
        if self.touched is not None:
            self.touched[node] = None

    def attach(self, node: Node, space: TierGroup, copy: Copy) -> None:
        if (last := node.first) is None:
            node.first = copy
        else:
            space.joined += 1                  # what is new to the tree was not missed
            while last.space is not space and last.next is not None:
                last = last.next
            assert last.space is not space
            last.next = copy
        assert copy.node is None
        copy.node, copy.space = node, space
        self.touch(node)
        if space.states:
            copy.inner = self.is_inner(node, space)
            self._look_above(node.parent, (space,))
            self._look_serving(node)

    def detach(self, node: Node, space: TierGroup) -> Copy:
        """This copy is not the tree's any more. What is left of the node is to be looked at again."""
        copy = node.copy_in(space)
        if node.first is copy:
            node.first = copy.next
        else:
            before = node.first
            while before is not None and before.next is not copy:
                before = before.next
            assert before is not None
            before.next = copy.next
        copy.node = copy.space = copy.next = None
        self.touch(node)
        if space.states and not copy.inner:      # else the state before it leads to the same one as it did
            self._look_above(node.parent, (space,))
        copy.inner = False
        if space.states:
            self._look_serving(node)
        return copy

    def ref(self, node: Node) -> None:
        """A request takes this node into its path. What is in use is evicted last, deepest first:
        a prefix without its end still serves, an end without its prefix does not."""
        node.refs += 1
        if node.last_used != IN_USE:
            if node.last_used <= self.flushed:
                self.touch(node)
            node.last_used = IN_USE
            if node.first is not None:
                self._enter(node)                # its place in the eviction orders is another now

    def unref(self, path: Sequence[Node], user: Session | None = None) -> None:
        """A request, which has used it if there is a `user`, gives up the end of its path. All of it was used now: a
        page is never older than those that build on it, so least recently used, deepest first, takes leaves first."""
        self._clock += 1
        for node in reversed(path):
            node.refs -= 1
            assert node.refs >= 0
            if user is not None and (node.session is not user or node is path[-1]):
                claim(node, user, is_end=node is path[-1])
            if not node.refs:
                ended = node.session is not None and node.session.ended
                node.last_used = 0 if node.banished else self.flushed + 1 if ended else self._clock
            self.update_evictable(node)

    # ---------------------------------------------------------------- eviction
    def evictable(self, node: Node, space: TierGroup) -> bool:
        return (copy := node.find(space)) is not None and not copy.pins and copy.evictable_in is not None

    def update_evictable(self, node: Node) -> None:
        """After anything about a node changed: enter it into the eviction orders, or remove it if nothing is left."""
        self._enter(node)
        gone: Node | None = node
        while gone is not None and not (gone.first or gone.only or gone.more or gone.refs):
            self.retained.users.pop(gone, None)
            if gone.session is not None:
                gone.session.lost(gone)
            if gone.parent is None:
                self.roots.pop(gone.key[0], None)
            elif gone.parent.child(gone.key) is gone:
                gone.parent.drop_child(gone)
                if gone.parent.num_children == 1:
                    self._look_above(gone.parent, self._states)
            gone = gone.parent

    def _enter(self, node: Node) -> None:
        """Into the eviction orders, at its place by now: a copy that can be had has one, which moves."""
        serves, late = node.serves or node.refs, self.retained.late(node) if self.retained.users else 0
        following = node.first
        while (copy := following) is not None:
            following, space = copy.next, copy.space
            if copy.moves or copy.pins or not copy.ready or space is None:
                continue                       # who made it so has said so, see `unmark_evictable`
            if copy.evictable_in is None:
                mark_evictable(copy, space.pool)
            if copy.readers or copy.inner or not serves:
                order, at = space.read if copy.readers else space.order, place(node, copy, late)
            else:                              # most of them
                order, at = space.order, ((node.last_used + late + 1) << DEPTH_BITS) - 1 - node.depth
            stays = copy.number >> ENTRY_BITS == at
            if stays and copy.order is order:
                continue
            if copy.order is not None:
                copy.order.remove(copy)
            if not stays:
                self._entry += 1
                copy.number = (at << ENTRY_BITS) + self._entry
            order.add(copy)
            copy.order = order

    def oldest(self, space: TierGroup, *, read: bool = False) -> tuple[int, Node] | None:
        """The page that `evict` takes next; `read`: after all those. The number is negative if it serves no prompt."""
        order = space.read if read else space.order
        return (order[0].number, order[0].node) if order else None

    def evict(self, space: TierGroup, n: int, *, until: int = IN_USE) -> int:
        """Give up to n copies back to the space's pool, oldest first, as long as their last use is not later
        than `until`. Returns how many; they are free when the fence of their last use has passed."""
        gone: list[Copy] = []
        while len(gone) < n and (entry := self.oldest(space)) is not None and entry[-1].last_used <= until:
            gone.append(self._take_out(entry[-1], space))
            if self._states and not space.states:
                self._forget_states(entry[-1])
        for used, copies in itertools.groupby(gone, lambda copy: copy.used):
            space.pool.release([copy.page for copy in copies], Fence(used))
        space.evicted += len(gone)
        return len(gone)

    def evict_oldest(self, spaces: Sequence[TierGroup], n: int) -> int:
        """The same of all these spaces together."""
        for gone in range(n):
            oldest = [(entry[0] >> ENTRY_BITS, space) for space in spaces if (entry := self.oldest(space)) is not None]
            if not oldest:
                return gone
            self.evict(min(oldest, key=lambda pair: pair[0])[1], 1)
        return n

    def evict_all(self, spaces: Sequence[TierGroup]) -> int:
        """Give up every copy in these spaces that nobody needs. Returns how many."""
        return sum([self.evict(space, 1 << 60) for space in spaces])

    def flush(self) -> None:
        """Hide from lookups the pages that no request names now: they are the oldest, and evicted first."""
        self._clock += 2               # between the two are pages of ended sessions
        self.flushed, self.to_flush, self.was_flushed = self._clock - 1, list(self.spaces), True

    def is_flushed(self, node: Node) -> bool:
        """Whether a flush has hidden it from lookups."""
        return node.last_used <= self.flushed

    def give_up_flushed(self, n: int) -> None:
        """Evict up to n of these pages in each space."""
        if self.to_flush:
            self.to_flush = [space for space in self.to_flush if self.evict(space, n, until=self.flushed) == n]

    def forget(self, node: Node, space: TierGroup) -> None:
        """Remove a copy that no Move touches, and release its page."""
        copy = self._take_out(node, space)
        space.pool.release([copy.page], Fence(copy.used))

    def _take_out(self, node: Node, space: TierGroup) -> Copy:
        copy = self.detach(node, space)
        assert not copy.moves
        unmark_evictable(copy)
        self.update_evictable(node)
        return copy

    # ---------------------------------------------------------------- states
    def is_inner(self, node: Node, space: TierGroup) -> bool:
        """Whether a state that this page has, or is about to have, only leads to another: who needs this one
        leaves the path between the two, where so far nobody has."""
        while node.only is not None:
            node = node.only
            if node.find(space) is not None:
                return True
        return False

    def _look_above(self, node: Node | None, spaces: Sequence[TierGroup]) -> None:
        """There is another way on from this page, or one less: the last state up to it may be inner now, or no more."""
        for space in spaces:
            last = node
            while last is not None and last.find(space) is None:
                last = last.parent
            if last is not None and last.copy_in(space).inner != (inner := self.is_inner(last, space)):
                last.copy_in(space).inner = inner
                self.update_evictable(last)

    def is_serving(self, node: Node) -> bool:
        """Whether somebody can go on from this page or behind it: of models with states where one is."""
        return not self._states or any([node.find(space) is not None for space in self._states]) or any(
            [child.serves for child in node.children.values()])

    def _look_serving(self, node: Node | None) -> None:
        """A state came to this page or has gone: it and those before it may serve now, or no more."""
        while node is not None and node.serves != (serves := self.is_serving(node)):
            node.serves = serves
            self.touch(node)
            self._enter(node)
            node = node.parent

    def _forget_states(self, node: Node) -> None:
        """This page is not in a tier any more: if it is in none, nobody gets to its state."""
        if not all([space.states for space in node.copies]):
            return                             # what it has elsewhere is loaded
        for space in self._states:
            if self.evictable(node, space):
                self.forget(node, space)
                space.evicted += 1

    # ---------------------------------------------------------------- for checks and metrics
    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        for root in self.roots.values():
            for node in self.below(root):
                if node is not root:
                    yield node

    def below(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            stack.extend((node := stack.pop()).children.values())
            yield node
