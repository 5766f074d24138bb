"""Which requests are in which phase: queues in order of service, and counts, kept as phases change.

Policies read these and walk no requests, so a question costs the same however many run or wait.
`CoreState.transition` reports each change of phase here. Knows no policy.
"""
from __future__ import annotations

import bisect
import operator
from collections.abc import Callable
from functools import partial

from penstock.core.lifecycle import ACTIVE, WAITING, Phase, Place, State
from penstock.core.policy import demand
from penstock.core.request import PREEMPTIONS_MAX, Request
from penstock.core.settings import CoreConfig

# Phases in which a request is in one of `saving`, `stranded`, `ungranted` and `delivered`, or may come to be.
_PARKED = (Phase.PAUSED, Phase.FETCHING, Phase.SENDING, Phase.RECEIVING)
_ON_ITS_WAY = (Place.TO_HOST, Place.TO_DEVICE)
_key = operator.attrgetter("key")


class Queues:
    """Requests of one engine. Lists are in order of service."""

    def __init__(self, cfg: CoreConfig) -> None:
        self.by_phase: dict[Phase, list[Request]] = {p: [] for p in Phase if p is not Phase.DONE}
        self.by_place: dict[Place, list[Request]] = {p: [] for p in Place}       # of those that decode
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
        queues: list[tuple[list[Request], Callable[[State], bool]]] = [
            (self.running, lambda s: s.phase in ACTIVE), (self.waiting, lambda s: s.phase in WAITING),
            (self.hosted, lambda s: s.phase is Phase.DECODE and s.place.on_host),
            (self.on_host, lambda s: s.phase in ACTIVE and s.place is not Place.DEVICE),
            (self.transient, lambda s: s.phase in (Phase.LOADING, Phase.PREFILL) or s.place in _ON_ITS_WAY),
            *((queue, partial(_is_in_phase, p)) for p, queue in self.by_phase.items()),
            *((queue, partial(_decodes_at, p)) for p, queue in self.by_place.items())]
        self._queues = queues
        self._changes: dict[tuple[State, State], tuple[list[list[Request]], list[list[Request]]]] = {}

    def by_state(self) -> list[tuple[str, list[Request]]]:
        """All that live, by the names of their states."""
        return [*((p.value, queue) for p, queue in self.by_phase.items() if p is not Phase.DECODE),
                *((State(Phase.DECODE, p).name, queue) for p, queue in self.by_place.items())]

    def enqueue_new(self, r: Request) -> None:
        """A request has arrived."""
        insert(self.waiting, r)
        insert(self.by_phase[r.phase], r)

    def state_changed(self, r: Request, source: State) -> None:
        """`r` has left `source`."""
        left, entered = self._changes.get((source, r.state)) or self._change(source, r.state)
        for queue in left:
            remove(queue, r)
        for queue in entered:
            insert(queue, r)
        was, runs = source.phase in ACTIVE, r.phase in ACTIVE
        if was != runs and r.setbacks.preemptions >= PREEMPTIONS_MAX - 1:
            keep(self.tired, r, runs)
        if was:
            self._count(r, source.place, -1)
        if runs:
            self._count(r, r.place, 1)
        if source.phase is Phase.SENDING and r.remote.is_pushed:
            self.num_pushed -= 1
        if source.phase in _PARKED or r.phase in _PARKED:
            self.update_parked(r)

    def update_parked(self, r: Request) -> None:
        """What `r` waits for, without a row, has changed: copies, a grant, the KV that a peer computes."""
        paused = r.phase is Phase.PAUSED
        keep(self.saving, r, not is_bare(r) if paused else r.phase is Phase.FETCHING and r.storage.has_more)
        keep(self.stranded, r, paused and is_stranded(r))
        if self._cfg.role != "unified":
            keep(self.ungranted, r, r.phase is Phase.SENDING and r.remote.grant is None)
            keep(self.delivered, r, r.phase is Phase.RECEIVING and r.saving.is_done)

    def _change(self, source: State, target: State) -> tuple[list[list[Request]], list[list[Request]]]:
        """The queues that an edge leaves, and those that it enters."""
        self._changes[source, target] = change = (
            [queue for queue, holds in self._queues if holds(source) and not holds(target)],
            [queue for queue, holds in self._queues if holds(target) and not holds(source)])
        return change

    def _count(self, r: Request, place: Place, times: int) -> None:
        """It runs, or does no more, with its KV in `place`."""
        self.num_growing_host += times * (place is Place.HOST)
        for grown, total in self.demand.items():
            demand.add(total, demand.at_end(self._cfg, r, place, grown), times)

    def check_queues(self) -> None:
        """Whether queues and counts equal what a walk over all requests finds. Raises AssertionError."""
        live = sorted([*self.running, *self.waiting], key=lambda r: r.key)
        for i, (queue, holds) in enumerate(self._queues):
            assert queue == [r for r in live if holds(r.state)], i
        running, paused = self.running, self.by_phase[Phase.PAUSED]
        assert self.tired == [r for r in running if r.setbacks.preemptions >= PREEMPTIONS_MAX - 1]
        assert self.num_growing_host == sum([r.place is Place.HOST for r in running])
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


def _is_in_phase(phase: Phase, state: State) -> bool:
    return state.phase is phase


def _decodes_at(place: Place, state: State) -> bool:
    return state == (Phase.DECODE, place)


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
