"""What may leave the process: a recorded flight with every token replaced by a stand-in.

Two positions have the same stand-in if and only if they have the same namespace and the same tokens up
to and including them: that is all that the planner can see of content, so plans stay the same. Repeats
within a prompt are not visible, and the numbers are given anew for each dump. Writes no file.
"""
from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from penstock.core.pair.messages import End
from penstock.core.plan import (
    NAME_BITS,
    Arrived,
    Event,
    Finished,
    HotUse,
    Output,
    Received,
    RequestId,
    RetentionEnded,
    Retired,
    Say,
    SessionEnded,
    StepId,
    StepPlan,
    key_of,
)
from penstock.core.settings import CoreConfig
from penstock.replay.recorder import Edge, RecordedTurn, Recorder

UNKNOWN = -1                       # a token that the core did not look at


@dataclass(frozen=True, slots=True)
class Held:
    """A request that was live when the flight begins. `arrived.prompt` is its prompt alone."""

    arrived: Arrived
    outputs: tuple[int, ...]
    phase: str


@dataclass(frozen=True, slots=True)
class RedactedTurn:
    """One turn of a flight. `returned` is False for the turn that ended in an exception."""

    events: tuple[Event, ...]
    plan: StepPlan | None
    outputs: tuple[Output, ...]        # but for tokens
    tokens: int                        # how many there were
    edges: tuple[tuple[RequestId, str, str, str], ...]
    idle: int
    returned: bool


@dataclass(frozen=True, slots=True)
class Flight:
    """A recorder's ring without content. `lost` turns came before; 0: it begins with the core."""

    cfg: CoreConfig
    lost: int
    held: tuple[Held, ...]
    legs: tuple[RedactedTurn, ...]


@dataclass(slots=True, eq=False)
class _RequestHistory:
    """All that is known of one request: its tokens, true and as stand-ins."""

    arrived: Arrived
    tokens: tuple[int, ...]
    before: int                        # outputs when the flight begins
    stand: list[int]                   # of each token
    emitted: int                       # outputs up to the turn that is being written


class _Numbers:
    """Stand-ins of token sequences, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._next = 0
        self._seen: dict[int, list[tuple[tuple[int, ...], list[int]]]] = {}    # namespace -> sorted

    def of(self, namespace: int, tokens: tuple[int, ...]) -> list[int]:
        seen = self._seen.setdefault(namespace, [])
        at = bisect.bisect_left(seen, tokens, key=lambda pair: pair[0])
        # In sorted order, nobody shares more with it than its two neighbours.
        best: list[int] = []
        for other, stand in seen[max(0, at - 1):at + 1]:
            n = _common(other, tokens)
            if n > len(best):
                best = stand[:n]
        fresh = len(tokens) - len(best)
        out = best + list(range(self._next, self._next + fresh))
        self._next += fresh
        seen.insert(at, (tokens, out))
        return out


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    return bisect.bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: a[:n] != b[:n])


def redact(recorder: Recorder) -> Flight:
    """The recorder's ring as it is now, without content. Call it between two turns, or after one that
    did not return."""
    turns = [*recorder.turns, *([] if recorder.now is None else [recorder.now])]
    return _Redaction(recorder, turns).flight()


_Result = tuple[StepId, RequestId, tuple[int, ...]]      # of a request, of one step, and so far as they are its tokens
_Stands = dict[tuple[StepId, RequestId | None], list[int]]
FROM_PEER = StepId(0)              # in place of a step: the prefill instance sampled it


class _Redaction:
    def __init__(self, recorder: Recorder, turns: list[RecordedTurn]) -> None:
        self.recorder, self.turns = recorder, turns
        self.plans = {t.plan.step: t.plan for t in turns if t.plan is not None}
        self.born = {e.rid: e for t in turns for e in t.events if isinstance(e, Arrived)}
        self.namespaces: dict[int, int] = {}
        self.attentions: dict[int, int] = {0: 0}
        self.sessions: dict[int, int] = {0: 0}
        self.tenants: dict[int, int] = {}           # of sessions
        # What has ended and what is live; a refused request never had a Request.
        self.known = {r.rid: (r.arrived, r.tokens) for t in turns for r in t.ended}
        self.known |= {rid: (r.arrived, r.tokens) for rid, r in recorder.core.live.items()}
        self.known |= {rid: (a, list(a.prompt)) for rid, a in self.born.items() if rid not in self.known}
        self.transfers = {a.transfer: rid for rid, (a, _) in self.known.items() if a.transfer}
        self.results = list(map(self._results, turns))
        self.stories = self._stories()

    # ---------------------------------------------------------------- who there was
    def _stories(self) -> dict[RequestId, _RequestHistory]:
        known = self.known
        counted, late = Counter[RequestId](), defaultdict[RequestId, list[int]](list)
        for turn, results in zip(self.turns, self.results, strict=True):
            for _, rid, got in results:
                if turn is self.recorder.now:
                    late[rid] += got
                else:
                    counted[rid] += len(got)
        numbers, stories = _Numbers(), dict[RequestId, _RequestHistory]()
        for rid in sorted(known):
            a, tokens = known[rid]
            n, new = len(a.prompt), late[rid]
            if rid in self.born:
                before = 0
            else:
                # Did the turn that failed get as far as to apply its results?
                applied = len(new) if new and tokens[n:][-len(new):] == new else 0
                before = max(0, len(tokens) - n - applied - counted[rid])
            whole = (*tokens[:n + before + counted[rid]], *new)
            space = self.namespaces.setdefault(a.namespace, len(self.namespaces))
            self.attentions.setdefault(a.attention, len(self.attentions))
            stories[rid] = _RequestHistory(a, whole, before, numbers.of(space, whole), before)
        return stories

    def _sampled(self, e: Retired) -> Iterator[tuple[RequestId | None, tuple[int, ...]]]:
        """Whose results they are; None if the plan was made before the flight begins."""
        plan = self.plans.get(e.step)
        rids: Sequence[RequestId | None] = [None] * len(e.tokens)
        if plan is not None:
            mine = [rid for rid, samples in zip(plan.rids, plan.samples, strict=False) if samples]
            rids = mine if len(mine) == len(e.tokens) else rids
        return zip(rids, e.tokens, strict=True)

    def _results(self, turn: RecordedTurn) -> list[_Result]:
        found = list[_Result]()
        for e in turn.events:
            if isinstance(e, Retired):
                found += [(e.step, rid, got[:turn.counted.get((e.step, rid), len(got))])
                          for rid, got in self._sampled(e) if rid in self.known]
            elif isinstance(e, Received) and isinstance(end := e.message, End):
                if (rid := self.transfers.get(end.transfer)) is not None:
                    found.append((FROM_PEER, rid, end.first[:turn.counted.get((FROM_PEER, rid), 0)]))
        return found

    # ---------------------------------------------------------------- writing it down
    def flight(self) -> Flight:
        states = {rid: r.state.name for rid, r in self.recorder.core.live.items()}
        for turn in reversed(self.turns):
            for rid, source, _, _ in reversed(turn.edges):
                states[rid] = source.name
        held = tuple(Held(self._arrived(s.arrived), tuple(s.stand[len(s.arrived.prompt):][:s.before]),
                          states.get(rid, "queued"))
                     for rid, s in self.stories.items() if rid not in self.born)
        return Flight(self.recorder.core.cfg, self.recorder.lost, held,
                      tuple(map(self._leg, self.turns, self.results)))

    def _leg(self, turn: RecordedTurn, results: list[_Result]) -> RedactedTurn:
        stands = _Stands()
        for step, rid, tokens in results:
            s = self.stories[rid]
            first = len(s.arrived.prompt) + s.emitted
            stands[step, rid] = s.stand[first:first + len(tokens)]
            s.emitted += len(tokens)
        events = tuple([self._event(e, stands) for e in turn.events])
        return RedactedTurn(events, turn.plan and self._plan(turn.plan), tuple(map(self._output, turn.outputs)),
                            turn.num_tokens, tuple(map(_edge, turn.edges)), turn.idle, turn is not self.recorder.now)

    def _event(self, e: Event, stands: _Stands) -> Event:
        if isinstance(e, Arrived):
            return self._arrived(e)
        if isinstance(e, SessionEnded | RetentionEnded):
            return replace(e, session=self._session(e.session))
        if isinstance(e, Retired):
            mine = [(stands.get((e.step, rid), []), len(got)) for rid, got in self._sampled(e)]
            return Retired(e.step, tuple([(*stand, *[UNKNOWN] * (n - len(stand))) for stand, n in mine]))
        if isinstance(e, Received) and isinstance(e.message, End):
            return Received(self._end(e.message), e.peer)
        veiled: Event = e if isinstance(e, HotUse) else _veiled(e)         # it counts, and has no token
        return veiled

    def _output(self, o: Output) -> Output:
        if isinstance(o, Say) and isinstance(o.what, End):
            return Say(self._end(o.what), o.peer)
        veiled: Output = _veiled(replace(o, reason="") if isinstance(o, Finished) else o)
        return veiled

    def _end(self, end: End) -> End:
        """Its tokens have numbers: they are those of the request, or of no use."""
        s = self.stories.get(self.transfers.get(end.transfer, RequestId(-1)))
        first: tuple[int, ...] = _veiled(end.first)
        if s is not None:
            at = len(s.arrived.prompt)
            if s.tokens[at:at + len(first)] == end.first:
                first = tuple(s.stand[at:at + len(first)])
        return replace(end, first=first)

    def _arrived(self, a: Arrived) -> Arrived:
        s, n = self.stories[a.rid], len(a.prompt)
        # Stop ids that never came are as good as none: the core only looks whether a token is one.
        hit = frozenset(stand for token, stand in zip(s.tokens[n:], s.stand[n:], strict=True)
                        if token in a.stop)
        return replace(a, prompt=tuple(s.stand[:n]), stop=hit, namespace=self.namespaces[a.namespace],
                       attention=self.attentions[a.attention], session=self._session(a.session))

    def _session(self, number: int) -> int:
        tenant = self.tenants.setdefault(key_of(number), len(self.tenants))
        return self.sessions.setdefault(number, tenant << NAME_BITS | len(self.sessions))

    def _plan(self, p: StepPlan) -> StepPlan:
        if not p.tokens:
            return p                           # brief, or without rows
        tokens: list[int] = []
        for rid, start, count in zip(p.rids, p.start, p.count, strict=False):
            at, s = len(tokens), self.stories.get(rid)
            stand = [] if s is None else s.stand[start:start + count]
            stand += [UNKNOWN] * (count - len(stand))      # of a core that is out of its mind
            tokens += [mine if token >= 0 else UNKNOWN
                       for mine, token in zip(stand, p.tokens[at:at + count], strict=False)]
        return replace(p, tokens=tuple(tokens))


def _veiled(value: Any) -> Any:
    """Any other message: single numbers and names stay, whatever is a list might be tokens."""
    if isinstance(value, tuple | frozenset | list | dict):
        return (UNKNOWN,) * len(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: _veiled(getattr(value, f.name)) for f in fields(value)})


def _edge(edge: Edge) -> tuple[RequestId, str, str, str]:
    rid, source, trigger, target = edge
    return rid, source.name, trigger.value, target.name
