"""Faults of stages, each seen: an executor of two or more stages that has one of them fails these scenes."""
from __future__ import annotations

from dataclasses import replace

import pytest
import ranks
import torch
import where
from hosted import NEW, Engine, kind, play, resident
from late_copies import Shuffled
from ranks import Handover

from penstock.core.plan import Moved, Paused, RequestId, StepId
from penstock.exec.executor import RanksDisagree


@pytest.fixture(autouse=True)
def two_stages(monkeypatch):
    monkeypatch.setattr(ranks, "NUM", [2])


def scene(break_it=lambda engine: None) -> None:
    """Hosted and resident rows that pause and come back, on a device that is too small for all."""
    engine = Engine(step_tokens=100, hbm_pages=70)
    break_it(engine)
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 90 else ())
    assert engine.core.stats()["pauses"] >= 3


# What sees a fault: a token that is not the reference's, or that its logits do not give; a row's pages; its
# hot buffer.
WRONG = r"\A(request \d|a request was computed again)"
UNBOUND = r"\Arow \d (runs before it was bound|computes up to \d+ but has \d+ pages|has \d+ pages and grows)"
COLD = r"\A(row \d has pages on the host and no hot buffer|a row's hot units are too few)"


def moved_after_the_first_rank(engine):
    """The front believes one rank; the other is late with its copies."""
    front, other = engine.ex, engine.ex._ranks[1]
    real, late = other._mover.run, []

    def merge(rank, report, told=front._merge):
        if isinstance(report, Moved):
            if rank != 0:
                return []
            front._moves[report.id].missing = 1
        return told(rank, report)

    def run(executed, *, idle):
        late.append(executed)
        return real(StepId(max(0, late[max(0, len(late) - 9)])), idle=idle)

    front._merge, other._mover.run = merge, run


def a_rank_that_skips_a_plan(engine):
    rank = engine.ex._ranks[1]
    real = rank._execute

    def execute(plan):
        return real(plan if plan.step != 9 else replace(plan, binds=(), grows=(), remaps=()))

    rank._execute = execute


def a_host_page_in_the_wrong_rectangle(engine):
    """The second stage copies to, and from, where the first does."""
    first, second = (rank._dram[0] for rank in engine.ex._ranks)
    second.pages = first.pages[:, :second.layout.num_layers]


class Stale(Handover):
    """Gives what the step before was given, under the name of this one."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, object] = {}

    def take(self, step):
        new = super().take(step)
        held = type(new)(*(part.clone() if isinstance(part, torch.Tensor) else part for part in new))
        old = self._before.get(len(new[0]), new)
        self._before[len(new[0])] = held
        return old


def the_hidden_states_of_the_previous_step(engine):
    first, second = (rank._steps[-1] for rank in engine.ex._ranks)
    link = Stale()
    first._links = replace(first._links, after=link)
    second._links = replace(second._links, before=link)


def a_token_that_comes_a_step_late(engine):
    heard = engine.ex._ranks[0]._tokens._heard
    real = heard.last

    def last(rid):
        real(rid)
        outputs = heard._outputs[rid]
        return outputs[-2] if len(outputs) > 1 else 0

    heard.last = last


@pytest.mark.sweep
def test_the_scene_is_sound():
    scene()


def test_a_copy_that_is_torn_on_one_stage_is_torn():
    """`Moved` tells of all rectangles of a page, so a request whose copy failed on the second stage only is
    computed again, and says the same."""
    engine = Engine(step_tokens=100, hbm_pages=70)
    rank, torn = engine.ex._ranks[1], Shuffled(2, torn=0.3)
    rank._mover._lateness, rank._mover._thread = torn, None
    ok = [[], []]
    for one, told in zip(engine.ex._ranks, ok, strict=True):
        def tell(real=one._mover._tell, told=told):
            ended = real()
            told += ended
            return ended
        one._mover._tell = tell
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 90 else ())
    first, second = ({m.id: m.ok for m in told} for told in ok)
    assert all(first.values()) and not all(second.values()) and first.keys() == second.keys()
    assert {m.id: m.ok for m in engine.moved} == second


@pytest.mark.sweep
@pytest.mark.parametrize("fault,seen", [
    (moved_after_the_first_rank, WRONG), (a_rank_that_skips_a_plan, UNBOUND),
    (a_host_page_in_the_wrong_rectangle, WRONG), (the_hidden_states_of_the_previous_step, WRONG),
    (a_token_that_comes_a_step_late, WRONG)], ids=lambda f: getattr(f, "__name__", ""))
def test_a_fault_of_stages_is_seen(fault, seen):
    with pytest.raises(AssertionError, match=seen):
        scene(fault)


def test_a_link_refuses_another_steps_states():
    link: Handover[int] = Handover()
    link.put(StepId(3), 7)
    with pytest.raises(AssertionError, match="step 4 was handed what step 3 made"):
        link.take(StepId(4))


def test_row_tables_that_differ_stop_the_engine_with_both_records():
    """Planted in an entry that no step has read yet: no token is wrong, and it is found."""
    engine = Engine(hbm_pages=200, step_tokens=8)
    for rid, prompt in kind().prompts.items():
        engine.add(rid, prompt, 80)
    with pytest.raises(RanksDisagree, match=r"step 64: .*ranks 0 and 1 differ.*\(7\d, '\w{16}'\).*rank 1"):
        while engine.turn():
            if engine.ex._newest == 63:
                table = engine.ex._ranks[1]._tables.groups[0]
                row = next(row for row in range(4) if table._held[row])
                table.host_RM[row, table._held[row] - 1] = 5
    for rid, tokens in engine.got.items():
        assert tuple(tokens) == resident(kind().prompts[rid], 80)[:len(tokens)]


def not_bound(engine, path: str, what: str, left_out: list[RequestId]) -> None:
    """The second stage leaves out `what` of the first bind of each hosted request on `path`; `left_out`
    gets the requests so treated."""
    rank = engine.ex._ranks[1]
    tables, selecting = rank._tables, rank._attending
    real_tables, real_hot, real_remap, real_resize = (
        tables.bind, selecting.bind, tables.remap, selecting.resize)
    seen: set[RequestId] = set()
    rids: dict[int, RequestId] = {}

    def strikes(bind) -> bool:
        rids[bind.row] = bind.rid
        on = "resumed" if bind.rid in seen else "admitted"
        return bool(bind.hot) and on == path and bind.rid not in left_out

    def moves(row, part) -> bool:
        strike = path == "moved" and what == part and rids[row] not in left_out
        left_out.extend([rids[row]] * strike)
        return strike

    def remap(remap):
        if max(remap.host) < 0 or not moves(remap.row, "pages"):
            real_remap(remap)

    def resize(resize):
        if max([hot.keeps for hot in resize.pages], default=-1) < 0 or not moves(resize.row, "hot buffer"):
            real_resize(resize)

    def bind_tables(bind, last):
        if what == "hot buffer" or not strikes(bind):
            real_tables(bind, last)

    def bind_hot(bind, **given):
        if strikes(bind):
            left_out.append(bind.rid)
            if what == "pages":
                real_hot(bind, **given)
        else:
            real_hot(bind, **given)
        seen.add(bind.rid)

    tables.bind, selecting.bind, tables.remap, selecting.resize = bind_tables, bind_hot, remap, resize


@pytest.mark.parametrize("what", ["pages", "hot buffer"])
@pytest.mark.parametrize("path", ["admitted", "resumed", "moved"])
def test_hosted_decode_on_two_stages_whose_row_is_not_bound_on_one_path_is_caught(path, what):
    """A request that gets its row, one that comes back from a pause and one that moves to host pages as it
    decodes: stages are told of each. Where one is not, the engine stops or a token differs, and no answer."""
    left_out: list[RequestId] = []
    seen = UNBOUND if what == "pages" else COLD
    if (path, what) in (("moved", "pages"), ("resumed", "hot buffer")):
        seen = WRONG                        # it goes on with what it knew
    elif where.DEVICE == "cuda" and what == "hot buffer":
        seen = f"{WRONG}|{COLD}"            # a captured step looks at no row
    with pytest.raises(AssertionError, match=seen):
        scene(lambda engine: not_bound(engine, path, what, left_out))
    assert left_out, "no bind was left out"


@pytest.mark.parametrize("dense", [(0, 1), (2,)], ids=["first stage", "last stage"])
def test_a_stage_whose_layers_all_read_everything(dense):
    """Stages of layers 0 and 1, and 2. One without a layer that selects has no pages of the hosted group, and
    its rows are hosted all the same."""
    selection = replace(kind().selection, dense=dense)
    prompts = {rid: kind().prompts[rid] for rid in (1, 2)}
    ranks.NUM = [1]
    alone = Engine(hbm_pages=200, dram_pages=0, hot_pages=0, overlap=False, selection=selection)
    ranks.NUM = [2]
    engine = Engine(hbm_pages=200, always=True, step_tokens=40, selection=selection)
    for one in (alone, engine):
        for rid, prompt in prompts.items():
            one.add(rid, prompt, NEW)
        one.drain()
    assert engine.got == alone.got and engine.total("hot_misses") > 0
