"""Pool against a dict model: conservation after every rule, and no unit is free before its fence."""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.kv.pool import Fence, Pool
from penstock.core.plan import MoveId, StepId

CAPACITY, BASE = 7, 100


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool("test", CAPACITY, BASE)
        self.free = set(range(BASE, BASE + CAPACITY))
        self.held: set[int] = set()
        self.fenced: dict[int, Fence] = {}
        self.issued = self.retired = 0
        self.flying: set[MoveId] = set()

    @rule(n=st.integers(0, CAPACITY), near=st.none() | st.integers(BASE - 1, BASE + CAPACITY))
    def acquire(self, n: int, near: int | None) -> None:
        n = min(n, len(self.free))
        taken = self.pool.acquire(n, near)
        if n and near is not None and near + 1 in self.free:
            assert taken[0] == near + 1
        elif n and near is None:
            assert taken[0] == min(self.free)
        assert len(set(taken)) == n and self.free.issuperset(taken)
        self.free -= set(taken)
        self.held |= set(taken)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        units = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True)
                          if self.held else st.just([]))
        moves = data.draw(st.frozensets(st.sampled_from(sorted(self.flying)))
                          if self.flying else st.just(frozenset()))
        fence = Fence(StepId(data.draw(st.integers(0, self.issued))), moves)
        self.pool.release(units, fence)
        self.held -= set(units)
        self.fenced |= dict.fromkeys(units, fence)

    @rule()
    def issue_and_move(self) -> None:
        self.issued += 1
        self.flying.add(MoveId(self.issued))

    @precondition(lambda self: self.retired < self.issued)
    @rule()
    def retire(self) -> None:
        self.retired += 1

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.flying.remove(data.draw(st.sampled_from(sorted(self.flying))))

    @rule()
    def drain(self) -> None:
        passed = {unit for unit, fence in self.fenced.items()
                  if fence.step <= self.retired and not fence.moves & self.flying}
        assert self.pool.drain(StepId(self.retired), self.flying) == len(passed)
        self.free |= passed
        for unit in passed:
            del self.fenced[unit]

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        assert self.pool.held == self.held
        assert self.pool.free == len(self.free)
        assert self.pool.in_limbo == len(self.fenced)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase
