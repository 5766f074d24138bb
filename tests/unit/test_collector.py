"""Python's cycle collector runs between turns of the engine, and looks at little."""
from __future__ import annotations

import gc
import weakref

from penstock.config.base import collector


class Ring:
    """An object in a cycle: only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_a_cycle_is_collected_after_a_turn_and_not_during_it() -> None:
    between = collector.BetweenTurns()
    ring = weakref.ref(Ring())
    made = [[] for _ in range(3 * gc.get_threshold()[0])]
    assert ring() is not None and len(made) > 1
    between.collect(idle=False)
    assert ring() is None


def test_turns_that_make_little_are_collected_after_some() -> None:
    between = collector.BetweenTurns()
    gc.collect(0)
    ring = weakref.ref(Ring())
    for _ in range(collector.TURNS):
        assert ring() is not None
        between.collect(idle=False)
    assert ring() is None


def test_a_full_collection_waits_until_the_engine_is_idle() -> None:
    between, old = collector.BetweenTurns(), weakref.ref(ring := Ring())
    gc.collect()                               # it is among the oldest from now on
    del ring
    gc.set_threshold(1, 0, 0)
    for _ in range(8 * collector.TURNS):
        between.collect(idle=False)
    assert old() is not None
    for _ in range(8 * collector.TURNS):
        between.collect(idle=True)
    assert old() is None
