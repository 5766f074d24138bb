"""A prompt that is cached gets its pages in portions, as long as another request has a row."""
from __future__ import annotations

import tracemalloc

import pytest

from penstock.core.kv.prefix_tree import Tree, pack, unpack
from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Flushed,
    Outcome,
    RequestId,
    Retired,
    StepId,
    Tier,
)
from tests.doubles.driver import Driver

PROMPT, PAGES = range(1000, 1082), 20          # whole pages of 4 tokens


def cached(**settings: object) -> Driver:
    """Request 9 decodes, and the prompt of another is cached. A turn matches and pins 4 pages at most."""
    sizes: dict[str, object] = {"hbm_pages": 90, "take_pages": 2, "hit_pages": 4, "step_tokens": 100,
                                "max_len": 400}
    d = Driver(**(sizes | settings))
    d.arrive(9, range(4), 200)
    d.arrive(1, PROMPT, 1)
    while 1 in d.core.live or d.core.kv.freeing:
        d.retire()
    return d


def pins(d: Driver) -> int:
    return sum([len(entry.pins) for entry in d.core.kv.entering.values()])


def test_a_hit_is_matched_and_pinned_in_portions_and_begins_whole() -> None:
    d = cached()
    d.arrive(2, PROMPT, 4)
    turns, before = 1, 0
    while d.phase(2) is Phase.QUEUED:
        assert d.core.live[RequestId(2)].row is None and pins(d) - before <= 4
        before = pins(d)
        d.retire()
        turns += 1
    assert turns == 2 * PAGES // 4 and d.core.counters["prefix_hbm_hits"] == 4 * PAGES
    assert not d.core.kv.entering and not d.core.kv.returned
    d.run()


def test_a_hit_alone_is_taken_in_one_turn() -> None:
    d = cached()
    d.tell(Aborted(RequestId(9)))
    d.arrive(2, PROMPT, 4)
    assert d.phase(2) is not Phase.QUEUED and d.core.counters["prefix_hbm_hits"] == 4 * PAGES


@pytest.mark.parametrize("turns", range(1, 11))
def test_an_abort_in_the_middle_of_a_hit_leaves_nothing(turns: int) -> None:
    d = cached()
    loose = d.core.kv.arenas[Tier.HBM].num_evictable
    d.arrive(2, PROMPT, 4)
    for _ in range(turns):
        d.retire()
    d.tell(Aborted(RequestId(2)))
    while d.core.kv.returned or d.core.kv.freeing:
        d.retire()
    assert not d.core.kv.entering and d.core.kv.arenas[Tier.HBM].num_evictable == loose


def on_the_host() -> Driver:
    """The prompt is cached on the host alone: another has taken its pages. A turn starts 2 loads at most."""
    d = cached(hbm_pages=70, dram_pages=200)
    d.arrive(3, range(2000, 2208), 1)
    while d.core.live.keys() != {9} or d.core.kv.freeing or d.moves:
        d.retire()
        while d.moves:
            d.land()
    return d


def test_loads_of_a_hit_start_over_turns_and_then_it_gets_its_row() -> None:
    d = on_the_host()
    d.arrive(2, PROMPT, 4)
    loads = []
    while d.phase(2) is Phase.QUEUED:
        assert d.core.live[RequestId(2)].row is None
        loads += [len(m.dst_pages) for m in d.retire()[-1].moves if m.dst is Tier.HBM]
    assert loads == [2] * (PAGES // 2) and d.phase(2) is Phase.LOADING
    d.run()
    assert d.core.counters["prefix_dram_hits"] == 4 * PAGES
    assert d.finished()[2] is Outcome.LENGTH


@pytest.mark.parametrize("turns", range(1, 26, 3))
def test_who_gives_up_a_hit_that_loads_leaves_it_cached(turns: int) -> None:
    d = on_the_host()
    d.arrive(2, PROMPT, 4)
    for _ in range(turns):
        d.retire()
    begun = sum([len(m.dst_pages) for m in d.moves if m.dst is Tier.HBM])
    d.tell(Aborted(RequestId(2)))
    while d.core.kv.returned or d.core.kv.freeing or d.moves:
        d.retire()
        while d.moves:
            d.land()
    d.arrive(4, PROMPT, 4)
    d.run()
    assert d.core.counters["prefix_hbm_hits"] == 4 * begun
    assert d.core.counters["prefix_dram_hits"] == 4 * (PAGES - begun)


def test_a_load_that_fails_ends_the_trial_and_the_page_is_computed() -> None:
    d = on_the_host()
    d.arrive(2, PROMPT, 4)
    while not any([m.dst is Tier.HBM for m in d.moves]):
        d.retire()
    while d.moves:
        d.land(ok=d.moves[0].dst is not Tier.HBM)
    assert not d.core.kv.entering and d.core.live[RequestId(2)].computed == 0
    d.run()
    assert d.finished()[2] is Outcome.LENGTH and not d.core.counters["prefix_dram_hits"]


def test_a_hit_under_way_gives_way_to_who_needs_its_pages() -> None:
    d = cached()
    d.arrive(2, PROMPT, 4)
    while pins(d) < 8:
        d.retire()
    kv = d.core.kv
    can = kv.device[0].pool.free + kv.arenas[Tier.HBM].num_evictable
    kv.parts_left = 2
    assert kv.lacks(Tier.HBM, [can + 8]) == 4 and not kv.entering and kv.returned
    kv.parts_left = 2                          # the next turn
    assert not kv.lacks(Tier.HBM, [can + 8]) and not kv.returned
    assert d.phase(2) is Phase.QUEUED and d.core.live[RequestId(2)].path == []
    d.run()                                    # it begins anew
    assert d.core.counters["prefix_hbm_hits"] == 4 * PAGES


def test_a_hit_that_leaves_no_room_alone_is_given_back_at_once_and_evicted() -> None:
    """The cached pages fill the device: they are in the way of the hot buffer, and no event is to come that
    would give back the rest of the pins."""
    d = Driver(hbm_pages=5, dram_pages=28, budget=1000, hot_pages=3, take_pages=1, hit_pages=2, max_len=400)
    d.arrive(1, range(17), 1)                  # leaves 4 pages on the device,
    d.retire()
    d.land(ok=False)                           # and none on the host
    d.arrive(2, range(24), 4, selects=True)    # 7 pages at its end: it fits only on the host
    assert d.phase(2) is not Phase.QUEUED and not d.core.kv.returned
    d.run()
    assert d.finished() == {1: Outcome.LENGTH, 2: Outcome.LENGTH}


def test_what_is_evicted_in_the_middle_of_a_hit_shortens_it() -> None:
    d = cached()
    d.arrive(2, PROMPT, 4)
    while not 0 < pins(d) < PAGES:
        d.retire()
    kept = pins(d)
    d.tell(Flushed())
    while d.phase(2) is Phase.QUEUED:
        d.retire()
    assert d.core.counters["prefix_hbm_hits"] in (4 * kept, 4 * (kept + 4))
    d.run()


def test_choices_of_a_prompt_share_its_tokens_and_what_was_matched() -> None:
    d = cached()
    prompt, before = tuple(PROMPT), 0
    d.arrive(2, prompt, 60)
    for rid in (3, 4):
        d.arrive(rid, prompt, 4, leader=RequestId(2))
    leader, forks = d.core.live[RequestId(2)], [d.core.live[RequestId(rid)] for rid in (3, 4)]
    assert all([fork.arrived.prompt is leader.arrived.prompt for fork in forks])
    while not leader.num_output:
        d.retire()
    looked = d.core.kv.hits_left
    assert forks[0].found.hint is forks[1].found.hint == leader.path and looked >= 0
    turns = 0
    while any([fork.phase is Phase.QUEUED for fork in forks]):
        assert pins(d) - before <= 4
        before = pins(d) if pins(d) > before else 0
        d.retire()
        turns += 1
    assert turns <= 2 * PAGES // 4 + 2         # they pin, and match nothing again
    d.run()


def test_who_is_dropped_and_hits_what_it_had_is_admitted_in_portions() -> None:
    d = cached()
    d.arrive(2, PROMPT, 30)
    while not d.core.live[RequestId(2)].num_output:
        d.retire()
    d.tell(Dropped(RequestId(2)))
    while d.phase(2) is Phase.DROPPED:
        assert d.core.live[RequestId(2)].row is None
        d.retire()
    d.run()


def test_a_key_is_all_that_it_is_made_of() -> None:
    """In pages of 2, two large numbers take as many bytes as four small ones."""
    pages = [(1, 2), (1, 3), (2**31, 5), (5, 1 << 62), (1, 2, -7, 0), (1, 2, -(2**63) + 1, -3), (0, 0),
             (0, 0, 0, 0)]
    assert [tuple(unpack(pack(page))) for page in pages] == pages
    assert len({pack(page) for page in pages}) == len(pages)


def test_a_node_has_no_dict_for_one_child() -> None:
    tree = Tree([])
    root, keys = tree.root(0), [pack((n, n)) for n in range(3)]
    nodes = []
    for n, key in enumerate(keys):
        nodes.append(tree.child(root, key))
        assert (root.num_children, root.more is None) == (n + 1, n == 0)
    assert [root.child(key) for key in keys] == nodes == list(root.children.values())
    for node in nodes[1:]:
        root.drop_child(node)
    assert root.only is nodes[0] and root.more is None and root.child(keys[1]) is None
    root.drop_child(nodes[0])
    assert not root.children and root.child(keys[0]) is None


def test_a_cached_page_takes_less_than_seven_hundred_bytes() -> None:
    """Of Python's heap, at 16 tokens: 611, where a key that was a tuple of ints made it 1,700."""
    pages = 2_000
    d = Driver(page_size=16, rows=1, hbm_pages=pages + 8, max_len=17 * pages, step_tokens=17 * pages)
    tracemalloc.start()
    try:
        d.core.advance([Arrived(RequestId(1), tuple(range(1 << 20, (1 << 20) + 16 * pages + 1)), 1)])
        d.core.advance([Retired(StepId(1), ((7,),))])
        while d.core.kv.freeing:
            d.core.kv.free_gradually(all=True)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(list(d.core.kv.tree.nodes())) == pages and used < 700 * pages, used / pages


def test_damaged_pages_that_are_only_pinned_are_let_go_of() -> None:
    d = cached()
    d.arrive(2, (*PROMPT, 5, 6, 7, 8), 60)     # it computes the last page alone
    d.arrive(3, (*PROMPT, 5, 6, 7, 8, 9), 4)
    while not (3 in d.core.live and d.core.live[RequestId(3)].path):
        d.retire()
    named = d.core.live[RequestId(3)].path[0]
    d.core.kv.moves.invalidate(list(d.core.live[RequestId(3)].path[:1]))
    assert named.banished
    while d.phase(3) is Phase.QUEUED:
        d.retire()
    assert named not in d.core.live[RequestId(3)].path
    d.run()
