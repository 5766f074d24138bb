"""The network and the memory between the two engines of a pair, in virtual time.

It loses, repeats, delays and reorders messages; one-sided writes land late, in the page whose address
they were given; a fence ends a stream. It knows no protocol. Every seed draws its own speeds and
faults; a calm one loses nothing, and then nothing may need a timer.
"""
from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from penstock.core.pair.messages import IN_STREAM, Message

Name: TypeAlias = tuple[int, int]         # transfer, generation


class Violation(AssertionError):
    """Something that the protocol promises did not hold."""


def must(holds: bool, promise: str) -> None:
    if not holds:
        raise Violation(promise)


@dataclass(slots=True, eq=False)
class Write:
    """A one-sided write of one page. It was given its address when it began."""

    prefill: int                          # epochs of both ends
    decode: int
    name: Name
    index: int
    page: int
    landed: bool = False


@dataclass(slots=True)
class Faults:
    """Drawn for one seed. Probabilities, and times without unit."""

    loss: float
    repeat: float
    straggle: float                       # a message that takes ten times as long
    push_fails: float
    refuse: float
    abort: float
    stray: float                          # our copy of a request never reaches the prefill engine
    upsets: int                           # deaths and cuts
    stream: bool                          # pushes are reported before they land; End follows in order
    remind: float
    deadline: float

    @staticmethod
    def draw(rng: Random) -> Faults:
        def some(most: float) -> float:
            return rng.choice((0.0, most * rng.random()))
        if rng.random() < 0.25:
            return Faults(0, 0, some(0.4), some(0.2), some(0.5), some(0.8), 0, 0, rng.random() < 0.5,
                          1e6, 1e7)
        return Faults(some(0.5), some(0.5), some(0.3), some(0.3), some(0.6), some(0.8), some(0.3),
                      rng.choice((0, 1, 2, 4)), rng.random() < 0.5, rng.uniform(5, 60),
                      rng.uniform(3, rng.choice((20, 400))))


class Network:
    """Time, messages in flight, writes in flight, and the pages of the decode engine."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.faults = Faults.draw(self.rng)
        self.calm = self.faults.remind >= 1e6
        self.fired: Counter[str] = Counter()
        self.now, self.serial, self.epochs = 0.0, 0, 0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.flying: list[Write] = []
        self.tail: dict[tuple[int, int], float] = {}     # when the last item of a stream arrives
        self.closed: dict[int, int] = {}                 # decode epoch -> prefill epochs that it cut off
        self.num_pages = self.rng.randint(2, self.rng.choice((4, 16)))

    def boot_memory(self, epoch: int) -> None:
        """Writes to an older incarnation find nothing."""
        self.decode_epoch = epoch
        self.owner: dict[int, Name | None] = dict.fromkeys(range(self.num_pages))
        self.bytes: dict[int, tuple[Name, int]] = {}

    # ---------------------------------------------------------------- time
    def at(self, time: float, act: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (time, self.serial, act))

    def after(self, delay: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay, act)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def delay(self) -> float:
        slow = self.chance(self.faults.straggle)
        self.fired["straggler"] += slow
        return self.rng.uniform(0.1, 4) * (10 + 30 * self.rng.random() if slow else 1)

    def epoch(self) -> int:
        self.epochs += self.rng.randint(1, 3)
        return self.epochs

    def quiet(self) -> None:
        f = self.faults
        f.loss = f.repeat = f.straggle = 0.0

    # ---------------------------------------------------------------- network
    def post(self, m: Message, deliver: Callable[[Message], None]) -> None:
        pair = (m.sender, m.receiver)
        if self.faults.stream and isinstance(m, IN_STREAM):
            self.in_stream(pair, lambda: deliver(m))
            return
        copies = 0 if self.chance(self.faults.loss) else 1 + self.chance(self.faults.repeat)
        self.fired["lost" if not copies else "repeated" if copies > 1 else "sent"] += 1
        for _ in range(copies):
            self.after(self.delay(), lambda: deliver(m))

    def in_stream(self, pair: tuple[int, int], act: Callable[[], None]) -> None:
        """Arrives behind everything that the stream of this pair carries, unless that is cut."""
        tail = self.tail[pair] = max(self.tail.get(pair, 0), self.now + self.delay())
        self.at(tail, lambda: None if self.is_closed(pair) else act())

    def is_closed(self, pair: tuple[int, int]) -> bool:
        return pair[0] <= self.closed.get(pair[1], 0)

    def land(self, w: Write) -> None:
        if w not in self.flying:
            return                        # the fence or a failure took it
        self.flying.remove(w)
        if w.decode == self.decode_epoch:
            must(self.owner[w.page] == w.name, "no write lands in a page that is somebody else's")
            self.bytes[w.page] = w.name, w.index
            w.landed = True

    def close(self, epoch: int) -> None:
        """Drain the stream of the prefill epochs up to `epoch` to its end, wherever that is."""
        writes = [w for w in self.flying if w.prefill <= epoch and w.decode == self.decode_epoch]
        reached = self.rng.randint(0, len(writes))
        for w in writes[:reached]:
            self.land(w)
        for w in writes[reached:]:
            self.flying.remove(w)
        self.closed[self.decode_epoch] = max(epoch, self.closed.get(self.decode_epoch, 0))
        self.fired["fence"] += 1
