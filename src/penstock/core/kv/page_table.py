"""The page table of a request: two columns of a cache group, one a tier, and who pins what."""
from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.kv.prefix_tree import Copy
from penstock.core.settings import CacheGroup


@dataclass(slots=True, eq=False)
class PageTable:
    """One cache group's pages of one request. Entry i is page i of the group: its copy on the
    device and on the host, each the path node's own or a private twin, each pinned; None is a
    copy that the request has no need of, or does not have."""

    group: CacheGroup
    unit: int                                  # tokens of a page
    device: list[Copy | None] = field(default_factory=list)
    host: list[Copy | None] = field(default_factory=list)
    hot: list[Copy] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)  # hot unit -> the entry whose page it was
    first: int = 0                             # entries below were left behind by the window
    hosted: bool = field(init=False)           # the group's, kept: each page that grows asks for it
    reach: int = field(init=False)

    def __post_init__(self) -> None:
        self.hosted, self.reach = self.group.hosted, self.group.reach

    def begin(self, tokens: int) -> int:
        """The first entry that the step which computes position `tokens` reads."""
        return max(0, tokens - self.reach) // self.unit if self.reach else 0

    def end(self, tokens: int) -> int:
        """Entries that positions below `tokens` need."""
        return -(-tokens // self.unit)


# ---------------------------------------------------------------- pins: nobody else counts them
def pin(copy: Copy) -> Copy:
    copy.pins += 1
    return copy


def unpin(copy: Copy) -> None:
    copy.pins -= 1


def pinned(page: int = -1) -> Copy:
    """A new page of one request; -1: it is still to be had."""
    return Copy(page, None, True, 1)


def own(column: list[Copy | None], i: int) -> Copy | None:
    return column[i] if i < len(column) else None


def put(column: list[Copy | None], i: int, copy: Copy) -> None:
    """Enter a pinned copy. Columns are as long as their last entry."""
    pin(copy)
    column += [None] * (i + 1 - len(column))
    column[i] = copy
