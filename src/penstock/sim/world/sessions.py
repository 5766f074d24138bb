"""Sessions of a simulated engine: when they end and warm up, and whose pages must go first.

`Owners` keeps by itself who has used each sealed page, and knows nothing of how the core does.
"""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Arrived, Event, Outcome, RequestId, SessionEnded
from penstock.sim.world.view import Live, Sealed, View, Watcher
from penstock.sim.world.workload import Expect


@dataclass(slots=True, eq=False)
class Known:
    """One life of a session."""

    ended: bool = False


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
    world.send(SessionEnded(rng.choice(used) if aimed else rng.randint(1, world.sc.sessions + 1)))


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

    def __init__(self, view: View, most: int) -> None:
        self._view, self._most = view, most
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._of: dict[RequestId, Known | None] = {}        # of live requests; None: no session
        self._users: dict[Sealed, dict[Known | None, None]] = {}
        self._path: list[Sealed] = []

    def applied(self, event: Event) -> None:
        if isinstance(event, Arrived) and self._view.get(event.rid) is not None:        # else it was refused
            self._of[event.rid] = self._begin(event.session)
        elif isinstance(event, SessionEnded) and (known := self._known.pop(event.session, None)) is not None:
            known.ended = True

    def _begin(self, number: int) -> Known | None:
        if not number:
            return None
        known = self._known.setdefault(number, Known())
        self._known.move_to_end(number)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return known

    def edge(self, live: Live, trigger: Trigger) -> None:
        self._path = list(live.path)

    def taken(self, live: Live, source: Phase, trigger: Trigger) -> None:
        if live.phase in (Phase.DONE, Phase.DROPPED) and source is not Phase.QUEUED:    # which has only looked at them
            for page in self._path:
                self._users.setdefault(page, {})[self._of[live.rid]] = None
        if live.phase is Phase.DONE:
            del self._of[live.rid]

    def _is_over(self, page: Sealed) -> bool:
        """Whether one session alone has used it, and has ended."""
        users = self._users.get(page, {})
        return len(users) == 1 and all([user is not None and user.ended for user in users])

    def _is_wanted(self, page: Sealed) -> bool:
        """Whether a request without a session has used it, or a session that has not ended."""
        return any([user is None or not user.ended for user in self._users.get(page, {})])

    def check(self) -> int:
        """Pages of sessions that have ended are evicted before those of others, which keep their place. Return how
        many there are."""
        found = 0
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
