"""Both ends of a prefill/decode pair; hypothesis chooses what the network, the writes and death do.

Pages are named by (transfer, generation) here: a write may land only while its name is open.
"""
from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Message
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.pair.protocol import (
    Deadline,
    Declined,
    FenceEpoch,
    Granted,
    Landed,
    Remind,
    Renew,
    Report,
    Sent,
    Withdrawn,
)

TRANSFERS, TOKENS = st.integers(1, 3), 2
PICK = st.integers(0, 1 << 16)            # taken modulo what there is


@dataclass(eq=False)
class Write:
    push: int
    prefill: int
    decode: int
    name: tuple[int, int]


def state(side: DecodeSide | PrefillSide) -> str:
    """Everything that a message may change, but counters and repeated answers."""
    kept = {k: v for k, v in vars(side).items() if k not in ("outbox", "counters", "table", "pushes")}
    return repr((kept, side.table, getattr(side, "pushes", None)))


class PairMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.epochs = self.push = 0
        self.net: list[tuple[bool, Message]] = []     # to the decode side; in flight
        self.timers: list[tuple[object, Remind | Deadline]] = []
        self.fences: list[int] = []
        self.renew = False
        self.writes: list[Write] = []          # not landed
        self.pushes: dict[int, Write] = {}     # of the living prefill engine, not reported as ended
        self.landed: Counter[tuple[int, int, int]] = Counter()
        self.begun: Counter[tuple[int, int, int]] = Counter()
        self.open: dict[int, int] = {}
        self.copies: dict[int, int] = {}       # transfer -> generation, 0 until it was granted
        self.decode, self.prefill = DecodeSide(self.epoch()), PrefillSide(self.epoch())
        self.calamities = 0
        self.closed: dict[int, int] = {}       # decode epoch -> prefill epochs that it cut off
        self.collect()
        while self.net:
            self.delivers(0, False)

    def epoch(self) -> int:
        self.epochs += 1
        return self.epochs

    def collect(self, decoded: list[Report] | None = None, prefilled: list[Report] | None = None) -> None:
        for x in decoded or ():
            if isinstance(x, Landed):
                assert self.open.pop(x.transfer) == x.generation, "one outcome for each generation"
                name = x.transfer, x.generation
                assert not [w for w in self.writes if w.name == name and w.decode == self.decode.epoch]
                if x.ok:
                    key = (self.decode.epoch, *name)
                    assert self.begun[key] == self.landed[key] >= TOKENS
                    assert x.tokens == (100 * x.transfer + x.generation,)
            else:
                assert isinstance(x, Declined)
                assert self.open[x.transfer] == x.generation
        for x in prefilled or ():
            if isinstance(x, Granted):
                assert self.copies[x.transfer] == 0
                self.copies[x.transfer] = x.generation
            else:
                assert isinstance(x, Withdrawn | Sent)
                del self.copies[x.transfer]
        for side in (self.decode, self.prefill):
            for a in side.outbox:
                match a:
                    case Remind() | Deadline():
                        self.timers.append((side, a))
                    case FenceEpoch(epoch):
                        self.fences.append(epoch)
                    case Renew():
                        self.renew = True
                    case _:
                        self.net.append((side is self.prefill, a))
            side.outbox.clear()

    # ---------------------------------------------------------------- requests
    @rule(t=TRANSFERS, pages=st.integers(0, TOKENS))
    def both_begin(self, t: int, pages: int) -> None:
        """The usual way in, or no deep state would ever be reached."""
        self.opens(t)
        self.expects(t)
        while self.net:
            self.delivers(0, False)
        for _ in range(pages):
            self.pushes_a_page(t)

    @rule(t=TRANSFERS)
    def opens(self, t: int) -> None:
        if t not in self.open:
            self.open[t] = self.decode.open(t, TOKENS)
            self.collect()

    @rule(t=TRANSFERS)
    def cancels(self, t: int) -> None:
        self.collect(self.decode.cancel(t))

    @rule(t=TRANSFERS)
    def expects(self, t: int) -> None:
        if t not in self.copies:
            self.copies[t] = 0
            self.collect(prefilled=self.prefill.expect(t))

    @rule(t=TRANSFERS)
    def refuses(self, t: int) -> None:
        self.collect(prefilled=self.prefill.refuse(t))
        self.copies.pop(t, None)

    @rule(t=TRANSFERS)
    def pushes_a_page(self, t: int) -> None:
        generation = self.copies.get(t)
        sending = self.prefill.table[t].sending if generation else None
        if sending is not None and generation and sending.end is None:
            self.push += 1
            self.prefill.push_started(t, self.push)
            w = Write(self.push, self.prefill.epoch, self.prefill.peer, (t, generation))
            self.begun[w.decode, t, generation] += 1
            self.pushes[w.push] = w
            if w.prefill > self.closed.get(w.decode, 0):
                self.writes.append(w)
            else:
                w.prefill = 0                  # its stream is cut: it fails

    @rule(t=TRANSFERS)
    def finishes(self, t: int) -> None:
        """The owner pushes everything before it says so."""
        generation = self.copies.get(t)
        sending = self.prefill.table[t].sending if generation else None
        if sending is not None and generation and sending.end is None:
            while self.begun[self.prefill.peer, t, generation] < TOKENS:
                self.pushes_a_page(t)
            self.collect(prefilled=self.prefill.finish(t, 0, (100 * t + generation,)))

    # ---------------------------------------------------------------- writes
    @precondition(lambda self: self.writes)
    @rule(i=PICK)
    def lands(self, i: int) -> None:
        w = self.writes.pop(i % len(self.writes))
        if w.decode == self.decode.epoch:
            assert self.open.get(w.name[0]) == w.name[1], "a write landed in pages of somebody else"
        self.landed[w.decode, *w.name] += 1

    @precondition(lambda self: self.pushes)
    @rule(i=PICK)
    def push_ends(self, i: int) -> None:
        w = self.pushes.pop(sorted(self.pushes)[i % len(self.pushes)])
        ok = w not in self.writes and w.prefill > 0
        if w in self.writes:
            self.writes.remove(w)              # failed: it will never land
        self.collect(prefilled=self.prefill.push_ended(w.push, ok))

    # ---------------------------------------------------------------- network
    @precondition(lambda self: self.net)
    @rule(i=PICK, again=st.booleans())
    def delivers(self, i: int, again: bool) -> None:
        to_decode, m = self.net[i % len(self.net)] if again else self.net.pop(i % len(self.net))
        side = self.decode if to_decode else self.prefill
        mirror = deepcopy(side)
        first, second = mirror.received(m), mirror.received(m)
        out = side.received(m)
        assert out == first and not second
        assert state(side) == state(mirror), "twice is once"
        self.collect(*((out, None) if to_decode else (None, out)))

    @precondition(lambda self: self.net)
    @rule(i=PICK)
    def loses(self, i: int) -> None:
        self.net.pop(i % len(self.net))

    @precondition(lambda self: self.timers)
    @rule(i=PICK)
    def timer_fires(self, i: int) -> None:
        side, timer = self.timers.pop(i % len(self.timers))
        if side is self.decode and isinstance(timer, Remind):
            self.collect(self.decode.reminded(timer.transfer, timer.n))
        elif side is self.prefill and isinstance(timer, Deadline):
            self.collect(prefilled=self.prefill.expired(timer.transfer, timer.n))

    # ---------------------------------------------------------------- deaths
    @precondition(lambda self: self.calamities < 3)
    @rule()
    def decode_dies(self) -> None:
        self.calamities += 1
        self.decode, self.open, self.fences = DecodeSide(self.epoch()), {}, []
        self.collect()

    @precondition(lambda self: self.calamities < 3)
    @rule()
    def prefill_dies(self) -> None:
        self.calamities += 1
        self.prefill = PrefillSide(self.epoch())
        self.copies, self.pushes, self.renew = {}, {}, False
        self.collect()

    @precondition(lambda self: self.calamities < 3)
    @rule(reached=PICK)
    def is_cut(self, reached: int) -> None:
        """The stream of the living prefill engine is drained to its end, which may be anywhere."""
        self.calamities += 1
        self.fence(self.prefill.epoch, reached)

    @precondition(lambda self: self.fences)
    @rule(reached=PICK)
    def fence_comes(self, reached: int) -> None:
        self.fence(self.fences.pop(), reached)

    @precondition(lambda self: self.calamities < 3)
    @rule()
    def hangs_up(self) -> None:
        self.calamities += 1
        self.collect(prefilled=self.prefill.fenced(self.prefill.peer))

    @precondition(lambda self: self.renew)
    @rule()
    def renews(self) -> None:
        self.renew = False
        self.collect(prefilled=self.prefill.restart(self.epoch()))

    def fence(self, epoch: int, reached: int) -> None:
        mine = [w for w in self.writes if w.prefill <= epoch and w.decode == self.decode.epoch]
        for w in mine[:reached % (len(mine) + 1)]:
            self.lands(self.writes.index(w))
        for w in mine:
            if w in self.writes:
                self.writes.remove(w)
            w.prefill = 0                      # and its push fails, whether or not it landed
        self.closed[self.decode.epoch] = max(epoch, self.closed.get(self.decode.epoch, 0))
        self.collect(self.decode.fenced(epoch))

    # ---------------------------------------------------------------- judgement
    @invariant()
    def tables_agree(self) -> None:
        if hasattr(self, "open"):
            assert {t: r.generation for t, r in self.decode.table.items()} == self.open
            assert set(self.prefill.pushes) == set(self.pushes)

    def teardown(self) -> None:
        """Once the network delivers and timers fire, everything ends and nothing is remembered."""
        if not hasattr(self, "open"):
            return
        for _ in range(400):
            while self.writes:
                self.lands(0)
            while self.pushes:
                self.push_ends(0)
            for t in tuple(self.copies):
                self.finishes(t)
            while self.net:
                self.delivers(0, False)
            while self.fences:
                self.fence_comes(0)
            if self.renew:
                self.renews()
            for _ in range(len(self.timers)):
                self.timer_fires(0)
            busy = self.net or self.timers or self.writes or self.pushes or self.fences or self.renew
            if not busy:
                break
        assert not self.open and not self.copies
        assert not self.decode.table and not self.prefill.table and not self.prefill.pushes


PairMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestPair = PairMachine.TestCase
