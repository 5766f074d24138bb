"""What the front makes of its ranks' reports."""
from __future__ import annotations

import pytest

from penstock.config.request.params import SamplingParams
from penstock.core.plan import (
    Aborted,
    DramPage,
    Group,
    HbmPage,
    HotUse,
    Move,
    Moved,
    MoveId,
    RequestId,
    Retired,
    Row,
    StepId,
    StepPlan,
    Tier,
)
from penstock.exec.executor import Executor, RanksDisagree
from penstock.exec.sampling.sampler import NOT_FINITE, NOTHING_ADMITTED, Sampling, told
from penstock.exec.sampling.tokens import SampledStep
from penstock.exec.worker import Stepped

RID, STEP, MOVE = RequestId(1), StepId(1), MoveId(1)


class Scripted:
    """A rank that reports what it is given."""

    def __init__(self) -> None:
        self.reports = []

    def open(self, rid, prompt, params, *, choice, stop_ids):
        pass

    def start(self, plan):
        pass

    def collect(self, *, block):
        reports, self.reports = self.reports, []
        return reports


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_only_a_failed_copy_that_a_step_has_waited_for_excuses_its_rows(ok, waits):
    """One that fails beside it says nothing of what the step has read."""
    rank = Scripted()
    front = Executor([rank])
    front.open(RID, (5,), SamplingParams())
    move = Move(MOVE, Group(0), Tier.DRAM, (DramPage(0),), Tier.HBM, (HbmPage(0),), 4, StepId(0))
    front.submit(StepPlan(STEP, (Row(0),), (RID,), (0,), (1,), (True,), (5,), (), (), (move,),
                          waits=(MOVE,) if waits else ()))
    rank.reports = [Moved(MOVE, ok), Stepped(STEP, ((),), faults=((RID, "not finite", True),))]
    excused = waits and not ok
    aborts = [] if excused else [Aborted(RID, damaged=True)]
    assert front.poll(block=False) == [Moved(MOVE, ok), Retired(STEP, ((),)), *aborts]
    assert (front.fault(RID) is None) == excused


@pytest.mark.parametrize("other, seen", [((7,), False), ((8,), True), ((), True)])
def test_lanes_that_sample_apart_stop_the_engine_with_both(other, seen):
    """Of three ranks the last two are TP ranks of the last stage."""
    ranks = [Scripted() for _ in range(3)]
    front = Executor(ranks, tp_size=2)
    front.open(RID, (5,), SamplingParams())
    front.submit(StepPlan(STEP, (Row(0),), (RID,), (0,), (1,), (True,), (5,), (), (), ()))
    for rank, tokens in zip(ranks, ((), (other,), ((7,),)), strict=True):
        rank.reports = [Stepped(STEP, tokens)]
    if not seen:
        assert front.poll(block=False) == [Retired(STEP, ((7,),))]
        return
    with pytest.raises(RanksDisagree, match=r"step 1: rank 1 has sampled .*, rank 2 \[\(7,\)\]"):
        front.poll(block=False)


def test_what_rows_have_missed_is_told_every_sixteen_steps_of_all_ranks():
    """Ranks count from the beginning of a request, the core hears what is new. Who has selected nothing since
    is not named."""
    ranks, told = [Scripted(), Scripted()], []
    front = Executor(ranks)
    front.open(RID, (5,), SamplingParams())
    for n in range(1, 50):
        front.submit(StepPlan(StepId(n), (Row(0),), (RID,), (n,), (1,), (True,), (-1,), (), (), ()))
        for k, rank in enumerate(ranks):
            seen = min(n, 20)
            reads = (RID, (seen, 2 * seen, (k + 1) * seen, 0, 99))
            rank.reports = [Stepped(StepId(n), ((7,),), reads=(reads,))]
        told += [event for event in front.poll(block=False) if not isinstance(event, Retired)]
    assert told == [HotUse(StepId(16), ((RID, 16 * 9, 16 * 3),)), HotUse(StepId(32), ((RID, 4 * 9, 4 * 3),))]


@pytest.mark.parametrize("code", [NOT_FINITE, NOTHING_ADMITTED])
def test_a_grammar_that_admits_no_token_damages_no_page(code):
    """Its request fails, and pages that others share with it stay."""
    answers = SampledStep()
    state = Sampling(SamplingParams(), (5,), (), 0)
    told([state], [code], None)
    assert not answers.say(RID, state, 0, code)
    rank = Scripted()
    front = Executor([rank])
    front.open(RID, (5,), SamplingParams())
    front.submit(StepPlan(STEP, (Row(0),), (RID,), (0,), (1,), (True,), (5,), (), (), ()))
    rank.reports = [Stepped(STEP, ((),), faults=tuple(answers.faults))]
    damaged = code == NOT_FINITE
    assert front.poll(block=False) == [Retired(STEP, ((),)), Aborted(RID, damaged=damaged)]
    assert ("grammar admits no token" in front.fault(RID)) != damaged
    rank.stats = dict
    assert front.stats()["executor_nonfinite_rows_total"] == damaged
