"""How many pages of each cache group a request needs, from its length and its place alone."""
from __future__ import annotations

from typing import TypeAlias

from penstock.core.lifecycle import Place
from penstock.core.request import Request
from penstock.core.settings import CoreConfig

PageCounts: TypeAlias = tuple[list[int], list[int]]           # of each group: device, host


def hot_units(cfg: CoreConfig, tokens: int, *, grown: bool = False) -> int:
    """The hot buffer, of each hosted group, of a request of `tokens` positions, at least, or `grown`: what is
    short needs no more of it than it has pages."""
    return min(cfg.largest_hot if grown else cfg.hot_pages, -(-tokens // cfg.page_size))


def needs(cfg: CoreConfig, place: Place, tokens: int, *, grown: bool = False) -> PageCounts:
    """Device and host pages of each group that a request of `tokens` positions needs at once; `grown`: with
    the largest hot buffer."""
    device, host = [], []
    for group in cfg.groups:
        unit = group.page_tokens or cfg.page_size
        pages = -(-tokens // unit)
        if group.reach:                        # the window, and the pages that are being written
            pages = min(pages, -(-(group.reach + cfg.chunk_multiple - 1) // unit) + 1)
        hosted = place.on_host and group.hosted
        device.append(hot_units(cfg, tokens, grown=grown) if hosted else pages)
        host.append(pages if hosted else 0)
    return device, host


def at_end(cfg: CoreConfig, r: Request, place: Place, grown: bool = False) -> PageCounts:
    """What `r` needs in `place` when its last position is computed; `grown`: with the largest hot buffer."""
    if (place, grown) not in r.at_end:
        r.at_end[place, grown] = needs(cfg, place, r.num_prompt + r.max_new - 1, grown=grown)
    return r.at_end[place, grown]


def add(total: PageCounts, pages: PageCounts, times: int = 1) -> None:
    """Add `pages`, or with -1 take them away."""
    for column, more in zip(total, pages, strict=True):
        for g, n in enumerate(more):
            column[g] += times * n
