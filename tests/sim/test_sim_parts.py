"""The simulator's own parts: the fake model, its devices, copies that fail, scenarios."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    NO_HBM,
    Aborted,
    Arrived,
    Bind,
    DramPage,
    Dropped,
    Group,
    HbmPage,
    Hot,
    HotResize,
    Move,
    Moved,
    MoveId,
    Remap,
    RequestId,
    Retired,
    Row,
    StepId,
    StepPlan,
    Tier,
)
from penstock.core.settings import CoreConfig
from penstock.sim.programs.shrink import shrink
from penstock.sim.programs.sweeps import sweep
from penstock.sim.ranks.clock import Clock
from penstock.sim.ranks.executor import SimExecutor
from penstock.sim.ranks.model import oracle
from penstock.sim.world import damage
from penstock.sim.world.scenario import draw
from penstock.sim.world.view import View
from penstock.sim.world.world import World

CFG = CoreConfig(page_size=2, rows=2, hbm_pages=8, dram_pages=8)
PROMPT = (11, 12, 13)


def plan(step: int, start: int, tokens: tuple[int, ...], *, binds: tuple[Bind, ...] = (),
         moves: tuple[Move, ...] = ()) -> StepPlan:
    return StepPlan(step=StepId(step), rows=(Row(0),), rids=(RequestId(0),), start=(start,),
                    count=(len(tokens),), samples=(True,), tokens=tokens, grows=(), binds=binds,
                    moves=moves)


def bind(*pages: int) -> tuple[Bind, ...]:
    return (Bind(Row(0), RequestId(0), (tuple(map(HbmPage, pages)),), 0),)


def executor(namespace: int = 0) -> SimExecutor:
    ex = SimExecutor(CFG, Clock(), Random(0), ranks=2)
    ex.register(Arrived(RequestId(0), PROMPT, 9, namespace=namespace), 5)
    return ex


def test_steps_and_tokens_come_from_the_oracle() -> None:
    ex = executor()
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2, 3)))
    ex.submit(plan(2, 3, (-1,)))
    tokens = [e.tokens[0][0] for _ in range(2) for e in ex.poll(block=True)]
    assert tuple(tokens) == oracle(PROMPT, 2, 0, 5)
    assert not ex.poll(block=True) and ex.in_flight == 0


def test_a_namespace_and_a_seed_change_every_token() -> None:
    streams = {oracle(PROMPT, 4, namespace, seed) for namespace in (0, 1) for seed in (5, 6)}
    assert len(streams) == 4


def test_a_page_that_was_poisoned_changes_the_next_token() -> None:
    ex = executor()
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2, 3)))
    ex.poll(block=True)
    for device in ex.devices:
        device.poison(Tier.HBM, 1)
    ex.submit(plan(2, 3, (-1,)))
    (retired,) = ex.poll(block=True)
    assert isinstance(retired, Retired)
    assert retired.tokens[0][0] != oracle(PROMPT, 2, 0, 5)[1]


@pytest.mark.parametrize("fail", [False, True])
def test_a_copy_arrives_whole_or_is_torn_and_says_so(fail: bool) -> None:
    ex = executor()
    move = Move(MoveId(1), Group(0), Tier.HBM, (HbmPage(1), HbmPage(2)), Tier.DRAM,
                (DramPage(6), DramPage(7)), 3, StepId(1))
    ex.fail_move = int(fail)
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2), moves=(move,)))
    events = [e for _ in range(2) for e in ex.poll(block=True)]
    assert Moved(MoveId(1), not fail) in events
    same = [d.page(Tier.HBM, 0, 2)[0] == d.page(Tier.DRAM, 0, 7)[0] for d in ex.devices]
    assert all(same) is not fail
    assert all(d.page(Tier.DRAM, 0, 7)[1] < 0 for d in ex.devices), "3 tokens, not 4"


def test_damage_is_alike_on_every_rank_and_changes_the_next_token() -> None:
    ex = executor()
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2, 3)))
    ex.poll(block=True)
    ex.damage(set(), {(Tier.HBM, 1)})
    assert ex.devices[0].page(Tier.HBM, 0, 1) == ex.devices[1].page(Tier.HBM, 0, 1)
    ex.submit(plan(2, 3, (-1,)))
    (retired,) = ex.poll(block=True)
    assert isinstance(retired, Retired)
    assert retired.tokens[0][0] != oracle(PROMPT, 2, 0, 5)[1]


def test_a_copy_in_flight_does_not_heal_a_damaged_page() -> None:
    ex = executor()
    move = Move(MoveId(1), Group(0), Tier.HBM, (HbmPage(1),), Tier.DRAM, (DramPage(6),), 2, StepId(1))
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2), moves=(move,)))
    while not ex.devices[0].done:
        ex.clock.step()
    good = list(ex.devices[0].page(Tier.HBM, 0, 1))
    ex.damage(set(), {(Tier.DRAM, 6)})
    while ex.in_flight:
        ex.poll(block=True)
    for device in ex.devices:
        assert device.page(Tier.HBM, 0, 1) == good
        assert not {*good} & {*device.page(Tier.DRAM, 0, 6)}


def test_ranks_may_disagree_about_a_damaged_request_and_no_other() -> None:
    for damaged in (set[RequestId](), {RequestId(0)}):
        ex = executor()
        ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2, 3)))
        ex.poll(block=True)
        ex.damage(damaged, set())
        ex.devices[1].damage(Tier.HBM, 1)
        ex.submit(plan(2, 3, (-1,)))
        if damaged:
            ex.poll(block=True)
        else:
            with pytest.raises(AssertionError, match="ranks disagree"):
                ex.poll(block=True)


def test_who_gave_up_its_kv_may_have_computed_whatever_has_its_tokens() -> None:
    core = Core(replace(CFG, overlap=True, pp_size=2))
    first, second = (core.advance([Arrived(RequestId(i), PROMPT, 9)]).plan for i in (1, 2))
    assert first is not None and second is not None
    core.advance([Retired(first.step, ((5,),))])           # the other is still computing the same page
    view = View(core)
    one, two = (core.live[RequestId(i)] for i in (1, 2))
    assert one.path and damage.distrusted(view, two) == []
    core.advance([Dropped(RequestId(2))])
    assert two.phase is Phase.DROPPED and damage.distrusted(view, two) == one.path == list(view.sealed(two))
    page = one.path[0]
    core.advance([Aborted(RequestId(2), damaged=True)])
    assert view.is_banished(page) and page not in one.path and one.kv_epoch == 1


def test_damage_strikes_a_request_beside_sound_ones_and_fires_in_every_tier() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200):
        world = World(draw(seed, "pair=0,damages=8")).play()
        seen += world.stats
    for name in ("damaged", "damaged page in hbm", "damaged page in dram", "damaged page in disk",
                 "damaged page in flight", "damaged after its drop", "damaged beside a sound one",
                 "computed again for itself"):
        assert seen[name], f"{name}: never fired"


def test_a_step_on_a_free_page_is_a_finding() -> None:
    ex = executor()
    ex.busy[Tier.HBM] = {1}
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2)))
    with pytest.raises(AssertionError, match="free hbm page"):
        ex.poll(block=True)


def test_a_hosted_row_reads_the_host_and_writes_what_it_computes_there() -> None:
    hot = ((Hot(HbmPage(5)),),)
    tables = Bind(Row(0), RequestId(0), ((NO_HBM,) * 3,), 0, ((DramPage(6), DramPage(7), DramPage(3)),), hot)
    ex = executor()
    ex.submit(plan(1, 0, PROMPT, binds=(tables,)))
    ex.submit(plan(2, 3, (-1,)))
    tokens = [e.tokens[0][0] for _ in range(2) for e in ex.poll(block=True)]
    assert tuple(tokens) == oracle(PROMPT, 2, 0, 5)
    assert ex.devices[0].stats["hot misses"] > 1 and 1 not in ex.devices[0].memory[Tier.HBM][0]
    ex.devices[0].poison(Tier.DRAM, 6)
    ex.devices[1].poison(Tier.DRAM, 6)
    ex.submit(plan(3, 4, (-1,)))
    (retired,) = ex.poll(block=True)
    assert isinstance(retired, Retired)
    assert retired.tokens[0][0] != oracle(PROMPT, 3, 0, 5)[2]


def test_a_row_that_is_remapped_goes_on_where_it_was() -> None:
    ex = executor()
    ex.submit(plan(1, 0, PROMPT, binds=bind(1, 2)))
    moved = Remap(Row(0), Group(0), (0,), (NO_HBM,), (DramPage(6),))
    hot = HotResize(Row(0), Group(0), (Hot(HbmPage(1), keeps=0),))
    ex.submit(replace(plan(2, 3, (-1,)), remaps=(moved,), resizes=(hot,)))
    tokens = [e.tokens[0][0] for _ in range(2) for e in ex.poll(block=True)]
    assert tuple(tokens) == oracle(PROMPT, 2, 0, 5)
    assert ex.devices[0].stats["hot hits"] > 0


def test_a_mode_fixes_dimensions_and_replays() -> None:
    sc = draw(7, "pp_size=2,overlap=1,ranks=3,fail=0.5")
    assert (sc.cfg.pp_size, sc.cfg.overlap, sc.ranks, sc.speeds.fail) == (2, True, 3, 0.5)
    assert sc.replay == "--seed 7 --mode pp_size=2,overlap=1,ranks=3,fail=0.5"
    for wrong in ("nothing=1", "seed=3", "pp_size=two", "groups=1"):
        with pytest.raises(ValueError, match=r"mode|two"):
            draw(7, wrong)


def test_shrink_says_nothing_about_a_seed_that_passes() -> None:
    assert shrink(0, "requests=2") == ""


def test_a_step_that_one_rank_leaves_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before a collective must be the same on every rank: here each asks its own loads."""
    run = SimExecutor._run

    def alone(self: SimExecutor, k: int) -> None:
        if not k or not self._flying[k]:
            return run(self, k)
        plan = self._queues[k].pop(0)
        self.devices[k].done, self._busy[k] = plan.step, False
        self._report(plan.step, ((0,),) * sum(plan.samples))
        self._kick(k)

    monkeypatch.setattr(SimExecutor, "_run", alone)
    found = sweep(range(12), "pair=0,ranks=2,copy=8").failures
    assert any("ranks disagree" in line for line in found), found
