"""A start takes a step of each kind: on scratch pages, for every kind of model, wherever its pages are."""
from __future__ import annotations

import logging

import hosted
import pytest
import ranks
from driven import backends

from penstock.exec.drafts.drafter import NGram
from penstock.exec.load.backends import parts_of
from penstock.exec.load.layout import caches_of
from penstock.exec.load.sizing import groups_of
from penstock.exec.start.kinds import CHUNKS, one_page, take_each_kind
from penstock.kernels import registry
from penstock.kernels.triton import compiles

STEP, ROWS = 48, 3


def front_of(name: str, hot_pages: int, monkeypatch, **rank):
    monkeypatch.setattr(hosted, "KIND", [name])
    kind = hosted.kind()
    make, selection = hosted.model_of(kind.selection), kind.selection
    groups = groups_of(make(), selection, hosted.FORMAT[0])
    caches = caches_of(groups, 4, make().dtype if hasattr(make(), "dtype") else hosted.torch.float32)
    core = one_page(caches, ROWS, hosted.MAX_LEN, hot_pages)
    more = registry.SELECTING[make().selector.score if selection.native else "bounds"]
    parts = parts_of(make(), backends((*make().spec.attention.ops, *more)), selection, hot_pages)
    front, _, _ = ranks.front(make, parts.attention, groups, caches, core, num_layers=kind.layers,
                              layers=(kind.layers,), max_len=core.max_len, lateness=None,
                              selects=parts, **rank)
    return front, core, selection


@pytest.mark.parametrize("name", list(hosted.KINDS))
def test_start_takes_each_kind_of_step_wherever_pages_are(name, monkeypatch):
    front, core, selection = front_of(name, hosted.KINDS[name].hot_pages, monkeypatch)
    plans, submit = [], front.submit
    monkeypatch.setattr(front, "submit", lambda plan: (plans.append(plan), submit(plan)))
    num = take_each_kind(front, core, STEP, selection.budget)
    assert num == len(plans) and [plan.step for plan in plans] == list(range(1, num + 1))
    shapes = {(plan.count, tuple(t < 0 for t in plan.tokens)[::max(1, len(plan.tokens) - 1)])
              for plan in plans}
    counts = {plan.count for plan in plans}
    assert {(n,) for n in (STEP, *CHUNKS) if n <= STEP} <= counts
    assert any(len(c) == 2 and 1 in c and max(c) > 1 for c in counts), "a chunk beside one that decodes"
    assert any(len(c) == 2 and min(c) > 1 for c in counts), "two prompts in a step"
    assert ((1, 1), (True, True)) in shapes, "two that decode"
    assert {bool(bind.host) for plan in plans for bind in plan.binds} == {False, True}
    # Those on the host were read from there.
    stats = front.stats()
    assert sum(n for key, n in stats.items() if key.startswith("hot_misses_total")) > 0


def test_start_without_a_host_tier_takes_resident_steps_only(monkeypatch):
    front, core, selection = front_of("bounds", 0, monkeypatch)
    plans, submit = [], front.submit
    monkeypatch.setattr(front, "submit", lambda plan: (plans.append(plan), submit(plan)))
    assert take_each_kind(front, core, STEP, selection.budget) == len(plans) > 10
    assert not any(bind.host or bind.hot for plan in plans for bind in plan.binds)


def test_kernel_compiled_while_serving_is_counted_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(compiles, "_watch", compiles._Watch())
    with compiles.noted("early"):
        pass
    assert compiles.stats() == {}
    compiles.serve()
    with caplog.at_level(logging.WARNING, "penstock.kernels"):
        with compiles.noted("cached"):
            pass
        monkeypatch.setattr(compiles, "SLOW_S", 0.0)
        with compiles.noted("late_kernel"):
            pass
    assert compiles.stats()["executor_compiled_total"] == 2
    assert [r.getMessage().split()[1] for r in caplog.records] == ["late_kernel"]



def test_start_takes_each_kind_with_a_drafter(monkeypatch):
    """A drafter follows its request, and asserts where a plan is at another position."""
    front, core, selection = front_of("bounds", 0, monkeypatch, drafter=NGram())
    assert take_each_kind(front, core, STEP, selection.budget) > 10
