"""Draft scheduling: how many drafts a request gets of a step, and what is asked for behind a step."""
from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.core.plan import RequestId, Row, StepId, StepPlan
from penstock.exec.drafts.drafter import Drafter, DraftQuery
from penstock.exec.drafts.narrow import Narrowing, _shares, decoding


class Ones(Drafter):
    """Proposes as many tokens as it is asked for."""

    name = "ones"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        self.asked += [(ask.rid, ask.most) for ask in asks]
        return [(1,) * ask.most for ask in asks]

    def forget(self, rid: RequestId) -> None:
        pass


def plan(counts: Sequence[int], prompt: int = 0) -> StepPlan:
    """Requests 0, 1, ... decode with so many positions each; the last one computes a part of its prompt."""
    num = len(counts) + bool(prompt)
    rids, rows = tuple(map(RequestId, range(num))), tuple(map(Row, range(num)))
    count = (*counts, prompt) if prompt else tuple(counts)
    return StepPlan(StepId(1), rows, rids, (9,) * num, count, (True,) * num,
                    (-1,) * sum(counts) + (5,) * prompt, (), (), ())


@pytest.mark.parametrize(("room", "drafting", "wanted", "given"), [
    (16, 2, [3, 3], [3, 3]),                # all that is wanted
    (4, 2, [3, 3], [2, 2]),                 # equal shares
    (5, 2, [3, 3], [3, 2]),                 # the first gets the odd one, and no more than there is
    (2, 4, [6, 6, 6, 6], [1, 1, 0, 0]),
    (4, 3, [0, 6, 6, 6], [0, 2, 2, 0]),
    (3, 1, [8], [3]),
    (0, 2, [3, 3], [0, 0]),
])
def test_drafts_of_a_step_are_shared_and_never_more_than_there_is_space_for(room, drafting, wanted, given):
    assert _shares(room, drafting, wanted) == given
    assert sum(given) <= room


@pytest.mark.parametrize(("counts", "prompt", "drafts"), [
    ([4, 4], 0, [3, 3]), ([4] * 4, 0, [1] * 4), ([9, 1], 0, [6, 0]), ([4] * 8, 0, [0] * 8),
    ([4, 4], 4, [1, 1]), ([4, 4], 8, [0, 0])])
def test_a_step_computes_no_more_positions_than_cost_little(counts, prompt, drafts):
    """Of eight positions: those of a prompt, one of each request, and drafts in what is left."""
    narrowing = Narrowing(Ones(), lambda rid: ((1, 2), (3,)), 10, 8)
    step = plan(counts, prompt)
    inputs, at, found = narrowing.choose(step, {}), 0, []
    for _ in decoding(step):
        found.append(inputs[at + 1])
        at += 2 + inputs[at + 1]
    assert found == drafts
    assert prompt + len(counts) + sum(found) <= max(8, prompt + len(counts))


@pytest.mark.parametrize(("pages_end", "asked"), [(99, 3), (6, 3), (5, 2), (4, 1), (3, 0)])
def test_a_draft_layer_is_asked_for_no_more_than_the_request_has_pages_for(pages_end, asked):
    """The newest token is at position 3, where the layer computes the first draft: it writes KV there and at
    one position more for each further draft."""
    layer = Ones()
    narrowing = Narrowing(Ones(), lambda rid: ((1, 2), (3, 4)), 10, 8)
    found = narrowing.next(plan([4]), [(4,)], 3, layer, lambda row: pages_end)
    assert found == ((1,) * asked,)
    assert layer.asked == ([(0, asked)] if asked else [])
