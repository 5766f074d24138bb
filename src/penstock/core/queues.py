"""Which requests are in which phase: queues in order of service, and counts, kept as phases change.

Policies read these and walk no requests, so a question costs the same however many run or wait.
`CoreState.transition` reports each change of phase here. Knows no policy.
"""
from __future__ import annotations

import bisect
import operator

from penstock.core.lifecycle import ACTIVE, BUSY, ON_HOST, WAITING, Phase, Place
from penstock.core.policy import demand
from penstock.core.request import PREEMPTIONS_MAX, Request
from penstock.core.settings import CoreConfig

# Phases in which a request is in one of `saving`, `stranded`, `ungranted` and `delivered`, or may come to be.
_PARKED = (Phase.PAUSED, Phase.FETCHING, Phase.SENDING, Phase.RECEIVING)
_key = operator.attrgetter("key")


class Queues:
    """Requests of one engine. Lists are in order of service."""

    def __init__(self, cfg: CoreConfig) -> None:
        self.by_phase: dict[Phase, list[Request]] = {p: [] for p in Phase if p is not Phase.DONE}
        self.running: list[Request] = []       # phases with a row
        self.hosted: list[Request] = []        # of these, who decodes from host pages
        self.on_host: list[Request] = []       # and all whose KV is in host pages, or on its way there
        self.tired: list[Request] = []         # of those running, who may give way only once more
        self.waiting: list[Request] = []       # phases without a row
        self.transient: list[Request] = []     # of those running, who may take an edge by itself
        # Of those waiting:
        self.saving: list[Request] = []        # is paused and not all copied, or has more to fetch
        self.stranded: list[Request] = []      # is paused, and has device pages that could not be copied
        self.ungranted: list[Request] = []     # prefill role: is computed, and has no grant
        self.delivered: list[Request] = []     # decode role: its KV has arrived
        self.num_pushed = 0                    # prefill role: have sent all, and know no end yet
        self.num_growing_host = 0              # running requests that grow in host pages alone
        # Pages that all running requests need at their ends; True: with the largest hot buffers.
        none = [0] * len(cfg.groups)
        self.demand: dict[bool, demand.PageCounts] = {
            grown: (none.copy(), none.copy()) for grown in (False, True)[:1 + cfg.sparse]}
        self._cfg = cfg
        self._queues = ((self.running, ACTIVE), (self.hosted, ON_HOST), (self.waiting, WAITING),
                        (self.transient, BUSY), *((queue, (p,)) for p, queue in self.by_phase.items()))
        self._changes: dict[tuple[Phase, Phase], tuple[list[list[Request]], list[list[Request]]]] = {}

    def enqueue_new(self, r: Request) -> None:
        """A request has arrived."""
        insert(self.waiting, r)
        insert(self.by_phase[r.phase], r)

    def phase_changed(self, r: Request, source: Phase, place: Place) -> None:
        """`r` has left `source`, where its KV was in `place`."""
        left, entered = self._changes.get((source, r.phase)) or self._change(source, r.phase)
        for queue in left:
            remove(queue, r)
        for queue in entered:
            insert(queue, r)
        was, runs = source in ACTIVE, r.phase in ACTIVE
        if was != runs and r.setbacks.preemptions >= PREEMPTIONS_MAX - 1:
            keep(self.tired, r, runs)
        if was or runs:
            self._count(r, was, source, place, -1)
            self._count(r, runs, r.phase, r.place, 1)
            keep(self.on_host, r, runs and (r.place is Place.HOST or r.phase is Phase.STAGING))
        if source is Phase.SENDING and r.remote.is_pushed:
            self.num_pushed -= 1
        if source in _PARKED or r.phase in _PARKED:
            self.update_parked(r)

    def update_parked(self, r: Request) -> None:
        """What `r` waits for, without a row, has changed: copies, a grant, the KV that a peer computes."""
        paused = r.phase is Phase.PAUSED
        keep(self.saving, r, not is_bare(r) if paused else r.phase is Phase.FETCHING and r.storage.has_more)
        keep(self.stranded, r, paused and is_stranded(r))
        if self._cfg.role != "unified":
            keep(self.ungranted, r, r.phase is Phase.SENDING and r.remote.grant is None)
            keep(self.delivered, r, r.phase is Phase.RECEIVING and r.saving.is_done)

    def _change(self, source: Phase, target: Phase) -> tuple[list[list[Request]], list[list[Request]]]:
        """The queues that an edge leaves, and those that it enters."""
        self._changes[source, target] = change = (
            [queue for queue, phases in self._queues if source in phases and target not in phases],
            [queue for queue, phases in self._queues if target in phases and source not in phases])
        return change

    def _count(self, r: Request, runs: bool, phase: Phase, place: Place, times: int) -> None:
        if runs:
            self.num_growing_host += times * (place is Place.HOST and phase is not Phase.PROMOTING)
            for grown, total in self.demand.items():
                demand.add(total, demand.at_end(self._cfg, r, place, grown), times)

    def check_queues(self) -> None:
        """Whether queues and counts equal what a walk over all requests finds. Raises AssertionError."""
        live = sorted([*self.running, *self.waiting], key=lambda r: r.key)
        for queue, phases in self._queues:
            assert queue == [r for r in live if r.phase in phases], phases
        running, paused = self.running, self.by_phase[Phase.PAUSED]
        assert self.on_host == [r for r in running if r.place is Place.HOST or r.phase is Phase.STAGING]
        assert self.tired == [r for r in running if r.setbacks.preemptions >= PREEMPTIONS_MAX - 1]
        assert self.num_growing_host == sum([
            r.place is Place.HOST and r.phase is not Phase.PROMOTING for r in running])
        for grown, total in self.demand.items():
            counted: demand.PageCounts = [0] * len(total[0]), [0] * len(total[0])
            for r in running:
                demand.add(counted, demand.at_end(self._cfg, r, r.place, grown))
            assert total == counted, "pages that running requests need"
        assert self.saving == [r for r in live if (r.phase is Phase.PAUSED and not is_bare(r)) or (
            r.phase is Phase.FETCHING and r.storage.has_more)]
        assert self.stranded == [r for r in paused if is_stranded(r)]
        sending, receiving = self.by_phase[Phase.SENDING], self.by_phase[Phase.RECEIVING]
        assert self.ungranted == [r for r in sending if r.remote.grant is None]
        assert self.num_pushed == sum([r.remote.is_pushed for r in sending])
        assert self.delivered == [r for r in receiving if r.saving.is_done]


def is_bare(r: Request) -> bool:
    """A parked request whose device pages stay: they could not be copied to the host."""
    return r.saving.is_done and not r.saving.is_copying and not r.moves


def is_stranded(r: Request) -> bool:
    """The same, if there are such pages."""
    return is_bare(r) and any([any(t.device) for t in r.tables])


# ---------------------------------------------------------------- one queue
def insert(queue: list[Request], r: Request) -> None:
    """Put a request into its place in the order of service."""
    if queue and queue[-1].key > r.key:
        bisect.insort(queue, r, key=_key)
    else:
        queue.append(r)                        # most come last


def remove(queue: list[Request], r: Request) -> None:
    """Take a request out, which is there."""
    at = bisect.bisect_left(queue, r.key, key=_key)
    assert queue[at] is r, "a queue out of order"
    del queue[at]


def keep(queue: list[Request], r: Request, belongs: bool) -> None:
    """Put a request in or take it out, if it is not where it belongs."""
    if not queue or queue[-1].key < r.key:
        if belongs:
            queue.append(r)
        return
    at = bisect.bisect_left(queue, r.key, key=_key)
    if (at < len(queue) and queue[at] is r) is belongs:
        return
    if belongs:
        queue.insert(at, r)
    else:
        del queue[at]
