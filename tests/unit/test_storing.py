"""How long a request may wait for storage, and what the core is told of speeds."""
from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.core.plan import Entered, Lookup, Rates, RequestId, StepId, StepPlan, Unstore
from penstock.engine.storing import FORGET_S, Storing


@dataclass
class Store:
    page_s: float = 0.0
    num_read: float = 0.0
    said: list = field(default_factory=list)

    def ask(self, lookup) -> None:
        self.said.append(lookup)

    def deny(self, keys) -> None:
        self.said.append(keys)


class Bench:
    def __init__(self, policy: str = "timeout") -> None:
        self.now, self.store, self.step = 100.0, Store(), 0
        self.storing = Storing(self.store, policy, lambda: self.now)

    def compute(self, tokens: int, seconds: float) -> None:
        self.step += 1
        self.storing.submitted(StepPlan(StepId(self.step), (), (), (), (tokens, 1), (), (), (), (), ()))
        self.now += seconds
        self.storing.retired(StepId(self.step))


def test_a_prompt_waits_at_most_for_five_eighths_of_its_own_time():
    bench = Bench()
    assert bench.storing.patience_s(10_000) == 2.0, "nothing was measured"
    bench.compute(1_000, 1.0)
    assert bench.storing.patience_s(10_000) == pytest.approx(6.25)
    assert bench.storing.patience_s(100) == 0.25 and bench.storing.patience_s(1 << 20) == 60.0
    bench.compute(1, 5.0)                      # decode alone says nothing of prompts
    assert bench.storing.patience_s(10_000) == pytest.approx(6.25)
    assert Bench("wait_complete").storing.patience_s(1) == 60.0


def test_reading_must_be_twice_as_fast_and_a_slow_store_is_tried_again():
    bench = Bench()
    assert bench.storing.rates() is None, "nothing is known"
    bench.compute(1_000, 1.0)
    bench.store.page_s, bench.store.num_read = 0.01, 4.0
    assert bench.storing.rates() == Rates(pytest.approx(20_000), pytest.approx(1_000))
    bench.now += 0.5
    bench.store.page_s = 0.09
    assert bench.storing.rates() is None, "told a moment ago"
    bench.now += 1
    bench.store.num_read = 5.0
    assert bench.storing.rates() == Rates(pytest.approx(180_000), pytest.approx(1_000))
    bench.now += 5
    assert bench.storing.rates() is None, "no news"
    bench.now += FORGET_S
    assert bench.storing.rates() == Rates(0.0, pytest.approx(1_000)), "nobody has read since: once more"
    assert Bench("wait_complete").storing.rates() is None


def test_look_ups_and_damage_reach_the_store_in_their_order():
    bench = Bench()
    lookup = Lookup(RequestId(1), 0, (b"a" * 16,))
    bench.storing.ask((Entered(RequestId(1), "fetching", 1), Unstore((b"b" * 16,)), lookup))
    assert bench.store.said == [(b"b" * 16,), lookup]
