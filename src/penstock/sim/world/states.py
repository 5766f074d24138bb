"""Which requests an event is about, and what it is called: the columns of the table of states.

Counted for every event by the judge, with the phase before and directly after it, that is before the
planner takes edges of its own. Says nothing about what should follow.
"""
from __future__ import annotations

from penstock.core.lifecycle import PLACED, Mode, Phase, Role, State, Trigger, changes
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Message, Refused
from penstock.core.plan import (
    Aborted,
    Dropped,
    Event,
    Expired,
    Flushed,
    Moved,
    Paused,
    PeerLeft,
    Promoted,
    Rates,
    Received,
    RequestId,
    Retired,
    Spilled,
    Stopped,
)
from penstock.sim.world.view import Live, View

WISHES = (Aborted, Stopped, Paused, Dropped, Spilled, Promoted)
SAID = {Grant: "granted", Cancel: "cancelled", End: "sent_end", Refused: "refused", Drained: "drained"}
NAMES: dict[type[Event], str] = {
    Retired: "retired", Expired: "expired", Flushed: "flushed", Rates: "rates", PeerLeft: "peer_left",
    **{kind: kind.__name__.lower() for kind in WISHES}}
EVENTS = (*NAMES.values(), "moved_ok", "moved_failed", *SAID.values())


def name(event: Event) -> str:
    """Of an event that some request can meet."""
    if isinstance(event, Moved):
        return "moved_ok" if event.ok else "moved_failed"
    return SAID[type(event.message)] if isinstance(event, Received) else NAMES[type(event)]


def met(view: View, event: Event) -> list[Live]:
    """The live requests that `event` is about."""
    match event:
        case Retired(step, _):
            return [r for r in view.in_step(step) if r.phase is not Phase.DONE]
        case Moved(id, _):
            return view.touched(id)
        case Flushed() | Rates():
            return view.live
        case Expired(rid, phase, visit):
            return [r for r in _one(view, rid) if (r.phase.value, r.visit) == (phase, visit)]
        case Stopped(rid, count):
            return [r for r in _one(view, rid) if count <= r.num_output]
        case Received(message):
            return _told(view, message)
        case PeerLeft():
            return view.at_peer
        case _ if isinstance(event, WISHES):
            return _one(view, event.rid)
    return []


def _one(view: View, rid: RequestId) -> list[Live]:
    r = view.get(rid)
    return [] if r is None else [r]


def _told(view: View, message: Message) -> list[Live]:
    """Whom a message concerns, if it is news."""
    r = None if view.cfg.role == "unified" else view.of_transfer(message.transfer)
    known = view.generation(message.transfer)
    early = isinstance(message, Grant) or (isinstance(message, Refused) and not message.generation)
    return [r] if r is not None and (early or known == message.generation) else []


# ---------------------------------------------------------------- what can meet
def possible(role: Role) -> list[tuple[str, str]]:
    """Every (state, event) that can meet in an engine with every tier."""
    full = Mode(host=True, disk=True, sparse=True, role=role)
    states = list({source.name: source.phase for source, _, _ in changes(full)}.items())
    return [(name, event) for name, p in states for event in EVENTS if not _cannot(role, p, event)]


def edge(source: State, trigger: Trigger, target: State) -> tuple[str, str]:
    """What a legal change is called, where edges are counted."""
    return source.name, f"{trigger.value} {target.place.value}" if trigger in PLACED else trigger.value


def _cannot(role: Role, p: Phase, event: str) -> bool:
    match event:
        case "granted" | "cancelled":
            return role is not Role.PREFILL
        case "refused":
            return role is not Role.DECODE
        case "sent_end" | "drained":                   # nobody grants anything before RECEIVING
            return role is not Role.DECODE or p in (Phase.QUEUED, Phase.FETCHING)
        case "peer_left":
            return role is Role.UNIFIED
        case "retired":                                # it never had a row, or waited until its steps had
            return p in (Phase.QUEUED, Phase.FETCHING, Phase.RECEIVING, Phase.LOADING)
        case "stopped":                                # nobody has seen an output token of it
            return role is Role.PREFILL or p in (Phase.QUEUED, Phase.FETCHING)
        case "moved_ok" | "moved_failed":              # it names no page
            return p is Phase.QUEUED
    return False
