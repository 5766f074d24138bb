"""What the core must know about the engine it plans for. Plain numbers, filled in at start."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a page table. `page_bytes` is one page of all its layers, in any tier."""

    name: str
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    page_size: int                      # tokens per page
    rows: int                           # device-resident table slots
    hbm_pages: int
    dram_pages: int = 0                 # 0: no host tier, hence no PAUSE, only DROP
    disk_pages: int = 0                 # 0: no storage tier; needs a host tier
    step_tokens: int = 512              # token budget of one step
    max_len: int = 1 << 20              # prompt + output tokens of one request
    overlap: bool = False
    pp_size: int = 1
    draft_tokens: int = 0               # a decoding row computes, and may return, up to 1 more than this
    prefix_cache: bool = True
    groups: tuple[CacheGroup, ...] = (CacheGroup(name="full", page_bytes=0),)
    hbm_base: int = 0                   # first HbmPage id; tests use disjoint ranges per tier
    dram_base: int = 0
    disk_base: int = 0
    row_base: int = 0

    @property
    def depth(self) -> int:
        """Plans in flight at most. Synchronous 1, overlapped 2, pipelined one per stage more."""
        return self.pp_size + int(self.overlap)
