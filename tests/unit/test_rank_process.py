"""A rank's process: plans go to it while a step flies on the device, and grammars before they are needed."""
from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from printable import vocabulary

from penstock.config.request.grammar import Grammar
from penstock.config.streams.frames import FrameBuffer
from penstock.core.plan import StepId, StepPlan
from penstock.engine.process import log
from penstock.exec.pipeline import wire
from penstock.exec.pipeline.hangs import Waits
from penstock.exec.pipeline.process import Process
from penstock.exec.pipeline.workers import WorkerProcess
from penstock.exec.sampling.grammar import COMPILED_MAX, Grammars
from penstock.exec.step.links import Links
from penstock.exec.worker import Stepped


class Event:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def synchronize(self) -> None:
        self.ended.wait()


class Device:
    """Of `exec.worker.Worker` what the process needs: every plan flies at once, until its event has ended."""

    awaits = False              # a stage in front

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
    device, said, heard = Device(), SimpleQueue(), FrameBuffer(wire.FROM_RANK)
    process = object.__new__(Process)
    process._executor = SimpleNamespace(send=said.put)
    process._rank, process._before, process._links = device, None, Links()
    process._inbox, process._flights, process._computed = SimpleQueue(), SimpleQueue(), deque()
    process._waits = Waits()
    process._awaits = process._uncounted = False
    process._queued, process._ended, process._count_at = 0, 0, time.monotonic() + 1000
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
        [report] = heard.feed(said.get(timeout=20))
        assert [stepped.step for stepped in report.stepped] == [step]
    until(lambda: not device.flights)


def test_a_rank_is_asked_once_for_a_grammar_and_says_when_no_step_would_wait():
    (here, there), news, go = socket.socketpair(), SimpleQueue(), threading.Event()
    rank = WorkerProcess(SimpleNamespace(tell=lambda: news.put(None)), 0, wire.Channel(here, wire.FROM_RANK), None)
    process = object.__new__(Process)
    process._executor, process._rank = wire.Channel(there, wire.TO_RANK), Device()
    process._grammars = Grammars(lambda: vocabulary() if go.wait(20) else None)
    try:
        grammar = Grammar("regex", "[ab]+")
        assert not rank.compiled(grammar) and not rank.compiled(grammar)
        process._handle(process._executor.receive())
        assert not rank.compiled(grammar) and news.empty()
        go.set()
        news.get(timeout=20)
        assert rank.compiled(grammar) and process._grammars.compiled(grammar)
        for n in range(COMPILED_MAX):               # what the rank may forget is asked for again
            assert not rank.compiled(Grammar("regex", f"a{{{n + 1}}}"))
            process._handle(process._executor.receive())
            news.get(timeout=20)
        assert len(rank._compiled) <= COMPILED_MAX // 2 + 1 and not rank.compiled(grammar)
    finally:
        there.close()
        here.close()


def test_lines_that_a_rank_logs_are_no_answers():
    """On a GPU it logs what its memory is used for, in front of Ready."""
    here, there = socket.socketpair()
    workers = SimpleNamespace(tell=lambda: None, ranks=[], hang=lambda of, s: (_ for _ in ()).throw(TimeoutError))
    rank = WorkerProcess(workers, 0, wire.Channel(here, wire.FROM_RANK), None)
    process = object.__new__(Process)
    process._executor, process._index = wire.Channel(there, wire.TO_RANK), 0
    process._use = SimpleNamespace(parts={"kv": 5})
    try:
        for _ in range(2):
            process._log("GPU memory in use")
        process.send(wire.Ready(b"", process._use.parts, "prompts"))
        process._log("and one more")
        assert rank.answer(20) == wire.Ready(b"", {"kv": 5}, "prompts")
        with pytest.raises(TimeoutError):
            rank.answer(0.05)
    finally:
        there.close()
        here.close()


def test_a_line_for_the_log_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share a pipe: of a text and its end apart, as an unbuffered file gets them, another's may come between."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    process = object.__new__(Process)
    process._index, process.send = 3, lambda message: None
    process._log("ready")
    log("ready")
    assert [piece for piece in written if piece] == ["rank 3: ready\n", "ready\n"]


def test_a_beat_tells_the_step_that_the_device_works_on_whatever_happens_meanwhile():
    class Gone:
        @property
        def flying(self):
            raise IndexError("it has ended between two looks")

    class Broken:
        def query(self):
            raise RuntimeError("CUDA error")

    process = object.__new__(Process)
    process._ended = 4
    told = []
    for event in (None, SimpleNamespace(query=lambda: True), SimpleNamespace(query=lambda: False), Broken()):
        process._rank = SimpleNamespace(flying=event)
        told.append(process._on_device())
    for process._rank in (None, Gone()):
        told.append(process._on_device())
    assert told == [0, 0, 5, 0, 0, 0]


def test_a_rank_that_sends_what_is_no_message_has_died_and_the_log_says_so(capfd):
    here, there = socket.socketpair()
    told = threading.Event()
    rank = WorkerProcess(SimpleNamespace(tell=told.set), 3, wire.Channel(here, wire.FROM_RANK), None)
    try:
        there.sendall(bytes([200]) + bytes(7))
        assert told.wait(20) and rank.died
        assert "penstock-rank-3 is taken for dead: a frame of kind 200" in capfd.readouterr().err
        assert there.recv(1) == b""             # and it ends too
    finally:
        there.close()
        here.close()
