"""Sessions of a simulated engine: when they end and warm up, and whose pages must go first.

`Owners` keeps by itself who has used each sealed page, and knows nothing of how the core does.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from penstock.core.lifecycle import Phase, Place, State, Trigger
from penstock.core.plan import NAME_BITS, Arrived, Event, Flushed, Outcome, RequestId, RetentionEnded, SessionEnded
from penstock.sim.world.view import Live, Sealed, View, Watcher
from penstock.sim.world.workload import Expect, session_number


@dataclass(slots=True, eq=False)
class Known:
    """One life of a session. `pages`: of its latest request, while they are to go last."""

    number: int
    ended: bool = False
    asks: bool = False
    pages: list[Sealed] = field(default_factory=list)


def schedule(world: Any) -> None:
    """Sessions of this `World` end, some of them twice or unknown, and some ask for what storage has."""
    sc, rng = world.sc, Random(f"sessions {world.sc.seed} {world.sc.cfg.role} {world.epoch}")
    for _ in range(sc.ends):
        world.clock.after(rng.random() * (sc.span + 20), partial(_end, world, rng))
    for _ in range(sc.warms if sc.cfg.role != "prefill" else 0):
        world.clock.after(rng.random() * (sc.span + 20), partial(_warm, world, rng))


def _end(world: Any, rng: Random) -> None:
    used = [e.arrived.session for e in world.load.made if e.sent and e.arrived.session]
    aimed = used and rng.random() < 0.8
    number = rng.choice(used) if aimed else session_number(rng.randint(1, world.sc.sessions + 1))
    world.send((RetentionEnded if world.sc.retains and rng.random() < 0.4 else SessionEnded)(number))


def _warm(world: Any, rng: Random) -> None:
    """Ask for the prompt of an earlier request, or of one that is here."""
    sent = [e for e in world.load.made if e.sent and not e.arrived.warms and e.outcome is not Outcome.REFUSED]
    if not sent or world.judge.issued > world.sc.steps:
        return
    before = rng.choice(sent)
    asked = replace(before.arrived, rid=RequestId(len(world.load.made)), max_new=1, stop=frozenset(), min_new=0,
                    leader=None, transfer=0, warms=True)
    e = Expect(asked, before.seed, world.clock.now, (), Outcome.WARMED, False)
    world.load.made.append(e)
    world.expect(e)


class Owners(Watcher):
    """Who has used each sealed page since it was sealed."""

    def __init__(self, view: View, most: int, retained: int) -> None:
        """most: sessions that are known. retained: pages of those that go last, together."""
        self._view, self._most, self._retained = view, most, retained
        self._last: list[Known] = []            # whose pages go last, in the order in which they came to
        self._known: dict[int, Known] = {}      # the one that was used longest ago first
        self._tenants: dict[int, None] = {}     # in the order in which they came to have sessions
        self._of: dict[RequestId, Known | None] = {}        # of live requests; None: no session
        self._users: dict[Sealed, dict[Known | None, None]] = {}
        self._path: list[Sealed] = []
        self.retained = 0                       # pages that were seen to go last

    def applied(self, event: Event) -> None:
        if isinstance(event, Arrived) and self._view.get(event.rid) is not None:        # else it was refused
            self._of[event.rid] = known = self._begin(event.session)
            if known is not None and event.retains:
                known.asks = True
        elif isinstance(event, SessionEnded) and (ended := self._known.pop(event.session, None)) is not None:
            ended.ended, ended.asks = True, False
        elif isinstance(event, RetentionEnded) and event.session in self._known:
            self._known[event.session].asks = False
        elif isinstance(event, Flushed):
            self._last = []
        self._last = [known for known in self._last if known.asks]

    def _begin(self, number: int) -> Known | None:
        if not number:
            return None
        known, tenant = self._known.pop(number, None) or Known(number), number >> NAME_BITS
        if all([other >> NAME_BITS != tenant for other in self._known]):
            self._tenants.pop(tenant, None)
            self._tenants[tenant] = None
        self._known[number] = known
        if len(self._known) > self._most:      # the tenant with the most, of equal ones the first, loses its oldest
            of = {t: [n for n in self._known if n >> NAME_BITS == t] for t in self._tenants}
            self._known.pop(max(of.values(), key=len)[0]).asks = False
        return known

    def _retain(self, known: Known) -> None:
        """All pages of its latest request go last, if those of the sessions before it leave room; if not, the tenant
        with the most gives way, and of its sessions the latest."""
        known.pages = list(self._path)
        if len(known.pages) > self._retained:
            self._last = [k for k in self._last if k is not known]
            return
        self._last += [known] * (known not in self._last)
        while sum([len(k.pages) for k in self._last]) > self._retained:
            sums: dict[int, int] = {}
            for k in self._last:
                sums[k.number >> NAME_BITS] = sums.get(k.number >> NAME_BITS, 0) + len(k.pages)
            largest = [k for k in self._last if sums[k.number >> NAME_BITS] == max(sums.values())]
            tenant = largest[0].number >> NAME_BITS      # of two that have as many the one that came first
            self._last.remove([k for k in largest if k.number >> NAME_BITS == tenant][-1])

    def edge(self, live: Live, trigger: Trigger, place: Place) -> None:
        self._path = list(live.path)

    def taken(self, live: Live, source: State, trigger: Trigger) -> None:
        looked = source.phase not in (Phase.QUEUED, Phase.DROPPED)      # those have pages of a trial to get a row only
        if live.phase in (Phase.DONE, Phase.DROPPED) and looked:
            for page in self._path:
                self._users.setdefault(page, {})[self._of[live.rid]] = None
        if live.phase is Phase.DONE:
            known = self._of.pop(live.rid)
            used = looked and self._path and not live.arrived.warms
            if used and known is not None and known.asks:
                self._retain(known)

    def _is_over(self, page: Sealed) -> bool:
        """Whether one session alone has used it, and has ended."""
        users = self._users.get(page, {})
        return len(users) == 1 and all([user is not None and user.ended for user in users])

    def _is_wanted(self, page: Sealed) -> bool:
        """Whether a request without a session has used it, or a session that has not ended."""
        return any([user is None or not user.ended for user in self._users.get(page, {})])

    def check(self) -> int:
        """Pages of sessions that have ended are evicted before those of others, and those of sessions that are
        retained after them; all others keep their place. Return how many there are that have ended."""
        found = 0
        last = {page for known in self._last for page in known.pages}
        for order in self._view.eviction_orders() if not self._view.is_ending and self._retained else ():
            order = [page for page in order if not self._view.is_banished(page)]
            retained = [page in last for page in order]
            self.retained += sum(retained)
            assert retained == [page in self._view.retained for page in order], "other pages are retained than should"
            assert retained == sorted(retained), "a page that no session retains outlives one that is retained"
            assert not any([self._view.is_hidden(page) for page in order if page in last]), "a hidden page is retained"
        for order in self._view.eviction_orders():
            wanted = False
            for page in order:
                if self._is_wanted(page) and not self._view.is_banished(page):
                    wanted = wanted or not self._view.is_hidden(page)
                    assert self._view.is_hidden(page) or not self._view.is_oldest(page), "a page of others goes first"
                elif self._is_over(page) and not self._view.is_ending:
                    assert not wanted, "a page of a session that has ended outlives others"
                    found += 1
        return found
