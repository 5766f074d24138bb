"""A rank's process on a device: plans go to it while a step of it flies."""
from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

from penstock.core.plan import StepId, StepPlan
from penstock.exec.pipeline import wire
from penstock.exec.pipeline.beats import Waits
from penstock.exec.pipeline.process import Process
from penstock.exec.rank import Stepped
from penstock.exec.step.links import Links


class Event:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def synchronize(self) -> None:
        self.ended.wait()


class Device:
    """Of `exec.rank.Rank` what the process needs: every plan flies at once, until its event has ended."""

    def __init__(self) -> None:
        self.flights: list[tuple[StepId, Event]] = []

    @property
    def flying(self) -> Event | None:
        return self.flights[0][1] if self.flights else None

    def start(self, plan: StepPlan) -> None:
        self.flights.append((plan.step, Event()))

    def collect(self, *, block: bool) -> list[Stepped]:
        step, event = self.flights[0]
        assert block and event.ended.is_set(), "it waits in the thread that takes plans"
        del self.flights[0]
        return [Stepped(step)]

    def stats(self) -> dict[str, float]:
        return {}


def plan(step: int) -> wire.Plan:
    return wire.Plan(StepPlan(step=StepId(step), rows=(), rids=(), start=(), count=(), samples=(), tokens=(),
                              grows=(), moves=(), binds=()))


def until(true) -> None:
    limit = time.monotonic() + 20
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_plan_is_launched_while_the_step_before_it_is_on_the_device():
    device, said = Device(), SimpleQueue()
    process = object.__new__(Process)
    process._front = SimpleNamespace(send=said.put)
    process._rank, process._before, process._links = device, None, Links()
    process._inbox, process._flights = SimpleQueue(), SimpleQueue()
    process._waits = Waits()
    process._awaits = process._uncounted = False
    process._queued, process._count_at = 0, time.monotonic() + 1000
    for body in (process._land, process.run):
        threading.Thread(target=body, daemon=True).start()

    process._inbox.put(plan(1))
    until(lambda: len(device.flights) == 1)
    process._inbox.put(plan(2))
    until(lambda: len(device.flights) == 2)             # the first has not ended
    assert said.empty()
    (_, first), (_, second) = device.flights
    for step, event in (1, first), (2, second):
        event.ended.set()
        report = wire.decode_from_rank(said.get(timeout=20)[8:])
        assert [stepped.step for stepped in report.stepped] == [step]
    until(lambda: not device.flights)
