"""Moves: which copies fly, what their end means for the tree, what is written through and stored.

Only copies whose `Moved(ok)` has arrived serve anybody new. A failed copy to a lower tier is
forgotten; a failed load makes its source suspect, and nobody reads that again.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from penstock.core.kv.pool import Arena, Fence, Pool
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree, unmark_evictable
from penstock.core.lifecycle import Phase
from penstock.core.plan import ONE_PEER, Group, Move, MoveId, Page, PeerId, StepId, Tier
from penstock.core.request import Request
from penstock.core.settings import CoreConfig

UP = {Tier.HBM: 0, Tier.DRAM: 1, Tier.DISK: 2, Tier.PEER: 3}


@dataclass(slots=True, eq=False)
class FlyingMove:
    """A Move that was planned and has not been answered. Private pages of `request`, or of nodes."""

    src: TierGroup
    dst: TierGroup
    pairs: list[tuple[Copy, Copy]]
    nodes: list[Node] = field(default_factory=list)
    request: Request | None = None
    savers: dict[Request, None] = field(default_factory=dict)   # are paused, and wait for its pages


def _pages(tier: Tier, copies: list[Copy]) -> tuple[Page, ...]:
    return () if tier is Tier.PEER else cast("tuple[Page, ...]", tuple([c.page for c in copies]))


class Moves:
    """Flying Moves of one engine, and the queue of pages that go to storage."""

    def __init__(self, cfg: CoreConfig, tree: Tree, device: list[TierGroup], host: list[TierGroup],
                 disk: list[TierGroup], disk_arena: Arena) -> None:
        self.cfg, self.tree = cfg, tree
        self.device, self.host, self.disk, self._disk_arena = device, host, disk, disk_arena
        self.flying: dict[MoveId, FlyingMove] = {}
        self.to_peer: dict[MoveId, None] = {}               # of these, those from or to another engine
        self.detached: dict[Copy, TierGroup] = {}             # read from storage for nobody, see `detach`
        self.outbox: list[Move] = []                     # planned since the last step
        self._saves: dict[TierGroup, MoveId] = {}            # the same, by source: more pages may join these
        self.retired = StepId(0)
        self._peer = TierGroup(Tier.PEER, Group(0), Pool("peer", 0))
        self.planned = 0                                 # Moves so far: the number of the last
        self._at_store = 0                               # host pages that storage reads or writes
        self._to_store: deque[tuple[int, Node]] = deque(maxlen=max(1, cfg.dram_pages))

    # ---------------------------------------------------------------- planning a copy
    def _fly(self, flight: FlyingMove) -> MoveId:
        self.planned += 1
        move = MoveId(self.planned)
        self.flying[move] = flight
        self._board(move, flight.pairs)
        return move

    def _board(self, move: MoveId, pairs: list[tuple[Copy, Copy]]) -> None:
        for src, dst in pairs:
            src.moves += 1
            dst.moves += 1
            dst.filled_by = move
            if src.evictable_in is not None:
                unmark_evictable(src)

    def _plan(self, move: MoveId, tokens: int, after: StepId, first: int = 0, transfer: int = 0,
              generation: int = 0, peer: PeerId = ONE_PEER, keys: tuple[bytes, ...] = ()) -> MoveId:
        """`after` names the last step that wrote the source; sealed pages have none, their producers
        were seen to retire."""
        flight = self.flying[move]
        near = flight.dst if flight.src is self._peer else flight.src
        self.outbox.append(Move(
            move, near.group, flight.src.tier, _pages(flight.src.tier, [s for s, _ in flight.pairs]),
            flight.dst.tier, _pages(flight.dst.tier, [d for _, d in flight.pairs]), tokens, after,
            first, transfer, generation, peer, keys))
        return move

    def move_nodes(self, nodes: list[Node], src: TierGroup, dst: TierGroup) -> None:
        """Fill the copies that `nodes` have in `dst` from those in `src`."""
        if nodes:
            pairs = [(n.copy_in(src), n.copy_in(dst)) for n in nodes]
            self._plan_nodes(self._fly(FlyingMove(src, dst, pairs, nodes)))

    def _plan_nodes(self, move: MoveId) -> None:
        flight = self.flying[move]
        at_store = Tier.DISK in (flight.src.tier, flight.dst.tier)
        self._at_store += len(flight.pairs) if at_store else 0
        keys = tuple(map(self.tree.digest, flight.nodes)) if at_store and self.cfg.store_root else ()
        self._plan(move, len(flight.nodes) * self._unit(flight.src), self.retired, keys=keys)

    def _join(self, move: MoveId, nodes: list[Node]) -> None:
        """These pages go with a Move that is not planned yet. From now on nobody evicts what it reads."""
        flight = self.flying[move]
        pairs = [(n.copy_in(flight.src), n.copy_in(flight.dst)) for n in nodes]
        self._board(move, pairs)
        flight.pairs += pairs
        flight.nodes += nodes

    def move_sealed(self, pairs: list[tuple[Copy, Copy]], src: TierGroup, dst: TierGroup,
                    r: Request | None) -> None:
        """Copy whole pages, of which one side belongs to `r` alone, or with None all are nodes'."""
        if pairs:
            move = self._fly(FlyingMove(src, dst, pairs, request=r))
            self._plan(move, len(pairs) * self._unit(src), self.retired)
            if r is not None:
                r.moves.add(move)

    def save(self, nodes: list[Node], src: TierGroup, dst: TierGroup) -> None:
        """The same for sealed pages that go to the host: all that the next plan saves of a group is one
        Move, however many rows have sealed them."""
        if not nodes:
            return
        move = self._saves.get(src)
        if move is None:
            move = self._saves[src] = self._fly(FlyingMove(src, dst, []))
        self._join(move, nodes)

    def take_planned(self) -> tuple[Move, ...]:
        """All that was planned since the last step, for a plan to carry."""
        for move in self._saves.values():
            self._plan_nodes(move)
        self._saves.clear()
        moves, self.outbox = tuple(self.outbox), []
        return moves

    @property
    def has_planned(self) -> bool:
        """Whether the next plan carries Moves."""
        return bool(self.outbox or self._saves)

    def move_private(self, r: Request, src: TierGroup, source: Copy, dst: TierGroup, target: Copy,
                     tokens: int, node: Node | None = None) -> None:
        """Copy a page of which one side belongs to `r` alone: its open page, or one of its own of `node`."""
        target.ready = False
        flight = FlyingMove(src, dst, [(source, target)], [] if node is None else [node], r)
        r.moves.add(self._plan(self._fly(flight), tokens, r.last_issue))

    def open(self, r: Request, space: TierGroup, targets: list[Copy], first: int, tokens: int,
             transfer: int, generation: int) -> MoveId:
        """Let the peer write positions `first` and on into pages of `r`. Only the peer's protocol
        says when that has ended."""
        for target in targets:
            target.ready = False
        flight = FlyingMove(self._peer, space, [(Copy(-1), target) for target in targets], request=r)
        move = self._plan(self._fly(flight), tokens, self.retired, first, transfer, generation,
                          r.arrived.peer)
        r.moves.add(move)
        self.to_peer[move] = None
        return move

    def push(self, r: Request, space: TierGroup, sources: list[Copy], first: int, tokens: int,
             transfer: int, generation: int) -> MoveId:
        """Write positions `first` and on, whose steps have retired, to where the peer has granted pages."""
        flight = FlyingMove(space, self._peer, [(source, Copy(-1)) for source in sources], request=r)
        move = self._plan(self._fly(flight), tokens, self.retired, first, transfer, generation,
                          r.arrived.peer)
        r.moves.add(move)
        self.to_peer[move] = None
        return move

    def pushes_of_ended(self) -> list[FlyingMove]:
        """Those from or to another engine whose request has ended."""
        flying = [self.flying[move] for move in self.to_peer]
        return [f for f in flying if f.request is not None and f.request.phase is Phase.DONE]

    def _unit(self, space: TierGroup) -> int:
        return self.cfg.groups[space.group].page_tokens or self.cfg.page_size

    # ---------------------------------------------------------------- a copy has ended
    def landed(self, id: MoveId, ok: bool, good: int) -> tuple[FlyingMove, list[Copy]]:
        """A Move was answered. Returns it, and the copies that nobody may read (again): whoever counts
        on them must let go of them before `update_evictable`. good: pages of one that failed that arrived."""
        failed: list[Copy] = []
        flight = self.flying.pop(id)
        self.to_peer.pop(id, None)
        for i, (source, target) in enumerate(flight.pairs):
            source.moves -= 1
            target.moves -= 1
            arrived = ok or i < good
            target.ready = arrived and not source.bad
            # A failed load makes its source suspect; a failed copy to a lower tier changes nothing.
            source.bad = source.bad or (not arrived and UP[flight.dst.tier] < UP[flight.src.tier])
            if not target.ready:
                failed.append(target)
            if source.bad and source.ready:
                source.ready = False
                failed.append(source)
        if flight.request is not None:
            flight.request.moves.discard(id)
        if Tier.DISK in (flight.src.tier, flight.dst.tier):
            self._at_store -= len(flight.pairs)
        return flight, failed

    def cancel_planned(self, moves: Sequence[Move]) -> None:
        """These are planned, and in no plan yet: they are not made."""
        for move in moves:
            self.outbox.remove(move)
            self.finish(self.landed(move.id, False, 0)[0])

    def detach(self, node: Node, space: TierGroup, copy: Copy) -> None:
        """A page is being read from storage, and somebody needs it who has it elsewhere. It is nobody's any
        more: it goes when the read has ended and those who fetched it have let go of it."""
        gone = self.tree.detach(node, space)
        assert gone is copy
        self.detached[copy] = space

    def free_detached(self, copy: Copy) -> None:
        if not (copy.pins or copy.moves):
            self.detached.pop(copy).pool.release([copy.page], Fence(copy.used))

    def finish(self, flight: FlyingMove) -> None:
        """Everybody who counted on a failed copy has let go: what it left behind goes too."""
        for _, target in flight.pairs if self.detached else ():
            if target in self.detached:
                self.free_detached(target)
        tiers = flight.dst.tier, flight.src.tier
        for source, target in flight.pairs:
            seen: Node | None = None           # both are the same node's, most of the time
            for copy, space in ((target, flight.dst), (source, flight.src)):
                node = copy.node
                if node is None:
                    continue
                self.tree.touch(node)
                if not (copy.ready or copy.moves or copy.pins):
                    self.tree.forget(node, space)
                elif node is not seen:
                    self.tree.update_evictable(node)
                seen = node
                if not self.cfg.prefix_cache:
                    self.discard_node(node)
        if Tier.DISK in tiers:
            self.store([])
        elif tiers[0] is Tier.DRAM and self.cfg.disk_pages and self.cfg.prefix_cache:
            self.store([(flight.dst.group, n) for n in flight.nodes if n.ready(flight.dst)])

    def invalidate(self, path: list[Node]) -> tuple[bytes, ...]:
        """The KV of a request that has left is damaged: nobody else may start from its pages, nor from what
        was computed from them. What nobody names goes at once, or once its copies have landed.
        Returns the keys under which storage may have any."""
        keys: tuple[bytes, ...] = ()
        if path:
            if self.cfg.store_root and not path[0].banished:
                keys = tuple(map(self.tree.digest, self.tree.below(path[0])))
            self.tree.banish(path[0])
            if left := [node for node in path[1:] if not node.refs]:
                self.tree.banish(left[0])
        for node in reversed(path):
            self.discard_node(node)
        return keys

    def discard_node(self, node: Node) -> None:
        """Give up the copies of a page that is not worth keeping, once nobody names it."""
        for space in tuple(node.copies):
            copy = node.find(space)
            if copy is not None and not (node.refs or copy.pins or copy.moves):
                self.tree.forget(node, space)

    # ---------------------------------------------------------------- storage
    def store(self, nodes: Sequence[tuple[int, Node]]) -> None:
        """Pages whose host copy has landed go on to storage, as far as there is room. Reads are urgent:
        they may use twice as much of the host as makes writes wait."""
        if self.cfg.store_writes:
            self._to_store += [n for n in nodes if n[1].reused] if self.cfg.store_reused else nodes
        todo: dict[int, MoveId] = {}
        num = 0
        while self._to_store and 2 * (self._at_store + num) < self.cfg.store_pages:
            g, node = self._to_store.popleft()
            space = self.disk[g]
            if (node.banished or not node.ready(self.host[g]) or node.find(space) is not None
                    or not self.slot(g) or not node.ready(self.host[g])):
                continue                       # for a slot its KV may have gone, and its state with that
            self.tree.attach(node, space, Copy(space.pool.acquire(1)[0], ready=False))
            if g not in todo:
                todo[g] = self._fly(FlyingMove(self.host[g], space, []))
            self._join(todo[g], [node])
            num += 1
        for move in todo.values():
            self._plan_nodes(move)

    @property
    def num_to_store(self) -> int:
        """Pages that wait for their turn to be stored, among them some that need it no more."""
        return len(self._to_store)

    @property
    def reads_left(self) -> int:
        """Host pages that storage may begin to fill now."""
        return max(0, self.cfg.store_pages - self._at_store)

    def slot(self, g: int) -> bool:
        """Whether a storage slot for a page of group g can be had, from the oldest of any group."""
        want = [int(k == g) for k in range(len(self.disk))]
        while self._disk_arena.short(want, promised=False):
            if not self.tree.evict_oldest(self.disk, 1):
                return False
            for space in self.disk:
                space.pool.drain(self.retired, self.flying)
        return True
