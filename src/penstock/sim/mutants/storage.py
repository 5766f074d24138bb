"""Seeded bugs of the storage tier, of deadlines and of ragged results."""
from __future__ import annotations

from collections.abc import Sequence

from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.holdings import Holdings
from penstock.core.lifecycle import Phase
from penstock.core.plan import Advance, Event, Expired, Moved, Outcome, StepId, Tier
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.sim.mutants.registry import become, mutant


class _BytesNotVerified(Core):
    way: tuple[Tier, Tier]

    def _landed(self, event: Moved) -> None:
        flight = self.have.flights[event.id]
        ok = event.ok or (flight.src, flight.dst) == self.way
        super()._landed(Moved(event.id, ok))


@mutant(400)
class StoredBytesNotVerified(_BytesNotVerified):
    """A damaged page from storage is taken for a good one."""

    way = Tier.DISK, Tier.DRAM


@mutant(400)
class FailedStoreLeftVisible(_BytesNotVerified):
    """Storage keeps the key of a page that it never got."""

    way = Tier.DRAM, Tier.DISK


class _HostPageOfAFetchIsFree(Holdings):
    __slots__ = ()

    def release(self, r: Request, leases: Sequence[object]) -> None:  # type: ignore[override]
        if r.phase is Phase.DROPPED and r.fetched:
            for copy in r.parked:
                if not copy.ready and copy.node is not None:
                    copy.moves = 0
                    self.tree.forget(copy.node, Tier.DRAM)
        Holdings.release(self, r, leases)      # type: ignore[arg-type]


@mutant(400)
class DeadlineFreesWhatIsStillBeingFilled(Core):
    """Pages released by time-out: the read that hangs lands later."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _HostPageOfAFetchIsFree)


@mutant()
class LateDeadlineHasEffect(Core):
    """The deadline of the queue ends a request that has left it."""

    def _apply(self, event: Event) -> None:
        r = self.live.get(event.rid) if isinstance(event, Expired) else None
        if r is not None:
            self._end(r, Outcome.EXPIRED)
        else:
            super()._apply(event)


@mutant()
class UpperBoundTakenForLength(Core):
    """A row that returned fewer tokens than it might is believed to be as long as planned."""

    def _retire(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        for row in self.in_flight[step]:
            if row.width > 1:
                row.request.settled += 1
                row.request.computed += 1
        super()._retire(step, tokens)


@mutant()
class GrammarRowRunsAhead(Core):
    """A row that needs its last token on the host is planned before it is there."""

    def advance(self, events: Sequence[Event]) -> Advance:
        may = schedule._may_decode

        def hasty(core: Core, r: Request, step: StepId) -> bool:
            pending, r.pending = r.pending, 0
            ahead = r.arrived.host_token and pending > 0
            try:
                return may(core, r, step) if not ahead else r.num_output + pending < r.max_new
            finally:
                r.pending = pending

        schedule._may_decode = hasty
        try:
            return super().advance(events)
        finally:
            schedule._may_decode = may
