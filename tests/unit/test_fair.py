"""Turns between API keys: the real scheduler under the loop, and executors that make tokens up."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from scripted import Scripted

from penstock.api.limits import Keys
from penstock.config.request.params import SamplingParams
from penstock.core.core import Core
from penstock.core.plan import Arrived
from penstock.core.settings import CoreConfig
from penstock.core.state import Watcher
from penstock.engine import wire
from penstock.engine.loop import EngineLoop

_spec = importlib.util.spec_from_file_location(
    "loop_hostile", Path(__file__).with_name("test_loop_hostile.py"))
hostile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hostile)

FLOOD, LIGHT, THIRD = 11, 22, 33


class Rig(Watcher):
    """One engine of `rows` slots. `ends`: request ids in the order of their ends; `arrived`: of entering."""

    def __init__(self, rows=4, pages=200, overlap=True):
        self.core = Core(CoreConfig(page_size=4, rows=rows, hbm_pages=pages, step_tokens=24, max_len=120,
                                    overlap=overlap))
        self.loop = EngineLoop(self.core, hostile.Executor(), vocab_size=100, max_model_len=120, check=True)
        self.rid, self.ends, self.arrived, self.tenant = 0, [], [], {}
        self.core.watchers.append(self)

    def event(self, event):
        if isinstance(event, Arrived):
            self.arrived.append(event)

    def submit(self, tenant, prompt=12, max_new=8, priority=0, **more):
        self.rid += 1
        self.tenant[self.rid] = tenant
        start = self.rid if more.get("leader") is None else more["leader"]
        tokens = [] if more.get("leader") else [(start * 7 + k) % 97 for k in range(prompt)]
        params = SamplingParams(n=9, priority=priority)
        self.loop.handle(wire.Submit(rid=self.rid, prompt=tokens, params=params, stop_ids=[], max_new=max_new,
                                     origin=wire.Origin(tenant), **more))
        return self.rid

    def turn(self):
        self.ends += [c.rid for c in self.loop.turn(block=True) if c.finish]

    def run(self):
        while not self.loop.idle:
            self.turn()
        return self.ends


def test_a_key_that_floods_does_not_make_another_wait_for_its_queue():
    rig = Rig()
    flood = [rig.submit(FLOOD) for _ in range(60)]
    for _ in range(3):
        rig.turn()
    light = rig.submit(LIGHT, prompt=2)
    assert len(rig.loop._fair) > 40
    assert rig.loop.stats()["requests_waiting"] == len(rig.core.waiting) + len(rig.loop._fair)
    ends = rig.run()
    # Before it are those that ran or had entered the scheduler when it came.
    assert ends.index(light) <= 4 + 4 and sorted(ends) == [*flood, light]


def test_each_of_several_keys_has_its_turns_and_an_admin_may_go_before_them():
    keys = Keys(["one", "two"], ["boss"])
    app = Scripted("{{ messages[0].content }}", keys=keys, is_admin=keys.is_admin, turn_of=keys.turn_of)
    turns = {}
    for key, priority in (("one", 0), ("one", 7), ("two", 0), ("boss", 0), ("boss", -1)):
        answer = app.post("/v1/chat/completions", headers={"authorization": f"Bearer {key}"},
                          priority=priority, messages=[{"role": "user", "content": "hi"}])
        assert answer.status_code == 200, answer.text
        turns.setdefault(key, []).append(app.tenant)
    one, two, boss = turns["one"], turns["two"], turns["boss"]
    assert one[0] == one[1] != 0 and len({one[0], two[0], boss[0]}) == 3 and boss[1] == 0
    assert Keys(["one"]).turn_of(Keys(["one"]).tenant(b"Bearer one")) == Keys([]).turn_of(b"") == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_without_tenants_requests_enter_at_once_in_order_with_their_priorities(overlap):
    rig = Rig(overlap=overlap)
    rids = [rig.submit(0, priority=n % 3) for n in range(30)]
    rig.turn()
    assert [(e.rid, e.priority) for e in rig.arrived] == [(rid, n % 3) for n, rid in enumerate(rids)]
    assert len(rig.run()) == 30


def test_priority_orders_one_keys_requests_and_no_other_keys():
    rig = Rig(rows=1)
    for n in range(12):
        rig.submit(FLOOD, priority=20 - n)     # each goes before all others of this key
        rig.submit(LIGHT, priority=2**31 - 1)
    rig.run()
    assert {e.priority for e in rig.arrived} == {0}
    order = [e.rid for e in rig.arrived]
    flood = [rid for rid in order if rig.tenant[rid] == FLOOD]
    assert flood[4:] == sorted(flood[4:], reverse=True)        # behind those that entered at once
    turns = [rig.tenant[rid] for rid in order]
    assert all(abs(turns[:n].count(FLOOD) - turns[:n].count(LIGHT)) <= 4 for n in range(len(turns)))


def test_tokens_are_shared_not_requests_and_idle_time_is_no_credit():
    rig = Rig(rows=2)
    for _ in range(12):
        rig.submit(FLOOD, prompt=60, max_new=40)
    while len(rig.ends) < 6:
        rig.turn()
    for _ in range(80):                        # it was idle until now
        rig.submit(LIGHT, prompt=6, max_new=4)
    at = len(rig.arrived)
    rig.run()
    turns = [rig.tenant[e.rid] for e in rig.arrived[at:]]
    first = turns[:turns.index(FLOOD, 1)]
    assert 1 < len(first) < 40                 # not all 80: as many as one large request has tokens
    assert turns[:40].count(FLOOD) >= 2


def test_cached_prompts_and_requests_that_never_start_cost_nothing():
    rig = Rig(rows=1)
    a = rig.submit(FLOOD, prompt=40, max_new=2)
    rig.run()
    assert rig.loop._fair._served[FLOOD] == 40 + 2
    rig.submit(FLOOD, leader=a, choice=1, max_new=2)
    rig.run()
    assert rig.loop._fair._served[FLOOD] == 42 + 4 + 2         # 36 of 40 were cached
    rids = [rig.submit(FLOOD, prompt=20) for _ in range(9)]
    for rid in rids:
        rig.loop.handle(wire.Abort(rid))
    assert sorted(rig.run())[2:] == rids and not len(rig.loop._fair)
    assert rig.loop._fair._served[FLOOD] == 48


def test_choices_share_one_prompt_when_they_wait_for_their_turn():
    rig = Rig(rows=1)
    for _ in range(6):
        rig.submit(LIGHT)
    first = rig.submit(FLOOD, prompt=50, max_new=2)
    others = [rig.submit(FLOOD, leader=first, choice=n, max_new=2) for n in range(1, 6)]
    rig.run()
    prompts = [e.prompt for e in rig.arrived if e.rid in (first, *others)]
    assert len(prompts) == 6 and all(p is prompts[0] for p in prompts)
    assert next(e.leader for e in rig.arrived if e.rid in others) == first


def test_three_keys_with_little_memory_all_end():
    rig = Rig(rows=6, pages=24)
    rids = [rig.submit((FLOOD, LIGHT, THIRD)[n % 3], prompt=10 + n % 30, max_new=30, priority=n % 5)
            for n in range(45)]
    assert sorted(rig.run()) == rids
