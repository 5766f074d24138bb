"""What the storage of a node does wrong, and the check in front of every byte that is read from it.

A slow store takes its time, a hung one answers long after every deadline, a full one takes nothing,
a lying one says that all is well. The ranks keep a checksum of what they stored; whatever does not
match is a failed copy, and the planner never hears of lies. Where the core names pages by what they hold, a
store also says what it has, forgets some of it by itself, and shows nothing that it was told is damaged.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from penstock.core.plan import Lookup, Move, Tier
from penstock.sim.ranks.device import Device, name_of, stored_as

SLOW = 5.0                # so many times slower than a copy in memory counts as slow


class SimStore:
    """The storage of all ranks, and what they know of it: `sums` of what each page should hold.

    `hang`, `full`, `lie`: chances that a copy is answered after some hundred units of time, that there
    is no space for what is stored, that a page is altered and said to be stored, that one is gone when it is
    asked for, that from now on nothing works for a while.
    """

    def __init__(self, hang: float, full: float, lie: float, gone: float, dead: float, rng: Random,
                 stats: Counter[str]) -> None:
        self.hang, self.full, self.lie, self.gone, self.dead = hang, full, lie, gone, dead
        self.spell = 0                                  # calls that it will not answer
        self.rng, self.stats = rng, stats
        self.sums: dict[tuple[int, int], int] = {}      # rank, page
        self.lies: set[tuple[int, int]] = set()
        self.denied: set[int] = set()                   # told to be damaged

    def late(self, times: float) -> float:
        """How much later than others a copy ends that is `times` slower than in memory."""
        self.stats["storage slow"] += times >= SLOW
        if self.rng.random() >= self.hang:
            return 0.0
        self.stats["storage hung"] += 1
        return 200 + 600 * self.rng.random()

    def is_dead(self) -> bool:
        """For this call, and then for some more."""
        if not self.spell and self.dead and self.rng.random() < self.dead:
            self.spell = self.rng.randint(3, 30)
            self.stats["storage dead"] += 1
        self.spell = max(0, self.spell - 1)
        return self.spell > 0

    def has_space(self) -> bool:
        if self.is_dead():
            return False
        full = self.rng.random() < self.full
        self.stats["storage full"] += full
        return not full

    def stored(self, k: int, device: Device, move: Move) -> None:
        """Rank `k` has written these pages, and remembers what they should hold."""
        for page in stored_as(move, Tier.DISK):
            slots = device.page(Tier.DISK, move.group, page)
            if page >> 3 in self.denied:
                device.memory[Tier.DISK][move.group].pop(page)
                continue
            self.sums[k, page] = hash(tuple(slots))
            self.lies.discard((k, page))
            if self.rng.random() < self.lie:
                self.stats["storage lied"] += 1
                self.lies.add((k, page))
                at = self.rng.randrange(len(slots))
                slots[at:] = [-8_000_003 - value for value in slots[at:]]

    def num_good(self, k: int, device: Device, move: Move) -> int:
        """Of how many of its first pages rank `k` gets what it has stored. The next is gone then, if it has
        a name."""
        pages = stored_as(move, Tier.DISK)
        if self.is_dead():
            return 0
        for i, page in enumerate(pages):
            memory = device.memory[Tier.DISK][move.group]
            if move.keys and page not in memory:
                known = (k, page) in self.sums or page >> 3 in self.denied
                assert known, f"{move}: reads what was never stored"
                return i
            slots = device.page(Tier.DISK, move.group, page)
            if hash(tuple(slots)) != self.sums.get((k, page)):
                assert (k, page) in self.lies, f"{move}: reads what was never stored"
                self.stats["lie found"] += 1
                if move.keys:
                    del memory[page]
                return i
        return len(pages)

    def present(self, devices: Sequence[Device], out: Lookup) -> bytes:
        """What every rank has, as `Listed` says it. Some of it goes just then."""
        found = [sum([1 << g for g in range(len(devices[0].groups)) if int.from_bytes(key) not in self.denied
                      and all([name_of(key, g) in device.memory[Tier.DISK][g] for device in devices])])
                 for key in out.keys]
        if self.is_dead():
            found = []
        self.forget(devices, [key for key in out.keys if self.rng.random() < self.gone])
        self.stats["storage asked"] += 1
        self.stats["storage knew of a page"] += bool(found and found[0])
        return bytes(found)

    def unstore(self, devices: Sequence[Device], keys: Sequence[bytes]) -> None:
        """These are damaged."""
        self.denied.update(map(int.from_bytes, keys))
        self.forget(devices, keys)

    def forget(self, devices: Sequence[Device], keys: Sequence[bytes]) -> None:
        """It has let go of these."""
        for device in devices:
            for g, memory in enumerate(device.memory[Tier.DISK]):
                for key in keys:
                    self.stats["storage forgot a page"] += memory.pop(name_of(key, g), None) is not None

    def taken(self, page: int) -> None:
        """A slot has another owner, and nobody knows what it should hold."""
        for k in {k for k, known in self.lies if known == page}:
            self.lies.discard((k, page))

    def damaged(self, k: int, device: Device, page: int) -> None:
        """What was stored was wrong from the beginning: no checksum sees that."""
        for memory in device.memory[Tier.DISK]:
            if page in memory and (k, page) in self.sums and (k, page) not in self.lies:
                self.sums[k, page] = hash(tuple(memory[page]))
