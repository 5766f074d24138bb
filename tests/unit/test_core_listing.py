"""Asking storage for pages that the core has never seen: in parts, within what it may remember, once."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.kv import listing
from penstock.core.plan import (
    Aborted,
    Arrived,
    Listed,
    Lookup,
    Moved,
    Output,
    RequestId,
    Retired,
    StepPlan,
    Tier,
    Unstore,
    Used,
)
from penstock.core.settings import CoreConfig


def core_of(**settings: object) -> Core:
    return Core(CoreConfig(**{"page_size": 1, "rows": 2, "hbm_pages": 9_000, "dram_pages": 9_000,
                              "disk_pages": 9_000, "store_root": b"root", **settings}))


def arrive(core: Core, n: int, rid: int = 1, **more: object) -> list[Output]:
    return list(core.advance([Arrived(RequestId(rid), tuple(range(n)), 1, **more)]).outputs)


def tell(core: Core, present: bytes, rid: int = 1, visit: int = 0) -> tuple[list[Output], StepPlan | None]:
    advance = core.advance([Listed(RequestId(rid), visit, present)])
    core.check()
    return list(advance.outputs), advance.plan


def test_a_long_prompt_is_asked_for_in_parts_until_one_is_missing():
    core, most = core_of(), listing.PAGES_MAX
    [first] = arrive(core, 2 * most + 500)
    assert isinstance(first, Lookup) and len(first.keys) == most and len(set(first.keys)) == most
    assert core.advance([]).plan is None, "it waits for the answer"
    [[second], plan] = tell(core, b"\x01" * most)
    assert isinstance(second, Lookup) and len(second.keys) == most and plan is None
    assert set(first.keys).isdisjoint(second.keys)
    outputs, plan = tell(core, b"\x01" * 7)
    assert not any(isinstance(o, Lookup) for o in outputs) and plan is not None
    reads = [m for m in plan.moves if m.src is Tier.DISK]
    assert sum(len(m.keys) for m in reads) == min(most + 7, core.cfg.store_pages)
    assert [k for m in reads for k in m.keys] == [*first.keys, *second.keys][:most + 7]
    assert tell(core, b"\x01" * most) == ([], None), "an answer that nobody has asked for"


def test_a_prompt_that_storage_does_not_have_is_computed_at_once():
    core = core_of()
    [lookup] = arrive(core, 10)
    assert len(lookup.keys) == 9, "the last token is always computed"
    _, plan = tell(core, b"")
    assert plan is not None and plan.rids == (1,) and not plan.moves


def test_others_do_not_wait_for_an_answer_and_an_abort_ends_the_question():
    core = core_of()
    arrive(core, 10)
    tell(core, b"", rid=2)
    [lookup] = arrive(core, 5, rid=2, namespace=7)
    assert lookup.rid == 2
    _, plan = tell(core, b"", rid=2)
    assert plan is not None and plan.rids == (2,)
    core.advance([Aborted(RequestId(1))])
    assert tell(core, b"\x01" * 9) == ([], None)


@pytest.mark.parametrize("disk_pages", [1, 4, 30])
def test_what_cannot_be_remembered_is_not_asked_for_again_and_again(disk_pages):
    core, asked = core_of(disk_pages=disk_pages, dram_pages=200), 0
    outputs: list[Output] = arrive(core, 120)
    while any(isinstance(o, Lookup) for o in outputs):
        [lookup] = [o for o in outputs if isinstance(o, Lookup)]
        assert len(lookup.keys) <= disk_pages
        asked += 1
        outputs, plan = tell(core, b"\x01" * len(lookup.keys))
    assert asked <= 3 and plan is not None


def test_a_page_is_named_alike_by_engines_and_never_by_tenants_or_other_engines():
    names = [arrive(core_of(store_root=root), 6, namespace=space)[0].keys
             for root, space in ((b"root", 0), (b"root", 0), (b"root", 1), (b"other", 0))]
    assert names[0] == names[1]
    assert len({*names[0], *names[2], *names[3]}) == 15


def test_storage_hears_of_damage_under_the_names_that_it_was_given():
    core = core_of()
    [lookup] = core.advance([Arrived(RequestId(1), tuple(range(6)), 9)]).outputs
    _, plan = tell(core, b"")
    core.advance([Retired(plan.step, ((3,),))])
    outputs = core.advance([Aborted(RequestId(1), damaged=True)]).outputs
    [told] = [o for o in outputs if isinstance(o, Unstore)]
    assert set(lookup.keys) < set(told.keys), "of all that was computed, not only of what was stored"
    again = core.advance([Aborted(RequestId(1), damaged=True)]).outputs
    assert not any(isinstance(o, Unstore) for o in again)


def test_pages_that_a_request_begins_with_are_told_as_used_wherever_they_are():
    core = core_of()
    [lookup] = arrive(core, 6)
    outputs, plan = tell(core, b"")
    assert not any(isinstance(o, Used) for o in outputs), "it begins with nothing"
    events = [Retired(plan.step, ((3,),))]
    while (advance := core.advance(events)).plan is not None:      # to the host, and on to storage
        events = [*[Moved(move.id, True) for move in advance.plan.moves], Retired(advance.plan.step, ())]
    outputs = [*arrive(core, 6, rid=2), *tell(core, b"", rid=2)[0]]
    [used] = [o for o in outputs if isinstance(o, Used)]
    assert used.keys == lookup.keys, "from the first on"
    assert not any(isinstance(o, Lookup) for o in outputs), "storage hears of these in no other way"
