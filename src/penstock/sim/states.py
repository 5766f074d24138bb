"""Which requests an event is about, and what it is called: the columns of the table of states.

Counted for every event by the judge, with the phase before and directly after it, that is before the
planner takes edges of its own. Says nothing about what should follow.
"""
from __future__ import annotations

from collections.abc import Iterable

from penstock.core.core import Core
from penstock.core.lifecycle import Mode, Phase, Role, edges
from penstock.core.messages import Cancel, Drained, End, Grant, Message, Refused
from penstock.core.plan import (
    Aborted,
    Dropped,
    Event,
    Expired,
    Flushed,
    Moved,
    MoveId,
    Overdue,
    Paused,
    PeerFenced,
    Promoted,
    Rates,
    Received,
    Reminded,
    Renewed,
    Retired,
    Spilled,
    Stopped,
)
from penstock.core.receiving import DecodeSide
from penstock.core.request import Request

WISHES = (Aborted, Stopped, Paused, Dropped, Spilled, Promoted)
SAID = {Grant: "granted", Cancel: "cancelled", End: "sent_end", Refused: "refused", Drained: "drained"}
NAMES: dict[type[Event], str] = {
    Retired: "retired", Expired: "expired", Flushed: "flushed", Rates: "rates", PeerFenced: "peer_fenced",
    Reminded: "reminded", Overdue: "overdue", Renewed: "renewed",
    **{kind: kind.__name__.lower() for kind in WISHES}}
EVENTS = (*NAMES.values(), "moved_ok", "moved_failed", *SAID.values())


def name(event: Event) -> str:
    """Of an event that some request can meet."""
    if isinstance(event, Moved):
        return "moved_ok" if event.ok else "moved_failed"
    return SAID[type(event.message)] if isinstance(event, Received) else NAMES[type(event)]


def met(core: Core, event: Event) -> Iterable[Request]:
    """The live requests that `event` is about."""
    live = core.live
    match event:
        case Retired(step, _):
            return [row.request for row in core.in_flight[step] if row.request.phase is not Phase.DONE]
        case Moved(id, _):
            return _moved(core, id)
        case Flushed() | Rates():
            return live.values()
        case Expired(rid, phase, visit):
            r = live.get(rid)
            return [r] if r is not None and (r.phase.value, r.visit) == (phase, visit) else ()
        case Stopped(rid, count):
            r = live.get(rid)
            return [r] if r is not None and count <= r.num_output else ()
        case Received(message):
            return _told(core, message)
        case PeerFenced() | Renewed():
            return core.pair.requests.values() if core.pair is not None else ()
        case Reminded(transfer, n) | Overdue(transfer, n):
            return _reminded(core, transfer, n)
        case _ if isinstance(event, WISHES):
            return [live[event.rid]] if event.rid in live else ()
    return ()


def _moved(core: Core, id: MoveId) -> list[Request]:
    """Its own copy, or one that it names a page of."""
    flight = core.have.copies.flights.get(id)
    if flight is None:
        return []
    copies = {copy for pair in flight.pairs for copy in pair}
    return [r for r in core.live.values() if r is flight.request or not all(
        copies.isdisjoint(t.device) and copies.isdisjoint(t.host) for t in r.tables)]


def _reminded(core: Core, transfer: int, n: int) -> list[Request]:
    """Whom a timer of the pair concerns, if it still counts."""
    pair = core.pair
    entry = None if pair is None else pair.side.table.get(transfer)
    r = None if pair is None else pair.requests.get(transfer)
    return [r] if r is not None and entry is not None and entry.n == n else []


def _told(core: Core, message: Message) -> list[Request]:
    """Whom a message concerns, if it is news from the present peer."""
    pair = core.pair
    if pair is None or not isinstance(message, Grant | Cancel | End | Refused | Drained):
        return []
    r = pair.requests.get(message.transfer)
    side = pair.side
    if r is None or (message.sender, message.receiver) != (side.peer, side.epoch):
        return []
    if isinstance(side, DecodeSide):
        open_ = side.table.get(message.transfer)
        if open_ is None or not open_.granted or open_.generation != message.generation:
            return []
    return [r]


# ---------------------------------------------------------------- what can meet
def possible(role: Role) -> list[tuple[str, str]]:
    """Every (phase, event) that can meet in an engine with every tier."""
    table = edges(Mode(host=True, disk=True, sparse=True, role=role))
    phases = [p for p in Phase if p is not Phase.DONE and any(source is p for source, _ in table)]
    return [(p.value, event) for p in phases for event in EVENTS if not _cannot(role, p, event)]


def _cannot(role: Role, p: Phase, event: str) -> bool:
    match event:
        case "granted" | "cancelled":
            return role is not Role.PREFILL
        case "sent_end" | "refused" | "drained" | "reminded":      # nobody grants anything before RECEIVING
            return role is not Role.DECODE or p in (Phase.QUEUED, Phase.FETCHING)
        case "overdue" | "renewed":
            return role is not Role.PREFILL
        case "peer_fenced":
            return role is Role.UNIFIED
        case "retired":                                # it never had a row, or waited until its steps had
            return p in (Phase.QUEUED, Phase.FETCHING, Phase.RECEIVING, Phase.LOADING)
        case "stopped":                                # nobody has seen an output token of it
            return role is Role.PREFILL or p in (Phase.QUEUED, Phase.FETCHING)
        case "moved_ok" | "moved_failed":              # it names no page
            return p is Phase.QUEUED
    return False
