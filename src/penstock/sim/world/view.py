"""What the simulator and its judge see of a core: one read-only view, with public names of its own.

Only this module and the seeded bugs look inside a core, so that it can change without the others
(`tests/tidy` says so). Requests, their tables and their pages are handles: their fields are read as they are.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

from penstock.core.core import Core
from penstock.core.kv.claims import Entry
from penstock.core.kv.listing import Shortage, Trial
from penstock.core.kv.page_table import PageTable
from penstock.core.kv.pool import Pool
from penstock.core.kv.prefix_tree import Node, unpack
from penstock.core.kv.prefix_tree import key_under as key_under
from penstock.core.lifecycle import changes
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.plan import ONE_PEER, Arrived, MoveId, RequestId, StepId, Tier
from penstock.core.policy import capacity as capacity  # arithmetic of what can ever fit: it has no state
from penstock.core.request import Request
from penstock.core.state import Watcher as Watcher
from penstock.sim.ranks.device import name_of

Live = Request            # handles, see `View`
Pages = PageTable          # of one cache group of a request
Sealed = Node


def alike(rng: Random, live: list[Live]) -> list[Live]:
    """Those of one state, each state as likely as any other."""
    name = rng.choice(list({r.state.name: None for r in live}))  # a dict keeps the order of insertion
    return [r for r in live if r.state.name == name]


class Where(NamedTuple):
    """A copy of a sealed page: where it is, whether a Move reads or writes it, its last step."""

    tier: Tier
    page: int
    is_moving: bool
    last_step: StepId


class View:
    """Of one core. Lists are in order of service."""

    def __init__(self, core: Core) -> None:
        self._core, self._kv = core, core.kv
        self._pair = core.pairs.get(ONE_PEER)
        self.cfg = core.cfg
        self.edges = core.edges
        self.states = {source.name for source, _, _ in changes(core.mode)}
        self.running, self.waiting = core.running, core.waiting
        self.tiers = list(core.kv.arenas)

    # ---------------------------------------------------------------- requests
    def get(self, rid: RequestId) -> Live | None:
        return self._core.live.get(rid)

    @property
    def live(self) -> list[Live]:
        return list(self._core.live.values())

    def head(self) -> Live | None:
        """Who waits for a row before all others, of those that wait for nothing else."""
        return next((r for r in self._core.runnable if self._core.admission.may_start(r)), None)

    def is_issued(self, r: Live) -> bool:
        """Whether a step of it has not retired."""
        return self._kv.in_flight(r)

    def is_complete(self, r: Live) -> bool:
        """Whether all its pages are somewhere."""
        return self._kv.is_complete(r)

    def looks_again(self, r: Live) -> bool:
        """Whether its trial goes on from an earlier turn, with a second look at what is cached of it."""
        entry = self._kv.entering.get(r)
        return isinstance(entry, Entry) and entry.again

    def in_step(self, step: StepId) -> list[Live]:
        return [row.request for row in self._core.in_flight[step]]

    def overtaken(self) -> list[Live]:
        """Who has rows in flight from before it gave up its KV, once for each row."""
        return [row.request for rows in self._core.in_flight.values() for row in rows
                if row.kv_epoch != row.request.kv_epoch]

    # ---------------------------------------------------------------- steps
    @property
    def retired(self) -> StepId:
        return self._kv.retired

    @property
    def num_edges(self) -> int:
        """Edges taken so far."""
        return self._core.edges_taken

    @property
    def num_freed(self) -> int:
        """Units that came back so far."""
        return self._kv.freed

    # ---------------------------------------------------------------- pages
    def changes(self, tier: Tier) -> int:
        return sum([pool.changes for pool in self._kv.arenas[tier].pools])

    def in_use(self, tier: Tier) -> set[int]:
        """Pages that somebody holds, or that are behind fences."""
        pools = self._kv.arenas[tier].pools
        fenced = [units for pool in pools for _, units in pool.limbo]
        return set[int]().union(*[pool.held for pool in pools], *fenced)

    def held(self, tier: Tier, group: int) -> set[int]:
        return self._kv.arenas[tier].pools[group].held

    def kept(self, tier: Tier, group: int, move: MoveId) -> set[int]:
        """Pages that somebody holds, or that `move` keeps behind a fence."""
        pool = self._kv.arenas[tier].pools[group]
        return pool.held | {unit for fence, units in pool.limbo if move in fence.moves for unit in units}

    def is_promised(self, tier: Tier) -> bool:
        """Whether pages will come back when steps and copies of this engine end."""
        return any([pool.in_limbo > pool.away for pool in self._kv.arenas[tier].pools])

    def away(self, tier: Tier) -> int:
        """Pages that the other engine may still write."""
        return self._kv.arenas[tier].away

    def free(self, tier: Tier) -> int:
        """The same, of what nobody has, nor was promised; of several groups slabs, at worst."""
        arena = self._kv.arenas[tier]
        if len(arena.pools) == 1:
            return arena.pools[0].free - arena.num_reserved
        return len(arena.free) - sum([-(-n // pool.per_slab)
                                      for n, pool in zip(arena.reserved, arena.pools, strict=True)])

    def longest(self, group: int) -> int:
        """Pages that a group can have on the device."""
        arena = self._kv.arenas[Tier.HBM]
        pool = arena.pools[group]
        return arena.slabs * pool.per_slab if pool.arena else pool.capacity

    def on_acquire(self, acquired: Callable[[Tier, list[int]], None]) -> None:
        """Call `acquired` with the units of every acquisition. A page may be freed and taken again
        within one advance, so looking at the pools in between is not enough."""

        def watch(tier: Tier, pool: Pool) -> None:
            real: Any = type(pool)

            def acquire(self: Pool, n: int, near: int | None = None) -> list[int]:
                units: list[int] = real.acquire(self, n, near)
                acquired(tier, units)
                return units

            pool.__class__ = type("Watched", (real,), {"__slots__": (), "acquire": acquire})

        for space in self._kv.tree.spaces:
            watch(space.tier, space.pool)

    # ---------------------------------------------------------------- copies
    def is_flying(self, move: MoveId) -> bool:
        return move in self._kv.moves.flying

    def reads_poison(self, move: MoveId, suspect: set[int]) -> bool:
        """Whether `move` reads one of these pages, and is not known to have failed by that."""
        return not all([src.bad for src, _ in self._kv.moves.flying[move].pairs if src.page in suspect])

    def is_tainted(self, move: MoveId) -> bool:
        """Whether `move` ends as a failed one however it went, as it has read what a failed load had read."""
        flight = self._kv.moves.flying.get(move)
        return flight is not None and any([source.bad for source, _ in flight.pairs])

    def touched(self, move: MoveId) -> list[Live]:
        """Whose own copy it is, or whose tables name a page of it."""
        flight = self._kv.moves.flying.get(move)
        if flight is None:
            return []
        pages = {page for pair in flight.pairs for page in pair}
        return [r for r in self._core.live.values() if r is flight.request or not all(
            pages.isdisjoint(t.device) and pages.isdisjoint(t.host) for t in r.tables)]

    def is_owed(self) -> bool:
        """Whether pages wait for the other engine: to write them no more, or to have read them for somebody
        who has ended."""
        copies, live = self._kv.moves, self._core.live.values()
        return any([arena.away for arena in self._kv.arenas.values()]) or any(
            [copies.flying[move].request not in live for move in copies.to_peer])

    def has_pushes(self) -> bool:
        """Whether a push is decided, and in no plan yet."""
        return any([m.dst is Tier.PEER for m in self._kv.moves.outbox])

    # ---------------------------------------------------------------- the prefix tree
    def sealed(self, r: Live) -> Iterator[Sealed]:
        """The sealed pages that have its tokens, as far as the tree knows them."""
        size, node = self.cfg.page_size, self._kv.tree.roots.get(r.arrived.namespace)
        for i in range(len(r.tokens) // size):
            node = None if node is None else node.child(r.page_key(i, size))
            if node is None or self._kv.tree.is_flushed(node):
                return
            yield node

    def serves(self, sealed: Sealed, group: int) -> bool:
        """Whether somebody may start from it: it is on the device or on its way there, or on the host."""
        device, host = (sealed.copies.get(s) for s in (self._kv.device[group], self._kv.host[group]))
        return bool((device is not None and not device.bad) or (host is not None and host.ready))

    def readers(self, sealed: Sealed) -> int:
        """How many requests have it in their path."""
        return sealed.refs

    def is_banished(self, sealed: Sealed) -> bool:
        """Nobody finds it any more."""
        return sealed.banished

    def eviction_orders(self) -> Iterator[list[Sealed]]:
        """Sealed pages that no request names, by tier and group, next first; not states that come before them."""
        for space in self._kv.tree.spaces:
            yield [copy.node for copy in space.order if copy.number >= 0 and not copy.node.refs]

    def is_hidden(self, sealed: Sealed) -> bool:
        """Whether a flush has hidden it."""
        return self._kv.tree.is_flushed(sealed)

    def is_oldest(self, sealed: Sealed) -> bool:
        """Whether it goes before all that was used since the last flush."""
        return sealed.last_used <= self._kv.tree.flushed + 1

    @property
    def is_ending(self) -> bool:
        """Whether pages of sessions that have ended, or are retained, are still to change their place."""
        return self._core.sessions.is_late

    @property
    def retained(self) -> Mapping[Sealed, int]:
        """Pages that go last, and how many sessions retain each."""
        return self._core.sessions.retained.users

    def copies(self, sealed: Sealed) -> list[Where]:
        named = self.cfg.store_root and [k for k in self._kv.disk if k in sealed.copies]
        key = self._kv.tree.digest(sealed) if named else b""
        return [Where(space.tier, name_of(key, space.group) if key and space.tier is Tier.DISK else page.page,
                      page.moves > 0, page.used) for space, page in sealed.copies.items()]

    def names(self, arrived: Arrived, num: int) -> tuple[bytes, ...]:
        """How storage calls the first `num` pages of a prompt."""
        found, size = [key_under(self.cfg.store_root, (arrived.namespace,))], self.cfg.page_size
        for i in range(num):
            found.append(key_under(found[-1], arrived.prompt[i * size:(i + 1) * size]))
        return tuple(found[1:])

    def published(self) -> dict[Tier, set[int]]:
        """The pages that a prompt finds in each tier whose pages are published, computed anew from the tree: in this
        tier or a faster one in all groups that keep every token, and so is the page before it. By their hashes."""
        tiers = (Tier.HBM, Tier.DRAM, Tier.DISK)[:self.cfg.published_tiers]
        found: dict[Tier, set[int]] = {tier: set() for tier in tiers}
        stack = [(root, key_under(self.cfg.store_root, root.key), tiers)
                 for namespace, root in self._kv.tree.roots.items() if namespace >= 0]
        while stack:
            parent, name, there = stack.pop()
            for node in parent.children.values():
                if where := self._found(node, there):
                    stack.append((node, key_under(name, node.key), tiers[tiers.index(where[0]):]))
                    for tier in where:
                        found[tier].add(int.from_bytes(stack[-1][1][:8]) >> 1)
        return found

    @property
    def publishes_later(self) -> bool:
        """Whether some of these are published in later turns only."""
        return bool(self._core.published.late)

    def _found(self, node: Node, tiers: tuple[Tier, ...]) -> list[Tier]:
        """Return the tiers in which prompts find it, of these."""
        size, tree = self.cfg.page_size, self._kv.tree
        if (node.banished or not node.serves or tree.is_flushed(node) or len(unpack(node.key)) != size):
            return []
        # Of each group that keeps all tokens the fastest tier that has it.
        ready: list[set[Tier]] = [
            {space.tier for space, copy in node.copies.items() if space.group == g and copy.ready and not copy.bad}
            for g, group in enumerate(self.cfg.groups) if not group.reach]
        order = list(self._kv.arenas)
        return [tier for tier in tiers if any([tier in held for held in ready])
                and all([any([t in held for t in order[:order.index(tier) + 1]]) for held in ready])]

    def num_stored(self, rid: RequestId, num: int) -> int:
        """Of the first `num` pages of its path, up to the last that is known to be in storage."""
        r = self._core.live.get(rid)
        stored = [any([(copy := node.good(space)) is not None and copy.ready for space in self._kv.disk])
                  for node in ([] if r is None else r.path[:num])]
        return max([i + 1 for i, known in enumerate(stored) if known], default=0)

    # ---------------------------------------------------------------- the pair
    def of_transfer(self, transfer: int) -> Live | None:
        return None if self._pair is None else self._pair.requests.get(transfer)

    @property
    def at_peer(self) -> list[Live]:
        """Live requests that name a transfer."""
        return [] if self._pair is None else list(self._pair.requests.values())

    def generation(self, transfer: int) -> int:
        """Of the grant or the request that the protocol knows, 0 if it knows none."""
        entry = None if self._pair is None else self._pair.side.table.get(transfer)
        return 0 if entry is None else entry.generation

    def is_closing(self) -> bool:
        """Decode role: a grant was given up for its pages, and its peer has not answered."""
        side = None if self._pair is None else self._pair.side
        return self._core.revoke_pending and isinstance(side, DecodeSide) and any(
            [entry.closing for entry in side.table.values()])

    # ---------------------------------------------------------------- the end
    def leaks(self) -> list[str]:
        """What is not free, when nobody lives and nothing is cached."""
        kv = self._kv
        pools = [kv.rows, *(pool for arena in kv.arenas.values() for pool in arena.pools)]
        lost = [f"{pool.capacity - pool.free} {pool.name}" for pool in pools if pool.free != pool.capacity]
        return lost + [f"slabs of {tier.value}" for tier, arena in kv.arenas.items()
                       if len(arena.pools) > 1 and len(arena.free) != arena.slabs]

    def leftovers(self) -> list[str]:
        """What is still remembered then."""
        core, copies = self._core, self._kv.moves
        kept: dict[str, Any] = {
            "live": core.live, "steps": core.in_flight, "running": core.running, "waiting": core.waiting,
            "line": core.runnable, "columns": core.columns, "moves": copies.flying,
            "detached": copies.detached, "sealed pages": self._kv.tree.roots,
            "ends of sessions": core.sessions.remembered, "warming": core.warming}
        for n, pair in core.pairs.items():
            kept |= {f"transfers {n}": pair.requests, f"grants {n}": pair.granted,
                     f"of peer {n}": pair.side.table}
            kept |= {f"asked {n}": pair.side.asked} if isinstance(pair.side, DecodeSide) else {
                f"pushes {n}": pair.side.pushes, f"pushing {n}": pair.pushing}
        return [name for name, what in kept.items() if what]


def refusable(core: Core, refuses: Callable[[], bool]) -> None:
    """Not a view, a fault: each way to take pages or rows asks `refuses` first."""
    no = Shortage(Tier.HBM, [0] * len(core.cfg.groups), waits_for_fence=False)

    def faulty(real: Callable[..., Trial]) -> Callable[..., Trial]:
        return lambda *args, **kw: no if refuses() else real(*args, **kw)

    for name in ("acquire", "grow", "make_free"):
        setattr(core.kv, name, faulty(getattr(core.kv, name)))
