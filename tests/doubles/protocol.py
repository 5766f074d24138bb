"""Both ends of a prefill/decode pair and their owners, on a bad network.

Either end dies, is cut off or takes the other for dead at any moment. The judge looks at what an owner
of pages cares about: none is used again while a write can land in it. It knows the calls and reports
of the two ends, nothing of their inside.
"""
from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pairnet import Name, Network, Violation, Write, must

from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Cancel, Drained, Message, Reason, Refused
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.pair.protocol import (
    Ask,
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

EVENTS_MAX = 20_000                       # a run of 12 transfers takes some hundreds


@dataclass(slots=True, eq=False)
class Job:
    """The prefill engine's copy of a request."""

    transfer: int
    generation: int = 0                   # 0: waits for its grant


@dataclass(slots=True, eq=False)
class Want:
    """The decode engine's side of a request."""

    transfer: int
    pages: int
    emitted: int
    tries: int = 3
    aborted: bool = False
    generation: int = 0                   # 0: not open
    held: tuple[int, ...] = ()


class World(Network):
    """One run: both ends, their owners, and the judge. The classes under test make the ends."""

    def __init__(self, seed: int, make_decode: Callable[[int], DecodeSide] = DecodeSide,
                 make_prefill: Callable[[int], PrefillSide] = PrefillSide) -> None:
        super().__init__(seed)
        self.make_decode, self.make_prefill = make_decode, make_prefill
        self.granted: dict[tuple[int, Name], tuple[int, ...]] = {}    # decode epoch, name -> pages
        self.prefill = self.make_prefill(self.epoch())
        self.jobs: dict[int, Job] = {}
        self.pushing: dict[int, Name] = {}               # of the living prefill engine
        self.wants: dict[int, Want] = {}
        self.boot_decode()
        self.after(0, lambda: self.tell_prefill([]))

    def run(self) -> Counter[str]:
        spread = self.rng.choice((5, 40, 150))
        for transfer in range(100, 100 + self.rng.randint(1, 12)):
            self.after(self.rng.uniform(0, spread), lambda t=transfer: self.arrive(t))  # type: ignore[misc]
        for _ in range(self.faults.upsets):
            self.after(self.rng.uniform(0, 250),
                       self.rng.choice((self.kill_decode, self.kill_prefill, self.cut, self.hang_up)))
        self.after(300, self.quiet)
        for _ in range(EVENTS_MAX):
            if not self.heap:
                break
            self.now, _, act = heapq.heappop(self.heap)
            act()
        must(not self.heap, "it comes to an end")
        must(not self.decode.table, "the decode side forgets what is over")
        must(not self.prefill.table and not self.prefill.pushes, "the prefill side forgets what is over")
        must(not any(self.owner.values()) and not any(w.generation for w in self.wants.values()),
             "all pages come back")
        must(not self.jobs, "each copy of a request ends")
        return self.fired

    # ---------------------------------------------------------------- messages arrive
    def to_decode(self, m: Message) -> None:
        self.tell_decode(self.decode.received(m))

    def to_prefill(self, m: Message) -> None:
        out = self.prefill.received(m)
        if isinstance(m, Cancel) and (m.sender, m.receiver) == (self.prefill.peer, self.prefill.epoch):
            name = m.transfer, m.generation
            must(name in self.pushing.values() or any(
                isinstance(a, Drained) and (a.transfer, a.generation) == name for a in self.prefill.outbox),
                "each Cancel is answered unless a push is in flight")
        self.tell_prefill(out)

    def fence(self, epoch: int) -> None:
        self.close(epoch)
        self.tell_decode(self.decode.fenced(epoch))

    # ---------------------------------------------------------------- deaths
    def boot_decode(self) -> None:
        """An incarnation with memory of its own: writes to an older one find nothing."""
        self.decode = self.make_decode(self.epoch())
        self.boot_memory(self.decode.epoch)
        lost, self.wants = self.wants, {}
        self.after(0, lambda: self.tell_decode([]))
        for want in lost.values():
            if self.chance(0.5):          # the router asks again, by the same id
                self.after(self.delay(), lambda t=want.transfer: self.arrive(t))  # type: ignore[misc]

    def kill_decode(self) -> None:
        self.fired["decode_died"] += 1
        dead = self.decode.epoch
        self.boot_decode()
        if self.chance(0.5):
            self.after(self.delay(), lambda: self.tell_prefill(self.prefill.fenced(dead)))

    def kill_prefill(self) -> None:
        self.fired["prefill_died"] += 1
        dead = self.prefill.epoch
        self.prefill, self.jobs, self.pushing = self.make_prefill(self.epoch()), {}, {}
        self.after(self.delay(), lambda: self.tell_prefill([]))
        if self.chance(0.5):
            self.after(self.delay(), lambda: self.fence(dead))

    def cut(self) -> None:
        """The decode engine closes the data connection of a prefill engine that lives."""
        self.fired["cut"] += 1
        self.fence(self.prefill.epoch)

    def hang_up(self) -> None:
        """The prefill engine takes a decode engine for dead that lives."""
        self.fired["hung_up"] += 1
        self.tell_prefill(self.prefill.fenced(self.decode.epoch))

    # ---------------------------------------------------------------- requests
    def arrive(self, transfer: int) -> None:
        if transfer in self.wants:
            return
        want = self.wants[transfer] = Want(transfer, self.rng.randint(1, min(3, self.num_pages)),
                                           self.rng.randint(0, 2))
        if self.chance(self.faults.abort):
            self.after(self.rng.uniform(0, self.rng.choice((6, 60))), lambda: self.abort(want))
        self.ask(want)

    def ask(self, want: Want) -> None:
        """Both engines get the request, in any order."""
        self.after(self.delay(), lambda: self.open(want))
        if not self.chance(self.faults.stray):
            self.after(self.delay() * self.rng.choice((1, 3)), lambda: self.copy(want))

    def open(self, want: Want) -> None:
        if self.wants.get(want.transfer) is not want or want.aborted or want.generation:
            return
        free = [page for page, owner in self.owner.items() if owner is None]
        if len(free) < want.pages:
            self.after(3, lambda: self.open(want))
            return
        want.held = tuple(self.rng.sample(free, want.pages))
        want.generation = self.decode.open(want.transfer, want.pages, want.emitted)
        name = want.transfer, want.generation
        self.granted[self.decode.epoch, name] = want.held
        self.owner.update(dict.fromkeys(want.held, name))
        self.tell_decode([])

    def abort(self, want: Want) -> None:
        if self.wants.get(want.transfer) is want and not want.aborted:
            want.aborted = True
            self.fired["abort" if want.generation else "abort_unopened"] += 1
            if want.generation:
                self.tell_decode(self.decode.cancel(want.transfer))
            if not want.generation and want.transfer in self.jobs:
                self.refuse(self.jobs[want.transfer])

    def copy(self, want: Want) -> None:
        if want.transfer in self.jobs or (want.aborted and not want.generation):
            return
        job = self.jobs[want.transfer] = Job(want.transfer)
        if self.chance(self.faults.refuse):
            self.after(self.rng.uniform(0, self.rng.choice((3, 30))), lambda: self.refuse(job))
        self.tell_prefill(self.prefill.expect(want.transfer))

    def refuse(self, job: Job) -> None:
        if self.jobs.get(job.transfer) is job:
            del self.jobs[job.transfer]
            self.fired["refuse" if job.generation else "refuse_early"] += 1
            out = self.prefill.refuse(job.transfer)
            self.said_so(job)
            self.tell_prefill(out)

    def said_so(self, job: Job) -> None:
        """Rule 5, for a copy that ended on our side."""
        said = any(isinstance(m, Refused) and (m.transfer, m.generation) == (job.transfer, job.generation)
                   for m in self.prefill.outbox)
        must(said or not job.generation, "the decode side hears at once of a refusal")

    # ---------------------------------------------------------------- what the sides say
    def tell_decode(self, out: list[Report]) -> None:
        side = self.decode
        asked, side.outbox[:] = tuple(side.outbox), []
        for x in out:
            self.fired[type(x).__name__] += 1
            if isinstance(x, Landed):
                self.landed(x)
            else:
                must(isinstance(x, Declined), "the decode side has no other reports")
        for a in asked:
            if isinstance(a, Ask):
                self.serve(side, a)
            else:
                self.post(a, self.to_prefill)

    def serve(self, side: DecodeSide | PrefillSide, a: Ask) -> None:
        match a:
            case Remind(transfer, n, tries):
                self.after(self.faults.remind * (1 + tries), lambda: self.remind(side, transfer, n))
            case Deadline(transfer, n):
                self.after(self.faults.deadline * self.rng.uniform(0.5, 1), lambda: (
                    self.tell_prefill(self.prefill.expired(transfer, n)) if side is self.prefill else None))
            case FenceEpoch(epoch):
                self.after(self.delay(), lambda: self.fence(epoch) if side is self.decode else None)
            case Renew():
                self.fired["renewed"] += 1
                self.after(self.delay(), lambda: (
                    self.tell_prefill(self.prefill.restart(self.epoch())) if side is self.prefill else None))

    def remind(self, side: object, transfer: int, n: int) -> None:
        if side is self.decode:
            out = self.decode.reminded(transfer, n)
            must(not (self.calm and self.decode.outbox), "nothing waits for a timer if nothing was lost")
            self.tell_decode(out)

    def landed(self, x: Landed) -> None:
        want, name = self.wants[x.transfer], (x.transfer, x.generation)
        must(want.generation == x.generation, "one report for each generation")
        must(not any(w.name == name and w.decode == self.decode.epoch for w in self.flying),
             "pages come back when no write can land any more")
        must(not (self.calm and x.reason == Reason.EXPIRED), "nothing expires if nothing was lost")
        if x.ok:
            must([self.bytes.get(p) for p in want.held] == [(name, i) for i in range(want.pages)],
                 "if it is ok, all bytes are in place")
            must(x.index == want.emitted and x.tokens == first(name, want.emitted, want.emitted + 2),
                 "first tokens are those of this generation, none twice")
        for page in want.held:
            self.owner[page] = None
            self.bytes.pop(page, None)
        want.generation, want.held, want.tries = 0, (), want.tries - 1
        if not (x.ok or want.aborted) and want.tries:
            self.fired["asked_again"] += 1
            self.ask(want)

    def tell_prefill(self, out: list[Report]) -> None:
        side = self.prefill
        for x in out:
            self.fired[type(x).__name__] += 1
            match x:
                case Granted():
                    self.granted_to(x)
                case Withdrawn(transfer, reason):
                    must(transfer in self.jobs, "only what was expected stops")
                    must(not (self.calm and reason == Reason.EXPIRED), "nothing expires if nothing was lost")
                    if reason in (Reason.FAILED, Reason.EXPIRED):
                        self.said_so(self.jobs[transfer])
                    del self.jobs[transfer]
                case Sent(transfer, generation):
                    must(self.jobs.pop(transfer).generation == generation, "what was granted is sent")
                case _:
                    raise Violation("the prefill side has no other reports")
        asked, side.outbox[:] = tuple(side.outbox), []
        for a in asked:
            if isinstance(a, Ask):
                self.serve(side, a)
            else:
                self.post(a, self.to_decode)

    # ---------------------------------------------------------------- pushes
    def granted_to(self, x: Granted) -> None:
        job = self.jobs.get(x.transfer)
        if job is None or job.generation:
            raise Violation("a copy is granted once")
        job.generation = x.generation
        self.after(self.rng.uniform(0, 10), lambda: self.push(job, 0, x.tokens, x.emitted))

    def push(self, job: Job, index: int, pages: int, emitted: int) -> None:
        if self.jobs.get(job.transfer) is not job:
            return
        if index == pages:
            begin = self.rng.randint(0, emitted)
            self.tell_prefill(self.prefill.finish(
                job.transfer, begin, first((job.transfer, job.generation), begin, emitted + 2)))
            return
        self.serial += 1
        side, push, fails = self.prefill, self.serial, self.chance(self.faults.push_fails)
        side.push_started(job.transfer, push)
        self.pushing[push] = job.transfer, job.generation
        w = self.write(job, index)
        early = self.faults.stream and not fails
        if not early and w is not None and not (fails and self.chance(0.5)):
            self.after(at := self.delay(), lambda: self.land(w))
        else:
            at = 0.0

        def end() -> None:
            if w is not None and not early and w in self.flying:
                self.flying.remove(w)     # a failed one that will never land
            if side is self.prefill:
                del self.pushing[push]
                ok = not fails and w is not None and (early or w.landed)
                self.fired["push_failed"] += not ok
                self.tell_prefill(self.prefill.push_ended(push, ok))
        if early and w is not None:
            self.in_stream((w.prefill, w.decode), lambda: self.land(w))
        self.after(at + self.rng.uniform(0.1, 3), end)
        self.after(self.rng.choice((0, 2, 8)), lambda: self.push(job, index + 1, pages, emitted))

    def write(self, job: Job, index: int) -> Write | None:
        """Begin a write, unless nobody is there to take it."""
        pair, name = (self.prefill.epoch, self.prefill.peer), (job.transfer, job.generation)
        if self.is_closed(pair):
            return None
        w = Write(*pair, name, index, self.granted[pair[1], name][index])
        self.flying.append(w)
        return w


def first(name: Name, begin: int, end: int) -> tuple[int, ...]:
    """Output tokens of one generation: no two generations have the same, so none can pass for another's."""
    return tuple(name[0] * 1000 + name[1] * 10 + i for i in range(begin, end))


def hunt(seeds: Iterable[int], decode: Callable[[int], DecodeSide] = DecodeSide,
         prefill: Callable[[int], PrefillSide] = PrefillSide) -> tuple[int | None, str]:
    """The first seed that fails, and how; None if none does."""
    for seed in seeds:
        try:
            World(seed, decode, prefill).run()
        except (AssertionError, LookupError) as error:
            return seed, f"{type(error).__name__}: {error}"
    return None, ""
