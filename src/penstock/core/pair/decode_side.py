"""The decode end of a pair: pages that another engine may write into, and when it has stopped.

A Receiving is one Move of the decode engine, from PEER into its pages. It ends in exactly one
Landed; what the pages are, and what a request is, it refuses to know.
"""
from __future__ import annotations

from dataclasses import dataclass

from penstock.core.pair.messages import Cancel, Drained, End, Grant, Hello, Message, Reason
from penstock.core.pair.protocol import Declined, FenceEpoch, Landed, Remind, Report, Side


@dataclass(slots=True, eq=False)
class Receiving:
    """One generation that has not ended."""

    transfer: int
    generation: int
    tokens: int
    emitted: int
    start: int = 0
    granted: bool = False                      # the peer's present epoch was told: it may write
    closing: int = Reason.NONE                 # why it must fail; what is missing is the proof of its end
    n: int = 0                                 # names the timer that counts
    tries: int = 0


class DecodeSide(Side):
    """Gives pages away and says when they are its own again. One for each prefill engine."""

    def __init__(self, epoch: int, identity: int = 0) -> None:
        super().__init__(epoch, identity)
        self.table: dict[int, Receiving] = {}
        self._generation = 0
        self._newest = 0                       # newest epoch of the peer that was heard of
        self._stranger = 0                     # newest with another identity

    def open(self, transfer: int, tokens: int, emitted: int = 0, start: int = 0) -> int:
        """Grant pages for positions `start` to `tokens` - 1. Returns the generation, which ends in
        exactly one Landed; only then may the same transfer be opened again, or its pages used for
        anything else."""
        assert transfer not in self.table, "its earlier generation has not ended"
        assert tokens > 0
        assert emitted >= 0
        self._generation += 1
        r = self.table[transfer] = Receiving(transfer, self._generation, tokens, emitted, start)
        self._ask(r)
        return r.generation

    def cancel(self, transfer: int) -> list[Report]:
        """The request is gone. No effect on a transfer that is not open."""
        r = self.table.get(transfer)
        if r is None:
            self._ignore("cancel")
        elif not r.granted:
            self._end(r, Landed(transfer, r.generation, False, Reason.CANCELLED))    # nobody may write
        elif not r.closing:
            r.closing, r.tries = Reason.CANCELLED, 0
            self._ask(r)
        return self._told()

    def reminded(self, transfer: int, n: int) -> list[Report]:
        """A timer fired: repeat what has not been answered."""
        r = self.table.get(transfer)
        if r is not None and r.n == n:
            r.tries += 1
            self._ask(r)
        else:
            self._ignore("timer")
        return self._told()

    def fenced(self, epoch: int) -> list[Report]:
        """No write of the peer's epochs up to `epoch` can land any more. Asked for or not."""
        self.banned = max(self.banned, epoch)
        if self.peer and self.peer <= epoch:
            self.peer = 0
            for r in tuple(self.table.values()):
                if r.granted:
                    self._end(r, Landed(r.transfer, r.generation, False, r.closing or Reason.LOST))
            self._adopt()
        return self._told()

    # ---------------------------------------------------------------- inside
    def _heard(self, epoch: int) -> None:
        if epoch > self._newest:
            self._newest = epoch
            if self.peer:
                self.outbox.append(FenceEpoch(self.peer))
            self._adopt()

    def _replaced(self, epoch: int) -> None:
        if self.peer and epoch > max(self.peer, self._stranger):
            self._stranger = epoch
            self.outbox.append(FenceEpoch(self.peer))

    def _adopt(self) -> None:
        """Pair with the newest incarnation, but not before the fence of the one before it."""
        if self.peer == 0 and self._newest > self.banned:
            self.peer = self._newest
            for r in self.table.values():
                r.tries = 0
                self._ask(r)

    def _ask(self, r: Receiving) -> None:
        """Say what has not been answered, and have us reminded of it."""
        # A grant names one incarnation, so that its fence is all that its pages wait for.
        r.granted = r.granted or (self.peer != 0 and self.peer == self._newest)
        if not r.granted:
            self._greet(0)
        elif r.closing:
            self.outbox.append(Cancel(self.epoch, self.peer, r.transfer, r.generation))
        else:
            self.outbox.append(Grant(self.epoch, self.peer, r.transfer, r.generation, r.tokens, r.emitted,
                                     r.start))
        r.n = self._next()
        self.outbox.append(Remind(r.transfer, r.n, r.tries))

    def _apply(self, m: Message) -> None:
        match m:
            case Hello():
                return
            case Grant() | Cancel():
                self._ignore("role")
                return
        r = self.table.get(m.transfer)
        if r is None or not r.granted or r.generation != m.generation:
            self._ignore("generation")
        elif isinstance(m, End):
            self._take(r, m)
        elif isinstance(m, Drained):
            self._end(r, Landed(r.transfer, r.generation, False, r.closing or m.reason or Reason.BROKEN))
        elif r.closing:
            self._ignore("refused")
        else:
            r.closing = m.reason or Reason.REFUSED
            self._out.append(Declined(r.transfer, r.generation, r.closing))

    def _take(self, r: Receiving, m: End) -> None:
        """The bytes are in place; they count only if they are what was asked for, and if no output
        token is missing between what was streamed and what came (rule 9). Nobody decodes without one."""
        ok = (m.tokens == r.tokens and 0 <= m.index <= r.emitted
              and r.emitted + len(m.first[r.emitted - m.index:]) > 0 and min(m.first, default=0) >= 0)
        if ok:
            new = m.first[r.emitted - m.index:]
            self._end(r, Landed(r.transfer, r.generation, True, Reason.NONE, r.emitted, new))
        else:
            self._end(r, Landed(r.transfer, r.generation, False, Reason.BROKEN))

    def _end(self, r: Receiving, landed: Landed) -> None:
        del self.table[r.transfer]
        # What was not said of it yet is not said: a Grant might come after the end of its pages.
        self.outbox = [m for m in self.outbox if not (
            isinstance(m, Grant | Cancel) and m.generation == r.generation)]
        self._out.append(landed)
