"""The decode instance of a pair in the loop, without engines: who gets no answer, and what is said of it."""
from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config.request.params import SamplingParams
from penstock.core.pair.messages import Drained, End, Reason, Refused
from penstock.core.plan import Aborted, Advance, Arrived, Entered, Finished, Outcome, PeerLeft
from penstock.engine import process as engine_main
from penstock.engine import wire
from penstock.engine.loop import EngineLoop
from penstock.engine.pd.remote import Peer
from penstock.engine.pd.router import CROWDED, FAILS, LATE, REFUSES, Peers
from penstock.transfer.events import Down, Events, PeerMessage, Unpaired, Up
from penstock.transfer.messages import Ask

_spec = importlib.util.spec_from_file_location(
    "engine_fake", Path(__file__).with_name("engine_fake.py"))
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)


class Core(fake.FakeCore):
    """Its requests wait for the other engine; `next` is told in the next turn."""

    def __init__(self):
        super().__init__()
        self.cfg = replace(self.cfg, role="decode")
        self.next = []

    def advance(self, events):
        outputs, self.next = self.next, []
        self.seen += events
        outputs += [Finished(e.rid, Outcome.ABORT) for e in events if isinstance(e, Aborted)]
        return Advance(None, tuple(outputs))


class Link:
    """A link and its connection, on which the other end says what is in `events`."""

    def __init__(self):
        self.events, self.said, self.cuts, self.epoch, self.info = Events(lambda: None), [], [], 1, {}
        self.events.put(Up(self))

    def say(self, message):
        self.said.append(message)

    def cut(self):
        self.cuts.append(self.epoch)
        self.events.put(Down(self.epoch, "cut here"))

    def revoke(self, transfer, generation):
        pass

    def stats(self):
        return {}


class Rig:
    def __init__(self, *, refuses):
        self.now, self.link, self.core = 100.0, Link(), Core()
        self.peer = Peer(self.link, "decode", refuses=refuses, clock=lambda: self.now)
        self.loop = EngineLoop(self.core, fake.FakeExecutor(), vocab_size=fake.VOCAB,
                               max_model_len=fake.CONTEXT, peers=Peers(self.peer),
                               deadlines_s={"receiving": 5.0}, clock=lambda: self.now)
        self.ends = {}
        self.turn()
        for rid in (1, 2):
            self.loop.handle(wire.Submit(rid=rid, prompt=[5, 6], params=SamplingParams(n=8), stop_ids=[],
                                         max_new=4))
        self.turn()

    def turn(self, *outputs):
        self.core.next = list(outputs)
        for _ in range(2):                      # what is given up in one turn has ended in the next
            self.ends |= {c.rid: (c.finish, c.reason) for c in self.loop.turn(block=False) if c.finish}

    def hear(self, message):
        self.link.events.put(PeerMessage(message))


DROPPED = Entered(1, "dropped", 2)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_prompt_that_the_other_engine_refuses_is_not_computed_here_where_that_is_the_policy(refuses):
    rig = Rig(refuses=refuses)
    rig.hear(Refused(1, 0, Reason.REFUSED))
    rig.turn()
    assert rig.ends == ({1: ("unavailable", REFUSES)} if refuses else {})


@pytest.mark.parametrize("message, said", [
    (Refused(1, 3, Reason.REFUSED), REFUSES), (Drained(1, 3, Reason.FAILED), FAILS),
    (End(1, 3, 2, ()), FAILS), (None, CROWDED)])
def test_why_nothing_came_is_said(message, said):
    """CROWDED: with nothing from the other engine it was this one that took the pages back."""
    rig = Rig(refuses=True)
    if message is not None:
        rig.hear(message)
    rig.turn(DROPPED)
    assert rig.ends == {1: ("unavailable", said)}


def test_who_waited_too_long_is_told_so():
    rig = Rig(refuses=True)
    rig.turn(Entered(1, "receiving", 1))
    rig.now += 6
    rig.turn(DROPPED)
    assert rig.ends[1] == ("unavailable", LATE)


@pytest.mark.parametrize("heard", [False, True])
def test_an_engine_that_hangs_is_cut_off(heard):
    """Only the end of the connection gives the pages back that it was granted."""
    rig = Rig(refuses=False)
    rig.turn(Entered(1, "receiving", 1))
    rig.now += 3
    if heard:
        rig.hear(Refused(2, 0, Reason.REFUSED))
    rig.turn()
    rig.now += 3
    rig.turn(DROPPED)
    assert rig.link.cuts == ([] if heard else [1])
    assert any(isinstance(e, PeerLeft) for e in rig.core.seen) != heard
    rig.link.epoch = 2
    rig.link.events.put(Up(rig.link))
    rig.turn(DROPPED)                       # later, on its way here: once is enough
    assert rig.link.cuts == ([] if heard else [1])


def test_what_a_stranger_is_told_changes_nothing_while_there_is_a_pair():
    rig = Rig(refuses=False)
    rig.peer.changed = False
    rig.link.events.put(Unpaired("the other end is no engine of a pair"))
    rig.turn()
    assert not rig.peer.missing and not rig.peer.changed
    rig.link.events.put(Down(1, "silent"))
    rig.link.events.put(Unpaired("weights: a here and b there"))
    rig.turn()
    assert rig.peer.missing == "weights: a here and b there" and rig.peer.changed


def test_each_reason_without_a_pair_is_one_line_of_the_log(capfd):
    rig, sent = Rig(refuses=False), SimpleNamespace(send=lambda message: None)
    told = engine_main.tell(Peers(rig.peer), sent, "no connection yet")
    for words in ["weights: a here and b there", "weights: a here and b there", "cannot connect"]:
        rig.peer.session = None
        rig.link.events.put(Unpaired(words))
        rig.turn()
        told = engine_main.tell(Peers(rig.peer), sent, told)
    assert capfd.readouterr().err.splitlines() == [
        "disaggregation: connected", "disaggregation: weights: a here and b there",
        "disaggregation: cannot connect"]


def test_a_prefill_instance_that_writes_its_last_pages_takes_no_prompt(monkeypatch):
    link, core = Link(), Core()
    core.cfg = replace(core.cfg, role="prefill")
    loop = EngineLoop(core, fake.FakeExecutor(), vocab_size=fake.VOCAB, max_model_len=fake.CONTEXT,
                      peers=Peers(Peer(link, "prefill")))
    monkeypatch.setattr(loop, "stats", lambda: {"pages_to_store": 0})
    engine_main.store_rest(SimpleNamespace(loop=loop), None, 0.0)
    link.events.put(PeerMessage(Ask(7, bytes(8), SamplingParams(), [], 1, bytes(16))))
    loop.turn(block=False)
    assert link.said == [Refused(7, 0, Reason.REFUSED)] and not any(isinstance(e, Arrived) for e in core.seen)


def test_the_end_of_the_connection_is_the_excuse_of_all():
    rig = Rig(refuses=True)
    rig.link.events.put(Down(1, "silent"))
    rig.turn()
    assert set(rig.ends) == {1, 2} and all("(silent)" in reason for _, reason in rig.ends.values())
