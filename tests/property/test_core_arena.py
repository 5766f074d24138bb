"""Pools carved from one arena against a dict model: slabs have one owner, `short` tells the truth both
ways, and no memory stays with a pool that has no use for it."""
from __future__ import annotations

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.kv.pool import Arena, Fence, Pool
from penstock.core.plan import MoveId, StepId

BASES = (0, 1_000, 2_000)
WANT = st.lists(st.integers(0, 6), min_size=3, max_size=3)
LAST = StepId(1 << 40)


class ArenaMachine(RuleBasedStateMachine):
    """`fenced` is what was released: unit -> its fence. A fence that is `away` waits for a move of
    `granted`, which no step and no copy of ours ends."""

    def __init__(self) -> None:
        super().__init__()
        self.issued = self.retired = 0
        self.flying: set[MoveId] = set()
        self.granted: set[MoveId] = set()
        self.held: list[set[int]] = []
        self.fenced: list[dict[int, Fence]] = []

    @initialize(slabs=st.integers(1, 5), per_slab=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def carve(self, slabs: int, per_slab: list[int]) -> None:
        single = len(per_slab) == 1
        self.arena = Arena(slabs, [Pool(f"kind {k}", slabs * n if single else 0, base, n)
                                   for k, (n, base) in enumerate(zip(per_slab, BASES, strict=False))])
        self.pools = self.arena.pools
        self.held = [set() for _ in self.pools]
        self.fenced = [{} for _ in self.pools]

    # ---------------------------------------------------------------- what happens
    @rule(want=WANT, near=st.none() | st.integers(-1, 20))
    def acquire(self, want: list[int], near: int | None) -> None:
        """All of a demand, as `KVCache` does it: nothing at all if `short` says so."""
        want = want[:len(self.pools)]
        if self.arena.short(want, promised=False):
            return
        for k, (pool, n) in enumerate(zip(self.pools, want, strict=True)):
            units = pool.acquire(n, None if near is None else near + BASES[k])
            assert len(set(units)) == n
            assert self.held[k].isdisjoint(units) and self.fenced[k].keys().isdisjoint(units)
            self.held[k].update(units)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), away=st.booleans())
    def release(self, data: st.DataObject, away: bool) -> None:
        k = data.draw(st.sampled_from([k for k, units in enumerate(self.held) if units]))
        units = data.draw(st.lists(st.sampled_from(sorted(self.held[k])), unique=True))
        step = StepId(data.draw(st.integers(0, self.issued)))
        if away and self.granted:
            moves = frozenset({data.draw(st.sampled_from(sorted(self.granted)))})
        else:
            away = False
            moves = data.draw(st.frozensets(st.sampled_from(sorted(self.flying)), max_size=2)
                              if self.flying else st.just(frozenset()))
        self.pools[k].release(units, Fence(step, moves, away))
        self.held[k] -= set(units)
        self.fenced[k] |= dict.fromkeys(units, Fence(step, moves, away))

    @rule(granted=st.booleans())
    def issue_and_move(self, granted: bool) -> None:
        self.issued += 1
        (self.granted if granted else self.flying).add(MoveId(self.issued))

    @precondition(lambda self: self.retired < self.issued)
    @rule(n=st.integers(1, 4))
    def retire(self, n: int) -> None:
        self.retired = min(self.issued, self.retired + n)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.flying.remove(data.draw(st.sampled_from(sorted(self.flying))))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        """The other engine says that it writes no more."""
        self.granted.remove(data.draw(st.sampled_from(sorted(self.granted))))

    @rule()
    def drain(self) -> None:
        flying = self.flying | self.granted
        for pool, fenced in zip(self.pools, self.fenced, strict=True):
            passed = [unit for unit, fence in fenced.items()
                      if fence.step <= self.retired and not fence.moves & flying]
            assert pool.drain(StepId(self.retired), flying) == len(passed)
            for unit in passed:
                del fenced[unit]

    # ---------------------------------------------------------------- what `short` says
    def _fits(self, arena: Arena, want: list[int]) -> bool:
        """Try it, with every pool in turn."""
        try:
            for pool, n in zip(arena.pools, want, strict=True):
                pool.acquire(n)
        except AssertionError:
            return False
        arena.check()
        return True

    def _passed(self) -> Arena:
        """The arena as it is once every fence has passed that waits for nobody else. What is away stays
        so until somebody drains, also if the answer has come."""
        later = deepcopy(self.arena)
        for pool, fenced in zip(later.pools, self.fenced, strict=True):
            pool.drain(LAST, {move for fence in fenced.values() if fence.away for move in fence.moves})
        return later

    @rule(want=WANT)
    def short_is_true_now(self, want: list[int]) -> None:
        want = want[:len(self.pools)]
        assert self._fits(deepcopy(self.arena), want) == (
            self.arena.short(want, promised=False) == 0)

    @rule(want=WANT)
    def promised_is_true_later(self, want: list[int]) -> None:
        want, later = want[:len(self.pools)], self._passed()
        short = self.arena.short(want, promised=True)
        assert short == later.short(want, promised=False)
        assert self._fits(later, want) == (short == 0)

    @rule(want=WANT)
    def short_says_how_much(self, want: list[int]) -> None:
        """As many slabs more (of a single pool: units) are enough, and one less is not."""
        want, short = want[:len(self.pools)], self.arena.short(want[:len(self.pools)], promised=False)
        for more in {max(0, short - 1), short}:
            arena = deepcopy(self.arena)
            if len(arena.pools) == 1:
                arena.pools[0].free += more
                assert (arena.pools[0].free >= want[0]) == (more >= short)
            else:
                arena.free += range(100, 100 + more)
                arena.slabs += more
                assert (arena.short(want, promised=False) == 0) == (more >= short)

    # ---------------------------------------------------------------- what always holds
    @invariant()
    def conserved(self) -> None:
        self.arena.check()
        for pool, held, fenced in zip(self.pools, self.held, self.fenced, strict=True):
            assert pool.held == held and pool.in_limbo == len(fenced)
            assert pool.away == sum(fence.away for fence in fenced.values())
            assert pool.free == pool.capacity - len(held) - len(fenced)

    @invariant()
    def one_owner_and_none_empty(self) -> None:
        if len(self.pools) == 1:
            return
        slabs = list(self.arena.free)
        for pool, held, fenced in zip(self.pools, self.held, self.fenced, strict=True):
            used = {(unit - pool.base) // pool.per_slab for unit in (*held, *fenced)}
            assert set(pool.held_in) == used, "a slab that nobody uses, or that nobody owns"
            slabs += used
        assert sorted(slabs) == list(range(self.arena.slabs))

    def teardown(self) -> None:
        """Nothing is stranded: all that was taken comes back, and all slabs with it."""
        if not self.held:
            return
        for pool, held in zip(self.pools, self.held, strict=True):
            pool.release(sorted(held), Fence(StepId(self.issued), frozenset(self.flying)))
        for pool in self.pools:
            pool.drain(LAST, ())
        self.arena.check()
        if len(self.pools) == 1:
            assert self.pools[0].free == self.pools[0].capacity
        else:
            assert sorted(self.arena.free) == list(range(self.arena.slabs))
            assert not any(pool.capacity for pool in self.pools)


ArenaMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestArena = ArenaMachine.TestCase
