"""The prefill instance of a pair: which granted pages may be written, and the promise that writing is over.

Our copy of a request is here before its Grant can be. What is over is forgotten at once: a Grant or a Cancel
of it, which has crossed our answer, is answered with Drained. Nothing here knows pages or addresses: a push
is named by transfer, generation and token range.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.core.pair.messages import Cancel, Drained, End, Grant, Message, Reason, Refused
from penstock.core.pair.protocol import Granted, Report, Sent, Side, Withdrawn


class SendState(Enum):
    WAITING = "waiting"    # our copy of the request waits for its Grant
    PUSHING = "pushing"    # pushes may begin
    DRAINING = "draining"  # it will fail; pushes are in flight
    LOST = "lost"          # nobody is there to be told


@dataclass(slots=True, eq=False)
class Sending:
    """One transfer, as the prefill engine knows it."""

    transfer: int
    state: SendState = SendState.WAITING
    generation: int = 0
    tokens: int = 0
    flying: int = 0                            # pushes begun and not ended
    reason: int = Reason.NONE
    end: End | None = None                     # its first tokens are known: no push will be begun


class PrefillSide(Side):
    """Writes into pages that it was granted, and says when it has stopped. One for each decode engine.

    Of each transfer it has one copy of the request, from `expect` to Withdrawn, Sent or `refuse`."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[int, Sending] = {}
        self.pushes: dict[int, Sending] = {}   # by the owner's id

    # ---------------------------------------------------------------- our copy of the request
    def expect(self, transfer: int) -> None:
        """Our copy of the request is here: it came over this connection, and is the only one."""
        assert transfer not in self.table, "one copy of a request"
        self.table[transfer] = Sending(transfer)

    def forget(self, transfer: int) -> None:
        """Our copy works for somebody else, and nothing was ever granted."""
        assert self.table[transfer].state is SendState.WAITING
        del self.table[transfer]

    def refuse(self, transfer: int, reason: int = Reason.REFUSED) -> list[Report]:
        """Our copy has ended without success, whoever wanted that: tell the decode side (rule 5)."""
        s = self.table.get(transfer)
        if s is not None and s.state is SendState.WAITING:
            del self.table[transfer]
            self.outbox.append(Refused(transfer, 0, reason))
        elif s is not None and s.state is SendState.PUSHING:
            self._close(s, reason)
        return self._told()

    def finish(self, transfer: int, first: tuple[int, ...]) -> list[Report]:
        """All pushes have been begun; `first` are the first output tokens. Sent follows when they have
        ended well."""
        s = self._pushing(transfer)
        s.end = End(transfer, s.generation, s.tokens, first)
        self._end_if_idle(s)
        return self._told()

    def push_started(self, transfer: int, push: int) -> None:
        """A Move into the granted pages begins. `push` is not in use; it ends in one `push_ended`."""
        s = self._pushing(transfer)
        assert push not in self.pushes
        self.pushes[push] = s
        s.flying += 1

    def push_ended(self, push: int, ok: bool) -> list[Report]:
        """No byte of this push will move any more."""
        s = self.pushes.pop(push)
        s.flying -= 1
        if not ok and s.state is SendState.PUSHING:
            self._out.append(Withdrawn(s.transfer, Reason.FAILED))
            self._close(s, Reason.FAILED)
        else:
            self._end_if_idle(s)
        return self._told()

    def _lost(self) -> None:
        """Nobody waits for our answers. Pushes end, for us, when they are said to."""
        for s in self.table.values():
            if s.state is not SendState.DRAINING:
                self._out.append(Withdrawn(s.transfer, Reason.LOST))
            s.state = SendState.LOST
        self.table.clear()

    # ---------------------------------------------------------------- messages
    def _apply(self, m: Message) -> None:
        match m:
            case Grant():
                self._grant(m)
            case Cancel():
                self._cancel(m)
            case _:
                self._ignore("role")

    def _grant(self, m: Grant) -> None:
        s = self.table.get(m.transfer)
        if s is None:
            self._drained(m.transfer, m.generation, Reason.UNKNOWN)
        elif s.state is not SendState.WAITING:
            self._ignore("granted")            # our peer breaks its rule
        else:
            s.state, s.generation, s.tokens = SendState.PUSHING, m.generation, m.tokens
            self._out.append(Granted(m.transfer, m.generation, m.tokens, m.start))

    def _cancel(self, m: Cancel) -> None:
        s = self.table.get(m.transfer)
        if s is None:
            self._drained(m.transfer, m.generation, Reason.CANCELLED)
        elif s.generation != m.generation:
            self._ignore("generation")
        elif s.state is SendState.DRAINING:
            self._ignore("draining")           # it is told when the last push has ended
        else:
            self._out.append(Withdrawn(m.transfer, Reason.CANCELLED))
            s.state, s.reason = SendState.DRAINING, Reason.CANCELLED
            self._end_if_idle(s)

    # ---------------------------------------------------------------- states
    def _close(self, s: Sending, reason: int) -> None:
        """It fails on our side: say so at once, and that it has ended when it has."""
        s.state, s.reason = SendState.DRAINING, reason
        self.outbox.append(Refused(s.transfer, s.generation, reason))
        self._end_if_idle(s)

    def _end_if_idle(self, s: Sending) -> None:
        """With the last push ended, a transfer that has to end does."""
        if s.flying:
            return
        if s.state is SendState.DRAINING:
            del self.table[s.transfer]
            self._drained(s.transfer, s.generation, s.reason)
        elif s.state is SendState.PUSHING and s.end is not None:
            del self.table[s.transfer]
            self.outbox.append(s.end)
            self._out.append(Sent(s.transfer, s.generation))

    def _drained(self, transfer: int, generation: int, reason: int) -> None:
        if generation:
            self.outbox.append(Drained(transfer, generation, reason))

    def _pushing(self, transfer: int) -> Sending:
        s = self.table[transfer]
        assert s.state is SendState.PUSHING
        assert s.end is None, "finished: no push may follow"
        return s
