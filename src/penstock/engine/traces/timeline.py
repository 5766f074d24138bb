"""When each traced request was in which phase: the engine's part of its trace.

Watches the planner's edges, and turns what it has seen of a request into a `Timeline` when that has ended. Owns the
names of the phases in a trace. Knows no span, no library and no collector: the API process makes spans of timelines.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from penstock.core.lifecycle import Phase, State, Trigger
from penstock.core.plan import Event, Retired
from penstock.core.request import Request
from penstock.core.state import Watcher
from penstock.engine.wire import OutputChunk, Submit, Timeline

PHASES_MAX = 64             # of one request: one that is preempted all the time keeps its first ones
QUEUED, PREEMPTED, DECODE = "queued", "preempted", "decode"
NAMES = {Phase.QUEUED: QUEUED, Phase.FETCHING: "fetching", Phase.RECEIVING: "receiving", Phase.LOADING: "loading",
         Phase.PREFILL: "prefill", Phase.SENDING: "sending", Phase.DECODE: DECODE,
         Phase.PAUSED: PREEMPTED, Phase.DROPPED: PREEMPTED}
AFTER_PREFILL = (DECODE, "sending")


class _Line:
    __slots__ = ("choice", "name", "phases", "since", "trace")

    def __init__(self, trace: str, choice: int, since: int) -> None:
        self.trace, self.choice, self.name, self.since = trace, choice, QUEUED, since
        self.phases: list[tuple[str, int, int]] = []

    def enter(self, name: str, now: int) -> None:
        """It is in the phase `name` from `now` on. A phase that took no time is left out."""
        if name == self.name:
            return
        if now > self.since and len(self.phases) < PHASES_MAX:
            self.phases.append((self.name, self.since, now))
        self.name, self.since = name, now


class Timelines(Watcher):
    """Phases of requests that have a trace. Others cost one lookup per edge."""

    def __init__(self, steady: Callable[[], int] = time.monotonic_ns, wall: Callable[[], int] = time.time_ns) -> None:
        """steady: nanoseconds of a clock that never steps. wall: nanoseconds since 1970."""
        self._steady, self._wall = steady, wall
        self._open: dict[int, _Line] = {}
        self._untold: dict[int, Request] = {}       # have issued the step of their first token, which is not there
        self._aborted: list[int] = []               # since the last turn
        self._ended: list[Timeline] = []
        self._now = self._steady()

    def look(self) -> None:
        """Look at the clock: edges of this turn are taken now."""
        self._now = self._steady()

    def begin(self, m: Submit) -> None:
        """A request has come, if its client wants a trace; no news if it is known."""
        if m.origin.trace and m.rid not in self._open:
            self._open[m.rid] = _Line(m.origin.trace, m.choice, self._steady())

    def aborted(self, rid: int) -> None:
        """Its client has gone."""
        self._aborted.append(rid)

    def ended(self, chunks: Iterable[OutputChunk], live: Collection[int]) -> list[Timeline]:
        """Return what has ended in the turn that made these chunks. live: requests that the planner has; one that never
        reached it has waited to its end."""
        if self._open:
            for rid in (*self._aborted, *(chunk.rid for chunk in chunks if chunk.finish is not None)):
                if rid not in live:
                    self._end(rid)
        self._aborted.clear()
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------ edges of the planner
    def taken(self, r: Request, source: State, trigger: Trigger) -> None:
        line = self._open.get(r.rid)
        if line is None:
            return
        self._untold.pop(r.rid, None)
        if r.phase is Phase.DONE:
            self._end(r.rid)
            return
        name = NAMES[r.phase]
        if r.phase is Phase.DROPPED and not r.started:
            name = QUEUED                           # it was waited for in vain: the prompt is computed
        if name in AFTER_PREFILL and not r.num_output:
            self._untold[r.rid] = r                 # a prompt's last step is its prefill
        else:
            line.enter(name, self._now)

    def applied(self, event: Event) -> None:
        if self._untold and isinstance(event, Retired):
            for rid, r in [(rid, r) for rid, r in self._untold.items() if r.num_output]:
                del self._untold[rid]
                self._open[rid].enter(NAMES[r.phase], self._now)

    def _end(self, rid: int) -> None:
        line = self._open.pop(rid, None)
        if line is None:
            return
        self._untold.pop(rid, None)
        line.enter("", self._steady())
        since = self._wall() - self._steady()
        self._ended.append(Timeline(line.trace, line.choice, [(name, a + since, b + since)
                                                              for name, a, b in line.phases]))
