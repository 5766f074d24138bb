"""What `core.plan.PlanExecutor` promises, for every executor of the package, driven by the real core.

An executor class that is not listed here fails the walk.
"""
from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from random import Random

import pytest
import torch
from late_copies import Latest, Shuffled

import penstock.exec
import penstock.sim
from penstock.config.request.params import SamplingParams
from penstock.core.core import Core
from penstock.core.plan import Arrived, Finished, Moved, Paused, RequestId, Retired, Token
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.worker import Worker, WorkerParts
from penstock.kernels.attention import paged_attention
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Promptly
from penstock.memory.pool import PageLayout
from penstock.model.base import CacheShape, LocalLayer, Reads, Source, Stage
from penstock.sim.ranks.clock import Clock
from penstock.sim.ranks.executor import SimExecutor

SHAPE = PageLayout(num_layers=1, num_kv_heads=1, page_size=4, head_dim=4)
CFG = CoreConfig(page_size=4, rows=3, hbm_pages=12, dram_pages=20, step_tokens=6, overlap=True,
                 hbm_base=300, dram_base=7000, row_base=40,
                 groups=(CacheGroup(name="full", page_bytes=SHAPE.page_bytes),))


class Toy:
    """One layer of attention over one-hot-like embeddings; enough to depend on its history."""

    groups = (CacheShape(name="full", layers=(0,), num_kv_heads=1, head_dim=4),)
    reads, drafting = {LocalLayer(0): Reads(source=Source(LocalLayer(0)), num_heads=1, scale=0.5)}, None
    selector = None
    vocab_size, max_position, stage = 31, 128, Stage(0, 1, True, True)

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.embed, self.head = torch.randn(2, 31, 4, generator=random)

    def forward(self, ids, positions, attend):
        x = (self.embed[ids] + positions.unsqueeze(1).sin()).unsqueeze(1)
        return attend(0, x, torch.stack((x, x), 1)).squeeze(1)

    def logits(self, hidden):
        return hidden @ self.head.T


def front(*latenesses):
    """One rank for each: replicas, every one with all of the model."""
    plan = functools.partial(paged_attention.prepare, backend="reference")
    ex = Executor([
        Worker(WorkerParts(Toy(), plan), [HbmPool(SHAPE, 12, base=300)], [DramPool(SHAPE, 20, base=7000)], rows=3,
             max_len=48, row_base=40, lateness=lateness) for lateness in latenesses])
    return ex, lambda rid, prompt: ex.open(rid, prompt, SamplingParams(temperature=0.0))


def sim():
    ex = SimExecutor(CFG, Clock(), Random(3), ranks=2)
    return ex, lambda rid, prompt: ex.register(Arrived(rid, tuple(prompt), 99), 1)


EXECUTORS = {
    "Executor": [lambda: front(None), lambda: front(Promptly()), lambda: front(Latest()),
              lambda: front(Shuffled(1, torn=0.2)), lambda: front(Promptly(), Shuffled(1, torn=0.2)),
              lambda: front(Latest(), None)],
    "SimExecutor": [sim],
}
EVERY = [pytest.param(make, id=f"{name}-{i}")
         for name, makes in EXECUTORS.items() for i, make in enumerate(makes)]


def test_every_executor_is_listed():
    found = set()
    for package in (penstock.exec, penstock.sim):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            module = importlib.import_module(info.name)
            found |= {name for name, c in inspect.getmembers(module, inspect.isclass)
                      if c.__module__ == info.name and hasattr(c, "submit") and hasattr(c, "poll")}
    assert found == set(EXECUTORS)


@pytest.mark.parametrize("make", EVERY)
def test_nothing_in_flight_means_no_event(make):
    ex, _ = make()
    assert list(ex.poll(block=False)) == list(ex.poll(block=True)) == []


@pytest.mark.parametrize("make", EVERY)
def test_every_plan_and_every_move_is_answered_once_and_in_order(make):
    ex, open_request = make()
    core, events, tokens = Core(CFG), [], {}
    for rid in range(1, 7):
        prompt = tuple((rid * i) % 31 for i in range(3, 3 + 4 * rid))
        open_request(RequestId(rid), prompt)
        events.append(Arrived(RequestId(rid), prompt, 11))
        tokens[rid] = 0
    plans, moves, ended = {}, set(), set()             # in flight; finished requests
    retired, answers = 0, []
    for turn in range(2000):
        if turn % 5 == 4:
            events.append(Paused(RequestId(1 + turn % 6)))
        while True:
            adv = core.advance(events)
            events = []
            for o in adv.outputs:
                if isinstance(o, Token):
                    tokens[o.rid] += 1
                elif isinstance(o, Finished):
                    ended.add(o.rid)
            if adv.plan is None:
                break
            ex.submit(adv.plan)
            plans[adv.plan.step] = adv.plan
            moves |= {m.id for m in adv.plan.moves}
        core.check()
        found = ex.poll(block=True)
        assert found or not (plans or moves), "a blocking poll returned nothing"
        for event in found:
            if isinstance(event, Retired):
                retired += 1
                assert event.step == retired
                assert len(event.tokens) == sum(plans.pop(retired).samples)
            else:
                assert isinstance(event, Moved)
                moves.remove(event.id)
                answers.append(event.ok)
        events += found
        if not found:
            break
    assert not plans and not moves and len(ended) == 6
    assert core.stats()["pauses"] >= 1      # how many depends on when the thread's copies end
    assert set(tokens.values()) == {11}
    if isinstance(ex, Executor):               # its metrics tell a move once, whatever the number of ranks
        for name, count in (("moves_total", len(answers)), ("moves_failed_total", answers.count(False))):
            assert sum(v for k, v in ex.stats().items() if k.startswith(name)) == count
