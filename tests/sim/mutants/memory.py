"""Seeded bugs of fences, copies and ownership."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from mutants.registry import Real, holding, instead_of, mutant, swapped
from penstock.core import faults
from penstock.core.core import Core
from penstock.core.kv import allocate, moves, offload, page_table, promote, sealing
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.claims import Entry, Load
from penstock.core.kv.moves import Moves
from penstock.core.kv.page_table import PageTable
from penstock.core.kv.pages import Headroom, Pages
from penstock.core.kv.pool import Arena, Fence, Pool
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree
from penstock.core.lifecycle import Lease, Phase
from penstock.core.plan import Advance, Arrived, Event, Moved, Outcome, StepId, Tier
from penstock.core.request import Request
from penstock.core.state import CoreState


# ---------------------------------------------------------------- fences
@instead_of(Pool, "release")
def unfenced_release(real: Real, pool: Pool, units: Sequence[int], fence: Fence) -> None:
    """Pages are free at once, while steps in flight still read and write them."""
    real(pool, units, Fence(StepId(0)) if pool.name.startswith("hbm") else fence)


@instead_of(Core, "end")
def abort_forgets_the_fence(real: Real, core: Core, r: Request, outcome: Outcome) -> None:
    """Only the abort path releases at once."""
    if outcome is Outcome.ABORT:
        r.last_issue = StepId(0)
    real(core, r, outcome)


@instead_of(Pool, "release")
def fence_ignores_copies(real: Real, pool: Pool, units: Sequence[int], fence: Fence) -> None:
    """Steps are fenced, copies are not."""
    real(pool, units, Fence(fence.step))


@instead_of(Pool, "release", 200)
def host_page_freed_under_a_copy(real: Real, pool: Pool, units: Sequence[int], fence: Fence) -> None:
    """The host copy of an open page is given up while the copy that fills it flies."""
    real(pool, units, Fence(fence.step) if pool.name.startswith("dram") else fence)


@mutant()
class PageFreedUnderACopy(Core):
    """Eviction does not look at the copies that read or fill a page."""

    def advance(self, events: Sequence[Event]) -> Advance:
        with swapped(Tree, "_enter", _enter_under_a_copy), swapped(Tree, "detach", _detach_under_a_copy):
            return super().advance(events)


def _enter_under_a_copy(real: Real, tree: Tree, node: Node) -> None:
    _enter_in_spite(real, tree, node, "moves")


def _enter_in_spite(real: Real, tree: Tree, node: Node, what: str) -> None:
    """Into the eviction orders as if this counter of its copies were 0."""
    counts = {copy: getattr(copy, what) for copy in node.copies.values()}
    for copy in counts:
        setattr(copy, what, 0)
    real(tree, node)
    for copy, count in counts.items():
        setattr(copy, what, count)


def _detach_under_a_copy(real: Real, tree: Tree, node: Node, space: TierGroup) -> Copy:
    copy: Copy = real(tree, node, space)
    copy.moves = 0
    return copy


@instead_of(KVCache, "unpin")
def shared_page_freed_under_a_step(real: Real, kv: KVCache, r: Request, space: TierGroup,
                                   copy: Copy) -> None:
    """A shared page forgets which step used it last, so its eviction is not fenced."""
    used, shared = copy.used, copy.node is not None
    real(kv, r, space, copy)
    if shared:
        copy.used = used


# ---------------------------------------------------------------- copies between tiers
@instead_of(sealing, "seal", 200)
def unsealed_page_written_through(real: Real, kv: KVCache, r: Request) -> None:
    """Pages enter the tree, and their copies start, when they are planned, not when computed."""
    retired, r.retired = r.retired, r.computed
    real(kv, r)
    r.retired = retired


class _WrongOnFailure(Core):
    """Takes a failed Move into `tier` for a good one."""

    tier = Tier.HBM

    def _landed(self, event: Moved) -> None:
        if self.kv.moves.flying[event.id].dst.tier is self.tier:
            event = Moved(event.id, True)
        super()._landed(event)


@mutant()
class FailedWriteThroughVisible(_WrongOnFailure):
    """A host copy that is torn is found by the next prefix hit."""

    tier = Tier.DRAM


@mutant(200)
class FailedLoadTakenAsGood(_WrongOnFailure):
    """A torn load is decoded from."""

    tier = Tier.HBM


@instead_of(Moves, "move_nodes")
def load_in_progress_read_as_resident(real: Real, copies: Moves, nodes: list[Node], src: TierGroup,
                                      dst: TierGroup) -> None:
    """A request starts on pages whose load still runs."""
    real(copies, nodes, src, dst)
    for node in nodes:
        node.copies[dst].ready |= dst.tier is Tier.HBM


# ---------------------------------------------------------------- who owns what
@instead_of(Tree, "_enter")
def eviction_of_a_page_in_use(real: Real, tree: Tree, node: Node) -> None:
    """Eviction does not look at who runs on a page."""
    _enter_in_spite(real, tree, node, "pins")


@instead_of(offload, "save", 400)
def lease_dropped_by_a_pause(real: Real, kv: KVCache, r: Request) -> None:
    """A paused request's host pages may be evicted."""
    real(kv, r)
    for t in r.tables:
        for copy in t.host:
            if copy is not None and copy.node is not None:
                copy.pins -= 1


@instead_of(Core, "end")
def leak_when_a_paused_request_is_aborted(real: Real, core: Core, r: Request, outcome: Outcome) -> None:
    """The abort of a paused request forgets its host pages."""
    if outcome is Outcome.ABORT and r.phase is Phase.PAUSED:
        r.held.reserve = [[] for _ in r.tables]
        for t in r.tables:
            page_table.take_all(t.host)
    real(core, r, outcome)


@instead_of(Core, "_arrive")
def namespace_left_out_of_the_key(real: Real, core: Core, a: Arrived) -> None:
    """Tenants share pages."""
    real(core, replace(a, namespace=0))


@instead_of(allocate, "_start")
def open_page_forgotten(real: Real, kv: KVCache, r: Request, g: int, fills: list[Load], *,
                        up: bool) -> None:
    """A resume loads only sealed pages, and believes that it has them all."""
    for f in fills:
        f.source.pins -= f.node is None
    real(kv, r, g, [f for f in fills if f.node is not None], up=up)


@instead_of(KVCache, "release")
def row_taken_again_one_step_early(real: Real, kv: KVCache, r: Request, leases: Iterable[Lease]) -> None:
    """The last stage samples into a row that the first one has bound anew."""
    last = r.last_issue
    if Lease.ROW in leases and r.row is not None and last:
        r.last_issue = StepId(last - 1)
        real(kv, r, [Lease.ROW])
        r.last_issue = last
    real(kv, r, leases)


# ---------------------------------------------------------------- requests whose KV is damaged
DAMAGES = "damages=8,pair=0,prefix_cache=1"


@instead_of(Moves, "invalidate", mode=DAMAGES)
def damaged_pages_stay_cached(real: Real, copies: Moves, path: list[Node]) -> None:
    """A damaged request is aborted like any other: its pages wait for the next prefix hit."""


@instead_of(KVCache, "tainted_by", mode=DAMAGES)
def damage_that_shows_after_a_drop(real: Real, kv: KVCache, r: Request) -> list[Node]:
    """A request that was dropped with a step in flight names no page any more."""
    return list(r.path)


@instead_of(faults, "compute_again", mode=DAMAGES)
def who_shares_damaged_pages_goes_on(real: Real, core: CoreState, r: Request) -> None:
    """Requests that name banished pages go on with them."""


@instead_of(faults, "compute_again", mode=DAMAGES)
def results_of_damaged_pages_count(real: Real, core: CoreState, r: Request) -> None:
    """What steps in flight sampled from banished pages is said."""
    before = r.invalid_through
    real(core, r)
    r.invalid_through = before


# ---------------------------------------------------------------- what is counted
@instead_of(page_table, "unmark_evictable")
def pinned_page_counts_as_cached(real: Real, copy: Copy) -> None:
    """A cached page that a request takes is still counted among those that can be had."""


@instead_of(moves, "unmark_evictable")
def page_that_is_copied_counts_as_cached(real: Real, copy: Copy) -> None:
    """A cached page that is being loaded or saved is counted among those that can be had."""


# ---------------------------------------------------------------- promises, and what is given up later
@instead_of(Arena, "lacks", mode="take_pages=1")
def promised_pages_can_be_had(real: Real, arena: Arena, want: Sequence[int]) -> int:
    """Others take the pages that a prompt was admitted with and has not come to."""
    with holding(arena, "num_reserved", 0):
        return int(real(arena, want))


@instead_of(KVCache, "release", mode="take_pages=1")
def promise_outlives_its_row(real: Real, kv: KVCache, r: Request, leases: Iterable[Lease]) -> None:
    """Who is dropped or aborted in the middle of its prompt keeps others from its pages for ever."""
    if Lease.ROW in leases:
        r.held.reserved = [0] * len(r.held.reserved)
    real(kv, r, leases)


@instead_of(KVCache, "free_gradually", mode="take_pages=1")
def ended_request_is_forgotten(real: Real, kv: KVCache, *, all: bool = False) -> None:
    """A long request that has ended gives up the first portion of its pages alone."""
    real(kv, all=all)
    kv.freeing.clear()


@instead_of(Core, "_landed", mode="take_pages=1,fail=0.5")
def ended_request_keeps_what_was_lost(real: Real, core: Core, event: Moved) -> None:
    """A copy fails that only a request which has ended, and gives up its pages in portions, still names."""
    leaving, core.kv.freeing = core.kv.freeing, deque()
    real(core, event)
    core.kv.freeing = leaving


@instead_of(Request, "hand_over", mode="take_pages=1")
def dropped_request_keeps_its_pages(real: Real, r: Request, tables: list[PageTable]) -> Request:
    """Who is dropped is admitted with the tables that give up their pages in portions."""
    other = real(r, tables)
    r.tables = other.tables
    return cast("Request", other)


@instead_of(allocate, "_pin", mode="take_pages=1")
def half_a_hit_gets_a_row(real: Real, kv: Pages, r: Request, entry: Entry) -> bool:
    """A hit that takes several turns ends with the first of them."""
    done = bool(real(kv, r, entry))
    if not done and r in kv.entering and r.path:
        del entry.nodes[len(r.path):]
        return entry.found is not None
    return done


@instead_of(promote, "load_some", mode="hit_pages=2,take_pages=1,alike=1,page_size=2,prompt_max=60,requests=20,"
            "pair=0,hbm_pages=60,dram_pages=400,model=1,hot_pages=0")
def row_that_forgets_what_it_loads(real: Real, kv: Pages, r: Request, entry: Entry, headroom: Headroom) -> bool:
    """A hit whose loads start over turns gets its row, and waits for none of them."""
    goes_on = bool(real(kv, r, entry, headroom))
    for part in entry.parts if entry.loaded else ():
        part.late.clear()
    return goes_on
