"""Well-formed messages of a peer that make no sense: they cost their request, and nothing else."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.pair.messages import End, Grant
from penstock.core.plan import Arrived, Finished, Outcome, PeerJoined, Received, RequestId, Retired, Say
from penstock.core.settings import CoreConfig

TRANSFER, RID = 7, RequestId(1)
ASKED = Arrived(RID, (1, 2, 3, 4, 5, 6), 5, transfer=TRANSFER)


def engine(role: str) -> Core:
    return Core(CoreConfig(page_size=4, rows=2, hbm_pages=64, step_tokens=64, role=role))


@pytest.mark.parametrize("start", [-1, 6, 100])
def test_a_grant_of_no_position_begins_no_push(start: int) -> None:
    core = engine("prefill")
    plan = core.advance([PeerJoined(), ASKED]).plan
    assert plan is not None
    grant = Grant(TRANSFER, 1, len(ASKED.prompt), start)
    advance = core.advance([Retired(plan.step, ((9,),)), Received(grant)])
    assert Finished(RID, Outcome.LOST) in advance.outputs
    assert advance.plan is None and not core.kv.moves.flying
    core.check()


@pytest.mark.parametrize("first", [(), (-1,)])
def test_an_end_without_a_token_is_not_one(first: tuple[int, ...]) -> None:
    """Nothing would be left to compute, and nothing to decode from: its row would wait for ever."""
    core = engine("decode")
    advance = core.advance([PeerJoined(), ASKED])
    assert advance.plan is not None
    core.advance([Retired(advance.plan.step, ())])
    (generation,) = [o.what.generation for o in advance.outputs
                     if isinstance(o, Say) and isinstance(o.what, Grant)]
    advance = core.advance([Received(End(TRANSFER, generation, len(ASKED.prompt), first))])
    assert advance.plan is not None and advance.plan.start == (0,), "it is computed here"
    assert core.live[RID].state.name == "decode.device"
    core.check()
