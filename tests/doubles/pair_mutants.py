"""Seeded bugs of both ends of a prefill/decode pair. Each is a mistake that somebody made: in a peer,
or in a draft of ours. `MUTANTS` has for each name the two classes to run."""
from __future__ import annotations

from penstock.core.pair.decode_side import DecodeSide, Receiving
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Message, Reason, Refused
from penstock.core.pair.prefill_side import OVER, Entry, PrefillSide, Sending, Stage
from penstock.core.pair.protocol import Landed, Report

MUTANTS: dict[str, tuple[type[DecodeSide], type[PrefillSide]]] = {}


def decode(cls: type[DecodeSide]) -> type[DecodeSide]:
    MUTANTS[cls.__name__] = cls, PrefillSide
    return cls


def prefill(cls: type[PrefillSide]) -> type[PrefillSide]:
    MUTANTS[cls.__name__] = DecodeSide, cls
    return cls


# ---------------------------------------------------------------- rule 1: what frees pages
@decode
class PagesReleasedByTimeout(DecodeSide):
    def reminded(self, transfer: int, n: int) -> list[Report]:
        r = self.table.get(transfer)
        if r is not None and r.n == n and r.closing and r.tries >= 2:
            self._end(r, Landed(transfer, r.generation, False, r.closing))
            return self._told()
        return super().reminded(transfer, n)


@decode
class CancelFreesAtOnce(DecodeSide):
    def cancel(self, transfer: int) -> list[Report]:
        if (r := self.table.get(transfer)) is not None:
            r.granted = False
        return super().cancel(transfer)


@decode
class RefusalTakenForDrained(DecodeSide):
    def _apply(self, m: Message) -> None:
        if isinstance(m, Refused):
            m = Drained(m.sender, m.receiver, m.transfer, m.generation, m.reason)
        super()._apply(m)


@decode
class NewIncarnationSpeaksForTheDead(DecodeSide):
    """Adopted without the fence of the one before: its ack frees what the dead one still writes."""

    def _heard(self, epoch: int) -> None:
        self.peer = self._newest = max(epoch, self._newest)


@decode
class FenceOfAnotherEpochCounts(DecodeSide):
    def fenced(self, epoch: int) -> list[Report]:
        for r in tuple(self.table.values()):
            if r.granted:
                self._end(r, Landed(r.transfer, r.generation, False, Reason.LOST))
        self._out += (out := self._told())
        super().fenced(epoch)
        return out


# ---------------------------------------------------------------- rule 2: what an ack says
@prefill
class AckBeforeTheLastWrite(PrefillSide):
    def _end_if_idle(self, s: Sending) -> None:
        flying, s.flying = s.flying, 0 if s.stage is Stage.DRAINING else s.flying
        super()._end_if_idle(s)
        s.flying = flying


@prefill
class RepeatedCancelIsAckedAtOnce(PrefillSide):
    def _drain(self, s: Sending) -> None:
        if s.stage is Stage.DRAINING:
            self._say(Drained, s.transfer, s.generation, s.reason)
        super()._drain(s)


@prefill
class NoAckForUnknown(PrefillSide):
    def _cancel(self, m: Cancel) -> None:
        if m.transfer in self.table:
            super()._cancel(m)


@prefill
class NoAckWhenOver(PrefillSide):
    def _cancel(self, m: Cancel) -> None:
        e = self.table.get(m.transfer)
        if e is None or e.sending is None or e.sending.stage not in OVER:
            super()._cancel(m)


@prefill
class EarlyCancelForgotten(PrefillSide):
    """Acked, and then its Grant arrives."""

    def _remember(self, m: Cancel) -> None:
        self._ignore("cancel")


@prefill
class TombstoneForgottenByTime(PrefillSide):
    """A Grant that was on its way longer than the deadline begins anew."""

    def expired(self, transfer: int, n: int) -> list[Report]:
        out = super().expired(transfer, n)
        self.floor = 0
        return out


@prefill
class OldGrantNotAnswered(PrefillSide):
    def _grant(self, m: Grant) -> None:
        if m.generation > self.floor or m.transfer in self.table:
            super()._grant(m)


# ---------------------------------------------------------------- rule 3: notices are sticky
@prefill
class NoticeBeforeRequestLost(PrefillSide):
    def _grant(self, m: Grant) -> None:
        if m.transfer in self.table:
            super()._grant(m)


@prefill
class RefusalBeforeGrantLost(PrefillSide):
    def refuse(self, transfer: int, reason: int = Reason.REFUSED) -> list[Report]:
        out = super().refuse(transfer, reason)
        if transfer in self.table:
            self.table[transfer].declined = Reason.NONE
        return out


@prefill
class CancelBeforeRequestLost(PrefillSide):
    """The copy of the request comes after the end of its generation, and waits for another."""

    def expect(self, transfer: int) -> list[Report]:
        e = self.table.get(transfer)
        if e is not None and e.sending is not None and e.sending.stage in OVER:
            e.sending.met = True
        return super().expect(transfer)


@prefill
class RefusalRememberedForTheNextAttempt(PrefillSide):
    """A draft of ours; found by the driver."""

    def _close(self, s: Sending, reason: int) -> None:
        super()._close(s, reason)
        self.table[s.transfer].declined = reason


@prefill
class RefusalLostWithTheFirstGreeting(PrefillSide):
    """A draft of ours; found by the driver."""

    def _forget(self) -> None:
        for e in self.table.values():
            e.declined = Reason.NONE
        super()._forget()


# ---------------------------------------------------------------- rule 4: epochs and generations
@prefill
class MeantForAnotherIncarnation(PrefillSide):
    def _admits(self, m: Message) -> bool:
        super()._admits(m)
        return m.sender == self.peer


@prefill
class NewDecodeEngineMeetsOldGrants(PrefillSide):
    def _heard(self, epoch: int) -> None:
        self.peer = max(epoch, self.peer)


@prefill
class FencedAndGoesOn(PrefillSide):
    def _outdated(self) -> None:
        self._ignore("renew")


@decode
class GenerationNotChecked(DecodeSide):
    def _apply(self, m: Message) -> None:
        if isinstance(m, End | Refused | Drained) and m.transfer in self.table:
            object.__setattr__(m, "generation", self.table[m.transfer].generation)
        super()._apply(m)


@decode
class GenerationReused(DecodeSide):
    def open(self, transfer: int, tokens: int, emitted: int = 0) -> int:
        self._generation = 0
        return super().open(transfer, tokens, emitted)


# ---------------------------------------------------------------- rule 5: prefill owns the error
@prefill
class RefusalNotSent(PrefillSide):
    def _close(self, s: Sending, reason: int) -> None:
        s.stage, s.reason = Stage.DRAINING, reason
        self._end_if_idle(s)


@prefill
class FailedPushIsForgotten(PrefillSide):
    def push_ended(self, push: int, ok: bool) -> list[Report]:
        return super().push_ended(push, True)


@prefill
class GrantWaitsForEver(PrefillSide):
    def _arm(self, e: Entry) -> None:
        if e.sending is None or e.sending.stage is not Stage.NOTICED:
            super()._arm(e)


@decode
class NothingIsRepeated(DecodeSide):
    def reminded(self, transfer: int, n: int) -> list[Report]:
        return self._told()


# ---------------------------------------------------------------- rules 8 and 9: first tokens
@prefill
class EndOvertakesData(PrefillSide):
    def _end_if_idle(self, s: Sending) -> None:
        flying, s.flying = s.flying, 0 if s.end is not None else s.flying
        super()._end_if_idle(s)
        s.flying = flying


@prefill
class MetadataSlotReused(PrefillSide):
    """First tokens are kept by transfer, and the next generation finds them."""

    slots: dict[tuple[int, int], tuple[int, tuple[int, ...]]]

    def finish(self, transfer: int, index: int, first: tuple[int, ...]) -> list[Report]:
        self.__dict__.setdefault("slots", {})
        return super().finish(transfer, *self.slots.setdefault((self.peer, transfer), (index, first)))


@decode
class StreamedTokensComeAgain(DecodeSide):
    def _take(self, r: Receiving, m: End) -> None:
        self._end(r, Landed(r.transfer, r.generation, True, Reason.NONE, m.index, m.first))


# ---------------------------------------------------------------- idempotence
@prefill
class DuplicateGrantRestarts(PrefillSide):
    def _repeat(self, s: Sending) -> None:
        if s.stage in OVER:
            s.stage, s.met, s.end = Stage.NOTICED, False, None
        else:
            super()._repeat(s)


@prefill
class DuplicateGrantIsGrantedAgain(PrefillSide):
    def _repeat(self, s: Sending) -> None:
        if s.stage is Stage.PUSHING:
            self._pair(self.table[s.transfer], s)
        super()._repeat(s)


@prefill
class CancelledAndPushesOn(PrefillSide):
    def _drain(self, s: Sending) -> None:
        pushing, told = s.stage is Stage.PUSHING, len(self._out)
        super()._drain(s)
        if pushing:
            del self._out[told:]
