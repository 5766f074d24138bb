"""Who holds what: one acquire and one release for all leases of a request.

`Core` says which phase a request enters; this takes all that the phase requires or nothing, and gives
up what it does not allow, behind fences.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from penstock.core.kv import allocate, growth, offload, prefetch, promote
from penstock.core.kv.page_table import take_all
from penstock.core.kv.pages import Pages, Shortage, Trial
from penstock.core.kv.pool import Fence
from penstock.core.lifecycle import Lease, Phase, Place
from penstock.core.request import Request


class KVCache(Pages):
    """Pages, rows and who has them. Every method keeps `check` true."""

    def acquire(self, r: Request, phase: Phase, leases: Collection[Lease], place: Place,
                headroom: int = 0) -> Trial:
        """Make `r` hold what `phase` requires, or change nothing. On the way in so much must be left over
        that `headroom` rows, which run, can grow."""
        if Lease.ROW in leases and r.row is None:
            return allocate.enter(self, r, place, headroom)
        if phase in (Phase.PAUSED, Phase.STAGING):
            return offload.reserve(self, r, phase)
        if phase is Phase.FETCHING:
            return prefetch.reserve(self, r)
        if phase is Phase.RECEIVING:
            return allocate.receive(self, r, place, headroom)
        if Lease.HOT in leases and not any(t.hot for t in r.tables):
            return promote.take_hot_buffer(self, r)
        if phase is Phase.PROMOTING:
            return promote.reload(self, r, headroom)
        return True

    def release(self, r: Request, leases: Iterable[Lease]) -> None:
        """Give up all of these leases that `r` holds."""
        for lease in leases:
            if lease is Lease.ROW and r.row is not None:
                self.rows.release([r.row], Fence(r.last_issue))      # a promise of `Bind`
                r.row, r.bound, r.needs_rebind = None, False, False
            elif lease is Lease.HOT:
                self._free_hot_buffer(r)
            elif lease is Lease.DRAM:
                for g, t in enumerate(r.tables):
                    self.drop_column(r, g, t.host)
                offload.return_reserve(self, r)
            elif lease in (Lease.HBM, Lease.DEVICE_ONLY):
                for g, t in enumerate(r.tables):
                    if t.hosted == (lease is Lease.HBM):
                        self.drop_column(r, g, t.device)

    def _free_hot_buffer(self, r: Request) -> None:
        if r in self.reclaimable:
            self.reclaimable.remove(r)
        for g, t in enumerate(r.tables):
            for copy in take_all(t.hot):
                self.unpin(r, self.device[g], copy)
            t.kept = {}

    def grow(self, r: Request, upto: int) -> Literal[True] | Shortage:
        """Pages for positions below `upto` in every group, or nothing."""
        return growth.grow(self, r, upto)
