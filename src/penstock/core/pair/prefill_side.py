"""The prefill end of a pair: which granted pages may be written, and the promise that writing is over.

Notices are sticky: a Grant or a Cancel may come before our copy of the request. What is over is
remembered until a deadline, and after that by one number. Nothing here knows pages or addresses:
a push is named by transfer, generation and token range.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from penstock.core.pair.messages import Cancel, Drained, End, Grant, Hello, Message, Reason, Refused
from penstock.core.pair.protocol import Deadline, Granted, Renew, Report, Sent, Side, Withdrawn


class Stage(Enum):
    NOTICED = "noticed"    # its Grant waits for our copy of the request
    PUSHING = "pushing"    # pushes may begin
    DRAINING = "draining"  # it will fail; pushes are in flight
    DRAINED = "drained"    # remembered, so that a late message does not begin it again
    ENDED = "ended"        # the same; the End may be asked for again
    LOST = "lost"          # nobody is there to be told


OVER = (Stage.DRAINED, Stage.ENDED)


@dataclass(slots=True, eq=False)
class Sending:
    """One generation, as the prefill engine knows it."""

    transfer: int
    generation: int
    stage: Stage
    tokens: int = 0
    emitted: int = 0
    start: int = 0
    met: bool = False                          # our copy of the request and this generation were paired
    flying: int = 0                            # pushes begun and not ended
    reason: int = Reason.NONE
    end: End | None = None                     # its first tokens are known: no push will be begun


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one transfer."""

    transfer: int
    waiting: bool = False                      # our copy of the request waits for its Grant
    declined: int = Reason.NONE                # it was refused before that came
    sending: Sending | None = None             # newest generation
    n: int = 0                                 # names the deadline that counts; 0: none does


class PrefillSide(Side):
    """Writes into pages that it was granted, and says when it has stopped. One for each decode engine.

    It has one copy of the request of a transfer at a time, from `expect` to Withdrawn, Sent or `refuse`."""

    def __init__(self, epoch: int, identity: int = 0) -> None:
        super().__init__(epoch, identity)
        self.table: dict[int, Entry] = {}
        self.pushes: dict[int, Sending] = {}   # by the owner's id
        self.floor = 0                         # generations up to this one may have been forgotten
        self._renewing = False

    # ---------------------------------------------------------------- our copy of the request
    def expect(self, transfer: int) -> list[Report]:
        """Our copy of the request is here. The Grant or the Cancel may have come before it (rule 3)."""
        e = self._entry(transfer)
        s = e.sending
        assert not e.waiting, "one copy at a time"
        assert s is None or s.stage is not Stage.PUSHING, "one copy at a time"
        e.declined = Reason.NONE
        if s is not None and s.stage is Stage.NOTICED:
            self._pair(e, s)
        elif s is not None and not s.met:
            s.met = True
            self._out.append(Withdrawn(transfer, s.reason))
        else:
            e.waiting = True
            self._arm(e)
        return self._told()

    def refuse(self, transfer: int, reason: int = Reason.REFUSED) -> list[Report]:
        """Our copy has ended without success, whoever wanted that: tell the decode side (rule 5)."""
        e = self.table.get(transfer)
        if e is not None and e.waiting:
            e.waiting, e.declined = False, reason
            self._arm(e)
        elif e is not None and e.sending is not None and e.sending.stage is Stage.PUSHING:
            self._close(e.sending, reason)
        else:
            self._ignore("refuse")
        return self._told()

    def finish(self, transfer: int, index: int, first: tuple[int, ...]) -> list[Report]:
        """All pushes have been begun; `first` are output tokens from number `index` on. Sent follows
        when they have ended well."""
        s = self._pushing(transfer)
        s.end = End(self.epoch, self.peer, transfer, s.generation, s.tokens, index, first)
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
        if not ok and s.stage is Stage.PUSHING:
            self._withdraw(s.transfer, Reason.FAILED)
            self._close(s, Reason.FAILED)
        else:
            self._end_if_idle(s)
        return self._told()

    # ---------------------------------------------------------------- time and incarnations
    def expired(self, transfer: int, n: int) -> list[Report]:
        """A deadline fired: what waits is refused, what is over is forgotten."""
        e = self.table.get(transfer)
        if e is None or e.n != n:
            self._ignore("timer")
            return self._told()
        e.n, e.declined, s = 0, Reason.NONE, e.sending
        if e.waiting:
            e.waiting, e.declined = False, Reason.EXPIRED
            self._withdraw(transfer, Reason.EXPIRED)
            self._arm(e)
        elif s is None:
            del self.table[transfer]
        elif s.stage is Stage.NOTICED:
            self._close(s, Reason.EXPIRED)
        elif s.stage in OVER:
            # A Grant or Cancel of it may still be on its way. Time proves nothing: so no Grant that is
            # as old is taken any more.
            self.floor = max(self.floor, s.generation)
            del self.table[transfer]
        return self._told()

    def fenced(self, epoch: int) -> list[Report]:
        """The connection to this epoch of the decode engine is closed. It may live: so it is told."""
        for e in tuple(self.table.values()) if self.peer and self.peer <= epoch else ():
            s = e.sending
            if s is not None and s.stage in (Stage.NOTICED, Stage.PUSHING):
                if s.stage is Stage.PUSHING:
                    self._withdraw(s.transfer, Reason.LOST)
                self._close(s, Reason.LOST)
        return self._told()

    def restart(self, epoch: int) -> list[Report]:
        """Go on as a new incarnation: the answer to Renew."""
        assert epoch > self.epoch
        self._forget()
        self.epoch, self._renewing = epoch, False
        self._greet(self.peer)
        return self._told()

    def _outdated(self) -> None:
        if not self._renewing:
            self._renewing = True
            self.outbox.append(Renew())

    def _heard(self, epoch: int) -> None:
        if epoch > self.peer:
            self._forget()
            self.peer = epoch

    def _forget(self) -> None:
        """The pairing is over, and nobody waits for our answers. Copies that have not met
        a Grant stay, and so do their refusals: the Grant may be the new incarnation's."""
        self.floor = 0
        for e in tuple(self.table.values()):
            if e.sending is not None:
                if e.sending.stage is Stage.PUSHING:
                    self._withdraw(e.transfer, Reason.LOST)
                e.sending.stage, e.sending = Stage.LOST, None
            if not (e.waiting or e.declined):
                del self.table[e.transfer]

    # ---------------------------------------------------------------- messages
    def _apply(self, m: Message) -> None:
        match m:
            case Hello():
                pass
            case Grant():
                self._grant(m)
            case Cancel():
                self._cancel(m)
            case _:
                self._ignore("role")

    def _grant(self, m: Grant) -> None:
        e = self.table.get(m.transfer)
        s = None if e is None else e.sending
        if s is not None and m.generation == s.generation:
            self._repeat(s)
        elif s is not None and m.generation < s.generation:
            self._ignore("generation")
        elif m.generation <= self.floor:
            self._say(Refused, m.transfer, m.generation, Reason.FORGOTTEN)
            self._say(Drained, m.transfer, m.generation, Reason.FORGOTTEN)
        elif s is not None and s.stage not in OVER:
            self._ignore("early")              # our peer breaks its rule; it will repeat itself
        else:
            e = self._entry(m.transfer)
            s = e.sending = Sending(m.transfer, m.generation, Stage.NOTICED, m.tokens, m.emitted,
                                      m.start)
            if e.waiting:
                self._pair(e, s)
            elif e.declined:
                s.met, reason, e.declined = True, e.declined, Reason.NONE
                self._close(s, reason)
            else:
                self._arm(e)

    def _cancel(self, m: Cancel) -> None:
        e = self.table.get(m.transfer)
        s = None if e is None else e.sending
        if s is not None and m.generation == s.generation and s.stage not in OVER:
            self._drain(s)
        elif s is not None and m.generation > s.generation and s.stage not in OVER:
            self._ignore("early")
        else:
            if m.generation > max(self.floor, 0 if s is None else s.generation):
                self._remember(m)
            self._say(Drained, m.transfer, m.generation, Reason.CANCELLED)

    def _drain(self, s: Sending) -> None:
        """The decode side cancelled what has begun: it is told when the last push has ended."""
        if s.stage is Stage.DRAINING:
            self._ignore("draining")
            return
        if s.stage is Stage.PUSHING:
            self._withdraw(s.transfer, Reason.CANCELLED)
        s.stage, s.reason = Stage.DRAINING, Reason.CANCELLED
        self._end_if_idle(s)

    def _remember(self, m: Cancel) -> None:
        """A Cancel came before its Grant: that must not begin anything, and our copy must hear of it."""
        e = self._entry(m.transfer)
        e.sending = Sending(m.transfer, m.generation, Stage.DRAINED, met=e.waiting or bool(e.declined),
                            reason=Reason.CANCELLED)
        if e.waiting:
            self._withdraw(m.transfer, Reason.CANCELLED)
        e.waiting, e.declined = False, Reason.NONE
        self._arm(e)

    def _repeat(self, s: Sending) -> None:
        """The Grant came again, so our answer was lost, or there is none yet."""
        if s.stage is Stage.ENDED:
            assert s.end is not None
            self.outbox.append(s.end)
        elif s.stage in (Stage.DRAINING, Stage.DRAINED):
            self._say(Refused, s.transfer, s.generation, s.reason)
            if s.stage is Stage.DRAINED:
                self._say(Drained, s.transfer, s.generation, s.reason)
        else:
            self._ignore("repeated")

    # ---------------------------------------------------------------- stages
    def _pair(self, e: Entry, s: Sending) -> None:
        e.waiting, e.n, s.met, s.stage = False, 0, True, Stage.PUSHING
        self._out.append(Granted(s.transfer, s.generation, s.tokens, s.emitted, s.start))

    def _close(self, s: Sending, reason: int) -> None:
        """It fails on our side: say so at once, and that it has ended when it has."""
        s.stage, s.reason = Stage.DRAINING, reason
        self._say(Refused, s.transfer, s.generation, reason)
        self._end_if_idle(s)

    def _end_if_idle(self, s: Sending) -> None:
        """With the last push ended, a generation that has to end does."""
        if s.flying:
            return
        if s.stage is Stage.DRAINING:
            s.stage = Stage.DRAINED
            self._say(Drained, s.transfer, s.generation, s.reason)
            self._arm(self.table[s.transfer])
        elif s.stage is Stage.PUSHING and s.end is not None:
            s.stage = Stage.ENDED
            self.outbox.append(s.end)
            self._out.append(Sent(s.transfer, s.generation))
            self._arm(self.table[s.transfer])

    def _pushing(self, transfer: int) -> Sending:
        s = self.table[transfer].sending
        assert s is not None
        assert s.stage is Stage.PUSHING
        assert s.end is None, "finished: no push may follow"
        return s

    def _withdraw(self, transfer: int, reason: int) -> None:
        self._out.append(Withdrawn(transfer, reason))

    def _say(self, kind: Callable[[int, int, int, int, int], Message], transfer: int, generation: int,
             reason: int) -> None:
        self.outbox.append(kind(self.epoch, self.peer, transfer, generation, reason))

    def _entry(self, transfer: int) -> Entry:
        return self.table.setdefault(transfer, Entry(transfer))

    def _arm(self, e: Entry) -> None:
        e.n = self._next()
        self.outbox.append(Deadline(e.transfer, e.n))
