"""The seam between the core and its side of a prefill/decode pair.

Turns reports of the protocol into edges and copies, and requests' fates into the protocol's calls. A
grant is a Move from PEER into our pages, a push a Move of our pages to PEER; both are fenced like
any other copy. Knows no messages: what they are is `protocol`'s business.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from penstock.core import retire
from penstock.core.kv import allocate, sealing
from penstock.core.kv.moves import FlyingMove
from penstock.core.kv.prefix_tree import Copy, TierGroup
from penstock.core.lifecycle import Phase, Role, State, Trigger
from penstock.core.pair import protocol
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Grant, Reason
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.plan import Claimed, MoveId, Outcome, PeerId, PeerJoined, PeerLeft, Received, Say, Tier
from penstock.core.request import Request
from penstock.core.state import CoreState, Watcher

FromPeer = Received | PeerJoined | PeerLeft | Claimed


def pairings(core: CoreState, role: Role) -> dict[PeerId, Pairing]:
    """One for each peer; an engine that does all of a request itself has none."""
    found: dict[PeerId, Pairing] = {}
    for peer in map(PeerId, range(0 if role is Role.UNIFIED else core.cfg.peers)):
        found[peer] = Pairing(core, role, peer, found)
    return found


class Pairing(Watcher):
    """One engine's end of its pair with one peer. Transfers are named by the server, on both alike."""

    def __init__(self, core: CoreState, role: Role, peer: PeerId, all: Mapping[PeerId, Pairing]) -> None:
        """all: of this engine, by peer."""
        self.core, self.peer, self._all = core, peer, all
        self.side: DecodeSide | PrefillSide = (DecodeSide if role is Role.DECODE else PrefillSide)()
        self.requests: dict[int, Request] = {}              # by transfer, live ones
        self.granted: dict[int, list[MoveId]] = {}          # transfer -> Moves that end with it
        self.pushing: dict[Request, None] = {}              # granted, and not all of it is pushed

    def hear(self, event: FromPeer) -> None:
        match event:
            case Received(message):
                self._apply(self.side.received(message))
            case PeerJoined():
                self.side.joined()
            case PeerLeft():
                self._recall()
                self._apply(self.side.left())
                for r in self.requests.values():
                    r.remote.is_asked = False
            case Claimed(rid, transfer):
                if (found := self.core.live.get(rid)) is not None:
                    self._all[found.arrived.peer].handed_over(found)
                    found.arrived = replace(found.arrived, transfer=transfer, peer=self.peer)
                    self.arrived(found)
                else:                               # it has ended meanwhile, and whoever asked waits for it
                    self.refused(transfer)
            case _:
                assert_never(event)

    def _recall(self, transfer: int = 0) -> None:
        """Pushes that no plan has yet are not begun: of one transfer, or all."""
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
            self.side.expect(r.arrived.transfer)
            r.remote.is_asked = isinstance(self.side, DecodeSide) and self.side.up

    def handed_over(self, r: Request) -> None:
        """A request without a grant is another peer's from now on."""
        assert isinstance(self.side, PrefillSide) and r.remote.grant is None
        del self.requests[r.arrived.transfer]
        self.side.forget(r.arrived.transfer)

    def refused(self, transfer: int) -> None:
        """A request can never run here."""
        if transfer:
            self.side.expect(transfer)
            if isinstance(self.side, PrefillSide):
                self._apply(self.side.refuse(transfer, Reason.REFUSED))
            else:
                self._apply(self.side.cancel(transfer))

    def taken(self, r: Request, source: State, trigger: Trigger) -> None:
        """What the other engine must hear of that."""
        transfer, side = r.arrived.transfer, self.side
        if r.arrived.peer != self.peer:
            return
        if isinstance(side, DecodeSide):
            if r.phase is Phase.RECEIVING:
                self._open(r)
            elif r.phase is not Phase.FETCHING and (transfer in side.asked or (
                    source.phase is Phase.RECEIVING and transfer in self.granted)):
                self._apply(side.cancel(transfer))
            if r.phase is Phase.DONE:
                self.requests.pop(transfer, None)
            return
        if r.phase is Phase.DONE:
            self.pushing.pop(r, None)
            if self.requests.pop(transfer, None) is not None:
                self._apply(side.refuse(transfer, Reason.REFUSED))

    def push_ready(self) -> None:
        """Push what is final and was not sent yet: sealed pages while the prompt is computed, and the rest
        once the last step has retired."""
        kv = self.core.kv
        for r in list(self.pushing):
            if r.phase is Phase.SENDING:
                if not kv.in_flight(r) and allocate.missing(r) == []:
                    del self.pushing[r]
                    self.push(r, r.num_prompt)
            elif r.phase is Phase.PREFILL:
                size = kv.cfg.page_size
                end = min(r.retired, r.num_prompt - 1) // size * size
                if end > r.remote.pushed:
                    self.push(r, end)

    def _open(self, r: Request) -> None:
        side, kv = self.side, self.core.kv
        assert isinstance(side, DecodeSide)
        transfer, start = r.arrived.transfer, r.retired
        generation = side.open(transfer, r.num_prompt, start)
        self.granted[transfer] = []
        for g, t in enumerate(r.tables):
            on_host = r.place.on_host and t.hosted
            space, column = (kv.host[g], t.host) if on_host else (kv.device[g], t.device)
            entry = max(start // t.unit, t.begin(r.num_prompt))
            copies = [c for c in column[entry:] if c is not None]
            if t.group.window and entry * t.unit < r.num_prompt - t.group.window:
                copies[0].partial = True       # the peer sends what the window needs, no more
            first = entry * t.unit
            self.granted[transfer].append(kv.moves.open(
                r, space, copies, first, r.num_prompt - first, transfer, generation))
            if r.place.on_host and not t.hosted and (below := sealing.receive_below(kv, r, g, entry)):
                self.granted[transfer].append(kv.moves.open(
                    r, kv.host[g], below, first, len(below) * t.unit, transfer, generation))

    def push(self, r: Request, end: int) -> None:
        """Send positions up to `end` that the other engine lacks; with the last of them all is said. Of a
        window or a state only the end of the prompt is sent."""
        side, kv, n = self.side, self.core.kv, r.num_prompt
        assert isinstance(side, PrefillSide) and r.remote.grant is not None
        transfer, grant = r.arrived.transfer, r.remote.grant
        pieces: list[tuple[TierGroup, list[Copy], int]] = []
        for g, t in enumerate(r.tables):
            if t.reach and end < n:
                continue
            on_host = r.place.on_host and t.hosted
            space, column = (kv.host[g], t.host) if on_host else (kv.device[g], t.device)
            first = max(grant.start if t.reach else r.remote.pushed, t.begin(n) * t.unit)
            copies = [c for c in column[first // t.unit:t.end(end)] if c is not None]
            if end < n and not all([c.ready for c in copies]):
                return                         # a page of it is on its way: the next turn looks again
            pieces.append((space, copies, first))
        for space, copies, first in pieces:
            move = kv.moves.push(r, space, copies, first, end - first, transfer, grant.generation)
            side.push_started(transfer, move)
        r.remote.pushed = end
        if end == n:
            r.remote.is_pushed = True
            self.core.num_pushed += 1
            self._apply(side.finish(transfer, tuple(r.between(n, n + 1))))

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
                    if o.generation == 0 and r is not None:
                        r.remote.is_asked = False
                    elif r is not None and r.phase is Phase.RECEIVING and not r.saving.is_done:
                        self.core.transition(r, Trigger.DROP)
                case protocol.Granted():
                    assert r is not None, "a transfer is known as long as its request lives"
                    if o.tokens == r.num_prompt and 0 <= o.start < o.tokens:
                        r.remote.grant, r.remote.pushed = o, o.start
                        self.core.update_parked(r)
                        self.pushing[r] = None
                        self.core.update_runnable(r)
                    else:
                        self.core.end(r, Outcome.LOST)      # it is not the same request
                case protocol.Withdrawn():
                    self._recall(o.transfer)
                    if r is not None:
                        del self.requests[o.transfer]        # its end is known there
                        self.core.end(r, Outcome.LOST)
                case protocol.Sent():
                    if r is not None:
                        del self.requests[o.transfer]
                        self.core.end(r, Outcome.SENT)
                case _:
                    assert_never(o)

    def _landed(self, o: protocol.Landed, r: Request | None) -> None:
        """No byte of a grant will move any more."""
        moves = self.core.kv.moves
        ids = self.granted.pop(o.transfer)
        # A grant that ended before it was planned was never said: nobody may hear of its pages.
        moves.outbox = [move for move in moves.outbox if move.id not in ids]
        flying: list[FlyingMove] = [moves.landed(id, o.ok, 0)[0] for id in ids]
        for flight in flying:
            moves.finish(flight)
        if r is None or r.phase is not Phase.RECEIVING or r.saving.is_done:
            return
        if o.ok:
            retire.delivered(self.core, r, o.tokens)
        else:
            self.core.transition(r, Trigger.DROP)
