"""What is known of the pages of a prompt: matched in the prefix tree, or listed by storage.

`Matching` finds pages that this process knows. Storage names pages by what they hold
(`prefix_tree.key_under`), so this engine finds those of any other: `keys` says what to ask for, `listed`
remembers the answer. Takes no host page: that is read later, by `prefetch`. `TrialRefused` says why a trial to take
pages changed nothing.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from penstock.core.kv.moves import Moves
from penstock.core.kv.page_table import PageTable
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree, key_under
from penstock.core.lifecycle import Place
from penstock.core.plan import Tier
from penstock.core.request import Request
from penstock.core.settings import CoreConfig

PAGES_MAX = 1024          # asked for at once: a page's key takes 1 us


class PrefixMatch(NamedTuple):
    """How far the prefix tree knew a request: the last of so many pages. From the `lost` last ones a group
    that keeps only a part cannot go on, each of these so often."""

    last: Node | None
    pages: int
    lost: int
    lost_by_group: Mapping[int, int]


class TrialRefused:
    """Why a trial changed nothing. It is false; a trial that succeeds is True."""

    def __bool__(self) -> Literal[False]:
        return False


@dataclass(slots=True)
class Shortage(TrialRefused):
    """Pages of each group that somebody wanted in vain."""

    tier: Tier
    want: Sequence[int]
    waits_for_fence: bool      # it waits for fences, or for requests that are giving up their pages
    found: PrefixMatch | None = None  # None: it knew what it has
    capacity_version: tuple[int, ...] = ()  # `Pages.capacity_version` when it gave up


@dataclass(slots=True)
class SourceNotReady(TrialRefused):
    """What it would copy is still being filled."""

    source: Copy


NO_ROW, UNDERWAY = TrialRefused(), TrialRefused()     # UNDERWAY: its prefix is long, the next turn goes on
Trial: TypeAlias = Literal[True] | TrialRefused


@dataclass(slots=True, eq=False)
class Entering:
    """What a request that waits has pinned so far, of what is too long for one turn."""

    place: Place
    nodes: list[Node]              # what was matched: not all of it is named yet
    pins: list[Copy]               # what it needs,
    optional: list[Copy]           # and what it can do without
    end: tuple[Node | None, int] | None = None     # how far the tree knows it; None: not seen yet
    lost_by_group: dict[int, int] = field(default_factory=dict)  # see `PrefixMatch`
    found: PrefixMatch | None = None  # all of that is known


@dataclass(slots=True, eq=False)
class Returned:
    """Pinned copies and named pages that a request has given up: they go back in portions."""

    pins: list[Copy]
    path: list[Node]


class Matching:
    """What the prefix tree has of the tokens of a request."""

    cfg: CoreConfig
    tree: Tree
    moves: Moves
    device: list[TierGroup]
    host: list[TierGroup]
    disk: list[TierGroup]

    def is_reachable(self, node: Node, g: int, stored: bool = False) -> bool:
        """Whether a request can get this page on the device: it is there, coming, or below."""
        below = node.find(self.host[g])
        if stored and (not below.bad if below is not None else node.ready(self.disk[g])):
            return True
        return node.good(self.device[g]) is not None or (below is not None and below.ready)

    def match(self, r: Request, *, stored: bool = False) -> tuple[list[Node], PrefixMatch]:
        """The longest path of whole pages that every group can serve and that leaves at least one
        token to compute, and how far the tree knows it; with `stored`, storage counts too."""
        path: list[Node] = []
        self.extend(r, path, stored)
        known = len(path)
        last = path[-1] if path else None
        lost_by_group: dict[int, int] = {}
        self.cut_back(r, path, lost_by_group, stored)
        return path, PrefixMatch(last, known, known - len(path), lost_by_group)

    def extend(self, r: Request, path: list[Node], stored: bool = False, most: int = 1 << 60) -> bool:
        """Match up to `most` pages more. False: there are more of them."""
        node = path[-1] if path else self.tree.roots.get(r.arrived.namespace)
        size, at, flushed = self.cfg.page_size, len(path), self.tree.flushed
        whole = [g for g, t in enumerate(r.tables) if not t.reach]
        end = min((r.num_tokens - 1) // size, r.cached_max // size)
        device = self.device[whole[0]] if len(whole) == 1 else None
        for i in range(at, min(end, at + most)):
            if node is None or (node := node.child(r.page_key(i, size))) is None or node.last_used <= flushed:
                return True
            copy = node.find(device) if device is not None else None
            if (copy is None or copy.flags) and not all([self.is_reachable(node, g, stored) for g in whole]):
                return True
            path.append(node)
        return node is None or self._next(r, node, len(path), stored) is None

    def cut_back(self, r: Request, path: list[Node], lost_by_group: dict[int, int], stored: bool = False,
                 most: int = 1 << 60) -> bool:
        """Give up to `most` last pages up, as long as a group that keeps only a part cannot go on behind
        them; such groups serve fewer boundaries. False: there are more of them."""
        for _ in range(most):
            if not path or (g := self.refuses(r, path, stored)) is None:
                return True
            path.pop()
            lost_by_group[g] = lost_by_group.get(g, 0) + 1
        return not path or self.refuses(r, path, stored) is None

    def recomputed(self, r: Request) -> int:
        """Prompt tokens behind the path of `r` that the tree has as outputs of one who selected as `r`
        does: a prompt is computed with all of its KV, so they are computed again."""
        size, pages = self.cfg.page_size, len(r.path)
        node = r.path[-1] if r.path else self.tree.roots.get(r.arrived.namespace)
        ways = range(size)                     # how much of the first page was that one's prompt
        while r.arrived.attention and node is not None and (pages + 1) * size <= r.num_prompt:
            node = next((n for i in ways if (n := node.child(r.output_key(pages, size, i)))), None)
            pages, ways = pages + (node is not None), range(1)
        return (pages - len(r.path)) * size

    def _next(self, r: Request, last: Node, pages: int, stored: bool = False) -> Node | None:
        """The page that continues a prefix of so many, if every group that keeps all of it has it, and
        a token is left to compute."""
        size = self.cfg.page_size
        if (pages + 1) * size >= r.num_tokens or (pages + 1) * size > r.cached_max:
            return None
        node = last.child(r.page_key(pages, size))
        if node is None or self.tree.is_flushed(node) or not all(
                [self.is_reachable(node, g, stored) for g, t in enumerate(r.tables) if not t.reach]):
            return None
        return node

    def refuses(self, r: Request, path: list[Node], stored: bool = False) -> int | None:
        """The first group that keeps only a part and cannot go on behind this path; None: all can."""
        size = self.cfg.page_size
        end = len(path) * size
        return next((g for g, t in enumerate(r.tables) if t.group.reach
                     and ((t.group.snapshot and end % t.unit)
                          or not all(self.is_reachable(path[(i + 1) * t.unit // size - 1], g, stored)
                                     for i in range(t.begin(end), t.end(end))))), None)

    def node(self, r: Request, t: PageTable, i: int) -> Node | None:
        """The sealed page that table entry i is, or None for one that is not sealed."""
        at = (i + 1) * t.unit // self.cfg.page_size - 1
        return r.path[at] if at < len(r.path) else None

    def host_copy(self, node: Node, g: int, mine: Copy | None = None) -> Copy | None:
        """The host copy of a page that the device has, or `mine` is, for somebody who needs it on the host:
        one that is there or on its way. A read from storage is not waited for, it may hang; not even where
        the device's copy is still being loaded, that ends."""
        copy = node.good(self.host[g])
        flight = self.moves.flying.get(copy.filled_by) if copy is not None and not copy.ready else None
        waits = mine is None and node.good(self.device[g]) is None
        return copy if waits or flight is None or flight.src.tier is not Tier.DISK else None

    def take_host_copy(self, node: Node, g: int, mine: Copy | None = None) -> Copy | None:
        """The same for somebody who makes one if there is none: what is still being read is in its way."""
        copy = self.host_copy(node, g, mine)
        if copy is None and (read := node.good(self.host[g])) is not None:
            self.moves.detach(node, self.host[g], read)
        return copy

    def tainted_by(self, r: Request) -> list[Node]:
        """The pages that `r` names, and if it has ever given up its KV all that have its tokens: a step in
        flight when it was dropped may be what shows that they are damaged."""
        if not r.kv_epoch:
            return list(r.path)
        path: list[Node] = []
        node = self.tree.roots.get(r.arrived.namespace)
        if r.path and r.path[-1].banished:
            return path                        # what is known by now of its tokens is not what it has
        while node is not None and (len(path) + 1) * self.cfg.page_size <= r.num_tokens:
            node = node.child(r.page_key(len(path), self.cfg.page_size))
            path += [] if node is None else [node]
        return path


def keys(kv: Matching, r: Request) -> tuple[bytes, ...]:
    """Keys of the next pages behind those of `r` that can be had, or behind those that it has just asked for: of a
    window or a state these may have none, and a later one has it. The last token is always computed."""
    (path, match), size, last = kv.match(r, stored=True), kv.cfg.page_size, r.storage.keys
    begin = r.storage.first + len(last) if last else len(path)
    if not r.storage.first < begin <= match.pages:
        return ()                              # the last answer was of no use: it could not be remembered
    r.storage.first = begin
    end = min((r.num_tokens - 1) // size, r.cached_max // size, begin + PAGES_MAX, kv.cfg.disk_pages)
    at = last[-1] if last else kv.tree.digest(path[-1]) if path else kv.tree.root_digest(r.arrived.namespace)
    found = []
    for i in range(begin, end):
        found.append(at := key_under(at, r.page_key(i, size)))
    return tuple(found)


def listed(kv: Matching, r: Request, present: bytes) -> bool:
    """Remember what storage has of the pages that it was asked for. Returns whether it has all of them: then
    it may have more."""
    size, tree = kv.cfg.page_size, kv.tree
    node, path = tree.root(r.arrived.namespace), list[Node]()
    for i in range(r.storage.first + len(r.storage.keys)):
        new = i - r.storage.first
        if new >= 0 and not (new < len(present) and present[new]):
            break
        below = node.child(r.page_key(i, size))
        if below is None and new < 0:
            break                              # it has been evicted since: nobody could reach the others
        node = below or tree.child(node, r.page_key(i, size))
        tree.ref(node)
        path.append(node)
        if new >= 0:
            node.digest = r.storage.keys[new]
            if not _remember(kv, node, present[new]):
                break
    complete = len(path) == r.storage.first + len(r.storage.keys)
    tree.unref(path)
    if not path:
        tree.update_evictable(node)            # a root that nothing builds on
    return complete


def _remember(kv: Matching, node: Node, groups: int) -> bool:
    """False: there is no slot to be had."""
    for g, space in enumerate(kv.disk):
        if groups >> g & 1 and node.find(space) is None:
            if not kv.moves.slot(g):
                return False
            kv.tree.attach(node, space, Copy(space.pool.acquire(1)[0]))
    return True
