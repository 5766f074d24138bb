"""What an engine does between Shutdown and its end."""
from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from penstock.engine import process, wire


class Loop:
    """It writes a page a turn."""

    works_here, steps_in_flight, wait_s = False, 0, None

    def __init__(self, pages: int, hangs: bool = False, up: float = 1.0) -> None:
        self.moves_in_flight, self._left, self._hangs, self._up = 0, pages, hangs, up
        self.handled: list[object] = []
        self.recorder = SimpleNamespace(core=SimpleNamespace(live={7: None, 9: None}))

    def handle(self, message: object) -> None:
        self.handled.append(message)

    def turn(self, *, block: bool) -> list[object]:
        self._left -= self._left > 0 and not self._hangs
        self.moves_in_flight = int(self._left > 0)
        return []

    def stats(self) -> dict[str, float]:
        return {"pages_to_store": float(self._left), "storage_up": self._up}


@pytest.fixture
def rest(capfd):
    def go(loop: Loop, store_s: float) -> tuple[float, str]:
        link = SimpleNamespace(receive=lambda wait_s, wakes: time.sleep(min(wait_s, 0.01)))
        began = time.monotonic()
        process.store_rest(SimpleNamespace(loop=loop, wakes=None), link, store_s)
        return time.monotonic() - began, capfd.readouterr().err
    return go


def test_an_engine_that_stops_writes_what_waits_for_storage(rest) -> None:
    loop = Loop(5)
    took_s, said = rest(loop, 30.0)
    assert took_s < 20 and said == "storage: 5 pages were written before the exit, 0 are left\n"
    assert loop.handled == [wire.Abort(7), wire.Abort(9)]


def test_storage_that_hangs_holds_up_no_exit(rest) -> None:
    took_s, said = rest(Loop(5, hangs=True), 0.2)
    assert 0.2 <= took_s < 10 and said == "storage: 0 pages were written before the exit, 5 are left\n"


def test_storage_that_is_known_to_be_down_is_not_waited_for(rest) -> None:
    took_s, said = rest(Loop(5, hangs=True, up=0.0), 30.0)
    assert took_s < 20 and said == "storage: 0 pages were written before the exit, 5 are left\n"


def test_an_engine_that_has_nothing_to_store_stops_at_once(rest) -> None:
    took_s, said = rest(Loop(0), 30.0)
    assert took_s < 20 and said == ""
