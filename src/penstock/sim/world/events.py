"""A reader of KV events that believes nothing: it keeps what was published, and fails where a router's index would.

As in Dynamo's indexer, a page whose parent is not known is lost, and so are the pages that build on a removed one.
"""
from __future__ import annotations

from penstock.core.plan import Cached, StoredPages, Tier
from penstock.core.settings import CoreConfig
from penstock.sim.world.view import key_under

TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)       # fastest first


class Folded:
    """All `Cached` of one core so far: hashes by tier."""

    def __init__(self, cfg: CoreConfig) -> None:
        self._root = cfg.store_root
        self.pages: dict[Tier, set[int]] = {tier: set() for tier in TIERS[:cfg.published_tiers]}
        self._names: dict[int, bytes] = {}             # of all that were ever published: digest,
        self._parents: dict[int, int | None] = {}      # and hash of the page before it

    def take(self, cached: Cached | None) -> int:
        """Apply the news of one turn. Returns how many pages are new; raises AssertionError on what no index takes."""
        if cached is None:
            return 0
        for pages in self.pages.values() if cached.cleared else ():
            pages.clear()
        for stored in cached.stored:
            self._store(stored)
        for tier, hashes in cached.removed:
            for page in hashes:
                assert page in self.pages[tier], f"{tier}: a page is removed that was not published"
                self.pages[tier].discard(page)
                assert self._has(page, tier) or not [p for p in self.pages[tier] if self._parents[p] == page], (
                    f"{tier}: a page is removed before one that builds on it")
        return sum([len(stored.hashes) for stored in cached.stored])

    def _store(self, stored: StoredPages) -> None:
        parent, tier = stored.parent, stored.tier
        name = key_under(self._root, (stored.namespace,)) if parent is None else self._names[parent]
        for page, key in zip(stored.hashes, stored.keys, strict=True):
            name = key_under(name, key)
            assert page == int.from_bytes(name[:8]) >> 1, "other tokens or another parent than those of the page"
            assert parent is None or self._has(parent, tier), f"{tier}: a page is stored before the one before it"
            assert page not in self.pages[tier], f"{tier}: a page is stored twice"
            self.pages[tier].add(page)
            self._names[page], self._parents[page] = name, parent
            parent = page

    def _has(self, page: int, tier: Tier) -> bool:
        """In this tier or a faster one."""
        return any([page in self.pages[t] for t in TIERS[:TIERS.index(tier) + 1]])

    def differs(self, found: dict[Tier, set[int]]) -> str:
        """What can be found instead, in words."""
        return "; ".join(f"{tier}: {len(known - found[tier])} pages are published that no prompt finds, "
                         f"{len(found[tier] - known)} are not published" for tier, known in self.pages.items())
