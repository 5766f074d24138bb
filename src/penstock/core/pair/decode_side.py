"""The decode instance of a pair: pages that another engine may write into, and when it has stopped.

A Receiving is one Move of the decode engine, from PEER into its pages. It ends in exactly one
Landed; what the pages are, and what a request is, it refuses to know.
"""
from __future__ import annotations

from dataclasses import dataclass

from penstock.core.pair.messages import Cancel, Drained, End, Grant, Message, Reason, Refused
from penstock.core.pair.protocol import Declined, Landed, Report, Side


@dataclass(slots=True, eq=False)
class Receiving:
    """One generation that has not ended."""

    transfer: int
    generation: int
    tokens: int
    closing: int = Reason.NONE                 # why it must fail; what is missing is the proof of its end


class DecodeSide(Side):
    """Gives pages away and says when they are its own again. One for each prefill engine."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, None] = {}       # transfers that the peer works for, and nothing is granted yet
        self.table: dict[int, Receiving] = {}
        self._generation = 0

    def expect(self, transfer: int) -> None:
        """The request was sent to the other end, if there is one."""
        if self.up:
            self.asked[transfer] = None

    def open(self, transfer: int, tokens: int, start: int = 0) -> int:
        """Grant pages for positions `start` to `tokens` - 1 of a transfer that is `asked`. Returns the
        generation, which ends in exactly one Landed; only then may its pages be used for anything else."""
        del self.asked[transfer]
        self._generation += 1
        r = self.table[transfer] = Receiving(transfer, self._generation, tokens)
        self.outbox.append(Grant(transfer, r.generation, tokens, start))
        return r.generation

    def cancel(self, transfer: int) -> list[Report]:
        """The request is gone, or computed here. No effect on one that the peer does not work for."""
        r = self.table.get(transfer)
        if r is None:
            if transfer in self.asked:
                del self.asked[transfer]
                self.outbox.append(Cancel(transfer, 0))
        elif (grant := self._unsaid(r)) is not None:
            self.outbox[self.outbox.index(grant)] = Cancel(transfer, 0)
            self._end(r, Landed(transfer, r.generation, False, Reason.CANCELLED))    # nobody may write
        elif not r.closing:
            r.closing = Reason.CANCELLED
            self.outbox.append(Cancel(transfer, r.generation))
        return self._told()

    def _unsaid(self, r: Receiving) -> Grant | None:
        return next((m for m in self.outbox if isinstance(m, Grant) and m.generation == r.generation), None)

    def _lost(self) -> None:
        self.asked.clear()
        for r in tuple(self.table.values()):
            self._end(r, Landed(r.transfer, r.generation, False, r.closing or Reason.LOST))

    def _apply(self, m: Message) -> None:
        if isinstance(m, Grant | Cancel):
            self._ignore("role")
            return
        r = self.table.get(m.transfer)
        if isinstance(m, Refused) and m.generation == 0:
            if m.transfer in self.asked:
                del self.asked[m.transfer]
                self._out.append(Declined(m.transfer, 0, m.reason))
            elif r is not None and not r.closing:
                self._decline(r, m.reason)     # its Grant, which has crossed this, is answered too
        elif r is None or r.generation != m.generation:
            self._ignore("generation")
        elif isinstance(m, End):
            # The bytes are in place; they count only if they are what was asked for. Nobody decodes
            # without a token.
            ok = m.tokens == r.tokens and len(m.first) > 0 and min(m.first) >= 0
            self._end(r, Landed(r.transfer, r.generation, ok, Reason.NONE if ok else Reason.BROKEN,
                                m.first if ok else ()))
        elif isinstance(m, Drained):
            self._end(r, Landed(r.transfer, r.generation, False, r.closing or m.reason or Reason.BROKEN))
        elif not r.closing:
            self._decline(r, m.reason)

    def _decline(self, r: Receiving, reason: int) -> None:
        r.closing = reason or Reason.REFUSED
        self._out.append(Declined(r.transfer, r.generation, r.closing))

    def _end(self, r: Receiving, landed: Landed) -> None:
        del self.table[r.transfer]
        self._out.append(landed)
