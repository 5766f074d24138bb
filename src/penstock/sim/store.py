"""What the storage of a node does wrong, and the check in front of every byte that is read from it.

A slow store takes its time, a hung one answers long after every deadline, a full one takes nothing,
a lying one says that all is well. The ranks keep a checksum of what they stored; whatever does not
match is a failed copy, and the planner never hears of lies.
"""
from __future__ import annotations

from collections import Counter
from random import Random

from penstock.core.plan import Move, Tier
from penstock.sim.device import Device

SLOW = 5.0                # so many times slower than a copy in memory counts as slow


class Store:
    """The storage of all ranks, and what they know of it: `sums` of what each page should hold.

    `hang`, `full`, `lie`: chances that a copy is answered after some hundred units of time, that there
    is no space for what is stored, that a page is altered and said to be stored.
    """

    def __init__(self, hang: float, full: float, lie: float, rng: Random, stats: Counter[str]) -> None:
        self.hang, self.full, self.lie = hang, full, lie
        self.rng, self.stats = rng, stats
        self.sums: dict[tuple[int, int], int] = {}      # rank, page
        self.lies: set[tuple[int, int]] = set()

    def late(self, times: float) -> float:
        """How much later than others a copy ends that is `times` slower than in memory."""
        self.stats["storage slow"] += times >= SLOW
        if self.rng.random() >= self.hang:
            return 0.0
        self.stats["storage hung"] += 1
        return 200 + 600 * self.rng.random()

    def has_space(self) -> bool:
        full = self.rng.random() < self.full
        self.stats["storage full"] += full
        return not full

    def stored(self, k: int, device: Device, move: Move) -> None:
        """Rank `k` has written these pages, and remembers what they should hold."""
        for page in move.dst_pages:
            slots = device.page(Tier.DISK, move.group, page)
            self.sums[k, page] = hash(tuple(slots))
            self.lies.discard((k, page))
            if self.rng.random() < self.lie:
                self.stats["storage lied"] += 1
                self.lies.add((k, page))
                at = self.rng.randrange(len(slots))
                slots[at:] = [-8_000_003 - value for value in slots[at:]]

    def is_good(self, k: int, device: Device, move: Move) -> bool:
        """Whether rank `k` gets from storage what it has stored."""
        wrong = [page for page in move.src_pages
                 if hash(tuple(device.page(Tier.DISK, move.group, page))) != self.sums.get((k, page))]
        for page in wrong:
            assert (k, page) in self.lies, f"{move}: reads what was never stored"
        self.stats["lie found"] += bool(wrong)
        return not wrong

    def taken(self, page: int) -> None:
        """A slot has another owner, and nobody knows what it should hold."""
        for k in {k for k, known in self.lies if known == page}:
            self.lies.discard((k, page))

    def damaged(self, k: int, device: Device, page: int) -> None:
        """What was stored was wrong from the beginning: no checksum sees that."""
        for memory in device.memory[Tier.DISK]:
            if page in memory and (k, page) in self.sums and (k, page) not in self.lies:
                self.sums[k, page] = hash(tuple(memory[page]))
