"""What the core must know about the engine it plans for. Plain numbers, filled in at start."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a page table, and how much of it a step reads.

    A step that computes position p reads all earlier positions, or, with `window`, the last
    `window` of them. A snapshot is a state: its page covers `page_tokens` positions, a step reads
    the state behind position p - 1 and a prefix hit needs the state behind its last position, which
    only the end of a page has.
    """

    name: str
    page_bytes: int                    # one page of all its layers, in any tier
    page_tokens: int = 0               # of a snapshot: a multiple of the engine's page size; 0: the page size
    window: int = 0                    # 0: everything is read
    keep: int = 0                      # of a window: tokens from one end of a prefix that it serves to the next, see
                                       # `PageTable.stays`; 0: it serves all page ends
    snapshot: bool = False             # implies that only the last position is read
    selector: bool = False             # what the selector reads: on the device even while hosted
    resident: bool = False             # what attention reads all of: on the device even while hosted
    slab_pages: int = 1                # pages of this group that fill one slab of memory

    @property
    def reach(self) -> int:
        """Positions before its own that a step reads; 0: all."""
        return 1 if self.snapshot else self.window

    @property
    def hosted(self) -> bool:
        """Whether a hosted row reads this group from host pages. What is small stays."""
        return not (self.selector or self.resident or self.reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Pools are counted in pages of the first group. With several groups each tier is carved into
    slabs, which go from one group to another as they are needed."""

    page_size: int                      # tokens per page
    rows: int                           # device-resident table slots
    hbm_pages: int
    dram_pages: int = 0                 # 0: no host tier, hence no PAUSE, only DROP
    disk_pages: int = 0                 # stored pages remembered; 0: no storage tier; needs a host tier
    store_writes: bool = True           # whether storage takes pages
    store_reused: bool = False          # only those that a request has begun with, which did not compute them
    fetch_waits: bool = True            # who could have a row waits for what storage is to bring
    store_root: bytes = b""             # what keys of stored pages begin with; empty: pages have no keys, and
                                        # storage is not asked for those of others
    hot_pages: int = 0                  # hot buffer of a hosted row in each hosted group; 0: none is hosted
    hot_pages_max: int = 0              # what it grows to while pages lie idle; less: it has one size
    budget: int = 0                     # tokens that a step of a hosted row selects; 0: its hot buffer's
    always_hosted: bool = False         # requests that select never take the device pages they could
    wait_pages: int = 0                 # a step may run before at most this many pages have landed
    step_tokens: int = 512              # token budget of one step
    chunk_multiple: int = 1             # chunks of prompts end at positions that are multiples of this, but the last
                                        # one of each prompt and what a step has too few tokens for
    last_tokens: int = 0                # of the last chunk of a prefill engine's prompt at most: what is
                                        # left to send when that ends; 0: as any other
    take_pages: int = 512               # of each group that an admission takes at once: the rest is promised
    save_pages: int = 256               # page table entries that paused requests save in one turn
    hit_pages: int = 512                # cached pages that waiting requests match, or pin, in one turn, if another
                                        # request has a row, see ADR 0079
    admissions: int = 64                # requests that a turn admits whatever the step has use for, see
                                        # `Admission.is_full`; the others follow in later turns
    load_pages: int = 64                # of each promotion that fly up at once, beside what rows miss
    max_len: int = 1 << 20              # prompt + output tokens of one request
    overlap: bool = False
    pp_size: int = 1
    pp_together: int = 1                # of several stages: so many rows that decode take no turns
    role: str = "unified"               # or one side of a pair: "prefill", "decode"
    peers: int = 1                      # engines of the other role, if it is a side of a pair
    draft_tokens: int = 0               # a decoding row computes, and may return, up to 1 more than this
    draft_positions: int = 0            # of a step with drafts, at most: many rows have none
    sessions_max: int = 4096            # whose pages are known to be theirs
    retained_pages: int = 0             # of sessions that ask to be evicted last, at most: see `Retained`
    prefix_cache: bool = True
    published_tiers: int = 0            # tiers whose cached pages `Advance.cached` reports: 0 none, 1 device,
                                        # 2 also host, 3 also storage
    published_turn: int = 4096          # pages a turn, at most, that are looked at because the one before them changed
    groups: tuple[CacheGroup, ...] = (CacheGroup(name="full", page_bytes=0),)
    hbm_base: int = 0                   # first HbmPage id; tests use disjoint ranges per tier
    dram_base: int = 0
    disk_base: int = 0
    row_base: int = 0
    group_base: int = 0                 # page ids of group g begin this much times g later

    def __post_init__(self) -> None:
        """Raises ValueError: a hit ends with a page of the engine, only a snapshot has no need of more
        than the last of its own, and only a window keeps a part of what it has."""
        for group in self.groups:
            unit = group.page_tokens or self.page_size
            if unit % self.page_size or not (group.snapshot or unit == self.page_size):
                raise ValueError(f"cache group {group.name}: pages of {unit} tokens, "
                                 f"and the engine's have {self.page_size}")
            if group.keep % self.page_size or (group.keep and not group.window):
                raise ValueError(f"cache group {group.name}: keeps windows of {group.window} each {group.keep} tokens")

    @property
    def look_pages(self) -> int:
        """Entries of a page table that are looked at in one turn, at most."""
        return 16 * self.save_pages

    @property
    def planner_bytes(self) -> int:
        """Memory that the planner has when all pages of device and host are cached, as `tests/unit/
        test_core_planning.py` counts it: of each page its tokens, its place in the tree and in an order of
        eviction, and its number."""
        return (self.hbm_pages + self.dram_pages) * (430 + 4 * self.page_size)

    @property
    def depth(self) -> int:
        """Plans in flight at most. Synchronous 1, overlapped 2, pipelined one per stage more."""
        return self.pp_size + int(self.overlap)

    @property
    def host_units(self) -> int:
        """What requests compete for in the host: pages, or, of several groups, slabs, since a page that
        stays behind keeps all of its slab."""
        return self.dram_pages // (self.groups[0].slab_pages if len(self.groups) > 1 else 1)

    @property
    def store_pages(self) -> int:
        """Host pages that storage may read and write at once: one that hangs keeps no more, and nobody
        is promised them."""
        return min(self.host_units, max(2, self.host_units // 8)) if self.disk_pages else 0

    @property
    def largest_hot(self) -> int:
        """Pages that a hot buffer may have."""
        return max(self.hot_pages, self.hot_pages_max)

    @property
    def sparse(self) -> bool:
        """Whether rows may decode from host pages."""
        return self.hot_pages > 0 and self.dram_pages > 0
