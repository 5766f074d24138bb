"""Seeded bugs of cache groups: windows, snapshots, page identity."""
from __future__ import annotations

from collections.abc import Sequence

from mutants.registry import Real, instead_of, mutant, swapped
from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv import allocate, sealing
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.claims import Claim, GroupAllocation
from penstock.core.kv.page_table import PageTable
from penstock.core.kv.prefix_tree import Copy, Node, pack, unpack
from penstock.core.plan import Advance, Event, Grow, StepId, Tier
from penstock.core.request import Request


# ---------------------------------------------------------------- boundaries
@instead_of(KVCache, "cut_back", mode="model=3")
def hit_one_page_short(real: Real, kv: KVCache, r: Request, path: list[Node], by: dict[int, int],
                       stored: bool = False, most: int = 1 << 60) -> bool:
    """Where groups keep only a part, the last boundary that all of them can serve is not used."""
    ended = real(kv, r, path, by, stored, most)
    if ended:
        del path[-1:]
        while path and kv.refuses(r, path, stored) is not None:
            path.pop()
    return ended


# ---------------------------------------------------------------- windows
@instead_of(sealing, "leave_behind")
def window_left_as_planned(real: Real, kv: KVCache, r: Request, g: int, t: PageTable) -> None:
    """A window moves on with the steps that are planned, not with those that have retired."""
    retired, r.retired = r.retired, r.computed
    real(kv, r, g, t)
    r.retired = retired


@instead_of(sealing, "leave_behind")
def window_left_as_planned_without_a_fence(real: Real, kv: KVCache, r: Request, g: int, t: PageTable) -> None:
    """A window moves on with the steps that are planned, and its pages are free at once."""
    last, r.last_issue = r.last_issue, StepId(0)
    window_left_as_planned(real, kv, r, g, t)
    r.last_issue = last


# ---------------------------------------------------------------- prefix hits
def _or_empty(real: Real, kv: KVCache, r: Request, g: int, i: int, node: Node | None, way: GroupAllocation,
              claim: Claim, *, host: bool) -> Copy:
    try:
        copy: Copy = real(kv, r, g, i, node, way, claim, host=host)
        return copy
    except AssertionError:
        if host:
            raise
        return claim.want(Tier.HBM, g)


@mutant()
class PrefixHitWithoutItsWindow(Core):
    """A prefix hit is the longest that one group can serve: it starts with a page that is empty."""

    def advance(self, events: Sequence[Event]) -> Advance:
        with swapped(allocate, "_entry", _or_empty), swapped(KVCache, "refuses", self.refuses):
            return super().advance(events)

    @staticmethod
    def refuses(real: Real, kv: KVCache, r: Request, path: list[Node], stored: bool = False) -> int | None:
        end = len(path) * kv.cfg.page_size
        inside = any(t.group.snapshot and end % t.unit for t in r.tables)
        group: int | None = real(kv, r, path, stored) if inside or stored else None
        return group


@instead_of(Request, "page_key")
def decode_identity_left_out_of_the_key(real: Real, r: Request, index: int, page_size: int) -> Sequence[int]:
    """Pages that a selecting decode wrote are shared with requests that compute exactly."""
    return pack(r.between(index * page_size, (index + 1) * page_size))


@instead_of(Request, "page_key", 400,
            mode="alike=1,page_size=4,pauses=30,hot_pages=1,model=1,save_pages=256,turns=0.7,requests=12,prefix_cache=1,"
                 "hbm_pages=200,sessions=0,ends=0,warms=0")
def end_of_the_prompt_left_out_of_the_key(real: Real, r: Request, index: int,
                                          page_size: int) -> Sequence[int]:
    """A page that decode finished is shared whatever part of it was a prompt."""
    key: Sequence[int] = real(r, index, page_size)
    return pack(unpack(key)[:page_size + 1])


# ---------------------------------------------------------------- grows
@instead_of(schedule, "_grows")
def grow_one_entry_too_early(real: Real, r: Request) -> list[Grow]:
    """New pages take the place of the last that the row has."""
    return [g._replace(index=g.index - 1) for g in real(r)]


@instead_of(PageTable, "stays", mode="model=3")
def every_page_of_a_window_stays(real: Real, table: PageTable, i: int, ends: Sequence[int]) -> bool:
    """Windows fill the prefix tree, whatever prompts may go on from."""
    return True


@instead_of(PageTable, "stays", mode="model=3")
def the_first_page_of_a_window_goes(real: Real, table: PageTable, i: int, ends: Sequence[int]) -> bool:
    """No prompt goes on at a multiple of `keep` where the window needs two pages."""
    end = (i + 1) * table.unit
    return real(table, i, ends) and (not table.group.keep or any(
        [table.begin(at) < i and end <= at for at in (-(-end // table.group.keep) * table.group.keep, *ends)]))


@instead_of(sealing, "_extend", mode="model=3,pair=0,page_size=1", budget=600)
def windows_go_where_paths_part(real: Real, kv: KVCache, r: Request, known: int) -> list[int]:
    """Each prompt that begins as others do is computed again from the multiple before."""
    real(kv, r, known)
    return []
