"""The seam between the core and its side of a prefill/decode pair.

Turns reports of the protocol into edges and copies, and requests' fates into the protocol's calls. A
grant is a Move from PEER into our pages, a push a Move of our pages to PEER; both are fenced like
any other copy. Knows no messages: what they are and when they are repeated is `protocol`'s business.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from penstock.core.kv import allocate
from penstock.core.kv.moves import FlyingMove
from penstock.core.lifecycle import Phase, Place, Role, Trigger
from penstock.core.pair import protocol
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Grant, Reason
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.plan import (
    MoveId,
    Outcome,
    Overdue,
    PeerFenced,
    PeerId,
    Received,
    Reminded,
    Renewed,
    Say,
    Tier,
)
from penstock.core.request import Request
from penstock.core.state import CoreState

FromPeer = Received | Reminded | Overdue | PeerFenced | Renewed


def pairings(core: CoreState, role: Role) -> dict[PeerId, Pairing]:
    """One for each peer; an engine that does all of a request itself has none."""
    return {p: Pairing(core, role, p)
            for p in map(PeerId, range(0 if role is Role.UNIFIED else core.cfg.peers))}


class Pairing:
    """One engine's end of its pair with one peer. Transfers are named by the server, on both alike."""

    def __init__(self, core: CoreState, role: Role, peer: PeerId) -> None:
        self.core, self.peer = core, peer
        self.side: DecodeSide | PrefillSide = (
            DecodeSide if role is Role.DECODE else PrefillSide)(core.cfg.epoch, core.cfg.identity)
        self.requests: dict[int, Request] = {}              # by transfer, live ones
        self.granted: dict[int, list[MoveId]] = {}          # transfer -> Moves that end with it
        self.ready: list[Request] = []                      # computed and granted, but not pushed yet

    def event(self, event: FromPeer) -> None:
        side = self.side
        reports: list[protocol.Report] = []
        epochs = side.epoch, side.peer
        match event:
            case Received(message):
                reports = side.received(message)
            case PeerFenced(epoch):
                reports = side.fenced(epoch)
            case Reminded(transfer, n):
                reports = side.reminded(transfer, n) if isinstance(side, DecodeSide) else []
            case Overdue(transfer, n):
                reports = side.expired(transfer, n) if isinstance(side, PrefillSide) else []
            case Renewed(epoch):
                reports = side.restart(epoch) if isinstance(side, PrefillSide) else []
            case _:
                assert_never(event)
        if (side.epoch, side.peer) != epochs:
            self._recall()
        self._apply(reports)

    def _recall(self, transfer: int = 0) -> None:
        """Pushes that no plan has yet are not begun: of one transfer, or all, where one of the two has
        become another. The new connection is not the one that the peer closes, or has closed."""
        moves, side = self.core.kv.moves, self.side
        pushes = [m for m in moves.outbox if m.dst is Tier.PEER and m.peer == self.peer
                  and transfer in (0, m.transfer)]
        moves.cancel_planned(pushes)
        for move in pushes:
            assert isinstance(side, PrefillSide)
            self._apply(side.push_ended(move.id, False))

    def flush(self) -> list[Say]:
        """What is to be said now. A grant waits for the plan that has its Move."""
        planned = {m.generation for m in self.core.kv.moves.outbox
                   if m.src is Tier.PEER and m.peer == self.peer}
        early = [isinstance(what, Grant) and what.generation in planned for what in self.side.outbox]
        out = [Say(what, self.peer) for what, waits in zip(self.side.outbox, early, strict=True) if not waits]
        self.side.outbox = [what for what, waits in zip(self.side.outbox, early, strict=True) if waits]
        return out

    # ---------------------------------------------------------------- from the core
    def arrived(self, r: Request) -> None:
        if r.arrived.transfer:
            self.requests[r.arrived.transfer] = r
            if isinstance(self.side, PrefillSide):
                self._apply(self.side.expect(r.arrived.transfer))

    def refused(self, transfer: int) -> None:
        """A request can never run here."""
        if isinstance(self.side, PrefillSide) and transfer:
            self._apply(self.side.expect(transfer))
            self._apply(self.side.refuse(transfer, Reason.REFUSED))

    def entered(self, r: Request, source: Phase) -> None:
        """`r` has changed its phase: what the other engine must hear of that."""
        transfer = r.arrived.transfer
        if isinstance(self.side, DecodeSide):
            if r.phase is Phase.RECEIVING:
                self._open(r)
            elif source is Phase.RECEIVING and transfer in self.granted:
                self._apply(self.side.cancel(transfer))
            if r.phase is Phase.DONE:
                self.requests.pop(transfer, None)
            return
        if source is Phase.SENDING and r in self.ready:
            self.ready.remove(r)
        if r.phase is Phase.SENDING and r.grant is not None:
            self.ready.append(r)
        if r.phase is Phase.DONE and self.requests.pop(transfer, None) is not None:
            self._apply(self.side.refuse(transfer, Reason.REFUSED))

    def push_ready(self) -> None:
        """Begin the pushes of those whose last step has retired."""
        for r in list(self.ready):
            if not self.core.kv.in_flight(r) and allocate.missing(r) == []:
                self.ready.remove(r)
                self.push(r)

    def _open(self, r: Request) -> None:
        side, kv = self.side, self.core.kv
        assert isinstance(side, DecodeSide)
        transfer, start = r.arrived.transfer, r.retired
        generation = side.open(transfer, r.num_prompt, start=start)
        self.granted[transfer] = []
        for g, t in enumerate(r.tables):
            on_host = r.place is Place.HOST and t.hosted
            space, column = (kv.host[g], t.host) if on_host else (kv.device[g], t.device)
            entry = max(start // t.unit, t.begin(r.num_prompt))
            copies = [c for c in column[entry:] if c is not None]
            if t.group.window and entry * t.unit < r.num_prompt - t.group.window:
                copies[0].partial = True       # the peer sends what the window needs, no more
            self.granted[transfer].append(kv.moves.open(
                r, space, copies, entry * t.unit, r.num_prompt - entry * t.unit, transfer, generation))

    def push(self, r: Request) -> None:
        """All of a prompt is computed, and the other engine has pages: send what it lacks."""
        side, kv = self.side, self.core.kv
        assert isinstance(side, PrefillSide) and r.grant is not None
        n, transfer = r.num_prompt, r.arrived.transfer
        for g, t in enumerate(r.tables):
            on_host = r.place is Place.HOST and t.hosted
            space, column = (kv.host[g], t.host) if on_host else (kv.device[g], t.device)
            first = max(r.grant.start, t.begin(n) * t.unit)
            copies = [c for c in column[first // t.unit:t.end(n)] if c is not None]
            move = kv.moves.push(r, space, copies, first, n - first, transfer, r.grant.generation)
            side.push_started(transfer, move)
        r.is_pushed = True
        self._apply(side.finish(transfer, 0, tuple(r.tokens[n:n + 1])))

    def push_ended(self, id: MoveId, ok: bool) -> None:
        side = self.side
        assert isinstance(side, PrefillSide)
        self._apply(side.push_ended(id, ok))

    # ---------------------------------------------------------------- from the protocol
    def _apply(self, reports: Iterable[protocol.Report]) -> None:
        for o in reports:
            r = self.requests.get(o.transfer)
            match o:
                case protocol.Landed():
                    self._landed(o, r)
                case protocol.Declined():
                    if r is not None and r.phase is Phase.RECEIVING and not r.is_saved:
                        self.core.transition(r, Trigger.DROP)
                case protocol.Granted():
                    if r is not None and o.tokens == r.num_prompt and 0 <= o.start < o.tokens:
                        r.grant = o
                        self.ready += [r] if r.phase is Phase.SENDING else []
                        self.core.update_runnable(r)
                    elif r is not None:
                        self.core.end(r, Outcome.LOST)      # it is not the same request
                case protocol.Withdrawn():
                    self._recall(o.transfer)
                    if r is not None:
                        del self.requests[o.transfer]        # its end is known there
                        self.core.end(r, Outcome.LOST)
                case protocol.Sent():
                    if r is not None:
                        del self.requests[o.transfer]
                        self.core.sent(r)
                case _:
                    assert_never(o)

    def _landed(self, o: protocol.Landed, r: Request | None) -> None:
        """No byte of a grant will move any more."""
        moves = self.core.kv.moves
        ids = self.granted.pop(o.transfer)
        # A grant that ended before it was planned was never said: nobody may hear of its pages.
        moves.outbox = [move for move in moves.outbox if move.id not in ids]
        flying: list[FlyingMove] = [moves.landed(id, o.ok)[0] for id in ids]
        for flight in flying:
            moves.finish(flight)
        if r is None or r.phase is not Phase.RECEIVING or r.is_saved:
            return
        if o.ok:
            self.core.delivered(r, o.tokens)
        else:
            self.core.transition(r, Trigger.DROP)
