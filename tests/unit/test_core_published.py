"""KV events of one core, by hand."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.kv.prefix_tree import pack
from penstock.core.plan import Cached, Event, Flushed, Republish, Tier
from penstock.core.settings import CacheGroup
from penstock.sim.world.events import Folded

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


class Reader(Driver):
    """A driver that keeps all that is published."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**({"published_tiers": 2} | settings))
        self.news: list[Cached] = []
        self.index = Folded(self.core.cfg)
        real = self.core.advance

        def advance(events: tuple[Event, ...]):  # type: ignore[no-untyped-def]
            found = real(events)
            if found.cached is not None:
                self.news.append(found.cached)
                self.index.take(found.cached)
            return found

        self.core.advance = advance  # type: ignore[method-assign]

    def known(self) -> tuple[int, ...]:
        """Pages by tier."""
        return tuple(len(pages) for pages in self.index.pages.values())


def test_full_pages_are_published_in_a_chain_and_then_on_the_host() -> None:
    d = Reader(dram_pages=16)
    d.arrive(0, PROMPT, 1)
    d.retire()
    assert d.news[0] == Cached(True, (), ())                       # what a reader knows of an earlier engine is void
    [stored] = d.news[1].stored
    assert (stored.tier, stored.namespace, stored.parent) == (Tier.HBM, 0, None)
    assert stored.keys == (pack((1, 2, 3, 4)), pack((5, 6, 7, 8))) and d.known() == (2, 0)
    d.run()
    [below] = d.news[2].stored
    assert (below.tier, below.hashes) == (Tier.DRAM, stored.hashes) and d.known() == (2, 2)
    d.arrive(1, (*PROMPT[:8], 20, 21, 22, 23, 24), 1)
    d.run()
    [new] = d.news[3].stored
    assert (new.parent, new.keys) == (stored.hashes[1], (pack((20, 21, 22, 23)),))


def test_a_failed_copy_to_the_host_is_not_published() -> None:
    d = Reader(dram_pages=16)
    d.arrive(0, PROMPT, 1)
    d.retire()
    d.land(ok=False)
    assert d.known() == (2, 0)


def test_pages_that_are_evicted_are_withdrawn_deepest_first() -> None:
    d = Reader(hbm_pages=4)
    d.arrive(0, PROMPT, 1)
    d.run()
    [stored] = d.news[1].stored
    d.arrive(1, range(30, 43), 1)
    d.run()
    assert d.news[2].removed == ((Tier.HBM, stored.hashes[::-1]),) and d.known() == (3, 0)


def test_a_flush_clears_all_and_publishes_what_is_still_in_use() -> None:
    d = Reader()
    d.arrive(0, PROMPT, 1)
    d.run()
    d.arrive(1, range(30, 39), 4)
    d.retire()
    assert d.known() == (4, 0)
    d.tell(Flushed())
    assert d.news[-1].cleared and d.known() == (2, 0)
    d.run()
    d.tell(Flushed())
    assert d.known() == (0, 0)


def test_pages_are_published_again_over_several_turns() -> None:
    d = Reader(published_turn=2)
    d.arrive(0, range(1, 22), 1)
    d.run()
    [stored] = d.news[1].stored
    begun = len(d.news)
    d.tell(Republish())
    assert d.core.flushing and d.known() == (2, 0)
    while d.core.flushing:
        d.tell()
    assert [n.cleared for n in d.news[begun:]] == [True, False, False] and d.known() == (5, 0)
    assert [page for n in d.news[begun:] for s in n.stored for page in s.hashes] == list(stored.hashes)


@pytest.mark.parametrize("most", [3, 4])
def test_more_pages_than_a_turn_looks_at_lose_their_prefix_and_readers_forget_all(most: int) -> None:
    """The first page of five is found to be damaged; another prompt's two pages stay."""
    d = Reader(published_turn=most, hbm_pages=16)
    d.arrive(0, range(1, 22), 1)
    d.run()
    d.arrive(1, range(30, 39), 1)
    d.run()
    while d.core.flushing:
        d.tell()
    assert d.known() == (7, 0)
    begun, [first] = len(d.news), [n for n in d.core.kv.tree.nodes() if n.key == pack((1, 2, 3, 4))]
    d.core.kv.tree.banish(first)
    d.tell()
    news = d.news[begun]
    if most == 4:                                   # all of them, deepest first
        assert not news.cleared and not news.stored and len(news.removed[0][1]) == 5
    else:
        assert news.cleared and not news.removed and len(news.stored[0].hashes) == 2
    while d.core.flushing:
        d.tell()
    assert d.known() == (2, 0)


def test_pages_of_sparse_decode_are_not_published() -> None:
    """No prompt finds them; nor what is computed after them."""
    d = Reader(dram_pages=16, hot_pages=1)
    d.arrive(0, PROMPT, 12, selects=True, attention=7)
    d.run()
    assert d.finished() and d.known() == (2, 2)


def test_a_group_with_a_window_does_not_decide() -> None:
    d = Reader(groups=(CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=2)))
    d.arrive(0, range(1, 22), 1)
    d.run()
    assert d.known() == (5, 0)


def test_without_readers_nothing_is_published() -> None:
    d = Reader(published_tiers=0)
    d.arrive(0, PROMPT, 1)
    d.run()
    d.tell(Flushed(), Republish())
    assert d.news == [] and d.core.kv.tree.touched is None
