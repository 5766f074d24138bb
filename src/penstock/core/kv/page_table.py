"""The page table of a request: two columns of a cache group, one a tier, and who pins what."""
from __future__ import annotations

from collections.abc import Iterable

from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import Place
from penstock.core.request import Request


def own(column: list[Copy | None], i: int) -> Copy | None:
    return column[i] if i < len(column) else None


def put(column: list[Copy | None], i: int, copy: Copy) -> None:
    """Enter a pinned copy. Columns are as long as their last entry."""
    copy.pins += 1
    column += [None] * (i + 1 - len(column))
    column[i] = copy


def missing(r: Request) -> list[Copy] | None:
    """Device pages that are still being loaded; None if something else is not in place either."""
    out: list[Copy] = []
    for t in r.tables:
        if not all(c is None or c.ready for c in t.host):
            return None
        if r.place is Place.DEVICE or not t.hosted:
            out += [c for c in t.device if c is not None and not c.ready]
    return out


def last_missing(columns: Iterable[list[Copy | None]]) -> list[Copy]:
    """One page that is not in place, if any: as long as it is not, they are not all."""
    for column in columns:
        for copy in reversed(column):          # pages come in order: it is among the last
            if copy is not None and not copy.ready:
                return [copy]
    return []
